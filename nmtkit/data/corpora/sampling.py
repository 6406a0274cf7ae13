"""A uniform random sample of a text, such as the lines that train a tokenizer or the pairs that fit filters."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")


class Sample(Generic[T]):
    """A uniform random sample of at most `limit` items, such as lines. The sample keeps the order of the items.

    Every item gets a random number, which depends only on the seed and the index of the item. The sample consists of
    the items with the smallest numbers. So the same items and seed give the same sample, however the items are
    divided among calls of `add`.
    """

    def __init__(self, limit: int, seed: int) -> None:
        self._limit, self._seed = limit, seed
        self.count = 0  # number of items given to `add`
        self._threshold = np.uint64(2**64 - 1)
        self._numbers = [np.empty(0, np.uint64)]
        self._items: list[T] = []

    def add(self, items: Sequence[T], accepts: Callable[[T], bool] | None = None) -> None:
        """Offers the next items to the sample. The sample never takes items for which `accepts` returns false."""
        numbers = random_numbers(self._seed, self.count, len(items))
        self.count += len(items)
        rows = np.flatnonzero(numbers <= self._threshold).tolist()
        if accepts is not None:
            rows = [row for row in rows if accepts(items[row])]
        self._items += [items[row] for row in rows]
        self._numbers.append(numbers[rows])
        if len(self._items) > 2 * self._limit:
            self._prune()

    def _prune(self) -> None:
        numbers = np.concatenate(self._numbers)
        if len(numbers) > self._limit:
            self._threshold = np.partition(numbers, self._limit - 1)[self._limit - 1]
        rows = np.flatnonzero(numbers <= self._threshold)
        self._items, self._numbers = [self._items[row] for row in rows.tolist()], [numbers[rows]]

    def items(self) -> list[T]:
        """Returns the sampled items in the order in which they were added."""
        self._prune()
        return self._items


def random_numbers(seed: int, first: int, count: int) -> npt.NDArray[np.uint64]:
    """Returns a random 64-bit number for each index from `first` to `first + count - 1`.

    The generator is splitmix64 (Steele, Lea and Flood 2014, figure 17).
    """
    with np.errstate(over="ignore"):
        z = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(seed % (1 << 64))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
