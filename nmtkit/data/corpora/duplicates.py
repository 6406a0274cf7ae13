"""Finds duplicate pairs in bounded memory: computes a 128-bit hash of each pair and searches for repeated hashes.

The hash of a pair has 64 bits for each side: a multilinear hash of the ids. The multilinear hash is the sum over tokens
of random(id) * random(position), modulo 2^64. A false match needs equal hashes on both sides. Among a billion pairs
that differ on both sides, the probability of a false match is about 1e-21. For two pairs with one side in common, the
probability is about 1e-19.
"""

import hashlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PARTITION_PAIRS = 1 << 18  # number of pairs whose hashes are sorted at a time; about 20 MB
MAX_PARTITIONS = 512
CHUNK_PAIRS = 1 << 16
PART_TOKENS = 1 << 15  # approximate number of tokens that are hashed at once, in the CPU cache
POSITIONS = 1 << 10  # number of random multipliers; later positions reuse the multipliers with a shift

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]


class RowHash:
    """A 64-bit hash function for sentences of token ids. All processes and machines compute the same hashes."""

    def __init__(self, vocabulary: int, side: int) -> None:
        rng = np.random.default_rng((20_170_612, side))
        self._position_numbers = rng.integers(0, 1 << 64, POSITIONS, np.uint64) | np.uint64(1)
        self._id_numbers = rng.integers(0, 1 << 64, vocabulary, np.uint64)

    def __call__(self, ids: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> Keys:
        """Returns the hash of each sentence. `ids` are the concatenated sentences. Every sentence must have tokens."""
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        bounds = np.unique(np.append(np.searchsorted(ends, np.arange(0, total, PART_TOKENS)), len(ends))).tolist()
        parts = [
            self._part(ids[int(ends[first]) - int(lengths[first]) : int(ends[last - 1])], lengths[first:last])
            for first, last in pairwise(bounds)
        ]
        return np.concatenate([np.empty(0, np.uint64), *parts])

    def _part(self, ids: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> Keys:
        starts = np.cumsum(lengths) - lengths
        position = np.arange(len(ids)) - np.repeat(starts, lengths)
        if int(lengths.max()) <= POSITIONS:
            multiplier = self._position_numbers[position]
        else:
            rounds = (position // POSITIONS).astype(np.uint64)
            multiplier = self._position_numbers[position % POSITIONS] + np.uint64(2) * rounds
        return np.add.reduceat(self._id_numbers[ids] * multiplier, starts)


def pair_keys(hashes: Keys) -> Keys:
    """Combines the hashes [pairs, 2] of both sides into one 64-bit key for each pair."""
    source, target = hashes[:, 0], hashes[:, 1]
    return (source ^ (source >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15) + target


def tag_salt(tag: str) -> np.uint64:
    """Returns a number for a tag. This number is added to source hashes, so that pairs with different tags differ."""
    return np.uint64(int.from_bytes(hashlib.sha256(tag.encode()).digest()[:8], "little"))


def partition(hashes: Path, folder: Path) -> list[Path]:
    """Splits a file of hashes (two uint64 per pair) into files of (hash, hash, row). Equal pairs get the same file."""
    count = hashes.stat().st_size // 16
    parts = int(np.clip(-(-count // PARTITION_PAIRS), 1, MAX_PARTITIONS))
    paths = [folder / f"hashes.{part}" for part in range(parts)]
    files = [path.open("wb") for path in paths]
    try:
        for first, chunk in _chunks(hashes):
            rows = np.arange(first, first + len(chunk), dtype=np.uint64)
            part_of = (pair_keys(chunk) >> np.uint64(40)) % np.uint64(parts)
            order = np.argsort(part_of.astype(np.uint16), kind="stable")
            records = np.column_stack((chunk, rows))[order]
            bounds = np.searchsorted(part_of[order], np.arange(parts + 1))
            for file, start, end in zip(files, bounds[:-1], bounds[1:], strict=True):
                file.write(records[start:end].tobytes())
    finally:
        for file in files:
            file.close()
    return paths


def _chunks(hashes: Path) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
    with hashes.open("rb") as file:
        first = 0
        while text := file.read(CHUNK_PAIRS * 16):
            chunk = np.frombuffer(text, np.uint64).reshape(-1, 2)
            yield first, chunk
            first += len(chunk)


def find_duplicates(path: Path, quality: npt.NDArray[np.float32] | None = None) -> Rows:
    """Returns the rows to drop in a partition, in ascending order: the rows that equal a better row.

    The row with the highest `quality` [rows of all partitions] is better, or the first row if the quality is equal or
    None.
    """
    records = np.fromfile(path, np.uint64).reshape(-1, 3)
    rank = np.zeros(len(records)) if quality is None else -quality[records[:, 2].astype(np.int64)]
    order = np.lexsort((records[:, 2], rank, records[:, 1], records[:, 0]))
    source, target, rows = records[order].T
    repeats = (source[1:] == source[:-1]) & (target[1:] == target[:-1])
    return np.sort(rows[1:][repeats]).astype(np.int64)
