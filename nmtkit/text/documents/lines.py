"""Finds sentences that continue over several lines, and divides a translation into lines."""

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from nmtkit.text.documents.inline import Inline, Piece
from nmtkit.text.edits import Replacement
from nmtkit.text.sentences import SENTENCE_ENDS

_BREAKABLE = re.compile(r"[ \t\r\n\f\v]+|[^ \t\r\n\f\v]+")  # a no-break space is a part of a word
_ENDS = SENTENCE_ENDS + ":։።"
_COMMAS = ",、，،"
_AROUND = "\"'’”»›)]}」』“„«‹([{「『 \t\r\n\u00a0♪"
_NEAR = 3  # the end of a part moves by at most this number of words, so that the part ends in punctuation


def ends_sentence(text: str) -> bool:
    return text.rstrip(_AROUND)[-1:] in (*_ENDS, "")


def continues(before: str, after: str) -> bool:
    """Returns whether a sentence of the line `before` continues in the line `after`.

    `before` must not end a sentence. In addition, `before` must end with a comma, or `after` must begin with a small
    letter.
    """
    after = after.lstrip(_AROUND)
    return not ends_sentence(before) and after != "" and (after[0].islower() or before.rstrip(_AROUND)[-1:] in _COMMAS)


def sentence_ranges(lines: Sequence[str], joins: Callable[[str, str], bool] = continues) -> Iterator[tuple[int, int]]:
    """Yields the ranges of lines that are translated together.

    `joins` returns whether a line and the next line are translated together.
    """
    first = 0
    for end in range(1, len(lines) + 1):
        if end == len(lines) or not joins(lines[end - 1], lines[end]):
            yield first, end
            first = end


@dataclass
class Word:
    """A unit that no line break divides: a word with its codes, or a character of a script without spaces."""

    raw: str = ""  # text of the word as in the file
    text: str = ""  # text of the word without codes
    space: bool = False  # whether a space comes before the word

    @property
    def width(self) -> int:
        """The number of columns, including the space before the word. A Chinese character takes two columns."""
        return self.space + sum(
            0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
            for char in self.text
        )


def words_of(pieces: Sequence[Piece], escape: Callable[[str], str]) -> list[Word]:
    """Returns the words of a translation. A code belongs to the word before it, or after a space to the next word."""
    words = [Word()]
    for piece in pieces:
        if piece.role != "text":
            words[-1].raw += piece.raw
            continue
        for part in _BREAKABLE.findall(piece.text):
            if part[0] in " \t\r\n\f\v":
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
    """Returns whether a line may end between two characters of Chinese or Japanese text."""
    wide = "W" in (unicodedata.east_asian_width(before), unicodedata.east_asian_width(after))
    opening, closing = unicodedata.category(before) in ("Ps", "Pi"), unicodedata.category(after)[0] == "P"
    return wide and not opening and (not closing or unicodedata.category(after) in ("Ps", "Pi"))


def divided(words: Sequence[Word], weights: Sequence[float], limit: float = float("inf")) -> list[Sequence[Word]]:
    """Divides words into one part for each weight, with lengths in proportion to the weights.

    Each part has a word if there are enough words. The end of a part moves by up to three words, to a word that ends in
    punctuation, if the parts still fit into `limit` columns.
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
        window = range(max(first, near - _NEAR), min(last, near + _NEAR) + 1)
        for index in sorted(window, key=lambda index: abs(index - near)):
            fits = ends[index] - ends[cuts[-1]] <= limit
            fits = fits and (number < len(weights) - 1 or ends[-1] - ends[index] <= limit)
            if fits and 0 < index < len(words) and unicodedata.category(words[index - 1].text[-1:] or " ") == "Po":
                best = index
                break
        cuts.append(best)
    cuts.append(len(words))
    return [words[start:end] for start, end in pairwise(cuts)]


def joined(words: Sequence[Word]) -> str:
    """Returns the words as one line of the file."""
    return "".join((" " if word.space and index else "") + word.raw for index, word in enumerate(words))


def wrapped(words: Sequence[Word], lines: int, limit: int) -> list[str]:
    """Returns the words in `lines` lines of about equal width, or in more lines to stay within `limit` columns."""
    width = sum(word.width for word in words)
    lines = max(1, min(len(words), max(lines, -(-width // limit))))
    return [joined(part) for part in divided(words, [1.0] * lines, limit)]


@dataclass(frozen=True)
class TextPart:
    """A part of a text that is translated as one segment, and its position in the text."""

    start: int
    end: int
    inline: Inline
    write: Callable[[str], str]  # escapes the words of a translation
    lines: int = 1  # number of lines of the part
    width: int = 0  # maximum number of columns of a line, if the part has several lines

    def written(self, translation: str) -> str | None:
        """Returns the translation as it is written in the text, or None if the translation equals the source."""
        text = self.inline.written(translation, self.write)
        if text is None or self.lines == 1:
            return text
        return "\n".join(wrapped(words_of(self.inline.parts(translation), self.write), self.lines, self.width))


def edits_of(parts: Sequence[TextPart], translations: Iterator[str]) -> list[Replacement]:
    """Returns the edits that put the next translations of the iterator into the text of the parts."""
    texts = [(part.start, part.end, part.written(next(translations))) for part in parts]
    return [(start, end, text) for start, end, text in texts if text is not None]
