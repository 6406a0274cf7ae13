"""A document: a file in which text stands between what is no text, and its translation, which is the same file else."""

import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from nmtkit.documents.encoding import Encoding

_LINE_END = re.compile(r"\r\n|\r|\n")

Edit = tuple[int, int, str]  # from this character to that one, the file is to say this


@dataclass(frozen=True)
class ReadOptions:
    """Settings of reading and writing a document."""

    target_language: str | None = None  # code, as de or deu_Latn
    overwrite: bool = False  # translate what is translated already, in formats that hold both languages


class Document(ABC):
    """A file that has been read. `segments` are lines of inline markup, which a translator turns into translations."""

    protects: ClassVar[bool] = False  # whether placeholders, as %s, are common in it

    def __init__(self, text: str, encoding: Encoding, options: ReadOptions) -> None:
        self.text, self.encoding, self.options = text, encoding, options
        self.segments: list[str] = []

    @classmethod
    @abstractmethod
    def read(cls, data: bytes, options: ReadOptions) -> "Document":
        """Reads a file. Raises ValueError, beginning with the line, for what is no such file."""

    @abstractmethod
    def edits(self, translations: Sequence[str]) -> list[Edit]:
        """Returns what changes in the text."""

    def render(self, translations: Sequence[str]) -> str:
        """Returns the text with a translation for each segment, in order. The rest is what it was."""
        assert len(translations) == len(self.segments)
        return spliced(self.text, sorted(self.edits(translations)))

    def encoded(self, text: str) -> bytes:
        """Returns a rendered text as the file's bytes."""
        return self.encoding.encode(text)


def spliced(text: str, edits: Sequence[Edit], start: int = 0, end: int | None = None) -> str:
    """Returns the text from `start` to `end` with those of the sorted edits that are within; none may overlap."""
    end = len(text) if end is None else end
    parts, cursor = [], start
    for first, last, new in edits[bisect_left(edits, (start, start, "")) :]:
        if last > end or first > end:
            break
        assert cursor <= first <= last
        parts += [text[cursor:first], new]
        cursor = last
    return "".join([*parts, text[cursor:end]])


def line_of(text: str, place: int) -> int:
    """Returns the number of the line, from 1, of a character."""
    return text.count("\n", 0, place) + 1


def lines_of(text: str) -> list[tuple[int, int]]:
    """Returns the places of the lines of a text, without their ends."""
    lines = []
    place = 0
    while place <= len(text):
        match = _LINE_END.search(text, place)
        lines.append((place, match.start() if match else len(text)))
        place = match.end() if match else len(text) + 1
    return lines


def newline_of(text: str) -> str:
    """Returns how the lines of a file end."""
    first = text.find("\n")
    if first < 0:
        return "\r" if "\r" in text else "\n"
    return "\r\n" if first > 0 and text[first - 1] == "\r" else "\n"


def without_white_space(text: str, start: int, end: int) -> tuple[int, int]:
    """Returns the place without the white space at either end; a no-break space is none."""
    part = text[start:end]
    return start + len(part) - len(part.lstrip(" \t\r\n\f")), end - (len(part) - len(part.rstrip(" \t\r\n\f")))
