"""Finds the words of a text, links the words of a translation to source words, and maps positions with these links."""

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

Span = tuple[int, int]  # start and end (exclusive) in characters

# Letters of scripts without spaces: Thai, Lao, Myanmar, Khmer, kana, Han. Each of these characters counts as a word.
UNSPACED_LETTERS = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
UNSPACED = re.compile(rf"[{UNSPACED_LETTERS}\u2e80-\u303f]")  # UNSPACED_LETTERS, radicals, and CJK punctuation
JOINERS = "'’-"  # characters that belong to a word if they stand between two of its letters
ZERO_WIDTH_JOINER, ZERO_WIDTH_SPACE = "\u200d", "\u200b"
_EMOJI_MODIFIERS = "\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"


@dataclass(frozen=True)
class Link:
    """A word of a translation, and its source word. Positions are in characters; ends are exclusive."""

    source_start: int
    source_end: int
    target_start: int
    target_end: int

    def moved(self, source: int, target: int) -> "Link":
        return Link(self.source_start + source, self.source_end + source, self.target_start + target,
                    self.target_end + target)  # fmt: skip

    def with_target(self, start: int, end: int) -> "Link":
        return replace(self, target_start=start, target_end=end)


def is_letter(char: str) -> bool:
    """Returns whether a character is a letter, a digit or a combining mark."""
    return unicodedata.category(char)[0] in "LMN"


def is_spaced_letter(char: str) -> bool:
    """Returns whether `char` is a letter, a digit or a combining mark of a script with spaces between words.

    Returns False for an empty text.
    """
    return char != "" and unicodedata.category(char)[0] in "LMN" and not UNSPACED.match(char)


def is_joined(text: str, index: int) -> bool:
    """Returns whether the characters before and at `index` belong to the same word."""
    pair = text[index - 1 : index + 1] if index else ""
    if len(pair) < 2:
        return False
    if pair[1] in _EMOJI_MODIFIERS or ZERO_WIDTH_JOINER in pair:
        return True
    return all(map(is_spaced_letter, pair))


def words(text: str) -> list[Span]:
    """Returns the words of a text: runs of letters and digits, and each other character that is not white space.

    >>> [text[start:end] for start, end in words(text := "It's 5 o'clock, isn't it?")]
    ["It's", '5', "o'clock", ',', "isn't", 'it', '?']
    """
    spans: list[Span] = []
    last = ""  # last character of the current word, without format characters
    for index, char in enumerate(text):
        if char.isspace():
            last = ""
            continue
        category = unicodedata.category(char)
        attached = category[0] == "M" or (category == "Cf" and char != ZERO_WIDTH_SPACE) or char in _EMOJI_MODIFIERS
        if last and (attached or text[index - 1] == ZERO_WIDTH_JOINER):
            last = last if category == "Cf" else char
        elif char in JOINERS and is_spaced_letter(last) and is_spaced_letter(text[index + 1 : index + 2]):
            pass  # the joiner and the next letter belong to the current word
        elif is_spaced_letter(char) and is_spaced_letter(last):
            last = char
        else:
            spans.append((index, index + 1))
            last = char
            continue
        spans[-1] = (spans[-1][0], index + 1)
    return spans


def units(text: str, spans: Iterable[Span]) -> list[Span]:
    """Returns the units of a text. All words within one of the `spans`, such as a protected text, are one unit.

    Each word outside the `spans` is a unit.
    """
    wholes = sorted(set(spans))
    merged: list[Span] = []
    index = 0
    for start, end in words(text):
        while index < len(wholes) and wholes[index][1] < end:
            index += 1
        if index < len(wholes) and wholes[index][0] <= start:
            start, end = wholes[index]
        if merged and start < merged[-1][1]:
            start, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((start, end))
    return merged


def has_letter(text: str) -> bool:
    return any(map(is_letter, text))


