"""Candidates of a beam search: the best continuations of open hypotheses, and their selection.

Both searches, `beam_search.BeamSearch` and `graph_search.GraphBeamSearch`, use these functions, so that they find the
same translations.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from nmtkit.data.tokenizers.tokenizer import EOS

# B sentences, R hypotheses of each, V target vocabulary, C candidates of a sentence

BLOCK = 128  # number of columns of a block; chosen by measurements on 128 rows of 10,000 and 37,000 columns


@dataclass(frozen=True)
class Candidates:
    """Continuations of the hypotheses of each sentence, best first; each field is B C."""

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
        """Returns the scores B C of candidates that end, divided by `penalty`, and -inf for other candidates."""
        return (self.log_probability / penalty).masked_fill(self.tokens != EOS, -math.inf)


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


def is_over(log_probability: Tensor, largest_penalty: Tensor, threshold: Tensor, greedy: bool) -> Tensor:
    """Returns whether no open hypothesis of a sentence can become one of the best finished hypotheses: B, bool.

    `log_probability` [B, R] has the log probabilities of the open hypotheses. `largest_penalty` [B] is the largest
    divisor of their final scores. `threshold` [B] is the score of the worst kept hypothesis, -inf until enough
    hypotheses are finished. Log probabilities only fall, so the best score within reach is the current log probability
    divided by the largest penalty. A greedy search is over as soon as its hypothesis ends.
    """
    over = log_probability.amax(1) / largest_penalty <= threshold
    return over | (threshold > -math.inf) if greedy else over


# --- the best continuations, in two stages ----------------------------------------------------------------------------


def continuations(
    scores: Tensor, before: Tensor, number: int, block_maxima: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the `number` largest sums scores + before of each sentence, largest first, and their indices among R x V.

    `scores` is B R V, `before` B R; sums are taken in fp64. The result is exact. The largest sums lie in the blocks of
    columns with the largest maxima, so all other blocks are read only once, for their maximum. `block_maxima` [B, R,
    blocks] are the maxima of the complete blocks of `BLOCK` columns. With `block_maxima`, the other blocks are not read
    at all, and NaN counts as -inf.
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
    first = block_starts(rows, columns, width, scores.device)[best]
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
    """Returns the maximum of each complete block of `BLOCK` columns: B R V -> B R blocks."""
    whole = scores.shape[2] // BLOCK
    return scores[:, :, : whole * BLOCK].unflatten(2, (whole, BLOCK)).amax(3)


def _without_nan(sums: Tensor, block_maxima: Tensor | None) -> Tensor:
    return sums if block_maxima is None else sums.masked_fill_(sums.isnan(), -math.inf)


@functools.lru_cache(64)
def block_width(columns: int) -> int:
    """Returns the number of columns of a block: a divisor of `columns` if a suitable one exists.

    The maximum is computed over 32 columns at a time, so a width that is not a multiple of 32 is slow.
    """
    widths = [width for width in range(64, 161) if columns % width == 0 and width % 32 <= 8]
    return min(widths, key=lambda width: (width % 32 / width, width), default=BLOCK)


def block_starts(rows: int, columns: int, width: int, device: torch.device) -> Tensor:
    """Returns the index of the first column of each block. The last block of a row may overlap the previous block."""
    if device.type == "cpu":
        return _block_starts(rows, columns, width)
    within = torch.arange(0, columns, width, device=device).clamp_max(columns - width)
    return (torch.arange(0, rows * columns, columns, device=device)[:, None] + within).flatten()


@functools.lru_cache(64)
def _block_starts(rows: int, columns: int, width: int) -> Tensor:
    within = torch.arange(0, columns, width).clamp_max(columns - width)
    return (torch.arange(0, rows * columns, columns)[:, None] + within).flatten()
