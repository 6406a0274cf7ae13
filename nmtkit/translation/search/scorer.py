"""Computes scores of the next tokens with one or several models, and chooses the best continuations.

`beam_search.Search` and `gpu_beam_search.py` use the same functions, so they find the same translations.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import EOS
from nmtkit.jobs import distributed
from nmtkit.models.architectures.contract import described
from nmtkit.models.architectures.interface import DecoderState
from nmtkit.translation.search.logits_processors import LogitsProcessor

# B sentences still in the search, R hypotheses of each, N = B x R rows, V target vocabulary, C candidates of a sentence

HEARTBEAT_STEPS = 64  # number of steps between two heartbeats of a process
POSITIVE = 1e-4  # a log probability above this limit is not a rounding error
BLOCK = 128  # number of columns of a block; chosen by measurements on 128 rows of 10,000 and 37,000 columns


def mean_log_probabilities(logits: Sequence[Tensor]) -> Tensor:
    """Returns the logarithm of the mean probabilities of several models in fp32, from their logits [N, V]."""
    each = [model_logits.log_softmax(1, dtype=torch.float32) for model_logits in logits]
    return each[0] if len(each) == 1 else torch.stack(each).logsumexp(0).sub_(math.log(len(each)))


class SearchModel(Protocol):
    """The part of an architecture that a search uses."""

    max_target_positions: int | None

    def encode(self, source: Packed) -> Packed: ...

    def start(self, memory: Packed, beams: int) -> DecoderState: ...

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor: ...


class Scorer:
    """Scores continuations with one model, or with the mean probabilities of several models. Keeps decoder states.

    `processors` change the log probabilities one after another. `max_length` [B] is the maximum length of an output.
    """

    def __init__(
        self,
        models: Sequence[SearchModel],
        source: Packed,
        beams: int,
        max_length: Tensor,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.models, self.processors, self.steps = models, processors, 0
        self.states = [model.start(model.encode(source), beams) for model in models]
        self.processor_states = [processor.start(source, max_length, beams) for processor in processors]

    def step(self, tokens: Tensor) -> Tensor:
        """Appends `tokens` [N] to the hypotheses. Returns the log probabilities [N, V] of the next tokens.

        If a model overflows, its rows of NaN become -inf, so the hypotheses of these rows have no continuation. Raises
        ValueError if a processor returns another shape or a log probability above 0.
        """
        log_probs = self.log_probabilities(self.logits(tokens))
        for processor, state in zip(self.processors, self.processor_states, strict=True):
            shape, result = log_probs.shape, state.step(tokens, log_probs)
            name = type(processor).__name__
            if not isinstance(result, Tensor) or result.shape != shape:
                raise ValueError(
                    f"step of {name} returned {described(result)}; it must return log probabilities [N, V] of shape "
                    f"{list(shape)}"
                )
            if (result > POSITIVE).any():
                raise ValueError(f"{name} returned log probabilities above 0; search needs values of at most 0")
            log_probs = result
        return log_probs

    def logits(self, tokens: Tensor) -> list[Tensor]:
        """Appends `tokens` [N] to the hypotheses. Returns the logits [N, V] of each model."""
        self.steps += 1
        if self.steps % HEARTBEAT_STEPS == 0:
            distributed.heartbeat()
        return [model.step(tokens, state) for model, state in zip(self.models, self.states, strict=True)]

    def log_probabilities(self, logits: Sequence[Tensor]) -> Tensor:
        mean = mean_log_probabilities(logits)
        column = mean[:, 0]
        if math.isnan((column if len(mean) == 1 else column.sum()).item()):  # a NaN makes all numbers of its row NaN
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


# --- candidates -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidates:
    """Continuations of the hypotheses of each sentence, best first. Each field has the shape [B, C]."""

    log_probability: Tensor  # log probability of the whole hypothesis, float64; -inf: the candidate does not exist
    beam_index: Tensor  # index of the continued hypothesis, 0 … R-1
    tokens: Tensor  # the next token

    def first(self, number: int) -> "Candidates":
        return Candidates(self.log_probability[:, :number], self.beam_index[:, :number], self.tokens[:, :number])

    @staticmethod
    def join(groups: "Sequence[Candidates]") -> "Candidates":
        """Concatenates the candidates of several groups of hypotheses."""
        columns = [(group.log_probability, group.beam_index, group.tokens) for group in groups]
        return Candidates(*(torch.cat(column, 1) for column in zip(*columns, strict=True)))

    def unfinished(self, number: int) -> "Candidates":
        """Returns the `number` best candidates that do not end."""
        log_probability = self.log_probability.masked_fill(self.tokens == EOS, -math.inf)
        order = log_probability.isfinite().to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :number]
        return Candidates(*(field.gather(1, order) for field in (log_probability, self.beam_index, self.tokens)))

    def final_scores(self, penalty: Tensor | float) -> Tensor:
        """Returns final scores [B, C]: log probability / `penalty` for candidates that end, -inf for the others."""
        return (self.log_probability / penalty).masked_fill(self.tokens != EOS, -math.inf)


def continuations(
    scores: Tensor, before: Tensor, number: int, block_maxima: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the `number` largest sums `scores + before` of each sentence, largest first, and their indices in R x V.

    `scores` is [B, R, V], and `before` is [B, R]. Sums are in fp64. The result is exact. The largest sums lie in the
    blocks of columns with the largest maxima, so all other blocks are read only once, for their maximum.
    `block_maxima` [B, R, blocks] are the maxima of the complete blocks of `BLOCK` columns. With `block_maxima`, the
    other blocks are not read at all, and NaN counts as -inf.
    """
    sentences, rows, columns = scores.shape
    number = min(number, rows * columns)
    width = block_width(columns) if block_maxima is None else BLOCK
    whole, rest = divmod(columns, width)
    if rows * whole < 4 * number:
        return _without_nan(scores + before[:, :, None], block_maxima).flatten(1).topk(number)
    scores = scores.contiguous()
    if block_maxima is None:
        maxima = scores.as_strided((sentences, rows, whole, width), (rows * columns, columns, width, 1)).amax(3)
    else:
        maxima = block_maxima
    if rest:
        maxima = torch.cat([maxima, scores.narrow(2, columns - rest, rest).amax(2, keepdim=True)], 2)
    best = _without_nan(maxima + before[:, :, None], block_maxima).flatten(1).topk(number, sorted=False).indices  # B C
    shape = rows, columns, width, scores.device
    first = (cached_block_starts(*shape) if scores.device.type == "cpu" else block_starts(*shape))[best]
    index = first
    if sentences > 1:
        index = first + torch.arange(0, scores.numel(), rows * columns, device=scores.device)[:, None]
    windows = scores.as_strided((scores.numel() - width + 1, width), (1, 1))
    picked = windows.index_select(0, index.flatten()).view(sentences, number, width)
    if rest:
        overlap = torch.arange(width, device=scores.device) < width - rest
        picked.masked_fill_((best % (whole + 1) == whole)[:, :, None] & overlap, -math.inf)
    sums = picked + before.gather(1, first // columns)[:, :, None]
    largest, index = _without_nan(sums, block_maxima).flatten(1).topk(number)
    return largest, first.gather(1, index // width) + index % width


def block_maxima(scores: Tensor) -> Tensor:
    """Returns the maxima [B, R, blocks] of all complete blocks of `BLOCK` columns of `scores` [B, R, V]."""
    whole = scores.shape[2] // BLOCK
    return scores[:, :, : whole * BLOCK].unflatten(2, (whole, BLOCK)).amax(3)


def _without_nan(sums: Tensor, block_maxima: Tensor | None) -> Tensor:
    return sums if block_maxima is None else sums.masked_fill_(sums.isnan(), -math.inf)


@functools.lru_cache(64)
def block_width(columns: int) -> int:
    """Returns the number of columns of a block: a suitable divisor of `columns`, or BLOCK if no divisor is suitable.

    The maximum is computed over 32 columns at a time, so a width that is not a multiple of 32 is slow.
    """
    widths = [width for width in range(64, 161) if columns % width == 0 and width % 32 <= 8]
    return min(widths, key=lambda width: (width % 32 / width, width), default=BLOCK)


def block_starts(rows: int, columns: int, width: int, device: torch.device) -> Tensor:
    """Returns the index of the first column of each block. The last block of a row may overlap the previous block."""
    within = torch.arange(0, columns, width, device=device).clamp_max(columns - width)
    return (torch.arange(0, rows * columns, columns, device=device)[:, None] + within).flatten()


# only for CPUs, because tensors that are made while a CUDA graph is recorded belong to this graph
cached_block_starts = functools.lru_cache(64)(block_starts)
