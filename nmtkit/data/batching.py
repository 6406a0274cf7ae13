"""The batches of an epoch: the pairs of each update, and how an update is split into micro-batches.

Within windows of contiguous pairs, so that reads stay near each other, pairs are sorted by target length with a little
random jitter; an update takes neighbours of that order up to the token budget; the order of updates and of windows is
random. All of it depends on (lengths, budget, seed, epoch) alone, and so is the same for every world size.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

WINDOW_PAIRS = 16_000_000
JITTER = 0.06  # share by which sort keys vary from target lengths; without it every epoch would have the same updates
COUNTED_PAIRS = 1_000_000  # up to this number of pairs, the updates of an epoch are counted and not estimated

Pairs = npt.NDArray[np.int64]


class BatchSampler:
    """The updates of a training set, each of at most `batch_tokens` (eos included) on either side.

    With `repeated`, every epoch has but so many different updates, the first of epoch 0, over and over.

    Raises ValueError for a pair that alone exceeds the budget, naming it and the smallest budget that suffices.
    """

    def __init__(
        self,
        source_lengths: Any,
        target_lengths: Any,
        batch_tokens: int,
        seed: int,
        window_pairs: int = WINDOW_PAIRS,
        repeated: int | None = None,
    ) -> None:
        self.source_lengths = source_lengths
        self.target_lengths = target_lengths
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.pairs = len(source_lengths)
        self.windows = _windows(self.pairs, window_pairs)
        source_tokens = target_tokens = 0
        max_source = max_target = 0
        for start, end in self.windows:
            source, target = source_lengths[start:end], target_lengths[start:end]
            check_sizes(range(start, end), source, target, batch_tokens, "--batch-tokens")
            max_source = max(max_source, int(source.max(initial=0)))
            max_target = max(max_target, int(target.max(initial=0)))
            source_tokens += int(source.sum(dtype=np.int64))
            target_tokens += int(target.sum(dtype=np.int64))
        self.max_lengths = max_source, max_target  # tokens of the longest source and target
        self._tokens = max(source_tokens, target_tokens)
        self._repeated: list[Pairs] | None = None
        if repeated is not None:
            self._repeated = list(islice(self.epoch(0), repeated))
            if len(self._repeated) < repeated:
                raise ValueError(
                    f"--overfit-batches is {repeated}, and the training set makes {len(self._repeated)} batches of "
                    f"{batch_tokens} tokens; give at most that, or a smaller --batch-tokens"
                )

    @cached_property
    def updates_per_epoch(self) -> int:
        """Estimated number of updates: for a small training set that of one epoch, from which others differ by one or
        two, for a large one the tokens of the larger side over the budget."""
        if self.pairs <= COUNTED_PAIRS and len(self.windows) == 1:
            return len(self._window(0, np.random.default_rng(0))[1]) - 1
        return -(-self._tokens // self.batch_tokens)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Pairs]:
        """Yields the updates of an epoch from index `start` on, each as its pairs in order of length."""
        if self._repeated is not None:
            yield from (self._repeated[index % len(self._repeated)] for index in range(start, self.updates_per_epoch))
            return
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.windows))
        for window in order.tolist():
            rng = np.random.default_rng((self.seed, epoch, window + 1))
            sorted_pairs, bounds = self._window(window, rng)
            shuffled = rng.permutation(len(bounds) - 1)
            for index in shuffled[start:].tolist():
                yield self.windows[window][0] + sorted_pairs[bounds[index] : bounds[index + 1]].astype(np.int64)
            start = max(0, start - len(shuffled))

    def _window(self, window: int, rng: np.random.Generator) -> tuple[npt.NDArray[Any], list[int]]:
        """Returns the pairs of a window, counted from its first, by length; and the bounds of its updates."""
        begin, end = self.windows[window]
        source, target = self.source_lengths[begin:end], self.target_lengths[begin:end]
        order = rng.permutation(np.arange(end - begin, dtype=np.int32))  # of pairs whose sort keys are equal
        noise = rng.random(end - begin, dtype=np.float32)
        noise *= 2 * JITTER
        noise += 1 - JITTER
        noise *= target
        noise *= 8
        # a stable sort of 16-bit keys is a radix sort: 16 M in a fraction of a second
        keys = np.minimum(noise, 65_535, out=noise).astype(np.uint16)[order]
        order = order[np.argsort(keys, kind="stable")]
        return order, split_by_tokens(source[order], target[order], self.batch_tokens)


def _windows(pairs: int, window_pairs: int) -> list[tuple[int, int]]:
    """Returns the bounds of windows of equal size, each of at most `window_pairs`."""
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


def check_all_sizes(source_lengths: Any, target_lengths: Any, limit: int, flag: str) -> None:
    """Raises ValueError when a pair of the training set has more than `limit` tokens on a side; reads it in windows."""
    for start in range(0, len(source_lengths), WINDOW_PAIRS):
        end = min(start + WINDOW_PAIRS, len(source_lengths))
        check_sizes(range(start, end), source_lengths[start:end], target_lengths[start:end], limit, flag)


def split_by_tokens(
    source_lengths: npt.NDArray[Any], target_lengths: npt.NDArray[Any], limit: int, max_sentences: int | None = None
) -> list[int]:
    """Splits pairs, in their order, into runs of at most `limit` tokens on either side, and `max_sentences` pairs.

    Returns the bounds of the runs, from 0 to the number of pairs. No single pair may exceed the limit.
    """
    source = np.concatenate(([0], np.cumsum(source_lengths, dtype=np.int64)))
    target = np.concatenate(([0], np.cumsum(target_lengths, dtype=np.int64)))
    bounds = [0]
    while bounds[-1] < len(source) - 1:
        start = bounds[-1]
        end = min(
            int(np.searchsorted(source, source[start] + limit, side="right")),
            int(np.searchsorted(target, target[start] + limit, side="right")),
            len(target) if max_sentences is None else start + 1 + max_sentences,
        )
        assert end - 1 > start, "a pair is larger than the limit"
        bounds.append(end - 1)
    return bounds


def micro_batches(
    update: Pairs, source_lengths: Any, target_lengths: Any, max_tokens: int, max_sentences: int | None = None
) -> list[Pairs]:
    """Splits an update into as few micro-batches as the limits allow, of about equal tokens.

    Pairs of a micro-batch are of similar length, sorted by (target, source), so that equal lengths are adjacent.

    Raises ValueError for a pair that alone exceeds `max_tokens`.
    """
    source, target = source_lengths[update], target_lengths[update]
    check_sizes(update, source, target, max_tokens, "--max-tokens")
    order = np.lexsort((source, target))
    source, target = source[order], target[order]
    bounds = split_by_tokens(source, target, max_tokens, max_sentences)
    # the smallest limit that needs no more micro-batches makes them even
    low, high = max(int(source.max()), int(target.max())), max_tokens
    while low < high:
        middle = (low + high) // 2
        tighter = split_by_tokens(source, target, middle, max_sentences)
        if len(tighter) <= len(bounds):
            high, bounds = middle, tighter
        else:
            low = middle + 1
    return [update[order[start:end]] for start, end in pairwise(bounds)]
