"""A block of pairs with features that several filters share. NumPy and `re` process the text of a block at once."""

import unicodedata
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.data.corpora.dropping import RowHash

Mask = npt.NDArray[np.bool_]
Scores = npt.NDArray[np.float32]  # [pairs]
Counts = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

CODE_POINTS = 0x110000
LAST_LETTER = 0x33FFF  # no letter has a larger code point


@cache
def _hash() -> RowHash:
    return RowHash(CODE_POINTS, 0)


# Kinds of characters; a character can have several kinds. UPPER includes title case.
LETTER, DIGIT, CURRENCY, SEPARATOR, BLANK, SPACE, LOWER, UPPER = (1 << bit for bit in range(8))
CURRENCY_SIGNS = "$€£¥₹₽₩₺₴₪฿"
SEPARATORS = "|»›·•"  # between the items of a menu


@cache
def _kinds() -> npt.NDArray[np.uint8]:
    """Returns the sum of the kinds of each code point. Digits and combining marks are also of the kind LETTER."""
    table = np.zeros(CODE_POINTS, np.uint8)
    for code in range(LAST_LETTER + 1):
        sign = chr(code)
        letter = sign.isalnum() or (not sign.isascii() and unicodedata.category(sign)[0] == "M")
        table[code] = (
            LETTER * letter + DIGIT * sign.isdecimal() + SPACE * sign.isspace() + LOWER * sign.islower()
            + UPPER * sign.istitle()
        )  # fmt: skip
    for kind, signs in ((CURRENCY, CURRENCY_SIGNS), (SEPARATOR, SEPARATORS), (BLANK, " \n\xa0")):
        table[[ord(sign) for sign in signs]] |= kind
    return table


@cache
def _folded() -> npt.NDArray[np.uint32]:
    """Returns the case-folded code point of each code point, or 0 if the case-folding has several code points."""
    table = np.arange(CODE_POINTS, dtype=np.uint32)
    for code in range(LAST_LETTER + 1):
        folded = chr(code).casefold()
        table[code] = ord(folded) if len(folded) == 1 else 0
    return table


def _casefold(text: str) -> str:
    """Equals `text.casefold()`, and takes half of the time if the text is not ASCII."""
    if text.isascii() or "\0" in text:
        return text.casefold()
    codes = np.frombuffer(text.replace("ß", "ss").encode("utf-32-le"), np.uint32)
    folded = _folded().take(codes, mode="clip")
    return folded.tobytes().decode("utf-32-le") if folded.all() else text.casefold()


class Side:
    """The lines of one side of a block."""

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
        """The code points of the text."""
        return np.frombuffer(self.text.encode("utf-32-le"), np.uint32)

    @cached_property
    def kinds(self) -> npt.NDArray[np.uint8]:
        """The sum of the kinds of each code point of the text, such as LETTER."""
        return _kinds().take(self.codes, mode="clip")

    def has(self, kind: int) -> Mask:
        """Returns a mask of the lines that have a character of this kind."""
        result = np.zeros(len(self.lines), np.bool_)
        result[self.rows_of(np.flatnonzero(self.kinds & kind != 0))] = True
        return result

    @cached_property
    def ends(self) -> Counts:
        """The position in the text after the line feed of each line."""
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

    def rows_with(self, *literals: str) -> list[int]:
        """Returns the indexes of the lines that contain at least one of the literals, ascending."""
        matches = np.zeros(len(self), np.bool_)
        for literal in literals:
            positions = np.flatnonzero(self.codes == ord(literal[0]))
            for offset, sign in enumerate(literal[1:], 1):
                positions = positions[self.codes.take(positions + offset, mode="clip") == ord(sign)]
            matches[self.rows_of(positions)] = True
        return np.flatnonzero(matches).tolist()

    def rows_of(self, positions: Counts) -> Counts:
        """Returns the index of the line of each position in the text."""
        return np.searchsorted(self.ends, positions, side="right")

    @cached_property
    def folded(self) -> "Side":
        """The case-folded lines."""
        return Side(_casefold(self.text).split("\n")[:-1])

    @cached_property
    def _normalized(self) -> tuple[npt.NDArray[np.uint32], Counts]:
        """The code points of all normalized lines, concatenated, and the length of each line."""
        folded = self.folded
        kept = folded.kinds & LETTER > 0
        empty = np.flatnonzero(folded.sums(kept) == 0)
        for row in empty.tolist():  # keeps all characters of the line, with the line feed
            kept[folded.starts[row] : folded.ends[row]] = True
        return folded.codes[kept], folded.sums(kept)

    @cached_property
    def keys(self) -> Keys:
        """A 64-bit hash of each normalized line."""
        return _hash()(*self._normalized)

    @property
    def normalized(self) -> list[str]:
        """The lines without case, punctuation and spaces. A line without letters and digits keeps all characters."""
        codes, lengths = self._normalized
        text, ends = codes.tobytes().decode("utf-32-le"), np.cumsum(lengths).tolist()
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class TextBlock:
    """Both sides of a block of pairs. `shared` holds results that several filters need, by name."""

    def __init__(self, sources: Sequence[str], targets: Sequence[str]) -> None:
        self.sides = Side(sources), Side(targets)
        self.shared: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.sides[0])

    def select(self, keep: Mask) -> "TextBlock":
        return self.rows(np.flatnonzero(keep))

    def rows(self, rows: Counts) -> "TextBlock":
        """Returns the pairs with the indices `rows`, in this order."""
        return TextBlock(*([side.lines[row] for row in rows.tolist()] for side in self.sides))
