"""Mixes training corpora: puts the rows of a training set in an order that spreads every corpus evenly over an epoch.

A row is a pair whose ids are stored, or the index of this pair in the order of the text. An epoch is a sequence of
rows. A row can occur several times in an epoch, but its ids are stored once. A row that is dropped after its ids were
written does not occur in an epoch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nmtkit.data.corpora.dropping import RowNumbers
from nmtkit.data.corpora.sampling import random_numbers

CHUNK_ROWS = 1 << 16  # number of rows in memory at a time

Dropped = npt.NDArray[np.uint8]  # one byte per row, 1 if the row is dropped


@dataclass(frozen=True)
class CorpusRows:
    """The rows of one corpus: rows `start` to `end` - 1 of the text. An epoch passes `weight` times over these rows."""

    start: int
    end: int
    weight: float

    def copies(self, rows: int) -> int:
        """Returns the number of extra rows in an epoch: the fractional part of `weight`, times `rows`, rounded.

        With the weight 2.3, an epoch has all rows twice, and this number of rows, 30 %, a third time.
        """
        return int((self.weight - int(self.weight)) * rows + 0.5)

    def chunks(self, dropped: Dropped | None) -> Iterator[RowNumbers]:
        """Yields the rows that are not dropped, in order."""
        for start in range(self.start, self.end, CHUNK_ROWS):
            rows = np.arange(start, min(start + CHUNK_ROWS, self.end))
            yield rows if dropped is None else rows[dropped[rows] == 0]

    def size(self, dropped: Dropped | None) -> int:
        """Returns the number of rows of this corpus in an epoch."""
        kept = sum(map(len, self.chunks(dropped)))
        return int(self.weight) * kept + self.copies(kept)

    def epoch(self, dropped: Dropped | None, seed: int) -> Iterator[RowNumbers]:
        """Yields the rows of an epoch: whole passes, then random rows. The random choice depends on (seed, row)."""
        for _ in range(int(self.weight)):
            yield from self.chunks(dropped)
        seen = 0
        for rows in self.chunks(dropped):
            count = self.copies(seen + len(rows)) - self.copies(seen)
            seen += len(rows)
            if count:
                numbers = random_numbers(seed, int(rows[0]), int(rows[-1] - rows[0]) + 1)[rows - rows[0]]
                yield rows[np.sort(np.argsort(numbers)[:count])]


def weights_of_temperature(pairs: Sequence[int], temperature: float) -> list[float]:
    """Returns weights that make the share of corpus i in an epoch proportional to pairs[i]^(1 / temperature).

    The smallest weight is 1, which is also the weight of an empty corpus. Source: Arivazhagan et al. 2019, section 4.2.
    The paper defines sampling probabilities instead of weights.
    """
    wanted = [count ** (1 / temperature) / count for count in pairs if count]
    return [count ** (1 / temperature) / count / min(wanted) if count else 1.0 for count in pairs]


def mixed_rows(corpora: Sequence[CorpusRows], dropped: Dropped | None, seed: int) -> Iterator[RowNumbers]:
    """Yields the rows of an epoch in which every corpus is spread evenly.

    Let s be the share of a corpus in the epoch. For every m, the number of rows of this corpus among the first m rows
    differs from m * s by less than the number of corpora.
    """
    sizes = [corpus.size(dropped) for corpus in corpora]
    streams = [corpus.epoch(dropped, seed) for corpus in corpora]
    rests: list[RowNumbers] = [np.empty(0, np.int64) for _ in corpora]
    blocks = max(1, -(-sum(sizes) // CHUNK_ROWS))
    for block in range(blocks):
        rows, positions = [], []  # positions are fractions of the epoch, from 0 to 1
        for index, size in enumerate(sizes):
            first, end = size * block // blocks, size * (block + 1) // blocks
            parts = [rests[index]]
            while sum(map(len, parts)) < end - first:
                parts.append(next(streams[index]))
            joined = np.concatenate(parts)
            rows.append(joined[: end - first])
            rests[index] = joined[end - first :]
            positions.append(np.arange(first + 1, end + 1) / max(1, size))
        yield np.concatenate(rows)[np.argsort(np.concatenate(positions), kind="stable")]


def write_offsets(lengths: Path, offsets: Path) -> None:
    """Reads the int32 lengths of consecutive sentences, and writes the int64 offset of each sentence."""
    total = 0
    with lengths.open("rb") as read, offsets.open("wb") as write:
        while text := read.read(4 * CHUNK_ROWS):
            chunk = np.frombuffer(text, np.int32)
            ends = total + np.cumsum(chunk, dtype=np.int64)
            write.write((ends - chunk).tobytes())
            total = int(ends[-1])