def word_links(
    source: str, target: str, source_pieces: Sequence[Span], target_pieces: Sequence[Span],
    weights: Sequence[Sequence[float]],
) -> list[Link]:  # fmt: skip
    """Returns a link from each word of `target` to the source word that the target word attends to most.

    `weights` has a row for each target piece, with a weight for each source piece. The weight between two words is the
    sum of the weights between their pieces. A word without any weight has no link.
    """
    source_words, target_words = words(source), words(target)
    columns = _overlaps(source_words, source_pieces)
    totals: list[dict[int, float]] = [defaultdict(float) for _ in target_words]
    for row, indices in zip(weights, _overlaps(target_words, target_pieces), strict=True):
        for index in indices:
            for weight, overlapping in zip(row, columns, strict=True):
                for column in overlapping:
                    totals[index][column] += weight / len(overlapping)
    links = []
    for word, total in zip(target_words, totals, strict=True):
        best = max(total, key=total.__getitem__, default=None)
        if best is not None and total[best] > 0:
            links.append(Link(*source_words[best], *word))
    return links


def _overlaps(spans: Sequence[Span], pieces: Sequence[Span]) -> list[range]:
    """Returns, for each piece, the indices of the spans that the piece overlaps. The spans are sorted and disjoint."""
    starts, ends = [start for start, _ in spans], [end for _, end in spans]
    return [range(bisect_right(ends, start), bisect_left(starts, end)) for start, end in pieces]


class PositionMap:
    """Maps positions at the edges of source words to positions in the translation. Uses the links between words.

    All words within one link, such as a protected text, are one unit. A mapped position is never inside a unit, except
    if the unit has the same text in the source and in the translation.
    """

    def __init__(self, source: str, target: str, links: Sequence[Link]) -> None:
        self.source, self.target = source, target
        source_units = [
            span for span in units(source, ((link.source_start, link.source_end) for link in links))
            if has_letter(source[slice(*span)])
        ]  # fmt: skip
        target_units = units(target, ((link.target_start, link.target_end) for link in links))
        lettered = [span for span in target_units if has_letter(target[slice(*span)])]
        self.first_letter = source_units[0][0] if source_units else len(source)
        self.last_letter = source_units[-1][1] - 1 if source_units else -1
        self.content_start, self.content_end = len(source) - len(source.lstrip()), len(source.rstrip())
        self.ends_in_letter = self.last_letter == self.content_end - 1
        self.start = lettered[0][0] if lettered else 0
        self.end = lettered[-1][1] if lettered else len(target)
        self.target_ends = [0, *(end for _, end in target_units)]
        self.source_starts = [start for start, _ in source_units]
        self.source_ends = [end for _, end in source_units]
        target_starts = [start for start, _ in target_units]
        self.linked: dict[int, Span] = {}  # index of a source unit -> start and end of its translation
        for link in links:
            index = bisect_right(self.source_starts, link.source_start) - 1
            unit = target_units[bisect_right(target_starts, link.target_start) - 1] if target_units else (0, 0)
            if index >= 0 and link.source_end <= self.source_ends[index] and has_letter(target[slice(*unit)]):
                start, end = self.linked.get(index, unit)
                self.linked[index] = min(start, unit[0]), max(end, unit[1])
        self.linked_indices = sorted(self.linked)

    def target_position(self, position: int) -> int:
        """Returns the position in the translation for a position at the edge of a source word.

        The result is an edge of the translation of the nearest linked word: the end of this translation if the word is
        before `position`, the start if the word is after `position`. Without links, the result is the end of a word of
        the translation: the end that is nearest to the same relative position.

        A position up to the first letter of the source maps to the first letter of the translation. A position after
        the last word of the source maps to the end of the last word of the translation. A position after the last
        punctuation of the source maps to the end of the translation.
        """
        if position <= self.first_letter:
            return self.start
        if position > self.last_letter:
            return len(self.target) if position >= self.content_end and not self.ends_in_letter else self.end
        before = bisect_right(self.source_ends, position)
        if before in self.linked and self.source_starts[before] < position:  # inside a unit
            (first, last), (start, end) = (self.source_starts[before], self.source_ends[before]), self.linked[before]
            if self.source[first:last] == self.target[start:end]:
                return start + position - first
        index = bisect_left(self.linked_indices, before)
        neighbours = self.linked_indices[max(0, index - 1) : index + 1]
        if neighbours:
            unit = min(neighbours, key=lambda unit: unit - before + 0.5 if unit >= before else before - 1 - unit)
            return self.linked[unit][0] if unit >= before else self.linked[unit][1]
        proportional = position / max(1, len(self.source)) * len(self.target)
        index = bisect_left(self.target_ends, proportional)
        near = self.target_ends[max(0, index - 1) : index + 1]
        return min(near, key=lambda end: abs(end - proportional))
