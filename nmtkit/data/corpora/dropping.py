"""The common rules of `preprocess` and `clean` for dropping pairs: reasons, examples, overlap and duplicates.

Equal sentences are found by their hashes, in bounded memory. The hash of a pair has 64 bits for each side: a
multilinear hash of the ids. The multilinear hash is the sum over tokens of random(id) * random(position), modulo 2^64.
A false match needs equal hashes on both sides. Among a billion pairs that differ on both sides, the probability of a
false match is about 1e-21. For two pairs with one side in common, the probability is about 1e-19.
"""

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.text.encoded import positions, starts_of

PARTITION_PAIRS = 1 << 18  # number of pairs whose hashes are sorted at a time; about 20 MB
MAX_PARTITIONS = 512
CHUNK_PAIRS = 1 << 16
PART_TOKENS = 1 << 15  # approximate number of tokens that are hashed at once, so that they fit in the CPU cache
POSITIONS = 1 << 10  # number of random multipliers; for a later position, a multiplier plus an even number is used

EXAMPLES = 5  # maximum number of example pairs that are kept for each reason
EXAMPLE_CHARACTERS = 200

Hashes = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
RowNumbers = npt.NDArray[np.int64]


# --- reasons ----------------------------------------------------------------------------------------------------------


def first_reasons(masks: Iterable[Mask], pairs: int) -> npt.NDArray[np.int16]:
    """Returns the index of the first mask that is true for each pair, or -1 if no mask is true. Masks are [pairs]."""
    result = np.full(pairs, -1, np.int16)
    for index, mask in enumerate(masks):
        result[mask & (result < 0)] = index
    return result


@dataclass(frozen=True)
class PairExample:
    """An example of a pair that is dropped or counted. Each line is cut after EXAMPLE_CHARACTERS characters."""

    position: str  # file:line
    source: str
    target: str

    @staticmethod
    def of(position: str, source: bytes, target: bytes) -> "PairExample":
        sides = (line[: 4 * EXAMPLE_CHARACTERS].decode("utf-8", "ignore") for line in (source, target))
        return PairExample(position, *(shortened(text, EXAMPLE_CHARACTERS) for text in sides))


def shortened(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[:characters] + "…"


@dataclass
class ReasonCounts:
    """The number of pairs to which each reason applies, and the first EXAMPLES of these pairs."""

    dropped: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)  # number of pairs counted but not dropped, by reason
    examples: dict[str, list[PairExample]] = field(default_factory=dict)

    def count(self, reason: str, pairs: int, examples: Sequence[PairExample] = (), *, drops: bool) -> None:
        """Adds `pairs` to the number of pairs of `reason` that are dropped (if `drops` is true) or kept.

        `examples` are some of these pairs. Calls must follow the order of the text, because the first EXAMPLES examples
        are kept.
        """
        counts = self.dropped if drops else self.kept
        counts[reason] = counts.get(reason, 0) + pairs
        if examples:
            self.examples[reason] = [*self.examples.get(reason, ()), *examples][:EXAMPLES]

    def pairs(self, reason: str) -> int:
        return self.dropped.get(reason, 0) + self.kept.get(reason, 0)

    def add(self, other: "ReasonCounts") -> None:
        """Adds `other`, the counts of text that comes after the text of `self`."""
        for counts, drops in ((other.dropped, True), (other.kept, False)):
            for reason, pairs in counts.items():
                self.count(reason, pairs, other.examples.get(reason, ()), drops=drops)


# --- hashes of sentences and pairs ------------------------------------------------------------------------------------


