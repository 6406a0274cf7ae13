"""Beam search, or diverse beam search with several groups of hypotheses.

`Scorer` computes the log probabilities of continuations, and `ConstraintProcessor` forbids some of them. `BeamSearch`
keeps the best continuations as open hypotheses, until no open hypothesis can reach a better score than the finished
hypotheses. Greedy search, sampling and search with required phrases are subclasses.
"""

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.translation.search.candidates import Candidates, continuations, is_over, length_penalty
from nmtkit.translation.search.constraints import ConstraintProcessor, Constraints
from nmtkit.translation.search.logits_processors import LogitsProcessor
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.scorer import Scorer, SearchModel
from nmtkit.translation.search.segments import Hypothesis

# B sentences still in the search, R hypotheses of each, N = B x R rows, L tokens of a hypothesis so far, V target
# vocabulary, C candidates of a sentence

COMPACTION = 0.25  # finished sentences are dropped from the batch when their share reaches this number

logger = logging.getLogger("nmtkit")


class FinishedHypotheses:
    """The best `size` finished hypotheses of each sentence."""

    def __init__(self, sentences: int, size: int, distinct: bool) -> None:
        self.size, self.distinct = size, distinct
        self.best: list[list[Hypothesis]] = [[] for _ in range(sentences)]
        # B, float64: the score that a new hypothesis of a sentence must exceed to be kept
        self.threshold = torch.full((sentences,), -math.inf, dtype=torch.float64)
        self.any_full = False  # whether some sentence has `size` finished hypotheses

    def add(self, sentence: int, hypothesis: Hypothesis) -> None:
        kept = self.best[sentence]
        if self.distinct and any(other.tokens == hypothesis.tokens for other in kept):
            return
        kept.append(hypothesis)
        kept.sort(key=lambda hypothesis: -hypothesis.score)
        del kept[self.size :]
        if len(kept) == self.size:
            self.threshold[sentence] = kept[-1].score
            self.any_full = True


