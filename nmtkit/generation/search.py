"""Search for the translations a model scores best: beam search and, with a beam of one, greedy search.

Roles: the `Scorer` says how probable continuations are, `Search` keeps the open hypotheses and picks the best
continuations, `Finished` keeps those that ended, `bound` says whether an open one can still be among the best.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.data.tokenizer import BOS, EOS, UNK
from nmtkit.generation.options import SearchOptions
from nmtkit.generation.scorer import Scorer
from nmtkit.generation.topk import topk
from nmtkit.packed import Packed

# B sentences still in the search, K hypotheses (beam) of each, N = B x K rows, V target vocabulary, C candidates

COMPACT = 0.25  # finished sentences are dropped from the batch when they make up this share of it

logger = logging.getLogger("nmtkit")


@dataclass(frozen=True)
class Hypothesis:
    """A translation found. `tokens` are target ids without eos; `score` is the length-penalised log probability."""

    tokens: list[int]
    score: float
    log_probability: float  # natural logarithm, eos included


def penalty(length: Tensor | int, lenpen: float) -> Tensor:
    """What divides the log probability of an output of `length` pieces, eos included.

    Source: Wu et al. 2016, equation 14, without the coverage term; Vaswani et al. 2017, section 6.1.
    """
    return ((5.0 + torch.as_tensor(length, dtype=torch.float64)) / 6.0) ** lenpen


@torch.inference_mode()
def beam_search(models: Sequence[Architecture], source: Packed, options: SearchOptions) -> list[list[Hypothesis]]:
    """The best `options.nbest` translations of each sentence of `source` (ids ending in eos), best first.

    They are distinct as piece sequences. A sentence whose every hypothesis overflowed gets one empty translation with
    score -inf, and a warning is logged.
    """
    return Search(models, source, options).run()


class Finished:
    """The best `size` ended hypotheses of each of `sentences` sentences."""

    def __init__(self, sentences: int, size: int) -> None:
        self.size = size
        self.best: list[list[Hypothesis]] = [[] for _ in range(sentences)]

    def add(self, sentence: int, hypothesis: Hypothesis) -> None:
        kept = self.best[sentence]
        kept.append(hypothesis)
        kept.sort(key=lambda one: -one.score)
        del kept[self.size :]

    def threshold(self, sentence: int) -> float:
        """The score a newcomer must beat."""
        kept = self.best[sentence]
        return kept[-1].score if len(kept) == self.size else -math.inf


class Search:
    """One run over one batch."""

    def __init__(self, models: Sequence[Architecture], source: Packed, options: SearchOptions) -> None:
        self.options = options
        self.device = source.values.device
        sentences, beam = source.layout.sentences, options.beam
        self.scorer = Scorer(models, source, beam)
        self.finished = Finished(sentences, options.nbest)
        limits = [model.max_target_positions for model in models if model.max_target_positions is not None]
        longest = [options.max_length(length - 1) for length in source.layout.lengths.tolist()]  # without eos
        # What search has to decide lives on the CPU: a few numbers per hypothesis and step.
        self.max_length = torch.tensor([min([length, *(limit - 1 for limit in limits)]) for length in longest])
        self.sentence = torch.arange(sentences)  # B: which sentence of the source
        self.history = torch.empty(sentences, beam, 0, dtype=torch.int64)  # B K t: the tokens so far
        # B K, float64: sums of many small numbers; all hypotheses of a sentence but one are dead at first.
        self.log_probability = torch.full((sentences, beam), -math.inf, dtype=torch.float64)
        self.log_probability[:, 0] = 0.0

    def run(self) -> list[list[Hypothesis]]:
        tokens = torch.full((self.log_probability.numel(),), BOS)
        while True:
            scores, rows, tokens = self.candidates(self.restrict(self.scorer.step(tokens.to(self.device))))
            self.finish(scores, rows, tokens)
            parents, tokens = self.extend(scores, rows, tokens)
            over = self.over()
            if over.all():
                break
            if over.sum() >= COMPACT * len(over):
                parents, tokens = self.compact(~over, parents, tokens)
            else:
                self.log_probability[over] = -math.inf  # goes on as a dead weight until it is dropped
            self.scorer.select(parents.to(self.device))
        return self.results()

    def restrict(self, steps: Tensor) -> Tensor:
        """Log probabilities N V with -inf where a continuation is not allowed; the others stay the model's."""
        length = self.history.shape[2]
        steps[:, UNK] = steps[:, BOS] = -math.inf
        if length < self.options.min_len:
            steps[:, EOS] = -math.inf
        full = self.max_length <= length
        if full.any():
            rows = full.repeat_interleave(self.options.beam).to(self.device)
            ending = steps[:, EOS].clone()
            steps.masked_fill_(rows[:, None], -math.inf)
            steps[:, EOS] = ending
        return steps

    def candidates(self, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best continuations of each sentence, best first: log probabilities, hypotheses, tokens, each B C.

        There are enough of them to go on with `beam` hypotheses even if that many of them end here.
        """
        beam = self.options.beam
        values, tokens = topk(steps, beam + 1)  # N k; one of a row's may be eos
        every = self.log_probability[:, :, None] + values.double().cpu().view(-1, beam, values.shape[1])
        best, place = every.flatten(1).topk(min(2 * beam, every[0].numel()), dim=1)
        return best, place // values.shape[1], tokens.cpu().view(len(every), -1).gather(1, place)

    def finish(self, scores: Tensor, rows: Tensor, tokens: Tensor) -> None:
        """Puts by the candidates that end; one that is not among the `beam` best of its sentence may not."""
        beam = self.options.beam
        ending = (tokens[:, :beam] == EOS) & scores[:, :beam].isfinite()
        if not ending.any():
            return
        where, which = ending.nonzero(as_tuple=True)
        log_probabilities = scores[where, which]
        penalised = log_probabilities / penalty(self.history.shape[2] + 1, self.options.lenpen)
        outputs = self.history[where, rows[where, which]]
        for sentence, output, score, log_probability in zip(
            self.sentence[where].tolist(),
            outputs.tolist(),
            penalised.tolist(),
            log_probabilities.tolist(),
            strict=True,
        ):
            if score > self.finished.threshold(sentence):
                self.finished.add(sentence, Hypothesis(output, score, log_probability))

    def extend(self, scores: Tensor, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Goes on with the `beam` best that do not end; returns their parent rows [N] and their tokens [N]."""
        beam = self.options.beam
        open_scores = scores.masked_fill(tokens == EOS, -math.inf)
        self.log_probability, place = open_scores.topk(beam, dim=1)
        rows, tokens = rows.gather(1, place), tokens.gather(1, place)
        past = self.history.gather(1, rows[:, :, None].expand(-1, -1, self.history.shape[2]))
        self.history = torch.cat([past, tokens[:, :, None]], 2)
        parents = rows + torch.arange(len(rows))[:, None] * beam
        return parents.flatten(), tokens.flatten()

    def over(self) -> Tensor:
        """Which sentences are done: B, bool."""
        threshold = torch.tensor([self.finished.threshold(sentence) for sentence in self.sentence.tolist()]).double()
        over = self.bound() <= threshold
        if self.options.beam == 1:  # greedy: the first end is the end
            over |= threshold > -math.inf
        return over

    def bound(self) -> Tensor:
        """The best score an open hypothesis of each sentence can still come to: B.

        Log probabilities only fall, so it is today's, divided by the largest penalty on the way to the longest output.
        """
        shortest = penalty(self.history.shape[2] + 1, self.options.lenpen)
        longest = penalty(self.max_length + 1, self.options.lenpen)
        return self.log_probability.amax(1) / torch.maximum(shortest, longest)

    def compact(self, going: Tensor, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Drops the sentences that are done from the batch; returns the rows that go on, renumbered."""
        kept = going.nonzero().flatten()
        self.scorer.keep(kept.to(self.device))
        beam = self.options.beam
        self.sentence, self.max_length = self.sentence[kept], self.max_length[kept]
        self.log_probability, self.history = self.log_probability[kept], self.history[kept]
        rows = parents.view(-1, beam)[kept] % beam + torch.arange(len(kept))[:, None] * beam
        return rows.flatten(), tokens.view(-1, beam)[kept].flatten()

    def results(self) -> list[list[Hypothesis]]:
        for hypotheses in self.finished.best:
            if not hypotheses:
                logger.warning("a sentence has no finite score (did the model overflow?); its translation is empty")
                hypotheses.append(Hypothesis([], -math.inf, -math.inf))
        return self.finished.best
