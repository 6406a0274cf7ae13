"""A block of pairs, with features of its lines that several filters share."""

import unicodedata
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nmtkit.data.corpora.dropping import Hashes, Mask, RowHash

Scores = npt.NDArray[np.float32]  # [pairs]
ScoreMatrix = npt.NDArray[np.float32]  # [pairs, scores]
Counts = npt.NDArray[np.int64]

CODE_POINTS = 0x110000
LAST_LETTER = 0x33FFF  # no letter has a larger code point


@cache
def _hash() -> RowHash:
    return RowHash(CODE_POINTS, 0)


@cache
def _letter_table() -> Mask:
    """Returns whether each code point is a letter, a digit or a combining mark."""
    table = np.zeros(CODE_POINTS, np.bool_)
    for code in range(LAST_LETTER + 1):
        sign = chr(code)
        table[code] = sign.isalnum() or (not sign.isascii() and unicodedata.category(sign)[0] == "M")
    return table


class TextSide:
    """The lines of one side of a block. A line must not contain a line feed."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines

    def __len__(self) -> int:
        return len(self.lines)

    @cached_property
    def text(self) -> str:
        """All lines, each with a line feed at its end."""
        return "\n".join([*self.lines, ""])

    @cached_property
    def codes(self) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self.text.encode("utf-32-le"), np.uint32)

    @cached_property
    def ends(self) -> Counts:
        """For each line, the position in the text directly after its line feed."""
        return np.flatnonzero(self.codes == ord("\n")) + 1

    @cached_property
    def starts(self) -> Counts:
        return np.concatenate((np.zeros(1, np.int64), self.ends[:-1]))

    @cached_property
    def characters(self) -> Counts:
        """The number of characters of each line."""
        return self.ends - self.starts - 1

    def sums(self, values: npt.NDArray[Any]) -> Counts:
        """Returns the sum of `values` in each line [lines]. `values` has a number for each code point of all lines."""
        return np.add.reduceat(values, self.starts, dtype=np.int64) if len(self.lines) else np.empty(0, np.int64)

    @cached_property
    def is_letter(self) -> Mask:
        """Whether each code point of the text is a letter, a digit or a combining mark."""
        return _letter_table().take(self.codes, mode="clip")

    @cached_property
    def _normalized(self) -> tuple[npt.NDArray[np.uint32], Counts]:
        """The code points of all normalized lines, concatenated, and the length of each line.

        With a regular expression for each line, hashing took 13 times as long.
        """
        folded = TextSide(self.text.casefold().split("\n")[:-1])
        kept = folded.is_letter
        empty = np.flatnonzero(folded.sums(kept) == 0)
        for row in empty.tolist():  # keeps all characters of the line, with the line feed
            kept[folded.starts[row] : folded.ends[row]] = True
        return folded.codes[kept], folded.sums(kept)

    @cached_property
    def keys(self) -> Hashes:
        """A 64-bit hash of each normalized line."""
        return _hash()(*self._normalized)

    @property
    def normalized(self) -> list[str]:
        """The lines without case, punctuation and spaces. A line without letters and digits keeps all characters."""
        codes, lengths = self._normalized
        text, ends = codes.tobytes().decode("utf-32-le"), np.cumsum(lengths).tolist()
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class PairWords(NamedTuple):
    """The words of the pairs of a block. A word is a sequence of characters between white space, as in `str.split`."""

    total: Counts  # [sides, pairs] number of words
    distinct: Counts  # [sides, pairs] number of different words
    common: list[set[str]]  # [pairs] words that both sides have


class TextBlock:
    """Both sides of a block of pairs. `shared` holds results that several filters need, by name."""

    def __init__(self, sources: Sequence[str], targets: Sequence[str]) -> None:
        self.sides = TextSide(sources), TextSide(targets)
        self.shared: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.sides[0])

    @property
    def keys(self) -> Hashes:
        """The hashes of the normalized source and target of each pair: [pairs, 2]."""
        return np.column_stack([side.keys for side in self.sides])

    @cached_property
    def words(self) -> PairWords:
        common: list[set[str]] = []
        counts: list[int] = []  # for each pair: words of source and target, distinct words of source and target
        for source, target in zip(*(side.lines for side in self.sides), strict=True):
            first, second = source.split(), target.split()
            distinct = set(first), set(second)
            common.append(distinct[0] & distinct[1])
            counts += len(first), len(second), len(distinct[0]), len(distinct[1])
        columns = np.array(counts, np.int64).reshape(-1, 4).T
        return PairWords(columns[:2], columns[2:], common)

    def select(self, keep: Mask) -> "TextBlock":
        return self.rows(np.flatnonzero(keep))

    def rows(self, rows: Counts) -> "TextBlock":
        """Returns the pairs with the indices `rows`, in this order."""
        return TextBlock(*([side.lines[row] for row in rows.tolist()] for side in self.sides))
