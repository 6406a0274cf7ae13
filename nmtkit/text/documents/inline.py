"""Replaces inline codes (tags, placeholders, comments) by HTML tags for the translator, and puts the codes back.

A translator gets each segment as a line of HTML with a tag `<g0>`, `</g0>` or `<g0/>` for each code. So
`nmtkit.text.markup` can move the codes of all formats.
"""

import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from unicodedata import category

from nmtkit.text import markup
from nmtkit.text.alignment import is_spaced_letter
from nmtkit.text.edits import OPENING
from nmtkit.text.markup import TAG

_STAND_IN = re.compile(r"(</?g\d+/?>)")
_WHITE_SPACE = re.compile(r"[ \t\r\n\f]+")  # excludes the no-break space
_ENTITY = re.compile(r"&(?:#\d+|#[xX][0-9a-fA-F]+|\w+);")
_SPACED_PUNCTUATION = "\"'¿¡@&#*/\\"  # punctuation that may follow a space
_CODE = "\ufffc"  # value of the variable `before` (the last character so far) after a spaced code


@dataclass(frozen=True)
class Piece:
    """A piece of text, or a code.

    A `spaced` code has spaces around it like a word. Examples are an image, and a tag without a partner, such as <file>
    in the help text of a command.
    """

    role: str  # "text", "opening", "closing" or "alone"
    text: str = ""  # without escapes; empty for a code
    raw: str = ""  # the code as written in the file; empty in web pages, where `start` and `end` give its place
    name: str = ""  # an opening code and its closing code have the same name
    spaced: bool = False
    start: int = 0  # position in the file
    end: int = 0

    @property
    def blank(self) -> bool:
        return self.role == "text" and not self.text.strip()


def has_words(pieces: Sequence[Piece]) -> bool:
    """Returns whether the text has a letter. Numbers and signs alone need no translation."""
    return any(char.isalpha() for piece in pieces if piece.role == "text" for char in piece.text)


def split_markup(text: str) -> Iterator[markup.Tag]:
    """Yields the tags of a text and the parts of the text between the tags."""
    cursor = 0
    for tag in markup.tags(text):
        if cursor < tag.start:
            yield markup.Tag("text", cursor, tag.start)
        yield tag
        cursor = tag.end
    if cursor < len(text):
        yield markup.Tag("text", cursor, len(text))


def is_markup(text: str) -> bool:
    """Returns whether a text is HTML: whether it has a tag, and an entity that stands for a character."""
    return TAG.search(text) is not None and _ENTITY.search(text) is not None


