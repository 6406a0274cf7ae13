"""Selects the pairs of each update of an epoch, and splits an update into micro-batches.

The training set is divided into windows of contiguous pairs, so that an update reads from a small part of the files.
The pairs of a window are sorted by target length with a little random jitter. An update consists of consecutive pairs
in this order, up to the token budget. The windows have a random order, and so have the updates of a window. The updates
are the same for every world size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.data.corpora.dropping import RowNumbers

WINDOW_PAIRS = 16_000_000
JITTER = 0.06  # largest relative change of a sort key; with 0, only pairs of equal target length would be shuffled
COUNTED_PAIRS = 1_000_000  # in a larger training set, the updates of an epoch are estimated instead of counted


@dataclass(frozen=True, eq=False)
class DirectionSampling:
    """The weights of the directions (such as en-de) of a multilingual dataset. Chooses random pairs by weight.

    The weight of a direction is the mean number of times that an epoch contains each of its pairs.
    With the weight 2.3, an epoch contains each pair twice, and a random 30 % of the pairs a third time. Each epoch
    draws these 30 % anew.
    """

    direction_index: Any  # [pairs], index into `weights`
    weights: npt.NDArray[np.float64]  # [directions]

    def weights_of(self, start: int, end: int) -> npt.NDArray[np.float64]:
        """Returns the weights of a range of pairs."""
        return self.weights[self.direction_index[start:end]]

    def draw(self, start: int, end: int, rng: np.random.Generator) -> npt.NDArray[np.int32]:
        """Draws pairs of a range for an epoch. Returns ascending offsets from `start`. An offset can be repeated."""
        weights = self.weights_of(start, end)
        whole = np.floor(weights)
        counts = whole.astype(np.int64) + (rng.random(end - start) < weights - whole)
        return np.repeat(np.arange(end - start, dtype=np.int32), counts)


class BatchSampler:
    """The updates of a training set. An update has at most `batch_tokens` tokens (eos included) on either side.

    With `repeated`, every epoch cycles through the first `repeated` updates of epoch 0. With `sampling`, an epoch has a
    sample of the pairs, which depends on (seed, epoch). Otherwise, an epoch has each pair once.

    Raises ValueError if a single pair exceeds the budget. The message names the pair and the necessary budget.
    """

    def __init__(
        self,
        source_lengths: Any,
        target_lengths: Any,
        batch_tokens: int,
        seed: int,
        window_pairs: int = WINDOW_PAIRS,
        repeated: int | None = None,
        sampling: DirectionSampling | None = None,
    ) -> None:
        self.sampling = sampling
        self.source_lengths = source_lengths
        self.target_lengths = target_lengths
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.pairs = len(source_lengths)
        # windows of equal size, each of at most `window_pairs` pairs
        count = max(1, -(-self.pairs // window_pairs))
        self.windows = list(pairwise(self.pairs * index // count for index in range(count + 1)))
        longest, tokens = np.zeros(2, np.int64), np.zeros(2)  # tokens of [source, target]: maximum, sum
        for start, end in self.windows:
            sides = source_lengths[start:end], target_lengths[start:end]
            check_sizes(range(start, end), *sides, batch_tokens, "--batch-tokens")
            longest = np.maximum(longest, [side.max(initial=0) for side in sides])
            weights = 1 if sampling is None else sampling.weights_of(start, end)
            tokens += [round(float((side * weights).sum(dtype=np.float64))) for side in sides]
        self.max_lengths = int(longest[0]), int(longest[1])  # number of tokens of the longest source and target
        self._tokens = int(tokens.max())
        self._repeated: list[RowNumbers] = []  # empty while `epoch` selects the updates to repeat
        self._repeated = list(islice(self.epoch(0), repeated or 0))
        if len(self._repeated) < (repeated or 0):
            raise ValueError(
                f"--overfit-batches is {repeated}, but the training set makes {len(self._repeated)} batches of "
                f"{batch_tokens} tokens; give a smaller --overfit-batches or --batch-tokens"
            )

    @property
    def repeats_pairs(self) -> bool:
        """Whether an epoch can contain a pair several times: with sampling, or with --overfit-batches."""
        return self.sampling is not None or bool(self._repeated)

    @cached_property
    def updates_per_epoch(self) -> int:
        """Estimated number of updates of an epoch.

        For a small training set, the result is the count for one random order. Other epochs may differ by one or two
        updates. For a large training set, the result is the number of tokens of the larger side, divided by the budget.
        """
        if self.pairs <= COUNTED_PAIRS and len(self.windows) == 1:
            return len(self._window(0, np.random.default_rng(0))[1]) - 1
        return -(-self._tokens // self.batch_tokens)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[RowNumbers]:
        """Yields the updates of an epoch from index `start` on.

        An update is an array of pair indices, sorted by jittered target length.
        """
        if self._repeated:
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
        """Returns the pairs of a window, sorted by jittered target length, and the bounds of the updates.

        The pairs are offsets from the start of the window. The bounds are indices into the sorted pairs.
        """
        begin, end = self.windows[window]
        source, target = self.source_lengths[begin:end], self.target_lengths[begin:end]
        sampled = None if self.sampling is None else self.sampling.draw(begin, end, rng)
        lengths = target if sampled is None else target[sampled]
        order = rng.permutation(np.arange(len(lengths), dtype=np.int32))  # random order of pairs with equal sort keys
        noise = rng.random(len(lengths), dtype=np.float32)
        noise *= 2 * JITTER
        noise += 1 - JITTER
        noise *= lengths
        noise *= 8
        # for 16-bit keys, the stable sort of NumPy is a radix sort, which sorts 16 M keys in a fraction of a second
        keys = np.minimum(noise, 65_535, out=noise).astype(np.uint16)[order]
        order = order[np.argsort(keys, kind="stable")]
        if sampled is not None:
            order = sampled[order]
        return order, split_by_tokens(source[order], target[order], self.batch_tokens)


def copy_numbers(pairs: RowNumbers) -> npt.NDArray[np.int64]:
    """Returns, for each position in `pairs`, how often the pair at this position occurs at earlier positions."""
    numbers, order = np.empty(len(pairs), np.int64), np.argsort(pairs, kind="stable")
    numbers[order] = np.arange(len(pairs)) - np.searchsorted(pairs[order], pairs[order])
    return numbers


def check_sizes(
    pairs: Sequence[int] | RowNumbers, source_lengths: Any, target_lengths: Any, limit: int, flag: str
) -> None:
    """Raises ValueError, with the pair and `flag`, if a side of a pair exceeds `limit` tokens. Lengths are [pairs]."""
    if not len(pairs):
        return
    largest = max(int(source_lengths.max()), int(target_lengths.max()))
    if largest > limit:
        row = int(np.argmax(np.maximum(source_lengths, target_lengths)))
        raise ValueError(
            f"pair {pairs[row] + 1:,} of the training set has {largest} tokens on one side, more than {flag} {limit}; "
            f"give {flag} {largest}, or preprocess with a smaller --max-len"
        )


def check_all_sizes(source_lengths: Any, target_lengths: Any, limit: int, flag: str) -> None:
    """Applies `check_sizes` to the whole training set. Reads the lengths window by window."""
    for start in range(0, len(source_lengths), WINDOW_PAIRS):
        end = min(start + WINDOW_PAIRS, len(source_lengths))
        check_sizes(range(start, end), source_lengths[start:end], target_lengths[start:end], limit, flag)


def split_by_tokens(
    source_lengths: npt.NDArray[Any], target_lengths: npt.NDArray[Any], limit: int, max_sentences: int | None = None
) -> list[int]:
    """Splits pairs into groups of consecutive pairs. A group has at most `limit` tokens per side.

    A group also has at most `max_sentences` pairs. Returns the bounds of the groups, from 0 to the number of pairs. No
    single pair may exceed the limit.
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
    update: RowNumbers, source_lengths: Any, target_lengths: Any, max_tokens: int, max_sentences: int | None = None
) -> list[RowNumbers]:
    """Splits an update into as few micro-batches as the limits allow, with about equal numbers of tokens.

    The pairs are sorted by (target length, source length), so a micro-batch has pairs of similar length.

    Raises ValueError if a single pair exceeds `max_tokens`.
    """
    source, target = source_lengths[update], target_lengths[update]
    check_sizes(update, source, target, max_tokens, "--max-tokens")
    order = np.lexsort((source, target))
    source, target = source[order], target[order]
    bounds = split_by_tokens(source, target, max_tokens, max_sentences)
    # find the smallest limit with the same number of micro-batches, so that their sizes are about equal
    low, high = max(int(source.max()), int(target.max())), max_tokens
    while low < high:
        middle = (low + high) // 2
        tighter = split_by_tokens(source, target, middle, max_sentences)
        if len(tighter) <= len(bounds):
            high, bounds = middle, tighter
        else:
            low = middle + 1
    return [update[order[start:end]] for start, end in pairwise(bounds)]
