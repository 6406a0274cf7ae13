"""Lines that are parts of a sentence: which belong together, and a text divided into lines again."""

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from nmtkit.documents.inline import Piece

_ENDS = ".!?…:。！？؟।։።"
_COMMAS = ",、，،"
_AROUND = "\"'’”»›)]}」』“„«‹([{「『 \t\r\n\u00a0♪"
_NEAR = 3  # words that a division may move to stand after punctuation


def ends_sentence(text: str) -> bool:
    return text.rstrip(_AROUND)[-1:] in (*_ENDS, "")


def goes_on(before: str, after: str) -> bool:
    """Returns whether a sentence goes on in `after`: it begins with a small letter, or a comma stands before it."""
    after = after.lstrip(_AROUND)
    return not ends_sentence(before) and after != "" and (after[0].islower() or before.rstrip(_AROUND)[-1:] in _COMMAS)


@dataclass
class Word:
    """A part without a place for a line break: a word with its codes, or a character of a script without spaces."""

    raw: str = ""  # as it stands in the file
    text: str = ""  # without codes
    space: bool = False  # before it

    @property
    def width(self) -> int:
        """Columns with the space before it. A Chinese character takes two."""
        return self.space + sum(
            0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
            for char in self.text
        )


def words_of(pieces: Sequence[Piece], escape: Callable[[str], str]) -> list[Word]:
    """Returns the words of a translation; codes belong to the word that they touch."""
    words = [Word()]
    for piece in pieces:
        if piece.role != "text":
            words[-1].raw += piece.raw
            continue
        for part in re.findall(r"\s+|\S+", piece.text):
            if part.isspace():
                if words[-1].raw:
                    words.append(Word(space=True))
                continue
            for char in part:
                if words[-1].text and _breaks(words[-1].text[-1], char):
                    words.append(Word())
                words[-1].text += char
                words[-1].raw += escape(char)
    if not words[-1].raw:
        words.pop()
    return words


def _breaks(before: str, after: str) -> bool:
    """Returns whether a line may end between two characters without white space: in Chinese or Japanese text."""
    wide = "W" in (unicodedata.east_asian_width(before), unicodedata.east_asian_width(after))
    opening, closing = unicodedata.category(before) in ("Ps", "Pi"), unicodedata.category(after)[0] == "P"
    return wide and not opening and (not closing or unicodedata.category(after) in ("Ps", "Pi"))


def divided(words: Sequence[Word], weights: Sequence[float], limit: float = float("inf")) -> list[Sequence[Word]]:
    """Divides words among as many parts as there are weights, in proportion, each with one at least where that is
    possible.

    A part rather ends after punctuation than a few words from there, where the parts still fit into `limit` columns.
    """
    ends = [0, *accumulate(word.width for word in words)]
    shares = list(accumulate(weights))
    cuts = [0]
    for number, share in enumerate(shares[:-1], 1):
        first = min(cuts[-1] + 1, len(words))
        last = max(len(words) - (len(weights) - number), first)
        ideal = ends[-1] * share / (shares[-1] or 1)
        near = bisect_left(ends, ideal)
        near = min(max(near if near == 0 or ends[min(near, len(words))] - ideal <= ideal - ends[near - 1] else near - 1,
                       first), last)  # fmt: skip
        best = near
        for at in sorted(range(max(first, near - _NEAR), min(last, near + _NEAR) + 1), key=lambda at: abs(at - near)):
            fits = ends[at] - ends[cuts[-1]] <= limit and (number < len(weights) - 1 or ends[-1] - ends[at] <= limit)
            if fits and 0 < at < len(words) and unicodedata.category(words[at - 1].text[-1:] or " ") == "Po":
                best = at
                break
        cuts.append(best)
    cuts.append(len(words))
    return [words[start:end] for start, end in pairwise(cuts)]


def joined(words: Sequence[Word]) -> str:
    """Returns the words as one line of the file."""
    return "".join((" " if word.space and index else "") + word.raw for index, word in enumerate(words))


def wrapped(words: Sequence[Word], lines: int, limit: int) -> list[str]:
    """Returns the words in as many lines of about equal width, or in more where these would be over `limit` columns."""
    width = sum(word.width for word in words)
    lines = max(1, min(len(words), max(lines, -(-width // limit))))
    return [joined(part) for part in divided(words, [1.0] * lines, limit)]
