"""Mends lines: wrong encodings, HTML entities, white space, invisible characters, and Unicode normalization."""

import html
import re
import unicodedata
from functools import partial
from typing import Any

from nmtkit.config.extras import imported
from nmtkit.data.corpora.corpus import Pairs
from nmtkit.text.normalization import INVISIBLE

MENDED = ("encoding", "entities", "characters", "spaces", "normalization")

# Two characters that come from a lead byte of UTF-8 and its next byte, decoded as Windows-1252 or Latin-1.
_MOJIBAKE = re.compile("[\u00c2-\u00f4][\u0080-\u00bf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]")
_ENTITY = re.compile(r"&(?:#[0-9]{2,6}|#[xX][0-9a-fA-F]{2,5}|[a-zA-Z][a-zA-Z0-9]{1,30});")
_SPACE = re.compile("[ \t\x0b\x0c\r\x1c-\x1f\x85\u2028\u2029]+")
_INVISIBLE_OR_SPACE = re.compile(f"{INVISIBLE.pattern}|[\t\x0b\x0c\r\x1c-\x1f\x85\u2028\u2029]")


class Mender:
    """Mends the lines of blocks, and counts the mended lines for each name of `MENDED`.

    Raises ImportError if the package ftfy, which undoes wrong encodings, is missing.
    """

    def __init__(self) -> None:
        need = "mending wrong encodings needs pip install 'nmtkit[data]'; --no-mend leaves all text as it is"
        ftfy = imported("ftfy", need=need)
        self._fix_encoding = partial(ftfy.fix_encoding, config=ftfy.TextFixerConfig(explain=False, unescape_html=False))
        self.counts: dict[str, int] = dict.fromkeys(MENDED, 0)

    def __call__(self, lines: list[str]) -> list[str]:
        """Returns the mended lines. A mended line never contains a line feed."""
        return list(map(self._mended, lines))

    def pairs(self, part: Pairs) -> Pairs:
        return Pairs(self(part.sources), self(part.targets), part.extras, part.first)

    def _mended(self, line: str) -> str:
        has_spaces = "  " in line or line.startswith(" ") or line.endswith(" ")  # extra spaces, which are removed
        if not line.isascii() and _MOJIBAKE.search(line):
            line = self._changed("encoding", line, self._fix_encoding(line).replace("\n", " "))
            has_spaces = True
        if "&" in line:
            line = self._changed("entities", line, _unescaped(line))
            has_spaces = True
        if not line.isprintable():  # a printable line cannot match the next two patterns
            has_spaces = has_spaces or _INVISIBLE_OR_SPACE.search(line) is not None
            line = self._changed("characters", line, INVISIBLE.sub("", line))
        if has_spaces:
            line = self._changed("spaces", line, _SPACE.sub(" ", line).strip())
        if not line.isascii():
            line = self._changed("normalization", line, unicodedata.normalize("NFC", line))
        return line

    def _changed(self, name: str, before: str, after: str) -> str:
        self.counts[name] += before != after
        return after


def mended_pairs(part: Pairs) -> Pairs:
    """Returns the pairs with mended lines on both sides. Does not count the mended lines."""
    return Mender().pairs(part)


def _unescaped(line: str) -> str:
    """Replaces the entities of a line by characters, also entities that are escaped twice. `&lt;` and `&gt;` stay."""
    for _ in range(2):
        line = _ENTITY.sub(_character, line)
    return line


def _character(match: re.Match[str]) -> str:
    character: Any = html.unescape(match[0])
    return match[0] if character in "<>\n\r" or character == match[0] else character
