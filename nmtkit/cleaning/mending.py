"""Mends lines: wrong encodings, HTML entities, white space, invisible characters, and Unicode normalization."""

import html
import re
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.texts import CODE_POINTS, Side
from nmtkit.text.normalization import INVISIBLE

MENDED = ("encoding", "entities", "characters", "spaces", "normalization")

# A lead byte of UTF-8 and its next byte, read as Windows-1252 or Latin-1.
_CONTINUATION = "[\u0080-\u00bf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"
_MOJIBAKE = re.compile(f"[\u00c2-\u00f4]{_CONTINUATION}")
_ENTITY = re.compile(r"&(?:#[0-9]{2,6}|#[xX][0-9a-fA-F]{2,5}|[a-zA-Z][a-zA-Z0-9]{1,30});")
_SPACE = re.compile("[ \t\x0b\x0c\r\x1c-\x1f\x85\u2028\u2029]+")


def fix_encoding() -> Callable[[str], str]:
    """Returns the function of ftfy that undoes a wrong encoding. Raises ImportError if ftfy is missing."""
    try:
        import ftfy
    except ImportError as error:
        raise ImportError(
            "mending wrong encodings needs pip install 'nmtkit[data]'; --no-mend leaves all text as it is"
        ) from error
    config = ftfy.TextFixerConfig(explain=False, unescape_html=False)
    return lambda text: ftfy.fix_encoding(text, config)


@cache
def _kinds() -> npt.NDArray[np.uint8]:
    """Returns a bit mask for each code point: which mending patterns may match at this character."""
    kinds = np.zeros(CODE_POINTS, np.uint8)
    for code in range(0x10000):
        sign = chr(code)
        kinds[code] = (
            ENCODING * ("\u00c2" <= sign <= "\u00f4")
            + ENTITIES * (sign == "&")
            + CHARACTERS * (INVISIBLE.match(sign) is not None)
            + SPACES * (sign not in " \n" and _SPACE.match(sign) is not None)
            + CONTINUATION * (re.match(_CONTINUATION, sign) is not None)
            + COMPOSING * _may_compose(sign)
        )
    kinds[0x10000:] = COMPOSING
    return kinds


def _may_compose(sign: str) -> bool:
    """Returns whether a text with this character may differ from its Unicode normalization NFC."""
    hangul = "\u1100" <= sign <= "\u11ff"  # Hangul letters compose syllables, other marks compose letters
    return hangul or unicodedata.category(sign)[0] == "M" or not unicodedata.is_normalized("NFC", sign)


ENCODING, ENTITIES, CHARACTERS, SPACES, CONTINUATION, COMPOSING = 1, 2, 4, 8, 16, 32


class Mender:
    """Mends the lines of blocks, and counts the mended lines for each name of `MENDED`."""

    def __init__(self) -> None:
        self._fix_encoding = fix_encoding()
        self.counts: dict[str, int] = dict.fromkeys(MENDED, 0)

    def __call__(self, lines: list[str]) -> list[str]:
        """Returns the mended lines. A mended line never contains a line feed."""
        if not lines:
            return lines
        side = Side(lines)
        codes = side.codes
        kinds = _kinds().take(codes, mode="clip")
        # The flag ENCODING stays only if the next character can be the second character of a wrong encoding.
        lead = np.flatnonzero(kinds & ENCODING != 0)
        kinds[lead[kinds[lead + 1] & CONTINUATION == 0]] &= 0xFF - ENCODING
        # The flag SPACES marks two adjacent spaces, a space next to a line feed, and a space at the very beginning.
        space, end = codes == 32, codes == 10
        blank = space | end
        kinds[1:][np.flatnonzero(blank[1:] & blank[:-1] & (space[1:] | space[:-1]))] |= SPACES
        if space[0]:
            kinds[0] |= SPACES
        marked = np.flatnonzero(kinds & (ENCODING | ENTITIES | CHARACTERS | SPACES) != 0)
        result = list(lines)
        changed = []
        if len(marked):
            rows = side.rows_of(marked)
            first = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
            flags = np.bitwise_or.reduceat(kinds[marked], first)
            changed = rows[first].tolist()
            for row, each in zip(changed, flags.tolist(), strict=True):
                result[row] = self._mended(result[row], each)
        composing = bool((kinds & COMPOSING).any())
        if not unicodedata.is_normalized("NFC", "\n".join(result if composing else [result[row] for row in changed])):
            normal = [unicodedata.normalize("NFC", line) for line in result]
            self.counts["normalization"] += sum(a != b for a, b in zip(result, normal, strict=True))
            result = normal
        return result

    def _mended(self, line: str, flags: int) -> str:
        if flags & ENCODING and _MOJIBAKE.search(line):
            line = self._changed("encoding", line, self._encoding(line))
            flags |= ENTITIES | CHARACTERS | SPACES
        if flags & ENTITIES and "&" in line:
            line = self._changed("entities", line, _unescaped(line))
            flags |= CHARACTERS | SPACES
        if flags & CHARACTERS:
            line = self._changed("characters", line, INVISIBLE.sub("", line))
            flags |= SPACES
        if flags & SPACES:
            line = self._changed("spaces", line, _SPACE.sub(" ", line).strip())
        return line

    def _changed(self, name: str, before: str, after: str) -> str:
        self.counts[name] += before != after
        return after

    def _encoding(self, line: str) -> str:
        return self._fix_encoding(line).replace("\n", " ")


def _unescaped(line: str) -> str:
    """Replaces the entities of a line by characters. Repeats this once, for double escapes. Tags stay escaped."""
    for _ in range(2):
        line = _ENTITY.sub(_character, line)
    return line


def _character(match: re.Match[str]) -> str:
    character: Any = html.unescape(match[0])
    return match[0] if character in "<>\n\r" or character == match[0] else character
