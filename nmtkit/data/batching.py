"""The plan of updates: which pairs make up each update of an epoch, and how an update is cut into slices.

Within windows of contiguous pairs, so that reads stay near each other, pairs are sorted by target length, give or take
a little at random; an update takes neighbours of that order up to the token budget; the order of updates and of windows
is random. All of it is a function of (lengths, budget, seed, epoch) alone: every world size walks the same path.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

WINDOW_PAIRS = 16_000_000
JITTER = 0.06  # target lengths are taken up to so much shorter or longer, or the same pairs would meet in every epoch
COUNTED_PAIRS = 1_000_000  # up to so many, the updates of an epoch are counted at the start

Pairs = npt.NDArray[np.int64]


class BatchSampler:
    """Updates of one training set, both sides of each at most `batch_tokens` (eos included).

    Raises ValueError for a pair that alone exceeds the budget, naming it and the budget that would do.
    """

    def __init__(
        self, source_lengths: Any, target_lengths: Any, batch_tokens: int, seed: int, window_pairs: int = WINDOW_PAIRS
    ) -> None:
        self.source_lengths = source_lengths
        self.target_lengths = target_lengths
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.pairs = len(source_lengths)
        self.windows = _windows(self.pairs, window_pairs)
        source_tokens = target_tokens = 0
        for start, end in self.windows:
            source, target = source_lengths[start:end], target_lengths[start:end]
            check_sizes(range(start, end), source, target, batch_tokens, "--batch-tokens")
            source_tokens += int(source.sum(dtype=np.int64))
            target_tokens += int(target.sum(dtype=np.int64))
        self._tokens = max(source_tokens, target_tokens)

    @cached_property
    def updates_per_epoch(self) -> int:
        """An estimate: of a small training set the updates of one epoch, from which others differ by one or two; of a
        large one the larger side's tokens over the budget."""
        if self.pairs <= COUNTED_PAIRS and len(self.windows) == 1:
            return len(self._window(0, np.random.default_rng(0))[1]) - 1
        return -(-self._tokens // self.batch_tokens)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Pairs]:
        """The updates of an epoch from index `start` on, each the pairs of one update in order of length."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.windows))
        for window in order.tolist():
            rng = np.random.default_rng((self.seed, epoch, window + 1))
            sorted_pairs, cuts = self._window(window, rng)
            shuffled = rng.permutation(len(cuts) - 1)
            for index in shuffled[start:].tolist():
                yield self.windows[window][0] + sorted_pairs[cuts[index] : cuts[index + 1]].astype(np.int64)
            start = max(0, start - len(shuffled))

    def _window(self, window: int, rng: np.random.Generator) -> tuple[npt.NDArray[Any], list[int]]:
        """The window's pairs, counted from its first, by length; and where each update begins and ends."""
        begin, end = self.windows[window]
        source, target = self.source_lengths[begin:end], self.target_lengths[begin:end]
        order = rng.permutation(np.arange(end - begin, dtype=np.int32))  # equals come out in this order
        noise = rng.random(end - begin, dtype=np.float32)
        noise *= 2 * JITTER
        noise += 1 - JITTER
        noise *= target
        noise *= 8
        # a stable sort of 16-bit keys is a radix sort: 16 M in a fraction of a second
        keys = np.minimum(noise, 65_535, out=noise).astype(np.uint16)[order]
        order = order[np.argsort(keys, kind="stable")]
        return order, cut(source[order], target[order], self.batch_tokens)


def _windows(pairs: int, window_pairs: int) -> list[tuple[int, int]]:
    """Equal windows, each at most `window_pairs`."""
    count = max(1, -(-pairs // window_pairs))
    edges = [pairs * index // count for index in range(count + 1)]
    return list(pairwise(edges))


def check_sizes(pairs: Sequence[int] | Pairs, source_lengths: Any, target_lengths: Any, limit: int, flag: str) -> None:
    """Raises ValueError when one of `pairs` has more than `limit` tokens on a side."""
    if not len(pairs):
        return
    largest = max(int(source_lengths.max()), int(target_lengths.max()))
    if largest > limit:
        row = int(np.argmax(np.maximum(source_lengths, target_lengths)))
        raise ValueError(
            f"pair {pairs[row]} of the training set has {largest} tokens on one side, more than {flag} {limit}; "
            f"give {flag} {largest}, or preprocess with a smaller --max-len"
        )


def cut(source_lengths: npt.NDArray[Any], target_lengths: npt.NDArray[Any], limit: int) -> list[int]:
    """Cuts a row of pairs into runs of at most `limit` tokens on either side; gives the bounds, from 0 to the end.

    Every pair must fit by itself.
    """
    source = np.concatenate(([0], np.cumsum(source_lengths, dtype=np.int64)))
    target = np.concatenate(([0], np.cumsum(target_lengths, dtype=np.int64)))
    cuts = [0]
    while cuts[-1] < len(source) - 1:
        start = cuts[-1]
        end = min(
            int(np.searchsorted(source, source[start] + limit, side="right")),
            int(np.searchsorted(target, target[start] + limit, side="right")),
        )
        assert end - 1 > start, "a pair is larger than the limit"
        cuts.append(end - 1)
    return cuts


def micro_batches(update: Pairs, source_lengths: Any, target_lengths: Any, max_tokens: int) -> list[Pairs]:
    """An update cut into as few slices as `max_tokens` per side allows, of about equal tokens.

    Pairs of a slice are of similar length, sorted by (target, source), so that equal lengths lie side by side.

    Raises ValueError for a pair that alone exceeds `max_tokens`.
    """
    source, target = source_lengths[update], target_lengths[update]
    check_sizes(update, source, target, max_tokens, "--max-tokens")
    order = np.lexsort((source, target))
    source, target = source[order], target[order]
    cuts = cut(source, target, max_tokens)
    low, high = 1, max_tokens  # the smallest limit that needs no more slices makes them even
    low = max(low, int(source.max()), int(target.max()))
    while low < high:
        middle = (low + high) // 2
        tighter = cut(source, target, middle)
        if len(tighter) <= len(cuts):
            high, cuts = middle, tighter
        else:
            low = middle + 1
    return [update[order[start:end]] for start, end in pairwise(cuts)]
