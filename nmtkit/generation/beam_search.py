"""Search for the translations a model scores best: beam search, greedy search (a beam of one), diverse groups.

Roles: the `Scorer` says how probable continuations are, `LogitsProcessor` which are allowed, `Search` keeps the open
hypotheses and picks the best continuations, `Finished` keeps those that ended, and `bound` says whether an open one can
still be among the best. Sampling and required phrases are searches of their own kind.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.data.tokenizer import BOS, EOS
from nmtkit.generation.constraints import Constraints, LogitsProcessor
from nmtkit.generation.options import SearchOptions
from nmtkit.generation.scorer import Scorer
from nmtkit.generation.topk import topk
from nmtkit.packed import Packed

# B sentences still in the search, R hypotheses (rows) of each, N = B x R, G rows of a group, V target vocabulary,
# C candidates

COMPACT = 0.25  # finished sentences are dropped from the batch when they make up this share of it

logger = logging.getLogger("nmtkit")


@dataclass(frozen=True)
class Hypothesis:
    """A translation found. `tokens` are target ids without eos; `score` is the length-penalised log probability."""

    tokens: list[int]
    score: float
    log_probability: float  # natural logarithm, eos included
    alignment: list[list[float]] | None = None  # where asked for: what each token gives each source token, eos included


@dataclass(frozen=True)
class Candidates:
    """Continuations of the hypotheses of each sentence, best first; each field is B C."""

    log_probability: Tensor  # of the whole hypothesis, float64; -inf where there is none
    rows: Tensor  # the hypothesis that is continued, 0 … R-1
    tokens: Tensor  # with this token

    def first(self, number: int) -> "Candidates":
        return Candidates(self.log_probability[:, :number], self.rows[:, :number], self.tokens[:, :number])


def penalty(length: Tensor | int, lenpen: float) -> Tensor:
    """What divides the log probability of an output of `length` pieces, eos included.

    Source: Wu et al. 2016, equation 14, without the coverage term; Vaswani et al. 2017, section 6.1.
    """
    return ((5.0 + torch.as_tensor(length, dtype=torch.float64)) / 6.0) ** lenpen


class Finished:
    """The best `size` ended hypotheses of each of `sentences` sentences."""

    def __init__(self, sentences: int, size: int, distinct: bool) -> None:
        self.size, self.distinct = size, distinct
        self.best: list[list[Hypothesis]] = [[] for _ in range(sentences)]

    def add(self, sentence: int, hypothesis: Hypothesis) -> None:
        kept = self.best[sentence]
        if self.distinct and any(one.tokens == hypothesis.tokens for one in kept):
            return
        kept.append(hypothesis)
        kept.sort(key=lambda one: -one.score)
        del kept[self.size :]

    def threshold(self, sentence: int) -> float:
        """The score a newcomer must beat."""
        kept = self.best[sentence]
        return kept[-1].score if len(kept) == self.size else -math.inf


class Search:
    """One run over one batch."""

    distinct = True

    def __init__(
        self,
        models: Sequence[Architecture],
        source: Packed,
        options: SearchOptions,
        constraints: Sequence[Constraints],
    ) -> None:
        self.options = options
        self.device = source.values.device
        sentences, rows = source.layout.sentences, options.rows
        self.scorer = Scorer(models, source, rows)
        self.finished = Finished(sentences, options.nbest, self.distinct)
        limits = [model.max_target_positions - 1 for model in models if model.max_target_positions is not None]
        longest = [options.max_length(length - 1) for length in source.layout.lengths.tolist()]  # without eos
        # What search has to decide lives on the CPU: a few numbers per hypothesis and step.
        self.logits_processor = LogitsProcessor(options, [min([length, *limits]) for length in longest], constraints)
        self.sentence = torch.arange(sentences)  # B: which sentence of the source
        self.history = torch.empty(sentences, rows, 0, dtype=torch.int64)  # B R t: the tokens so far
        # B R, float64: sums of many small numbers; all hypotheses of a group but one are dead at first.
        self.log_probability = torch.full((sentences, rows), -math.inf, dtype=torch.float64)
        self.log_probability[:, :: rows // options.diverse_groups] = 0.0

    def run(self) -> list[list[Hypothesis]]:
        tokens = torch.full((self.log_probability.numel(),), BOS)
        while True:
            steps = self.scorer.step(tokens.to(self.device))
            parents, tokens = self.advance(self.logits_processor.apply(steps, self.history))
            over = self.over()
            if over.all():
                return self.results()
            if over.sum() >= COMPACT * len(over):
                kept = (~over).nonzero().flatten()
                self.drop_finished(kept)
                rows = self.options.rows
                parents = (parents[kept] % rows) + torch.arange(len(kept))[:, None] * rows
                tokens = tokens[kept]
            else:
                self.log_probability[over] = -math.inf  # goes on as a dead weight until it is dropped
            self.scorer.reorder(parents.flatten().to(self.device))
            tokens = tokens.flatten()

    def advance(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Ends and extends hypotheses, a group at a time; returns parent rows, among N, and tokens, each B R."""
        sentences, rows = self.log_probability.shape
        steps = steps.view(sentences, rows, -1)
        size = rows // self.options.diverse_groups
        taken: list[Candidates] = []
        for start in range(0, rows, size):
            group = steps[:, start : start + size]
            if taken:
                group = group - self.options.diversity * _counts([one.tokens for one in taken], steps)
            candidates = self.candidates(group, start, steps)
            self.finish(candidates.first(size))
            taken.append(self.extended(candidates, size))
        parents = torch.cat([one.rows for one in taken], 1)
        tokens = torch.cat([one.tokens for one in taken], 1)
        self.log_probability = torch.cat([one.log_probability for one in taken], 1)
        past = self.history.gather(1, parents[:, :, None].expand(-1, -1, self.history.shape[2]))
        self.history = torch.cat([past, tokens[:, :, None]], 2)
        return parents + torch.arange(sentences)[:, None] * rows, tokens

    def candidates(self, group: Tensor, start: int, steps: Tensor) -> Candidates:
        """The best continuations of the rows from `start` on, by `group` B G V: what is to be gained by each token.

        There are enough of them to go on with G hypotheses even if that many of them end here. `steps` B R V holds the
        log probabilities, which differ from `group` when that favours diversity.
        """
        sentences, size = group.shape[:2]
        values, tokens = topk(group.flatten(0, 1), size + 1)  # B*G k; one of a row's may be eos
        width = values.shape[1]
        before = self.log_probability[:, start : start + size, None]
        ranked = (before + values.double().cpu().view(sentences, size, width)).flatten(1)
        best, place = ranked.topk(min(2 * size, size * width), dim=1)
        rows, tokens = start + place // width, tokens.cpu().view(sentences, -1).gather(1, place)
        if self.options.diverse_groups > 1:
            own = steps.cpu().flatten(1).gather(1, rows * steps.shape[2] + tokens)
            best = torch.where(best.isfinite(), self.log_probability.gather(1, rows) + own.double(), best)
        return Candidates(best, rows, tokens)

    def finish(self, candidates: Candidates) -> None:
        """Puts by the candidates that end."""
        ending = (candidates.tokens == EOS) & candidates.log_probability.isfinite()
        if not ending.any():
            return
        where, which = ending.nonzero(as_tuple=True)
        log_probabilities = candidates.log_probability[where, which]
        penalised = log_probabilities / penalty(self.history.shape[2] + 1, self.options.lenpen)
        outputs = self.history[where, candidates.rows[where, which]]
        for sentence, output, score, log_probability in zip(
            self.sentence[where].tolist(),
            outputs.tolist(),
            penalised.tolist(),
            log_probabilities.tolist(),
            strict=True,
        ):
            if score > self.finished.threshold(sentence):
                self.finished.add(sentence, Hypothesis(output, score, log_probability))

    def extended(self, candidates: Candidates, size: int) -> Candidates:
        """The `size` best candidates that do not end."""
        going = candidates.log_probability.masked_fill(candidates.tokens == EOS, -math.inf)
        first = going.isfinite().to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :size]
        return Candidates(going.gather(1, first), candidates.rows.gather(1, first), candidates.tokens.gather(1, first))

    def over(self) -> Tensor:
        """Which sentences are done: B, bool."""
        threshold = torch.tensor([self.finished.threshold(sentence) for sentence in self.sentence.tolist()]).double()
        over = self.bound() <= threshold
        if self.options.rows == 1:  # greedy: the first end is the end
            over |= threshold > -math.inf
        return over

    def bound(self) -> Tensor:
        """The best score an open hypothesis of each sentence can still come to: B.

        Log probabilities only fall, so it is today's, divided by the largest penalty on the way to the longest output.
        """
        shortest = penalty(self.history.shape[2] + 1, self.options.lenpen)
        longest = penalty(self.logits_processor.max_length + 1, self.options.lenpen)
        return self.log_probability.amax(1) / torch.maximum(shortest, longest)

    def drop_finished(self, kept: Tensor) -> None:
        """Drops all but these sentences from the batch."""
        self.scorer.drop_finished(kept.to(self.device))
        self.logits_processor.drop_finished(kept)
        self.sentence = self.sentence[kept]
        self.log_probability, self.history = self.log_probability[kept], self.history[kept]

    def results(self) -> list[list[Hypothesis]]:
        for hypotheses in self.finished.best:
            if not hypotheses:
                logger.warning("a sentence has no finite score (did the model overflow?); its translation is empty")
                hypotheses.append(Hypothesis([], -math.inf, -math.inf))
        return self.finished.best


def _counts(tokens: list[Tensor], like: Tensor) -> Tensor:
    """How often each token of the vocabulary is among `tokens` [B, …]: B 1 V."""
    chosen = torch.cat(tokens, 1).to(like.device)
    counts = like.new_zeros(len(like), like.shape[2])
    return counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=counts.dtype))[:, None]