def translatable(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Returns the pieces from the first text to the last text, or no pieces if the text has no letter.

    A code before the first text or after the last text is included if its partner is inside the range. A spaced code
    next to punctuation is also included: if the translation lacks this punctuation, a space must separate the code from
    the next word. A pair of codes around the whole text is left out, because its position is known.
    """
    first, last = 0, len(pieces)
    pairs = markup.partners([(piece.role, piece.name) for piece in pieces])
    while first < last:
        before = pieces[first + 1].text[:1] if first + 1 < last else ""
        after = pieces[last - 2].text[-1:] if first + 1 < last else ""
        if _is_outside(pieces[first], first < pairs.get(first, -1) < last, before):
            first += 1
        elif _is_outside(pieces[last - 1], first <= pairs.get(last - 1, -1) < last, after):
            last -= 1
        elif pairs.get(first) == last - 1:
            first, last = first + 1, last - 1
        else:
            break
    return pieces[first:last] if has_words(pieces[first:last]) else ()


def _is_outside(piece: Piece, has_partner: bool, touching: str) -> bool:
    """Returns whether a piece at the edge of a text is left out. `touching` is the character next to the piece."""
    touches_sign = piece.spaced and touching != "" and _space(touching) is None
    return piece.blank or not (piece.role == "text" or has_partner or touches_sign)


class Inline:
    """Pieces that are translated together. `markup` is the line to translate; `restored` reads its translation."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.codes: dict[str, Piece] = {}
        pairs = markup.partners([(piece.role, piece.name) for piece in pieces])
        pieces = [
            piece if piece.role in ("text", "alone") or index in pairs else replace(piece, spaced=True)
            for index, piece in enumerate(pieces)
        ]
        parts: list[str] = []
        self.spaces = _spaces(pieces)
        ends_blank = True  # the model gets the text without codes, so spaces around a code are merged
        for index, piece in enumerate(pieces):
            if self.is_glued(piece):  # the model must not read the words on both sides as one word
                parts.append(" ")
                ends_blank = True
            if piece.role == "text":
                text = _WHITE_SPACE.sub(" ", piece.text)
                if ends_blank and text.startswith(" "):
                    text = text[1:]
                ends_blank = text.endswith(" ") if text else ends_blank
                parts.append(html.escape(text, quote=False))
                continue
            other = pairs.get(index)
            tag = f"<g{index}/>" if other is None else f"<g{index}>" if other > index else f"</g{other}>"
            self.codes[tag] = piece
            parts.append(tag)
        self.markup = "".join(parts).strip(" ")
        self.source = self.parts(self.markup)

    def is_glued(self, piece: Piece) -> bool:
        """Returns whether a spaced code, such as a line break, stands between two letters without spaces."""
        return piece.spaced and self.spaces[id(piece)] == (False, False)

    @property
    def text(self) -> str:
        """The text without codes."""
        return "".join(piece.text for piece in self.source)

    def restored(self, translation: str) -> list[Piece] | None:
        """Returns the translation as pieces, with each code once, or None if the translation equals the source."""
        parts = self.parts(translation)
        assert sorted(id(piece) for piece in parts if piece.role != "text") == sorted(map(id, self.codes.values()))
        return None if parts == self.source else parts

    def written(
        self, translation: str, write: Callable[[str], str], code: Callable[[Piece], str] = attrgetter("raw")
    ) -> str | None:
        """Returns the translation as text of the file, or None if the translation equals the source.

        `write` escapes a text, and `code` returns a code as written in the file.
        """
        parts = self.restored(translation)
        if parts is None:
            return None
        return "".join(write(part.text) if part.role == "text" else code(part) for part in parts)

    def parts(self, line: str) -> list[Piece]:
        """Returns the pieces of a translated line.

        Spaced codes get the spaces that they have in the source. If a spaced code is next to a word only in the
        translation, a space separates the code and the word. If a word touches the code in the source, no space is
        added.
        """
        parts: list[Piece] = []
        before = ""  # the last character so far
        # whether the last spaced code needs a space after it; None: only before a word
        wants_space: bool | None = False
        gap = 0  # the index in `parts` where this space is inserted
        glued = False  # whether the next text must not begin with a space
        for part in _STAND_IN.split(line):
            if part in self.codes:
                piece = self.codes[part]
                if piece.spaced:
                    space_before, space_after = self.spaces[id(piece)]
                    wanted = space_before or wants_space or (space_before is None and is_spaced_letter(before))
                    if wanted and not (before in ("", *OPENING) or before.isspace()):
                        parts.append(Piece("text", " "))
                    glued = self.is_glued(piece)
                    if glued and parts and parts[-1].role == "text":
                        parts[-1] = replace(parts[-1], text=parts[-1].text.rstrip(" "))
                    parts.append(piece)
                    before, wants_space, gap = _CODE, space_after, len(parts)
                else:
                    gap += piece.role == "closing" and gap == len(parts)
                    parts.append(piece)
            elif part:
                text = _WHITE_SPACE.sub(" ", markup.unescape_entities(part))
                text = text.lstrip(" ") if glued else text
                if not text:
                    continue
                if _may_follow_space(text[0]) if wants_space else wants_space is None and is_spaced_letter(text[0]):
                    parts.insert(gap, Piece("text", " "))
                wants_space = glued = False
                parts.append(Piece("text", text))
                before = text[-1]
        return _merged(parts)


def _spaces(pieces: Sequence[Piece]) -> dict[int, tuple[bool | None, bool | None]]:
    """Maps the id() of each spaced code to two flags, for the text before the code and after the code.

    True stands for white space, False for a word that touches the code, and None for other text or no text.
    """
    spaces: dict[int, tuple[bool | None, bool | None]] = {}
    before = ""  # the last character so far
    last: Piece | None = None  # a spaced code that no text has followed yet
    for piece in pieces:
        if piece.spaced:
            last = piece
            spaces[id(piece)] = _space(before), None
            before = _CODE
        elif piece.text:
            if last is not None:
                spaces[id(last)] = spaces[id(last)][0], _space(piece.text[0])
            before, last = piece.text[-1], None
    return spaces


def _space(char: str) -> bool | None:
    return True if char.isspace() else False if is_spaced_letter(char) else None


def _may_follow_space(char: str) -> bool:
    """Returns whether a character may follow a space. Closing brackets and commas do not follow a space."""
    return not char.isspace() and (category(char) not in ("Pe", "Pf", "Po") or char in _SPACED_PUNCTUATION)


def _merged(parts: Sequence[Piece]) -> list[Piece]:
    """Returns the pieces with adjacent texts joined."""
    merged: list[Piece] = []
    for piece in parts:
        if merged and piece.role == merged[-1].role == "text":
            merged[-1] = Piece("text", merged[-1].text + piece.text)
        else:
            merged.append(piece)
    return merged
