"""One side of a split as arrays on disk: the sentences of one shard, or of several shards as if they were one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.data.corpora.dropping import RowNumbers
from nmtkit.text.encoded import Encoded, ranges, starts_of


class ConcatArrays:
    """A read-only concatenation of one-dimensional arrays, such as the arrays of several shards.

    Indexing copies only the selected values. The index is an integer, a slice with step 1, or an array of integers.
    `shifts[i]` is added to the values of part i, because offsets in a shard are relative to the beginning of the shard.
    """

    def __init__(self, parts: Sequence[Any], shifts: Sequence[int] | None = None) -> None:
        self.parts = parts
        self.shifts = shifts or [0] * len(parts)
        self.bounds = np.concatenate(([0], np.cumsum([len(part) for part in parts])))
        self.dtype = parts[0].dtype

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, end, step = index.indices(len(self))
            assert step == 1
            pieces = [
                part[max(0, start - first) : max(0, end - first)] + self.dtype.type(shift)
                for part, first, shift in zip(self.parts, self.bounds[:-1].tolist(), self.shifts, strict=True)
            ]
            return np.concatenate(pieces)
        rows = np.atleast_1d(np.asarray(index))
        result = np.empty(len(rows), self.dtype)
        part_of = np.searchsorted(self.bounds, rows, side="right") - 1
        for part in np.unique(part_of).tolist():
            inside = part_of == part
            result[inside] = self.parts[part][rows[inside] - self.bounds[part]] + self.dtype.type(self.shifts[part])
        return result if np.ndim(index) else result[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self[:]
        return values.astype(dtype or self.dtype, copy=False)


@dataclass(frozen=True, eq=False)
class FirstTokens:
    """Tokens that replace the first stored token of each sentence. The direction (such as en-de) selects the token."""

    direction_index: npt.NDArray[np.uint16] | ConcatArrays  # [n], one per sentence
    tokens: npt.NDArray[np.int64]  # [directions], one per direction

    def of(self, rows: Any) -> Any:
        return self.tokens[self.direction_index[rows]]


@dataclass(frozen=True, eq=False)
class StoredSide:
    """One side of a split. Sentence i is ids[offsets[i] : offsets[i] + lengths[i]]."""

    ids: npt.NDArray[Any] | ConcatArrays  # flat, uint16 or uint32
    offsets: npt.NDArray[np.int64] | ConcatArrays  # [n], one per sentence
    lengths: npt.NDArray[np.int32] | ConcatArrays  # [n], in tokens, eos included
    first: FirstTokens | None = None

    def sentence(self, row: int) -> list[int]:
        start = int(self.offsets[row])
        ids: list[int] = self.ids[start : start + int(self.lengths[row])].tolist()
        return ids if self.first is None else [int(self.first.of(row)), *ids[1:]]

    def gather(self, rows: RowNumbers) -> Encoded:
        """Returns the sentences of `rows`, concatenated, and their lengths."""
        lengths = self.lengths[rows].astype(np.int64)
        dtype = np.int64 if self.ids.dtype == np.uint32 else np.int32
        ids = self.ids[ranges(self.offsets[rows], lengths)].astype(dtype)
        if self.first is not None:
            ids[starts_of(lengths)] = self.first.of(rows)
        return Encoded(ids, lengths)


def joined(sides: list[StoredSide]) -> StoredSide:
    """Joins the same side of all shards of a dataset, in the order of `sides`."""
    if len(sides) == 1:
        return sides[0]
    ids = ConcatArrays([side.ids for side in sides])
    offsets = ConcatArrays([side.offsets for side in sides], ids.bounds[:-1].tolist())
    return StoredSide(ids, offsets, ConcatArrays([side.lengths for side in sides]))
