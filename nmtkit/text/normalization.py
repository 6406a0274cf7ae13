"""Normalizes text to the Unicode form NFC in linear time, and defines invisible characters and white space."""

import re
import unicodedata
from functools import cache

MAX_MARKS = 30  # maximum combining marks in a row in stream-safe text (UAX #15, definition D4)
SEPARATOR = "\u034f"  # the combining grapheme joiner, which the Stream-Safe Text Process inserts into longer runs
# Control characters, soft hyphens, and zero-width characters. The joiners U+200C and U+200D are not included, because
# they are parts of words and emoji.
INVISIBLE_CHARACTERS = "".join(
    map(chr, (*range(0x09), *range(0x0E, 0x1C), *range(0x7F, 0x85), *range(0x86, 0xA0), 0xAD, 0x200B, 0x2060, 0xFEFF))
)
INVISIBLE = re.compile(f"[{re.escape(INVISIBLE_CHARACTERS)}]")
# White space, except the space and the line feed, which separates lines
WHITE_SPACE = "\t\v\f\r\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
# Runs with fewer characters cannot have more than MAX_MARKS marks: NFD turns a mark into at most two marks, and a
# letter into a letter and at most three marks.
_CHECKED_RUN = MAX_MARKS // 2 - 3


def check_characters(text: str, title: str) -> None:
    """Raises ValueError, with `title` and a position, if `text` has half of a surrogate pair."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise ValueError(
            f"{title} has {half} at position {error.start}, half of a surrogate pair, which is not a character; "
            "decode the text as UTF-8, or remove this half"
        ) from None


def normalized(text: str) -> str:
    """Returns `text` in NFC, with a separator in every run of more than 30 combining marks.

    `unicodedata` sorts the marks of a run in quadratic time. The separator limits the length of the runs, so the time
    is linear in the length of the text. No language uses such long runs.
    """
    if text.isascii():
        return text
    return unicodedata.normalize("NFC", _long_runs().sub(_separated, text))


@cache
def _long_runs() -> re.Pattern[str]:
    """Returns a pattern for long runs of characters that are combining marks or are above U+FFFF.

    The pattern includes all characters above U+FFFF, because a character class that lists some of these characters one
    by one is slow.
    """
    marks = (
        char
        for char in map(chr, range(0x300, 0x10000))
        if unicodedata.category(char)[0] == "M" and unicodedata.combining(unicodedata.normalize("NFD", char)[0])
    )
    return re.compile(f"[{''.join(marks)}\U00010000-\U0010ffff]{{{_CHECKED_RUN},}}")


def _separated(match: re.Match[str]) -> str:
    """Returns the run with separators, inserted by the Stream-Safe Text Process (UAX15-D4)."""
    parts = []
    letter = match.string[max(0, match.start() - 1) : match.start()]
    count = sum(unicodedata.combining(part) != 0 for part in unicodedata.normalize("NFD", letter))
    for char in match[0]:
        is_mark = [unicodedata.combining(part) != 0 for part in unicodedata.normalize("NFD", char)]
        if not is_mark[0]:
            count = 0
        elif count + len(is_mark) > MAX_MARKS:
            parts.append(SEPARATOR)
            count = 0
        count += sum(is_mark)
        parts.append(char)
    return "".join(parts)
