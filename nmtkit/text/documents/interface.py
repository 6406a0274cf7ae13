"""The interface of document formats."""

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Self

from nmtkit.text.documents.encoding import Encoding, decode
from nmtkit.text.edits import Replacement, spliced
from nmtkit.text.languages import same_language

_LINE_END = re.compile(r"\r\n|\r|\n")

logger = logging.getLogger("nmtkit")


@dataclass(frozen=True)
class TagRules:
    """Names of elements, in small letters, that a format with tags treats differently from its default rules."""

    untranslated: frozenset[str] = frozenset()  # elements whose content is copied; a sentence may contain them
    splitting: frozenset[str] = frozenset()  # no sentence continues after the tags of these elements
    inline: frozenset[str] = frozenset()  # a sentence may continue after the tags of these elements


@dataclass(frozen=True)
class ReadOptions:
    """Settings of reading and writing a document."""

    target_language: str | None = None  # a code, such as de or deu_Latn
    overwrite: bool = False  # replace existing translations, in formats with source and target texts
    tags: TagRules = TagRules()  # rules for web pages and tagged texts
    source_language: str | None = None  # the language that the text should have
    name: str = "the file"  # name of the document in messages
    warn: Callable[[str], None] = logger.warning  # is called with each warning about the document


class Document(ABC):
    """A file of a format: extracts the translatable text, and writes the file with translated text.

    `segments` are lines of HTML, where a tag such as <g0/> stands for each inline code (inline.py). A translator
    translates each segment.
    """

    protects: ClassVar[bool] = False  # whether files of the format usually contain placeholders such as %s
    web: ClassVar[bool] = False  # whether names of encodings have the same meaning as in browsers
    unencodable: ClassVar[str] = "strict"  # error handler of `str.encode` for characters that the encoding lacks

    def __init__(self, text: str, encoding: Encoding, options: ReadOptions) -> None:
        self.text, self.encoding, self.options = text, encoding, options
        self.segments: list[str] = []

    @classmethod
    def read(cls, data: bytes, options: ReadOptions) -> Self:
        """Reads a file. Raises ValueError, with the line number if it is known, if the file is invalid."""
        text, encoding = decode(data, cls.declared_encoding(data), cls.web)
        return cls(text, encoding, options)

    @classmethod
    def declared_encoding(cls, data: bytes) -> str | None:
        """Returns the encoding that the file declares, or None."""
        return None

    def warn_of_languages(self, source: str | None, target: str | None = None) -> None:
        """Warns if the languages that the file names are not the languages of the command."""
        expected = self.options.source_language, self.options.target_language
        for side, named, language in zip(("source", "target"), (source, target), expected, strict=True):
            if named and language and not same_language(named, language):
                self.options.warn(
                    f"{self.options.name} names the {side} language {named[:40]!r}, not {language!r}; check the file "
                    "and the languages of the command or the model"
                )

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yields source and translation of each translated unit. Formats with a single text per unit yield nothing."""
        return iter(())

    @abstractmethod
    def edits(self, translations: Sequence[str]) -> list[Replacement]:
        """Returns the edits that put the translations into the text. Edits of the same range keep their order."""

    def render(self, translations: Sequence[str]) -> str:
        """Returns the text with segments replaced by `translations`, which are in the order of `segments`."""
        assert len(translations) == len(self.segments)
        return spliced(self.text, sorted(self.edits(translations), key=lambda edit: edit[:2]))

    def encoded(self, text: str) -> bytes:
        """Returns a rendered text as the bytes of the file."""
        return self.encoding.encode(text, self.unencodable)


def line_of(text: str, position: int) -> int:
    """Returns the number of the line that contains a character, counted from 1."""
    return sum(1 for _ in _LINE_END.finditer(text, 0, position)) + 1


def line_spans(text: str) -> list[tuple[int, int]]:
    """Returns start and end of each line of a text, without the line ends."""
    line_ends = [match.span() for match in _LINE_END.finditer(text)]
    return [(start, end) for (_, start), (end, _) in pairwise([(0, 0), *line_ends, (len(text), len(text))])]


def newline_of(text: str) -> str:
    """Returns the line end of a file."""
    first = re.search(r"\r?\n", text) or re.search(r"\r", text)
    return first[0] if first else "\n"


def without_white_space(text: str, start: int, end: int) -> tuple[int, int]:
    """Returns the range without white space at both ends. A no-break space does not count as white space."""
    part = text[start:end]
    return start + len(part) - len(part.lstrip(" \t\r\n\f")), end - (len(part) - len(part.rstrip(" \t\r\n\f")))
