"""Protected spans: parts of a source that its translation must contain unchanged, such as placeholders and addresses.

There are two methods. If the vocabulary of the model covers a span, the span stays in the sentence. After the search,
the span is looked up in the translation and repaired. If the vocabulary would spell the span in rare bytes, the span is
cut out of the sentence, and is inserted next to the translation of the word before the span. Both methods need
cross-attention and no special training.

Numbers with units may take the form of the target language: 5,50 € for €5.50, or 5 Minuten for 5 min.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import islice
from typing import NamedTuple
from unicodedata import category

from nmtkit.text.alignment import Link, PositionMap, Span, is_letter, is_spaced_letter, units, words
from nmtkit.text.edits import CLOSING, Edit, Parts, edited
from nmtkit.text.patterns import MEASURES, PATTERNS, Edges, is_message, numbers, occurrences, strings_of, values

__all__ = ["PATTERNS", "Protected", "ProtectedSpan", "compiled", "protect", "protected_spans"]

BRACKETS = ("()", "[]", "（）", "«»", "“”", "„“", "「」", '""')  # brackets around a span that was cut out
_SYMBOLS = re.compile(r"(?=.*[A-Za-z])(?=.*[{}%$@<>/\[\]])", re.DOTALL)  # a placeholder with a name
_MAX_CANDIDATES = 20  # maximum count of numbers that are compared with one measure


class ProtectedSpan(NamedTuple):
    """The start and end of a span. A `measure` is a number with a unit, which the translation may localise."""

    start: int
    end: int
    measure: bool = False


def compiled(patterns: Sequence[str]) -> list[re.Pattern[str]]:
    """Compiles patterns. Raises ValueError for an invalid pattern, and for a pattern that matches the empty text."""
    expressions = []
    for pattern in patterns:
        try:
            expressions.append(re.compile(pattern))
        except re.error as error:
            raise ValueError(f"--protect {pattern!r} is not a regular expression: {error}") from None
        if expressions[-1].fullmatch(""):
            raise ValueError(f"--protect {pattern!r} matches the empty text; let it match at least one character")
    return expressions


def protected_spans(
    text: str, patterns: Sequence[re.Pattern[str]], also: Iterable[Span] = ()
) -> list[ProtectedSpan]:  # fmt: skip
    """Returns the matches of the patterns, the spans of `also`, and whole words with the same text as a span.

    If spans overlap, the span that begins first is returned, or the longest of the spans with the same start. If
    `patterns` include the built-in patterns, a text without a letter, such as a list of numbers, is one span. A plural
    or select message of ICU is also one span, because a partly translated message is invalid.
    """
    built_in = {pattern.pattern for pattern in patterns}.issuperset(PATTERNS)
    if built_in and (is_message(text) or (text.strip() and not any(map(str.isalpha, text)))):
        return [ProtectedSpan(0, len(text))]
    matched = [
        ProtectedSpan(*match.span(), pattern.pattern in MEASURES)
        for pattern in patterns
        for match in pattern.finditer(text)
    ]
    spans = _disjoint([*matched, *(ProtectedSpan(*span) for span in also)])
    strings = strings_of(text, [span for span in spans if not span.measure])
    return _disjoint([*spans, *(ProtectedSpan(*span) for span in occurrences(text, strings))])


def _disjoint(spans: Iterable[ProtectedSpan]) -> list[ProtectedSpan]:
    kept: list[ProtectedSpan] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end, not span.measure)):
        if span.end > span.start and (not kept or span.start >= kept[-1].end):
            kept.append(span)
    return kept


def protect(source: str, spans: Sequence[ProtectedSpan], known: Callable[[str], bool]) -> "Protected":
    """Cuts `spans` out of a sentence, except the spans that the model knows, for which `known(text)` is true.

    Letters and signs that touch a span are cut out together with the span, such as the s in {name}s.
    """
    begins = {index: span.start for span in spans for index in range(span.start, span.end)}
    ends = {index: span.end for span in spans for index in range(span.start, span.end)}
    cuts: list[ProtectedSpan] = []
    kept = []
    for span in spans:
        if known(source[span.start : span.end]):
            kept.append(span)
            continue
        if cuts and span.end <= cuts[-1].end:  # this span touches the previous span and was cut out with it
            continue
        start, end = _widened(source, span.start, span.end, begins, ends)
        measure = span.measure and (start, end) == (span.start, span.end)
        if cuts and start <= cuts[-1].end:
            start, measure = cuts.pop().start, False
        cuts.append(ProtectedSpan(start, end, measure))
    removed = {index for span in cuts for index in range(span.start, span.end)}
    kept = [span for span in kept if removed.isdisjoint(range(span.start, span.end))]
    for start, end, _ in cuts:
        if (start == 0 or source[start - 1].isspace()) and source[end : end + 1].isspace():
            removed.add(end)
        elif start and source[start - 1].isspace() and source[end : end + 1] in tuple(CLOSING):
            removed.add(start - 1)
    model_text = [index for index in range(len(source)) if index not in removed]
    return Protected(source, sorted([*kept, *cuts]), [*spans], model_text)


def _widened(source: str, start: int, end: int, begins: Mapping[int, int], ends: Mapping[int, int]) -> Span:
    """Returns a span together with the letters, signs and other spans that touch it.

    `begins` maps each position in a span to the start of the span. `ends` maps each position to the end of the span.
    """
    # letters next to a span without ASCII characters, such as an emoji, are not cut out
    touching = any(char.isascii() for char in source[start:end])
    while start and (start - 1 in begins or (touching and _is_attached(source[start - 1]))):
        start = begins.get(start - 1, start - 1)
    while end < len(source) and (end in ends or (touching and _is_attached(source[end]))):
        end = ends.get(end, end + 1)
    return start, end


def _is_attached(char: str) -> bool:
    return char in "-_/'’+#&=" or is_spaced_letter(char)


@dataclass(frozen=True)
class Protected:
    """A sentence with protected spans. The text for the model has the characters at the positions `kept`.

    `spans` are disjoint and sorted. `originals` are the spans as they were found. A span that was cut out may contain
    several of the `originals`, and the text that touches these originals.
    """

    source: str
    spans: list[ProtectedSpan]
    originals: list[ProtectedSpan]
    kept: list[int]

    @property
    def text(self) -> str:
        return "".join(self.source[index] for index in self.kept)

    @cached_property
    def strings(self) -> frozenset[str]:
        """The protected texts."""
        return frozenset(self.source[span.start : span.end] for span in self.originals)

    @property
    def plain(self) -> bool:
        """Whether the sentence has unprotected words."""
        protected = {index for span in self.spans for index in range(span.start, span.end)}
        return any(is_letter(self.source[index]) for index in self.kept if index not in protected)

    def is_whole(self, start: int, end: int) -> bool:
        """Returns whether `text[start:end]` is contiguous in `source` and overlaps no protected span."""
        first, last = self.kept[start], self.kept[end - 1]
        index = bisect_right(self.spans, last, key=lambda span: span.start)
        return last - first == end - 1 - start and (index == 0 or self.spans[index - 1].end <= first)

    def restore(self, target: str, links: Sequence[Link], fixed: Sequence[Span] = ()) -> tuple[str, list[Link]]:
        """Turns `target`, the translation of `text`, into the translation of `source`. Returns the text and its links.

        The result contains every span as often as the source does. A measure in a different form also counts as an
        occurrence. Surplus occurrences are removed, except occurrences of measures. A missing span replaces the words
        that attend to the span, except words in `fixed`. If there are no such words, the span is inserted next to the
        translation of the word before the span. The result is `source` if the sentence has only protected words, or if
        the counts of the spans are still wrong afterwards.
        """
        if not self.spans:
            return target, list(links)
        if not self.plain:
            return self._copy()
        restoration = _Restoration(self, target, links, fixed)
        result, moved = edited(target, restoration.edits(), [self._from_source(link) for link in links])
        if self._count(result) != self._count(self.source):
            return self._copy()  # a span and the text next to it form a different span
        return result, [part for link in moved for part in self._parts(link, result)]

    def _parts(self, link: Link, result: str) -> list[Link]:
        """Splits a link between equal texts that contain several spans, so that tags can stand between the spans."""
        start, end = link.source_start, link.source_end
        first = bisect_left(self.originals, start, key=lambda span: span.start)
        inside = self.originals[first : bisect_right(self.originals, end, key=lambda span: span.end)]
        if len(inside) < 2 or self.source[start:end] != result[link.target_start : link.target_end]:
            return [link]
        shift = link.target_start - start
        parts = units(self.source[start:end], ((span.start - start, span.end - start) for span in inside))
        return [Link(start + first, start + last, start + first + shift, start + last + shift) for first, last in parts]

    @cached_property
    def exact(self) -> dict[str, Edges]:
        """The strings of spans that are not measures, with the letters that may touch them."""
        return strings_of(self.source, [span for span in self.originals if not span.measure])

    def _count(self, text: str) -> Counter[str]:
        return Counter(text[start:end] for start, end in occurrences(text, self.exact))

    def _copy(self) -> tuple[str, list[Link]]:
        return self.source, [Link(start, end, start, end) for start, end in words(self.source)]

    def _from_source(self, link: Link) -> Link:
        """Converts a link from positions in `text` to positions in `source`."""
        start, end = self.kept[link.source_start], self.kept[link.source_end - 1] + 1
        return Link(start, end, link.target_start, link.target_end)


class _Restoration:
    """Matches the spans of a sentence with a translation, and finds positions for missing spans."""

    def __init__(self, protected: Protected, target: str, links: Sequence[Link], fixed: Sequence[Span]) -> None:
        self.protected, self.source, self.target = protected, protected.source, target
        self.links = sorted(links, key=lambda link: (link.source_start, link.target_start))
        self.link_starts = [link.source_start for link in self.links]
        self.fixed = Parts(fixed)
        self.edited = Parts()
        self.collected: list[Edit] = []

    def edits(self) -> list[Edit]:
        exact = [span for span in self.protected.spans if not span.measure]
        measures = [span for span in self.protected.spans if span.measure]
        strings = {**strings_of(self.source, exact), **self.protected.exact}
        exact = self._matched(exact, self.source, self.target, strings, remove_surplus=True)
        lower, target = self.source.lower(), self.target.lower()
        if len(lower) == len(self.source) and len(target) == len(self.target):
            # the translation may have a placeholder in a different case, such as {NAME} for {name}
            named = [span for span in exact if _SYMBOLS.match(self.source[span.start : span.end])]
            missing = self._matched(named, lower, target, strings_of(lower, named))
            exact = [*set(exact).difference(named), *missing]
        measures = self._matched(measures, self.source, self.target, strings_of(self.source, measures))
        measures = self._matched_by_value(measures)
        positions: PositionMap | None = None
        ends = {edit.span[1]: edit.end for edit in self.collected if edit.span is not None}
        for span in sorted([*exact, *measures]):
            part = self._attending_words(span)
            if part is None and span.start in ends:  # the span touches the previous span in the source
                part = ends[span.start], ends[span.start]
            if part is None:
                positions = positions or PositionMap(self.protected.text, self.target, self.links)
                position = positions.target_position(bisect_left(self.protected.kept, span.start))
                position = self._in_brackets(span, position)
                position = self.fixed.outside(self.edited.outside(position))
                part = position, position
            self._add(*part, self.source[span.start : span.end], span)
            ends[span.end] = part[1]
        return self.collected

    def _add(self, start: int, end: int, text: str, span: ProtectedSpan | None) -> None:
        self.collected.append(Edit(start, end, text, span and (span.start, span.end)))
        self.edited.add(start, end)

    def _matched(
        self, spans: Sequence[ProtectedSpan], source: str, target: str, strings: Mapping[str, Edges],
        remove_surplus: bool = False,
    ) -> list[ProtectedSpan]:  # fmt: skip
        """Matches each span with an equal text of the translation. Returns the spans without a match.

        The texts of the translation that can match are the occurrences of `strings`.

        `source` and `target` are the texts to compare, which may be in small letters. If `remove_surplus`, removes the
        strings of the translation that match no span.
        """
        waiting: dict[str, deque[ProtectedSpan]] = defaultdict(deque)
        for span in spans:
            waiting[source[span.start : span.end]].append(span)
        for start, end in occurrences(target, strings):
            if self.edited.meet(start, end):
                continue
            if same := waiting[target[start:end]]:
                span = same.popleft()
                self._add(start, end, self.source[span.start : span.end], span)
            elif remove_surplus:
                self._add(start, end, "", None)
        return [span for each in waiting.values() for span in each]

    def _matched_by_value(self, spans: Sequence[ProtectedSpan]) -> list[ProtectedSpan]:
        """Matches measures with numbers that have the same value. Returns the measures without a match."""
        if not spans:
            return []
        free: dict[Decimal, deque[Span]] = defaultdict(deque)
        for start, end, possible in numbers(self.target):
            for value in possible if not self.edited.meet(start, end) else ():
                free[value].append((start, end))
        others = Counter(value for start, end, possible in numbers(self.source) for value in possible)
        for span in self.protected.spans:
            others.subtract(
                value for _, _, possible in numbers(self.source[span.start : span.end]) for value in possible
            )
        # These values occur more often in the translation than in the unprotected text of the source. A number with any
        # other value may translate an unprotected number, so the number needs a link to the measure.
        surplus = {value for value, equal in free.items() if len(equal) > others[value]}
        missing = []
        for span in sorted(spans):
            _, _, possible = (*numbers(self.source[span.start : span.end]), (0, 0, frozenset[Decimal]()))[0]
            match = next(filter(None, (self._number(span, free[value], value in surplus) for value in possible)), None)
            if match is None:
                missing.append(span)
                continue
            string = self.target[slice(*match)]
            self._add(*match, string, span)
            for value in values(string):
                free[value].remove(match)
        return missing

    def _number(self, span: ProtectedSpan, equal: Iterable[Span], surplus: bool) -> Span | None:
        """Returns the first number of `equal` that is linked to a measure. With `surplus`, no link is necessary."""
        free = list(islice(equal, _MAX_CANDIDATES))
        linked = [(link.target_start, link.target_end) for link in self._links_of(span)]
        near = [part for part in free if any(start < part[1] and part[0] < end for start, end in linked)]
        return next(iter(near or (free if surplus else ())), None)

    def _links_of(self, span: ProtectedSpan) -> list[Link]:
        """Returns the links from source words that overlap a span, sorted by position in the translation."""
        start, end = bisect_left(self.protected.kept, span.start), bisect_left(self.protected.kept, span.end)
        if start == end:
            return []
        index = bisect_right(self.link_starts, start)
        index = bisect_left(self.link_starts, self.link_starts[index - 1]) if index else 0
        links = self.links[index : bisect_left(self.link_starts, end)]
        return sorted((link for link in links if start < link.source_end), key=lambda link: link.target_start)

    def _attending_words(self, span: ProtectedSpan) -> Span | None:
        """Returns the part of the translation that a span replaces: the longest run of words attending to the span."""
        runs: list[Span] = []
        # characters that may stand between the words
        signs = " " + re.sub(r"\w", "", self.source[span.start : span.end])
        for link in self._links_of(span):
            start, end = link.target_start, link.target_end
            if category(self.target[start])[0] == "P" or self.edited.meet(start, end) or self.fixed.meet(start, end):
                continue
            last = runs[-1][1] if runs else 0
            between = self.edited.lie_between(last, start) or self.fixed.lie_between(last, start)
            if runs and not between and not self.target[last:start].strip(signs):
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((start, end))
        longest = max(runs, key=lambda run: run[1] - run[0], default=None)
        return longest and self._with_signs(span, *longest)

    def _with_signs(self, span: ProtectedSpan, start: int, end: int) -> Span:
        """Extends a part of the translation by adjacent signs that also begin or end the span, such as braces."""
        signs = re.fullmatch(r"(\W*)(?:.*\w)?(\W*)", self.source[span.start : span.end], re.DOTALL)
        assert signs is not None
        for sign in reversed(signs[1]):
            if start and self.target[start - 1] == sign and not self.edited.meet(start - 1, start):
                start -= 1
        for sign in signs[2]:
            if self.target[end : end + 1] == sign and not self.edited.meet(end, end + 1):
                end += 1
        return start, end

    def _in_brackets(self, span: ProtectedSpan, position: int) -> int:
        """Returns the position between empty brackets near `position`, if the span was cut out of such brackets.

        Otherwise returns `position`.
        """
        brackets = self.source[span.start - 1 : span.start] + self.source[span.end : span.end + 1]
        if brackets in BRACKETS:
            index = self.target.find(brackets, max(0, position - 2), position + 20)
            return index + 1 if index >= 0 else position
        return position
