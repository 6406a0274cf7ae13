"""Blocks of pairs with their scores: how worker processes score a block, and where the results are stored."""

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.filters.interface import Filter
from nmtkit.cleaning.filters.text_block import ScoreMatrix, Scores, TextBlock
from nmtkit.cleaning.mending import Mender
from nmtkit.cleaning.scores import checksums
from nmtkit.data.corpora.corpus import Pairs
from nmtkit.data.corpora.dropping import Hashes


@dataclass(frozen=True)
class StoredBlock:
    """A pickled block of pairs of a corpus. The block begins at byte `position` of the file `path`."""

    corpus: int  # index of the corpus, from 0
    path: Path
    position: int = 0

    def read(self) -> Pairs:
        with self.path.open("rb") as file:
            file.seek(self.position)
            block: Pairs = pickle.load(file)
        return block

    def write(self, block: Pairs) -> None:
        """Writes a block as the only block of the file."""
        self.path.write_bytes(pickle.dumps(block, pickle.HIGHEST_PROTOCOL))


def with_rows(blocks: Iterable[StoredBlock]) -> Iterator[tuple[slice, Pairs]]:
    """Reads the blocks. Yields each block, after the indices of its pairs among the pairs of all blocks, from 0."""
    start = 0
    for stored in blocks:
        block = stored.read()
        yield slice(start, start + len(block)), block
        start += len(block)


@dataclass
class Scored:
    """The mended text, the scores and the keys of all pairs, in the order of the corpora."""

    blocks: list[StoredBlock]
    scores: ScoreMatrix
    keys: Hashes  # [pairs, 2], hashes of the normalized source and target of each pair
    mended: dict[str, int]  # kind of change -> number of mended lines


class ScratchTable:
    """Collects the scores and the keys of all pairs in two files of the folder `scratch`."""

    def __init__(self, scratch: Path) -> None:
        self._scores, self._keys = ((scratch / name).open("wb+") for name in ("scores", "keys"))
        self._width = 0

    def append(self, scores: ScoreMatrix, keys: Hashes) -> None:
        """Appends the scores [pairs, scores] and the keys [pairs, 2] of a block."""
        self._width = scores.shape[1]
        self._scores.write(scores.tobytes())
        self._keys.write(keys.tobytes())

    def scored(self, blocks: list[StoredBlock], mended: dict[str, int]) -> Scored:
        """Returns the collected scores and keys as memory-mapped arrays, with the blocks of the same pairs."""
        keys = _mapped(self._keys, np.uint64, 2)
        scores = _mapped(self._scores, np.float32, self._width) if self._width else np.empty((len(keys), 0), np.float32)
        return Scored(blocks, scores, keys, mended)


def _mapped(file: BinaryIO, dtype: Any, columns: int) -> npt.NDArray[Any]:
    file.flush()
    if not file.seek(0, 2):
        return np.empty((0, columns), dtype)
    return np.memmap(file, dtype, "r").reshape(-1, columns)


class BlockScorer:
    """Mends and scores blocks of pairs in files. Each worker process has one object of this class."""

    def __init__(self, filters: Sequence[Filter], mends: bool) -> None:
        self._filters = filters
        self._mender = Mender() if mends else None

    def score(self, stored: StoredBlock) -> tuple[ScoreMatrix, Hashes, npt.NDArray[np.uint32]]:
        """Mends the pairs of a block, scores them, and writes the mended block back to its file.

        The file must hold only this block. Returns the scores [pairs, filters], the keys of the two sides [pairs, 2],
        and the checksums of the pairs.
        """
        block, matrix, keys = self.score_pairs(stored.read())
        stored.write(block)
        return matrix, keys, checksums(block.sources, block.targets)

    def score_pairs(self, block: Pairs) -> tuple[Pairs, ScoreMatrix, Hashes]:
        """Returns the mended block, its scores [pairs, filters], and the keys of the two sides [pairs, 2]."""
        if self._mender is not None:
            block = self._mender.pairs(block)
        texts = TextBlock(block.sources, block.targets)
        return block, score_block(self._filters, texts), texts.keys

    def mended(self) -> dict[str, int]:
        return {} if self._mender is None else self._mender.counts


def checked_scores(each: Filter, texts: TextBlock) -> Scores:
    """Returns the scores of a filter. Raises ValueError if the filter does not give a number for each pair."""
    scores = np.asarray(each.score(texts))
    if scores.shape != (len(texts),) or np.isnan(scores).any():
        raise ValueError(f"{type(each).__name__}.score must return a number for each of the {len(texts)} pairs")
    return scores


def score_block(filters: Sequence[Filter], texts: TextBlock) -> ScoreMatrix:
    """Returns the scores of all filters: [pairs, filters]."""
    scores = [checked_scores(each, texts) for each in filters]
    return np.column_stack(scores).astype(np.float32) if scores else np.empty((len(texts), 0), np.float32)
