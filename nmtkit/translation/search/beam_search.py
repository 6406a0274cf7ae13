"""The search in PyTorch: a loop over steps. In each step, a `Selector` chooses hypotheses.

`Scorer` computes the log probabilities of continuations, and `ConstraintProcessor` forbids continuations. A selector
chooses the continuations that stay open: `BeamSelector` for beam search and diverse beam search, `Sampler` for samples,
`constrained_search.RequiredTextSelector` for required texts. The search ends when no open hypothesis can reach a better
score than the finished hypotheses. The search with CUDA graphs is `gpu_beam_search.py`.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.models.architectures import Architecture
from nmtkit.models.layers import device_of_sums
from nmtkit.translation.search.constraints import Constraints
from nmtkit.translation.search.limited_search import limited_search
from nmtkit.translation.search.logits_processors import LogitsProcessor
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.rules import (
    ConstraintProcessor,
    TokenCount,
    is_over,
    length_penalty,
    max_lengths,
    open_hypotheses,
)
from nmtkit.translation.search.scorer import Candidates, Scorer, SearchModel, continuations
from nmtkit.translation.search.shortlist import Shortlist
from nmtkit.translation.search.types import BatchHypotheses, Hypothesis

# B sentences still in the search, R hypotheses of each, N = B x R rows, L tokens of a hypothesis so far, V target
# vocabulary, C candidates of a sentence

COMPACTION = 0.25  # finished sentences are dropped from the batch when their share reaches this number

logger = logging.getLogger("nmtkit")


@torch.inference_mode()
def free_search(
    models: Sequence[Architecture],
    source: Packed,
    options: SearchOptions,
    constraints: Sequence[Constraints],
    seeds: Sequence[int] | None = None,
    processors: Sequence[LogitsProcessor] = (),
    shortlist: Shortlist | None = None,
) -> BatchHypotheses:
    """Does the same as `decoding.beam_search`, but ignores required texts, also when it computes maximum lengths."""
    constraints = [replace(each, required=()) if each.required else each for each in constraints]
    selector = Sampler(options, seeds or range(len(constraints))) if options.sampling else BeamSelector(options)
    return run_search(models, source, options, constraints, lambda _: selector, processors, shortlist)


def run_search(
    models: Sequence[Architecture],
    source: Packed,
    options: SearchOptions,
    constraints: Sequence[Constraints],
    selector_of: "Callable[[Sequence[Constraints]], Selector]",
    processors: Sequence[LogitsProcessor],
    shortlist: Shortlist | None,
) -> BatchHypotheses:
    """Returns the hypotheses of a search over all target pieces, or over the `shortlist` with `options.shortlist`.

    `selector_of` makes the selector from the constraints of the search. With a shortlist, these constraints refer to
    columns of the shortlist.
    """

    def search(models: Sequence[SearchModel], source: Packed, constraints: Sequence[Constraints]) -> BatchHypotheses:
        return Search(models, source, options, constraints, selector_of(constraints), processors).run()

    if shortlist is None or not options.shortlist:
        return search(models, source, constraints)
    return limited_search(models, source, constraints, shortlist, search)


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


class Selector(ABC):
    """Chooses the continuations of the open hypotheses of a search."""

    distinct = True  # whether the finished hypotheses of a sentence must differ
    group = 1  # number of successive open hypotheses that begin as copies of one hypothesis

    @abstractmethod
    def select(self, search: "Search", scores: Tensor) -> Candidates:
        """Finishes hypotheses of `search`. Returns the continuations [B, R] that stay open. `scores` is [N, V]."""

    def drop_finished(self, kept: Tensor) -> None:  # noqa: B027  # most selectors keep nothing about sentences
        """Keeps only the sentences `kept` (indices, ascending)."""


class Search:
    """A search over one batch of sentences. `run` returns the hypotheses."""

    def __init__(
        self,
        models: Sequence[SearchModel],
        source: Packed,
        options: SearchOptions,
        constraints: Sequence[Constraints],
        selector: Selector | None = None,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.options, self.selector = options, selector or BeamSelector(options)
        self.device = source.values.device
        sentences, rows = source.layout.sentences, open_hypotheses(options)
        self.finished = FinishedHypotheses(sentences, options.nbest, self.selector.distinct)
        # hypotheses are kept on the CPU, because they are only a few numbers for each step
        limiting = [*models, *(model for processor in processors for model in processor.models)]
        lengths = max_lengths(options, source.layout.lengths.tolist(), constraints, limiting)
        self.constraint_processor = ConstraintProcessor(options, lengths, constraints)
        self.scorer = Scorer(models, source, rows, self.constraint_processor.max_length, processors)
        self.sentence = torch.arange(sentences)  # B: index of the sentence in `source`
        self.first_row = torch.arange(0, sentences * rows, rows)[:, None]  # B 1: first row of each sentence among N
        # B: penalty of the longest allowed output of a sentence
        self.longest_penalty = self.penalty(self.constraint_processor.max_length + 1)
        self.history = torch.empty(sentences, rows, 0, dtype=torch.int64)  # B R L: the tokens so far
        # B R, float64. At the start, only the first hypothesis of a group is open, because the others would be copies.
        self.log_probability = torch.full((sentences, rows), -math.inf, dtype=torch.float64)
        self.log_probability[:, :: self.selector.group] = 0.0

    def penalty(self, tokens: TokenCount) -> TokenCount:
        """Returns the length penalty of outputs with this number of tokens, language tokens and eos included."""
        language_tokens = self.constraint_processor.language_tokens
        return length_penalty(tokens, self.options.lenpen, language_tokens=language_tokens)

    def run(self) -> BatchHypotheses:
        tokens = torch.full((self.log_probability.numel(),), BOS)
        while True:
            scores = self.constraint_processor.apply(self.scorer.step(tokens.to(self.device)), self.history)
            scores = scores.to(device_of_sums(self.device))
            parents, tokens = self.extend(self.selector.select(self, scores))
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

    def extend(self, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """Makes `candidates` [B, R] the open hypotheses. Returns their parents (rows of N) and tokens, both [B, R]."""
        self.log_probability = candidates.log_probability
        parents = candidates.beam_index + self.first_row
        past = self.history if parents.shape[1] == 1 else self.history.flatten(0, 1)[parents]
        self.history = torch.cat([past, candidates.tokens[:, :, None]], 2)
        return parents, candidates.tokens

    def finish_among(self, candidates: Candidates, number: int) -> Candidates:
        """Finishes candidates that end among the best `number`. Returns the best `number` candidates that continue."""
        if not (candidates.tokens == EOS).any():
            return candidates.first(number)
        self.finish(candidates.first(number))
        return candidates.unfinished(number)

    def finish(self, candidates: Candidates) -> None:
        """Keeps the candidates that end and are among the best of their sentence."""
        scores = candidates.final_scores(self.penalty(self.history.shape[2] + 1))
        row, column = (scores > self.finished.threshold[self.sentence, None]).nonzero(as_tuple=True)
        outputs = self.history[row, candidates.beam_index[row, column]]
        columns = (self.sentence[row], outputs, scores[row, column], candidates.log_probability[row, column])
        for sentence, output, score, log_probability in zip(*(values.tolist() for values in columns), strict=True):
            if score > self.finished.threshold[sentence]:
                self.finished.add(sentence, Hypothesis(output, score, log_probability))

    def is_done(self) -> Tensor | None:
        """Returns a bool for each sentence, [B]: whether its search is over. None means that all searches continue."""
        if not self.finished.any_full and math.isfinite(self.log_probability[:, 0].sum().item()):
            return None
        next_penalty = self.penalty(self.history.shape[2] + 1)
        largest, threshold = self.longest_penalty.clamp_min(next_penalty), self.finished.threshold[self.sentence]
        return is_over(self.log_probability, largest, threshold, greedy=self.log_probability.shape[1] == 1)

    def drop_finished(self, kept: Tensor) -> None:
        """Keeps only the sentences `kept` (indices, ascending) in the batch."""
        self.scorer.drop_finished(kept.to(self.device))
        self.constraint_processor.drop_finished(kept)
        self.selector.drop_finished(kept)
        self.sentence, self.longest_penalty = self.sentence[kept], self.longest_penalty[kept]
        self.first_row = self.first_row[: len(kept)]
        self.log_probability, self.history = self.log_probability[kept], self.history[kept]


class BeamSelector(Selector):
    """Keeps the most probable continuations. With several groups, each group avoids the tokens of earlier groups.

    Source of diverse groups: Vijayakumar et al. 2016, "Diverse Beam Search".
    """

    def __init__(self, options: SearchOptions) -> None:
        self.diversity, self.group = options.diversity, options.beam // options.diverse_groups

    def select(self, search: Search, scores: Tensor) -> Candidates:
        sentences, rows = search.log_probability.shape
        log_probs = scores.view(sentences, rows, -1)
        if rows == self.group:
            return search.finish_among(self.candidates(log_probs, search.log_probability), rows)
        extended: list[Candidates] = []
        for start in range(0, rows, self.group):
            group = log_probs[:, start : start + self.group]
            if extended:
                counts = _token_counts([candidates.tokens for candidates in extended], log_probs)
                group = group - self.diversity * counts
            best = self.candidates(group, search.log_probability[:, start : start + self.group])
            beam_index = best.beam_index + start
            # the diversity penalty changes the order of the continuations, but not their log probabilities
            gained = log_probs.cpu().flatten(1).gather(1, beam_index * log_probs.shape[2] + best.tokens)
            total = search.log_probability.gather(1, beam_index) + gained.double()
            total = torch.where(best.log_probability.isfinite(), total, best.log_probability)
            extended.append(search.finish_among(Candidates(total, beam_index, best.tokens), self.group))
        return Candidates.join(extended)

    def candidates(self, scores: Tensor, before: Tensor) -> Candidates:
        """Returns the best continuations of hypotheses, from log probabilities `before` [B, R] and `scores` [B, R, V].

        There are twice as many continuations as hypotheses, because half of the continuations may end.
        """
        rows, columns = scores.shape[1:]
        best, index = continuations(scores, before.to(scores.device), 2 * rows)
        best, index = best.cpu(), index.cpu()
        return Candidates(best, index // columns, index % columns)


def _token_counts(tokens: list[Tensor], like: Tensor) -> Tensor:
    """Returns the counts [B, 1, V]: how often each token of the vocabulary occurs in `tokens` [B, …] of a sentence."""
    taken = torch.cat(tokens, 1).to(like.device)
    counts = like.new_zeros(len(like), like.shape[2])
    return counts.scatter_add_(1, taken, torch.ones_like(taken, dtype=counts.dtype))[:, None]


class Sampler(Selector):
    """Draws `options.nbest` samples for each sentence. Samples are sorted by score. Some samples can be equal.

    Each step of each sample uses one random number. The random numbers depend only on `options.seed` and on the seed of
    the sentence.
    """

    distinct = False

    def __init__(self, options: SearchOptions, seeds: Sequence[int]) -> None:
        self.options = options
        self.generators = [random_numbers(options.seed, seed) for seed in seeds]

    def select(self, search: Search, scores: Tensor) -> Candidates:
        sentences, rows = search.log_probability.shape
        uniform = np.stack([generator.random(rows) for generator in self.generators])
        drawn = draw(scores, torch.from_numpy(uniform).flatten().to(scores.device), self.options)
        gained = scores.gather(1, drawn[:, None]).cpu().double().view(sentences, rows)
        tokens, beam_index = drawn.cpu().view(sentences, rows), torch.arange(rows).expand(sentences, -1)
        total = search.log_probability + gained
        search.finish(Candidates(total, beam_index, tokens))
        return Candidates(total.masked_fill(tokens == EOS, -math.inf), beam_index, tokens)

    def drop_finished(self, kept: Tensor) -> None:
        self.generators = [self.generators[index] for index in kept.tolist()]


def random_numbers(seed: int, sentence: int) -> np.random.Generator:
    """Returns the random generator of a sentence. Each step draws one number for each sample, in order."""
    return np.random.Generator(np.random.Philox([seed, sentence]))


def draw(log_probs: Tensor, uniform: Tensor, options: SearchOptions) -> Tensor:
    """Samples a token for each row of `log_probs` [N, V], from random numbers `uniform` [N] in [0, 1)."""
    scaled = log_probs.double() / options.temperature
    if options.top_k:
        scaled, columns = scaled.topk(min(options.top_k, scaled.shape[1]), dim=1)
    elif options.top_p < 1:
        scaled, columns = scaled.sort(dim=1, descending=True, stable=True)
    else:
        columns = torch.arange(scaled.shape[1], device=log_probs.device).expand_as(scaled)
    probabilities = scaled.softmax(1)
    if options.top_p < 1:
        before = probabilities.cumsum(1) - probabilities
        probabilities = probabilities.masked_fill(before >= options.top_p, 0.0)
    cumulative = probabilities.nan_to_num().cumsum(1)
    index = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    # because of rounding, the index can be beyond the last token of positive probability
    last = (probabilities > 0).to(torch.uint8).cumsum(1, dtype=torch.int64).argmax(1, keepdim=True)
    return columns.gather(1, torch.minimum(index, last))[:, 0]
