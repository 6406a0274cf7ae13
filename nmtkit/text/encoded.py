"""Sentences of token ids: the ids of all sentences in one array, and the length of each sentence."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[Any]  # ids of tokens
Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Encoded:
    """Concatenated sentences: the ids of all tokens, such as pieces and eos, and the length of each sentence."""

    ids: Ids
    lengths: Lengths

    @staticmethod
    def concatenated(parts: Sequence["Encoded"]) -> "Encoded":
        return Encoded(np.concatenate([part.ids for part in parts]), np.concatenate([part.lengths for part in parts]))

    @property
    def starts(self) -> Lengths:
        return starts_of(self.lengths)

    @property
    def sentence_of_id(self) -> Lengths:
        """The index of the sentence of each id."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def split(self) -> list[Ids]:
        return np.split(self.ids, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []

    def lists(self) -> list[list[int]]:
        """Returns the ids of each sentence as a list. For short sentences, this method is much faster than `split`."""
        ids, ends = self.ids.tolist(), np.cumsum(self.lengths).tolist()
        return [ids[start:end] for start, end in pairwise([0, *ends])]

    def select(self, keep: npt.NDArray[np.bool_]) -> "Encoded":
        """Returns the sentences where `keep` is true."""
        if keep.all():
            return self
        return Encoded(self.ids[np.repeat(keep, self.lengths)], self.lengths[keep])

    def rows(self, rows: npt.NDArray[np.int64]) -> "Encoded":
        """Returns the sentences with the indices `rows`, in this order."""
        lengths = self.lengths[rows]
        return Encoded(self.ids[ranges(self.starts[rows], lengths)], lengths)

    def prepend(self, token: int) -> "Encoded":
        """Returns the sentences with `token` before each sentence."""
        return Encoded(np.insert(self.ids, self.starts, token), self.lengths + 1)

    def without_last(self) -> "Encoded":
        """Returns the sentences without their last tokens, which are eos."""
        kept = np.ones(len(self.ids), np.bool_)
        kept[np.cumsum(self.lengths) - 1] = False
        return Encoded(self.ids[kept], self.lengths - 1)


def starts_of(lengths: Lengths) -> Lengths:
    """Returns the index of the first item of each part, if parts of these lengths are concatenated."""
    return np.cumsum(lengths) - lengths


def positions(lengths: Lengths) -> Lengths:
    """Returns the position of each item in its part: 0, 1, …, length - 1 for each part."""
    return ranges(np.zeros_like(lengths), lengths)


def ranges(starts: Lengths, lengths: Lengths) -> Lengths:
    """Returns the concatenation of the ranges start, start + 1, …, start + length - 1."""
    return np.arange(int(lengths.sum())) + np.repeat(starts - starts_of(lengths), lengths)