class RowHash:
    """A 64-bit hash function for sentences of token ids. All processes and machines compute the same hashes."""

    def __init__(self, vocabulary: int, side: int) -> None:
        rng = np.random.default_rng((20_170_612, side))
        self._position_numbers = rng.integers(0, 1 << 64, POSITIONS, np.uint64) | np.uint64(1)
        self._id_numbers = rng.integers(0, 1 << 64, vocabulary, np.uint64)

    def __call__(self, ids: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> Hashes:
        """Returns the hash of each sentence. `ids` are the concatenated sentences. Every sentence must have tokens."""
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        bounds = np.unique(np.append(np.searchsorted(ends, np.arange(0, total, PART_TOKENS)), len(ends))).tolist()
        parts = [
            self._part(ids[int(ends[first]) - int(lengths[first]) : int(ends[last - 1])], lengths[first:last])
            for first, last in pairwise(bounds)
        ]
        return np.concatenate([np.empty(0, np.uint64), *parts])

    def _part(self, ids: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> Hashes:
        position = positions(lengths)
        if int(lengths.max()) <= POSITIONS:
            multiplier = self._position_numbers[position]
        else:
            rounds = (position // POSITIONS).astype(np.uint64)
            multiplier = self._position_numbers[position % POSITIONS] + np.uint64(2) * rounds
        return np.add.reduceat(self._id_numbers[ids] * multiplier, starts_of(lengths))


def pair_keys(hashes: Hashes) -> Hashes:
    """Combines the hashes [pairs, 2] of both sides into one 64-bit key for each pair."""
    source, target = hashes[:, 0], hashes[:, 1]
    return (source ^ (source >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15) + target


def salt(name: str) -> np.uint64:
    """Returns a number to add to source hashes, so that equal pairs with a different `name` get different hashes."""
    return np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def contained(keys: Hashes, sorted_keys: Hashes) -> Mask:
    """Returns a mask [keys] that is true for the keys in `sorted_keys`."""
    if not len(sorted_keys):
        return np.zeros(len(keys), np.bool_)
    return sorted_keys[np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)] == keys


# --- duplicates -------------------------------------------------------------------------------------------------------


def partition(hashes: Path, folder: Path) -> list[Path]:
    """Splits the file `hashes` into several files. Equal pairs are in the same file.

    `hashes` has two uint64 for each pair: the hashes of source and target. The new files have three uint64 for each
    pair: the two hashes and the index of the pair.
    """
    count = hashes.stat().st_size // 16
    parts = int(np.clip(-(-count // PARTITION_PAIRS), 1, MAX_PARTITIONS))
    paths = [folder / f"hashes.{part}" for part in range(parts)]
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in paths]
        for first in range(0, count, CHUNK_PAIRS):
            chunk = np.fromfile(hashes, np.uint64, 2 * CHUNK_PAIRS, offset=16 * first).reshape(-1, 2)
            rows = np.arange(first, first + len(chunk), dtype=np.uint64)
            part_of = (pair_keys(chunk) >> np.uint64(40)) % np.uint64(parts)
            order = np.argsort(part_of.astype(np.uint16), kind="stable")
            records = np.column_stack((chunk, rows))[order]
            bounds = np.searchsorted(part_of[order], np.arange(parts + 1))
            for file, start, end in zip(files, bounds[:-1], bounds[1:], strict=True):
                file.write(records[start:end].tobytes())
    return paths


def find_duplicates(path: Path, quality: npt.NDArray[np.float32] | None = None) -> RowNumbers:
    """Returns the indices of the pairs to drop, ascending. `path` is a file that `partition` has written.

    All pairs of a group of equal pairs are dropped, except the best pair. The best pair has the highest `quality`. If
    the qualities are equal, or without `quality`, the first pair is the best pair. `quality` has an entry for each pair
    of the corpus, not only for the pairs of this file.
    """
    records = np.fromfile(path, np.uint64).reshape(-1, 3)
    rank = np.zeros(len(records)) if quality is None else -quality[records[:, 2].astype(np.int64)]
    order = np.lexsort((records[:, 2], rank, records[:, 1], records[:, 0]))
    source, target, rows = records[order].T
    repeats = (source[1:] == source[:-1]) & (target[1:] == target[:-1])
    return np.sort(rows[1:][repeats]).astype(np.int64)
