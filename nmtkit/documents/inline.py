"""Text with inline codes: tags, placeholders of a format, comments; and the stand-ins by which it is translated.

Whatever codes a format has, a translator gets the text as a line of HTML with a tag `<g0>`, `</g0>` or `<g0/>` in place
of each, so that one way of moving markup (`nmtkit.text.markup`) serves all formats.
"""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nmtkit.text.protection import OPENING

MAX_CODES = 200  # of a segment: nested tags are put back by recursion, each at a cost that grows with the others

_STAND_IN = re.compile(r"(</?g\d+/?>)")
_WHITE_SPACE = re.compile(r"[ \t\r\n\f]+")  # not the no-break space


@dataclass(frozen=True)
class Piece:
    """A piece of text, or a code. `spaced`: a code that shows as a word does, and has spaces around it as a word."""

    role: Literal["text", "opening", "closing", "alone"]
    text: str = ""  # what a text says
    raw: str = ""  # a code as it stands in the file
    name: str = ""  # by which an opening code finds its closing one
    spaced: bool = False
    start: int = 0  # place in the file
    end: int = 0

    @property
    def blank(self) -> bool:
        return self.role == "text" and not self.text.strip()


def has_words(pieces: Sequence[Piece]) -> bool:
    """Returns whether there is a letter in the text: numbers and signs alone need no translation."""
    return any(char.isalpha() for piece in pieces if piece.role == "text" for char in piece.text)


def partners(pieces: Sequence[Piece]) -> dict[int, int]:
    """Returns the index of the closing code for that of each opening one that has it, properly nested."""
    found: dict[int, int] = {}
    waiting: list[int] = []
    for index, piece in enumerate(pieces):
        if piece.role == "opening":
            waiting.append(index)
        elif piece.role == "closing":
            place = next((at for at in reversed(range(len(waiting))) if pieces[waiting[at]].name == piece.name), None)
            if place is not None:
                found[waiting[place]] = index
                del waiting[place:]
    return found


def trimmed(pieces: Sequence[Piece]) -> tuple[int, int]:
    """Returns the range of pieces from the first text to the last, with the codes that have a partner in it.

    A pair that surrounds everything is left out: it is not for alignment to say where it goes.
    """
    first, last = 0, len(pieces)
    pairs = partners(pieces)
    closing = {end: start for start, end in pairs.items()}
    while first < last:
        if pieces[first].blank or (pieces[first].role != "text" and not first < pairs.get(first, -1) < last):
            first += 1
        elif pieces[last - 1].blank or (pieces[last - 1].role != "text" and closing.get(last - 1, -1) < first):
            last -= 1
        elif pairs.get(first) == last - 1:
            first, last = first + 1, last - 1
        else:
            break
    return first, last


class Inline:
    """Pieces that are translated together. `markup` is for the translator; what it returns is for `restored`."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.codes: dict[str, Piece] = {}
        pairs = partners(pieces)
        closing = {end: start for start, end in pairs.items()}
        parts: list[str] = []
        ends_blank = True  # of two white spaces around a code, one goes: the translator gets the text without codes
        for index, piece in enumerate(pieces):
            if piece.role == "text":
                text = _WHITE_SPACE.sub(" ", piece.text)
                if ends_blank and text.startswith(" "):
                    text = text[1:]
                ends_blank = text.endswith(" ") if text else ends_blank
                parts.append(html.escape(text, quote=False))
                continue
            if index in pairs:
                tag = f"<g{index}>"
            elif index in closing:
                tag = f"</g{closing[index]}>"
            else:
                tag = f"<g{index}/>"
            self.codes[tag] = piece
            parts.append(tag)
        self.markup = "".join(parts).strip(" ")
        self.spaces = self._spaces(pieces)
        self.own = self._parts(self.markup)

    def _spaces(self, pieces: Sequence[Piece]) -> dict[int, tuple[bool, bool]]:
        """Returns for each word-like code, by its identity, whether white space stands before and after it."""
        found: dict[int, tuple[bool, bool]] = {}
        before = ""
        last: Piece | None = None  # that no text has followed yet
        for piece in pieces:
            if piece.spaced:
                last = piece
                found[id(piece)] = before[-1:].isspace(), False
            elif piece.text:
                if last is not None:
                    found[id(last)] = found[id(last)][0], piece.text[0].isspace()
                before, last = piece.text, None
        return found

    @property
    def text(self) -> str:
        """The text without codes."""
        return "".join(piece.text for piece in self.own)

    def restored(self, translation: str) -> list[Piece] | None:
        """Returns the translation as pieces, each code once; None where it says what the source says."""
        parts = self._parts(translation)
        assert sorted(id(piece) for piece in parts if piece.role != "text") == sorted(map(id, self.codes.values()))
        return None if parts == self.own else parts

    def _parts(self, markup: str) -> list[Piece]:
        parts: list[Piece] = []
        blank = False  # a word-like code came last that wants a space after it
        before = ""  # the last character of text
        for part in _STAND_IN.split(markup):
            if part in self.codes:
                piece = self.codes[part]
                space_before, space_after = self.spaces.get(id(piece), (False, False))
                if space_before and before and not before.isspace() and before not in OPENING:
                    parts.append(Piece("text", " "))
                    before = " "
                parts.append(piece)
                if piece.spaced:
                    blank = space_after
            elif part:
                text = _WHITE_SPACE.sub(" ", html.unescape(part))
                if blank and text[0].isalnum():
                    text = " " + text
                blank = False
                parts.append(Piece("text", text))
                before = text[-1]
        return _merged(parts)


def _merged(parts: Sequence[Piece]) -> list[Piece]:
    """Returns the pieces with texts that follow each other as one."""
    merged: list[Piece] = []
    for piece in parts:
        if merged and piece.role == merged[-1].role == "text":
            merged[-1] = Piece("text", merged[-1].text + piece.text)
        else:
            merged.append(piece)
    return merged
