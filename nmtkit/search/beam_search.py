"""Beam search: greedy search with one hypothesis, diverse beam search with several groups of them.

`Scorer` computes the log probabilities of continuations, and `ConstraintProcessor` forbids some of them. `BeamSearch`
keeps the best as open hypotheses, until none of these can come to a better score than those that ended. Sampling and
search for required phrases are subclasses.
"""

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.data.tokenizer import BOS, EOS
from nmtkit.layers.packed import Packed
from nmtkit.processes import distributed
from nmtkit.search.constraints import ConstraintProcessor, Constraints
from nmtkit.search.logits_processors import LogitsProcessor, LogitsProcessorState
from nmtkit.search.options import SearchOptions
from nmtkit.search.segments import Hypothesis

# B sentences still in the search, R hypotheses of each, N = B x R rows, L tokens of a hypothesis so far, V target
# vocabulary, C candidates of a sentence

COMPACTION = 0.25  # share of finished sentences in the batch at which they are dropped from it
SOFTMAX_ROWS = 32  # rows normalised together on a CPU
EXP_ROWS = 16  # rows of which a CPU takes the exponentials together
POSITIVE = 1e-4  # above this, a log probability is not the result of rounding
LOG2_E = 1 / math.log(2)
TOPK_BLOCK = 128  # columns; measured on 128 rows of 10,000 and 37,000 columns

logger = logging.getLogger("nmtkit")


@dataclass(frozen=True)
class Candidates:
    """Continuations of the hypotheses of each sentence, best first; each field is B C."""

    log_probability: Tensor  # of the whole hypothesis, float64; -inf for none
    beam_index: Tensor  # the hypothesis that is continued, 0 … R-1
    tokens: Tensor  # the token that continues it

    def first(self, number: int) -> "Candidates":
        return Candidates(self.log_probability[:, :number], self.beam_index[:, :number], self.tokens[:, :number])

    @staticmethod
    def join(groups: "Sequence[Candidates]") -> "Candidates":
        """Returns the candidates of several groups of hypotheses side by side."""
        columns = [(group.log_probability, group.beam_index, group.tokens) for group in groups]
        return Candidates(*(torch.cat(column, 1) for column in zip(*columns, strict=True)))


@overload
def length_penalty(length: int, lenpen: float) -> float: ...
@overload
def length_penalty(length: Tensor, lenpen: float) -> Tensor: ...
def length_penalty(length: Tensor | int, lenpen: float) -> Tensor | float:
    """Returns the divisor of the log probability of an output of `length` pieces, eos included.

    Source: Wu et al. 2016, equation 14, without the coverage term; Vaswani et al. 2017, section 6.1.
    """
    if isinstance(length, int):
        penalty: float = ((5.0 + length) / 6.0) ** lenpen
        return penalty
    return ((5.0 + length.double()) / 6.0) ** lenpen


def log_softmax_(logits: Tensor) -> Tensor:
    """Returns the log probabilities of `logits` [N, V] in fp32, in the memory of the logits where these are fp32.

    On a CPU they are normalised a few rows at a time, which stay in the processor's cache: that saves 8 % of a
    projection of 128 rows onto 37,000 entries.
    """
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return logits.log_softmax(1, dtype=torch.float32)
    for rows in logits.split(SOFTMAX_ROWS):
        torch.log_softmax(rows, 1, out=rows)
    return logits


def mean_log_probabilities(logits: Sequence[Tensor]) -> Tensor:
    """Returns the logarithm of the models' mean probabilities, in fp32, from the logits [N, V] of each, overwritten."""
    each = [log_softmax_(model_logits) for model_logits in logits]
    return each[0] if len(each) == 1 else torch.stack(each).logsumexp(0).sub_(math.log(len(each)))