def nonempty(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Returns `hypotheses`. If the list is empty, logs a warning and returns an empty hypothesis with score -inf."""
    if hypotheses:
        return hypotheses
    logger.warning(
        "no hypothesis of a sentence has a finite score, so its translation is empty; the model overflowed, or a "
        "logits processor forbids all tokens"
    )
    return [Hypothesis([], -math.inf, -math.inf)]


class BeamSearch:
    """A beam search over one batch of sentences. `run` returns the hypotheses."""

    distinct = True

    def __init__(
        self,
        models: Sequence[SearchModel],
        source: Packed,
        options: SearchOptions,
        constraints: Sequence[Constraints],
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.options = options
        self.device = source.values.device
        sentences, rows = source.layout.sentences, options.rows
        self.finished = FinishedHypotheses(sentences, options.nbest, self.distinct)
        limits = [model.max_target_positions - 1 for model in models if model.max_target_positions is not None]
        lengths = [options.max_length(length - 1) for length in source.layout.lengths.tolist()]  # lengths without eos
        # hypotheses are kept on the CPU, because they are only a few numbers for each step
        self.constraint_processor = ConstraintProcessor(
            options, [min([length, *limits]) for length in lengths], constraints
        )
        self.scorer = Scorer(models, source, rows, processors, self.constraint_processor.max_length)
        self.sentence = torch.arange(sentences)  # B: index of the sentence in `source`
        self.first_row = torch.arange(0, sentences * rows, rows)[:, None]  # B 1: first row of each sentence among N
        # B: penalty of the longest allowed output of a sentence
        self.longest_penalty = length_penalty(self.constraint_processor.max_length + 1, options.lenpen)
        self.history = torch.empty(sentences, rows, 0, dtype=torch.int64)  # B R L: the tokens so far
        # B R, float64. At the start, only the first hypothesis of a group is open, because the others would be copies.
        self.log_probability = torch.full((sentences, rows), -math.inf, dtype=torch.float64)
        self.log_probability[:, :: rows // options.diverse_groups] = 0.0
        self.normalizer: Tensor | None = None  # N: scores of a step minus `normalizer` are log probabilities

    def run(self) -> list[list[Hypothesis]]:
        tokens = torch.full((self.log_probability.numel(),), BOS)
        while True:
            scores = self.scores(tokens.to(self.device))
            parents, tokens = self.advance(self.constraint_processor.apply(scores, self.history))
            done = self.is_done()
            number = 0 if done is None else int(done.sum())
            if number == len(self.sentence):
                return [nonempty(hypotheses) for hypotheses in self.finished.best]
            if done is None or not number:
                pass
            elif number >= COMPACTION * len(done):
                kept = (~done).nonzero().flatten()
                parents = parents[kept] - self.first_row[kept]
                self.drop_finished(kept)
                parents, tokens = parents + self.first_row, tokens[kept]
            else:
                self.log_probability[done] = -math.inf  # finished sentences stay in the batch as padding
            self.scorer.reorder(parents.flatten().to(self.device))
            tokens = tokens.flatten()

    def scores(self, tokens: Tensor) -> Tensor:
        """Appends `tokens` [N]. Returns scores N V of the next tokens.

        The scores minus `self.normalizer` are log probabilities. If `self.normalizer` is None, the scores are log
        probabilities.
        """
        if self.options.diverse_groups > 1 or self.history.shape[2] < self.constraint_processor.language_tokens:
            self.normalizer = None
            return self.scorer.step(tokens)
        scores, self.normalizer = self.scorer.step_unnormalized(tokens)
        return scores

    def advance(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Finishes and extends the hypotheses of all groups. Returns parent rows (of N) and tokens, both B R."""
        sentences, rows = self.log_probability.shape
        log_probs = log_probs.view(sentences, rows, -1)
        size = rows // self.options.diverse_groups
        extended: list[Candidates] = []
        for start in range(0, rows, size):
            group = log_probs if size == rows else log_probs[:, start : start + size]
            if extended:
                counts = _token_counts([candidates.tokens for candidates in extended], log_probs)
                group = group - self.options.diversity * counts
            candidates = self.candidates(group, start, log_probs)
            if (candidates.tokens == EOS).any():
                self.finish(candidates.first(size))
                extended.append(candidates.unfinished(size))
            else:
                extended.append(candidates.first(size))
        kept = extended[0] if len(extended) == 1 else Candidates.join(extended)
        self.log_probability = kept.log_probability
        parents = kept.beam_index + self.first_row
        past = self.history if rows == 1 else self.history.flatten(0, 1)[parents]
        self.history = torch.cat([past, kept.tokens[:, :, None]], 2)
        return parents, kept.tokens

    def candidates(self, group: Tensor, start: int, log_probs: Tensor) -> Candidates:
        """Returns the best continuations of a group.

        There are twice as many continuations as hypotheses, because half of the continuations may end. `start` is the
        index of the first hypothesis of the group. The scores `group` [B, hypotheses of the group, V] rank the tokens.
        In diverse beam search, these scores differ from the scores `log_probs` [B, R, V] of the models.
        """
        size, columns = group.shape[1:]
        before = self.log_probability[:, start : start + size]
        if self.normalizer is not None:
            before = before - self.normalizer.view_as(before)
        best, index = continuations(group, before.to(group.device), 2 * size)
        best, index = best.cpu(), index.cpu()
        rows, tokens = index // columns, index % columns
        if start:
            rows += start
        if self.options.diverse_groups > 1:
            gained = log_probs.cpu().flatten(1).gather(1, rows * log_probs.shape[2] + tokens)
            best = torch.where(best.isfinite(), self.log_probability.gather(1, rows) + gained.double(), best)
        return Candidates(best, rows, tokens)

    def finish(self, candidates: Candidates) -> None:
        """Keeps the candidates that end and are among the best of their sentence."""
        scores = candidates.final_scores(length_penalty(self.history.shape[2] + 1, self.options.lenpen))
        row, column = (scores > self.finished.threshold[self.sentence, None]).nonzero(as_tuple=True)
        outputs = self.history[row, candidates.beam_index[row, column]]
        columns = (self.sentence[row], outputs, scores[row, column], candidates.log_probability[row, column])
        for sentence, output, score, log_probability in zip(*(values.tolist() for values in columns), strict=True):
            if score > self.finished.threshold[sentence]:
                self.finished.add(sentence, Hypothesis(output, score, log_probability))

    def is_done(self) -> Tensor | None:
        """Returns whether the search of each sentence is over: B, bool. None means that all searches continue."""
        if not self.finished.any_full and math.isfinite(self.log_probability[:, 0].sum().item()):
            return None
        next_penalty = length_penalty(self.history.shape[2] + 1, self.options.lenpen)
        largest, threshold = self.longest_penalty.clamp_min(next_penalty), self.finished.threshold[self.sentence]
        return is_over(self.log_probability, largest, threshold, greedy=self.options.rows == 1)

    def drop_finished(self, kept: Tensor) -> None:
        """Keeps only the sentences `kept` (indices, ascending) in the batch."""
        self.scorer.drop_finished(kept.to(self.device))
        self.constraint_processor.drop_finished(kept)
        self.sentence, self.longest_penalty = self.sentence[kept], self.longest_penalty[kept]
        self.first_row = self.first_row[: len(kept)]
        self.log_probability, self.history = self.log_probability[kept], self.history[kept]


def _token_counts(tokens: list[Tensor], like: Tensor) -> Tensor:
    """Returns the number of times that each token of the vocabulary occurs in `tokens` [B, …]: B 1 V."""
    taken = torch.cat(tokens, 1).to(like.device)
    counts = like.new_zeros(len(like), like.shape[2])
    return counts.scatter_add_(1, taken, torch.ones_like(taken, dtype=counts.dtype))[:, None]
