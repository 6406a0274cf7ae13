"""Arrays of several parts, read as one without copying them together."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class ConcatArrays:
    """One-dimensional arrays end to end. `shifts` are added to the values of each part, so that offsets stay true.

    Takes an index, a slice, or an array of indices, and gives what NumPy would; nothing else of an array.
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
            return self._range(start, end)
        rows = np.atleast_1d(np.asarray(index))
        result = np.empty(len(rows), self.dtype)
        which = np.searchsorted(self.bounds, rows, side="right") - 1
        for part in np.unique(which).tolist():
            here = which == part
            result[here] = self.parts[part][rows[here] - self.bounds[part]] + self.dtype.type(self.shifts[part])
        return result if np.ndim(index) else result[0]

    def _range(self, start: int, end: int) -> npt.NDArray[Any]:
        pieces = [
            part[max(0, start - first) : max(0, end - first)] + self.dtype.type(shift)
            for part, first, shift in zip(self.parts, self.bounds.tolist(), self.shifts, strict=False)
        ]
        return np.concatenate(pieces)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self._range(0, len(self)).astype(dtype or self.dtype, copy=False)