def topk(values: Tensor, k: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the k largest of each row of `values` [N, V] and their columns, largest first: exact, in two stages.

    The k largest lie in the k blocks of columns with the largest maxima, so that all other blocks are only read once,
    for their maximum; or never, if the `maxima` [N, whole blocks] are known.
    """
    columns = values.shape[1]
    blocks = columns // TOPK_BLOCK
    if blocks < 4 * k or (maxima is None and values.numel() <= TOPK_BLOCK**2):
        return values.topk(min(k, columns), dim=1)
    values = values.contiguous()
    whole = values.as_strided((len(values), blocks, TOPK_BLOCK), (columns, TOPK_BLOCK, 1))
    best = (whole.amax(2) if maxima is None else maxima).topk(k, dim=1, sorted=False).indices  # N k
    picked = whole[torch.arange(len(values), device=values.device)[:, None], best].view(len(values), k * TOPK_BLOCK)
    if blocks * TOPK_BLOCK < columns:
        picked = torch.cat([picked, values[:, blocks * TOPK_BLOCK :]], 1)
        best = torch.nn.functional.pad(best, (0, 1), value=blocks)
    largest, index = picked.topk(k, dim=1)
    return largest, best.gather(1, index // TOPK_BLOCK) * TOPK_BLOCK + index % TOPK_BLOCK


@functools.lru_cache(64)
def block_width(columns: int) -> int:
    """Returns the width of the blocks in which `continuations` looks at rows: one that leaves no rest, if there is.

    Maxima come 32 columns at a time; those left over in a block are slow.
    """
    widths = [width for width in range(64, 161) if columns % width == 0 and width % 32 <= 8]
    return min(widths, key=lambda width: (width % 32 / width, width), default=TOPK_BLOCK)


@functools.lru_cache(64)
def block_starts(rows: int, columns: int, device: torch.device) -> Tensor:
    """Returns the start of each block of each of `rows`. The last block of a row may overlap the previous block."""
    width = block_width(columns)
    within = torch.arange(0, columns, width, device=device).clamp_max(columns - width)
    return (torch.arange(0, rows * columns, columns, device=device)[:, None] + within).flatten()


def continuations(scores: Tensor, before: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Returns the largest of `scores` + `before` of each sentence, largest first, and their indices among R x V.

    `scores` is B R V, `before` B R; sums are taken in fp64. Exact, in two stages: the best lie in as many blocks of
    columns, those with the largest maxima, so that all other blocks are only read once, for their maximum.
    """
    sentences, rows, columns = scores.shape
    width = block_width(columns)
    whole, rest = divmod(columns, width)
    if rows * whole < 4 * number:
        return (scores + before[:, :, None]).flatten(1).topk(number)
    scores = scores.contiguous()
    maxima = scores.as_strided((sentences, rows, whole, width), (rows * columns, columns, width, 1)).amax(3)
    if rest:
        maxima = torch.cat([maxima, scores.narrow(2, columns - rest, rest).amax(2, keepdim=True)], 2)
    best = (maxima + before[:, :, None]).flatten(1).topk(number, sorted=False).indices  # B C
    start = block_starts(rows, columns, scores.device)[best]
    begin = start
    if sentences > 1:
        begin = start + torch.arange(0, scores.numel(), rows * columns, device=scores.device)[:, None]
    windows = scores.as_strided((scores.numel() - width + 1, width), (1, 1))
    picked = windows.index_select(0, begin.flatten()).view(sentences, number, width)
    if rest:
        overlap = torch.arange(width, device=scores.device) < width - rest
        picked.masked_fill_((best % (whole + 1) == whole)[:, :, None] & overlap, -math.inf)
    largest, index = (picked + before.gather(1, start // columns)[:, :, None]).flatten(1).topk(number)
    return largest, start.gather(1, index // width) + index % width


def logsumexp(logits: Tensor) -> Tensor:
    """Returns the logarithm of the sum of exponentials of each row of `logits` [N, V] in fp32: N.

    It is not finite where a sum overflows. By powers of two, a few rows at a time, which stay in the processor's cache,
    it takes half the time of a log-softmax on a CPU.
    """
    space = torch.empty_like(logits[:EXP_ROWS])
    sums = [torch.mul(x, LOG2_E, out=space[: x.shape[0]]).exp2_().sum(1) for x in logits.split(EXP_ROWS)]
    return (sums[0] if len(sums) == 1 else torch.cat(sums)).log_()


class Scorer:
    """One model, or several whose probabilities are averaged; keeps their decoder states in step with the search.

    `processors` change the log probabilities, in their order. `max_length` [B] is the most tokens of an output.
    """

    def __init__(
        self,
        models: Sequence[Architecture],
        source: Packed,
        beams: int,
        processors: Sequence[LogitsProcessor] = (),
        max_length: Tensor | None = None,
    ) -> None:
        self.models = models
        self.states = [model.start(model.encode(source), beams) for model in models]
        self.processors = processors
        self.processor_states: list[LogitsProcessorState] = []
        if max_length is not None:
            self.processor_states = [processor.start(source, max_length, beams) for processor in processors]

    def step(self, tokens: Tensor) -> Tensor:
        """Appends `tokens` [N]; returns the log probabilities of all that may come next, N V.

        A row that is not finite (a model overflowed) has no continuation: it is all -inf.
        """
        log_probs = self.log_probabilities(self.logits(tokens))
        for processor, state in zip(self.processors, self.processor_states, strict=True):
            log_probs = state.step(tokens, log_probs)
            if (log_probs > POSITIVE).any():
                name = type(processor).__name__
                raise ValueError(f"{name} returned log probabilities above 0; search needs values of at most 0")
        return log_probs

    def step_unnormalized(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Appends `tokens` [N]; returns numbers N V, and what makes them log probabilities when it is taken off, N.

        For one model on a CPU they are its logits, since log probabilities would be written over all of them.
        """
        if self.processors:
            return self.step(tokens), None
        logits = self.logits(tokens)
        if len(logits) == 1 and logits[0].device.type == "cpu" and logits[0].dtype == torch.float32:
            normalizer = logsumexp(logits[0])
            if math.isfinite(normalizer.sum().item()):
                return logits[0], normalizer
        return self.log_probabilities(logits), None

    def logits(self, tokens: Tensor) -> list[Tensor]:
        """Appends `tokens` [N]; returns the logits of each model, N V."""
        distributed.heartbeat()
        return [model.step(tokens, state) for model, state in zip(self.models, self.states, strict=True)]

    def log_probabilities(self, logits: Sequence[Tensor]) -> Tensor:
        mean = mean_log_probabilities(logits)
        if math.isnan(mean[:, 0].sum().item()):  # one NaN spoils its whole row
            mean.masked_fill_(mean[:, :1].isnan(), -math.inf)
        return mean

    def reorder(self, beam_index: Tensor) -> None:
        for state in self.states:
            state.reorder(beam_index)
        for processor_state in self.processor_states:
            processor_state.reorder(beam_index)

    def drop_finished(self, sentences: Tensor) -> None:
        for state in self.states:
            state.drop_finished(sentences)
        for processor_state in self.processor_states:
            processor_state.drop_finished(sentences)


class FinishedHypotheses:
    """The best `size` finished hypotheses of each sentence."""

    def __init__(self, sentences: int, size: int, distinct: bool) -> None:
        self.size, self.distinct = size, distinct
        self.best: list[list[Hypothesis]] = [[] for _ in range(sentences)]
        # B, float64: the score that a further hypothesis of a sentence must beat
        self.threshold = torch.full((sentences,), -math.inf, dtype=torch.float64)
        self.any_full = False  # whether some sentence has `size` of them

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
    """Returns the hypotheses of a sentence, or an empty one with score -inf, and a warning, if there are none."""
    if hypotheses:
        return hypotheses
    logger.warning("a sentence has no finite score (did the model overflow?); its translation is empty")
    return [Hypothesis([], -math.inf, -math.inf)]


class BeamSearch:
    """One run over one batch."""

    distinct = True

    def __init__(
        self,
        models: Sequence[Architecture],
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
        lengths = [options.max_length(length - 1) for length in source.layout.lengths.tolist()]  # without eos
        # The bookkeeping stays on the CPU: it is a few numbers per hypothesis and step.
        self.constraint_processor = ConstraintProcessor(
            options, [min([length, *limits]) for length in lengths], constraints
        )
        self.scorer = Scorer(models, source, rows, processors, self.constraint_processor.max_length)
        self.sentence = torch.arange(sentences)  # B: index of the sentence in `source`
        self.first_row = torch.arange(0, sentences * rows, rows)[:, None]  # B 1: of each sentence, among N
        self.longest_penalty = length_penalty(
            self.constraint_processor.max_length + 1, options.lenpen
        )  # B: of the longest output of a sentence
        self.history = torch.empty(sentences, rows, 0, dtype=torch.int64)  # B R L: the tokens so far
        # B R, float64: sums of many small numbers. All hypotheses of a group but its first are closed at the start.
        self.log_probability = torch.full((sentences, rows), -math.inf, dtype=torch.float64)
        self.log_probability[:, :: rows // options.diverse_groups] = 0.0
        self.normalizer: Tensor | None = None  # N: what makes this step's scores log probabilities

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
        """Returns scores that rank the continuations of each hypothesis after `tokens` [N], N V.

        They are log probabilities, or logits from which a `normalizer` must be subtracted.
        """
        if self.options.diverse_groups > 1 or self.history.shape[2] < self.constraint_processor.given:
            self.normalizer = None
            return self.scorer.step(tokens)
        scores, self.normalizer = self.scorer.step_unnormalized(tokens)
        return scores

    def advance(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Finishes and extends hypotheses, a group at a time; returns parent rows, among N, and tokens, each B R."""
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
                extended.append(unfinished(candidates, size))
            else:
                extended.append(candidates.first(size))
        kept = extended[0] if len(extended) == 1 else Candidates.join(extended)
        self.log_probability = kept.log_probability
        parents = kept.beam_index + self.first_row
        past = self.history if rows == 1 else self.history.flatten(0, 1)[parents]
        self.history = torch.cat([past, kept.tokens[:, :, None]], 2)
        return parents, kept.tokens

    def candidates(self, group: Tensor, start: int, log_probs: Tensor) -> Candidates:
        """Returns the best continuations of the hypotheses from `start` on: twice as many as there are hypotheses, so
        that enough go on if half of them end.

        `group` [B, hypotheses of the group, V] ranks the tokens; it differs from `log_probs` [B, R, V], the models' own
        numbers, when it favours diversity.
        """
        size, columns = group.shape[1:]
        before = self.log_probability[:, start : start + size]
        if self.normalizer is not None:
            before = before - self.normalizer.view_as(before)
        best, index = continuations(group, before.to(group.device), min(2 * size, size * columns))
        best, index = best.cpu(), index.cpu()
        rows, tokens = index // columns, index % columns
        if start:
            rows += start
        if self.options.diverse_groups > 1:
            own = log_probs.cpu().flatten(1).gather(1, rows * log_probs.shape[2] + tokens)
            best = torch.where(best.isfinite(), self.log_probability.gather(1, rows) + own.double(), best)
        return Candidates(best, rows, tokens)

    def finish(self, candidates: Candidates) -> None:
        """Keeps those candidates that end and are among the best of their sentence."""
        ending = candidates.tokens == EOS
        scores = candidates.log_probability / length_penalty(self.history.shape[2] + 1, self.options.lenpen)
        row, column = (ending & (scores > self.finished.threshold[self.sentence, None])).nonzero(as_tuple=True)
        outputs = self.history[row, candidates.beam_index[row, column]]
        columns = (self.sentence[row], outputs, scores[row, column], candidates.log_probability[row, column])
        for sentence, output, score, log_probability in zip(*(values.tolist() for values in columns), strict=True):
            if score > self.finished.threshold[sentence]:
                self.finished.add(sentence, Hypothesis(output, score, log_probability))

    def is_done(self) -> Tensor | None:
        """Returns a mask of the sentences that cannot find a better hypothesis: B, bool; None if all can."""
        if not self.finished.any_full and math.isfinite(self.log_probability[:, 0].sum().item()):
            return None
        threshold = self.finished.threshold[self.sentence]
        done = self.best_attainable() <= threshold
        if self.options.rows == 1:  # greedy: the first end is the end
            done |= threshold > -math.inf
        return done

    def best_attainable(self) -> Tensor:
        """Returns the best score that an open hypothesis of each sentence can still come to: B.

        Log probabilities only fall, so it is today's, divided by the largest penalty on the way to the longest output.
        """
        shortest = length_penalty(self.history.shape[2] + 1, self.options.lenpen)
        return self.log_probability.amax(1) / self.longest_penalty.clamp_min(shortest)

    def drop_finished(self, kept: Tensor) -> None:
        """Drops all but the sentences `kept` (indices, ascending) from the batch."""
        self.scorer.drop_finished(kept.to(self.device))
        self.constraint_processor.drop_finished(kept)
        self.sentence, self.longest_penalty = self.sentence[kept], self.longest_penalty[kept]
        self.first_row = self.first_row[: len(kept)]
        self.log_probability, self.history = self.log_probability[kept], self.history[kept]


def unfinished(candidates: Candidates, size: int) -> Candidates:
    """Returns the `size` best candidates that do not end."""
    going_on = candidates.log_probability.masked_fill(candidates.tokens == EOS, -math.inf)
    order = going_on.isfinite().to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :size]
    return Candidates(*(field.gather(1, order) for field in (going_on, candidates.beam_index, candidates.tokens)))


def _token_counts(tokens: list[Tensor], like: Tensor) -> Tensor:
    """Counts each token of the vocabulary in `tokens` [B, …]: B 1 V."""
    taken = torch.cat(tokens, 1).to(like.device)
    counts = like.new_zeros(len(like), like.shape[2])
    return counts.scatter_add_(1, taken, torch.ones_like(taken, dtype=counts.dtype))[:, None]
