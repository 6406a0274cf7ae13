"""The rows of a training set, made when corpora are up-sampled, mixed and freed of duplicates.

Ids are stored once. A row is an offset and a length on each side: a pair that an epoch sees three times has three rows,
and a pair that is dropped after its ids were written has none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.data.spm_training import random_numbers

CHUNK_ROWS = 1 << 16  # rows of one corpus that stay together


@dataclass(frozen=True)
class CorpusRows:
    """Rows `start` to `end` - 1 in the order of the text, which an epoch sees `weight` times."""

    start: int
    end: int
    weight: float


def weights_of_temperature(pairs: Sequence[int], temperature: float) -> list[float]:
    """Returns weights with which the share of corpus i in an epoch is proportional to pairs[i]^(1 / temperature).

    The smallest weight is 1. Source: Arivazhagan et al. 2019, section 4.2 (there as sampling probabilities).
    """
    wanted = [count ** (1 / temperature) / count if count else 1.0 for count in pairs]
    return [weight / min(wanted) for weight in wanted]


def mixed_rows(corpora: Sequence[CorpusRows], seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yields runs of rows, with every corpus spread evenly over the whole.

    A row of weight w comes floor(w) or ceil(w) times; which of the two is random by (seed, row).
    """
    runs: list[tuple[float, int, int, int, float]] = []
    for index, corpus in enumerate(corpora):
        chunks = [(first, min(first + CHUNK_ROWS, corpus.end)) for first in range(corpus.start, corpus.end, CHUNK_ROWS)]
        whole, fraction = int(corpus.weight), corpus.weight - int(corpus.weight)
        passes = [1.0] * whole + [fraction] * (fraction > 0)
        for number, share in enumerate(passes):
            for chunk, (start, end) in enumerate(chunks):
                position = (number + (chunk + 0.5) / len(chunks)) / len(passes)  # in the epoch, from 0 to 1
                runs.append((position, index, start, end, share))
    for _, _, start, end, share in sorted(runs):
        rows = np.arange(start, end)
        if share < 1:
            rows = rows[random_numbers(seed, start, end - start) < np.uint64(min(share * 2.0**64, 2.0**64 - 2048))]
        yield rows


def write_offsets(lengths: Path, offsets: Path) -> None:
    """Writes where each sentence begins, as int64, from a file of int32 lengths."""
    total = 0
    with lengths.open("rb") as read, offsets.open("wb") as write:
        while text := read.read(4 * CHUNK_ROWS):
            chunk = np.frombuffer(text, np.int32)
            ends = total + np.cumsum(chunk, dtype=np.int64)
            write.write((ends - chunk).tobytes())
            total = int(ends[-1])


def write_rows(
    runs: Iterator[npt.NDArray[np.int64]],
    dropped: npt.NDArray[Any] | None,
    inputs: Sequence[Path],
    outputs: Sequence[Path],
) -> int:
    """Copies arrays row by row in the order of `runs`, without the `dropped` (a byte per row); returns their number.

    Inputs and outputs are files of offsets (int64) and lengths (int32) by turns.
    """
    dtypes = [np.int64, np.int32] * (len(inputs) // 2)
    arrays = [np.memmap(path, dtype, "r") for path, dtype in zip(inputs, dtypes, strict=True)]
    files = [path.open("wb") for path in outputs]
    count = 0
    try:
        for rows in runs:
            kept = rows if dropped is None else rows[dropped[rows] == 0]
            count += len(kept)
            for array, file in zip(arrays, files, strict=True):
                file.write(array[kept].tobytes())
    finally:
        for file in files:
            file.close()
    return count
