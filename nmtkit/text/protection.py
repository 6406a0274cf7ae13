"""Spans that a translation holds as they are: found in the source, looked for in the translation, copied where lost.

A span that the model's vocabulary knows stays in the sentence that the model reads. One that it does not know would be
spelt in bytes that it has hardly seen, and could spoil all around it: that one is cut out, and put back beside the
translation of the word it stood after. Both need no special training, only cross-attention.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from unicodedata import category

from nmtkit.text.alignment import UNSPACED, Link, Span, is_letter, position_after, words

_UNITS = (
    "%|‰|°C|°F|°|[kcmµnd]?m[²³23]?|km/h|m/s|mph|ft|yd|mi|[kmµ]?g|lbs?|oz|[mcdh]?l|L|gal|[kMG]?Wh?|[km]?V|[km]?A|[kMG]?Hz|"
    "[kKMGTP]i?[Bb]|[kMG]?bit/s|[kMG]bps|[mµn]?s|min|h|[kh]?Pa|bar|k?J|kcal|px|pt|dpi|fps|€|\\$|£|¥|EUR|USD|GBP|CHF|JPY"
)
# Repetitions that could begin anywhere in a line are bounded, so that the time for a line grows as its length does.
_NUMBER = r"[-+−±]?\d{1,30}(?:[.,  ' ]\d{3}){0,10}(?:[.,]\d{1,30})?"
_CONVERSION = r"[-+#0]*(?:\d+|\*)?(?:\.(?:\d+|\*))?(?:hh?|ll?|[Lzjt])?[diouxXeEfFgGaAcrsp@]"
CLOSING = ".,;:!?…\"'-/"  # stands close to the word before
OPENING = "([{«“„‘¿¡\"'-/"  # to the word after
PATTERNS = (
    r"(?:https?|ftps?|file)://[^\s<>\"“”«»]+(?<![.,;:!?)\]}'’…])",
    r"\bwww\.[^\s<>\"“”«»]+(?<![.,;:!?)\]}'’…])",
    r"\b(?:mailto:)?[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]+)+",
    r"\b(?:[a-z0-9-]{1,63}\.){1,8}[a-z]{2,63}/[^\s<>\"“”«»]*(?<![.,;:!?)\]}'’…])",
    r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b",  # IP addresses
    r"(?<![\w.@])@\w+",
    r"\$?\{\{?[^{}\n]*\}?\}",
    r"(?<![\d%])%\([\w. -]+\)" + _CONVERSION,
    r"(?<![\d%])%(?:\d+\$)?" + _CONVERSION,
    r"%\w+%",
    r"\$[A-Za-z_]\w*",
    rf"(?<![\w.,]){_NUMBER}[ \u00a0\u202f]?(?:{_UNITS})(?![\w²³])",
    rf"[€$£¥][ \u00a0]?{_NUMBER}(?![\w])",
)


def compiled(patterns: Sequence[str]) -> list[re.Pattern[str]]:
    """Raises ValueError for one that is no regular expression, or that matches the empty text."""
    found = []
    for pattern in patterns:
        try:
            found.append(re.compile(pattern))
        except re.error as error:
            raise ValueError(f"--protect {pattern!r} is not a regular expression: {error}") from None
        if found[-1].fullmatch(""):
            raise ValueError(f"--protect {pattern!r} matches the empty text; let it match a character at least")
    return found


def protected_spans(text: str, patterns: Sequence[re.Pattern[str]], also: Iterable[Span] = ()) -> list[Span]:
    """Returns what the patterns match, `also` other spans, and where else the same text stands; none overlap."""
    matched = [match.span() for pattern in patterns for match in pattern.finditer(text)]
    kept: list[Span] = []
    for start, end in sorted([*matched, *also], key=lambda span: (span[0], -span[1])):
        if end > start and (not kept or start >= kept[-1][1]):
            kept.append((start, end))
    return occurrences(text, {text[start:end] for start, end in kept})


def occurrences(text: str, strings: Collection[str]) -> list[Span]:
    """Returns where any of the strings stands in a text: of those that overlap the first, and then the longest."""
    lengths: dict[str, set[int]] = {}  # by first character
    for string in strings:
        lengths.setdefault(string[0], set()).add(len(string))
    longest_first = {char: sorted(found, reverse=True) for char, found in lengths.items()}
    spans = []
    end = 0
    for start, char in enumerate(text):
        if start >= end and char in longest_first:
            found = next(
                (text[start : start + n] for n in longest_first[char] if text[start : start + n] in strings), ""
            )
            if found:
                end = start + len(found)
                spans.append((start, end))
    return spans


def protect(source: str, spans: Sequence[Span], known: Callable[[str], bool]) -> "Protected":
    """Returns the sentence with those `spans` cut out that are not `known` to the model.

    What is glued to such a span is cut out with it, as the s of {name}s.
    """
    begins = {place: first for first, last in spans for place in range(first, last)}
    ends = {place: last for first, last in spans for place in range(first, last)}
    cuts: list[Span] = []
    kept = []
    for start, end in spans:
        if known(source[start:end]):
            kept.append((start, end))
            continue
        if cuts and end <= cuts[-1][1]:  # it was glued to the last
            continue
        start, end = _widened(source, start, end, begins, ends)
        if cuts and start <= cuts[-1][1]:
            start = cuts.pop()[0]
        cuts.append((start, end))
    removed = {place for start, end in cuts for place in range(start, end)}
    kept = [span for span in kept if removed.isdisjoint(range(*span))]
    for start, end in cuts:
        if (start == 0 or source[start - 1].isspace()) and source[end : end + 1].isspace():
            removed.add(end)
        elif start and source[start - 1].isspace() and source[end : end + 1] in tuple(CLOSING):
            removed.add(start - 1)
    strings = frozenset(source[start:end] for start, end in spans)
    return Protected(source, sorted([*kept, *cuts]), strings, [i for i in range(len(source)) if i not in removed])


def _widened(source: str, start: int, end: int, begins: Mapping[int, int], ends: Mapping[int, int]) -> Span:
    """Returns a span with what is glued to it: letters, and other spans, whose `begins` and `ends` each place names."""
    glue = any(char.isascii() for char in source[start:end])  # to an emoji or a foreign word nothing is
    while start and (start - 1 in begins or (glue and _glued(source[start - 1]))):
        start = begins.get(start - 1, start - 1)
    while end < len(source) and (end in ends or (glue and _glued(source[end]))):
        end = ends.get(end, end + 1)
    return start, end


def _glued(char: str) -> bool:
    return char in "-_/'’+#&=" or (is_letter(char) and not UNSPACED.match(char))


@dataclass(frozen=True)
class _Edit:
    """A part of a translation that is replaced by `text`, that of `span` of the source if any."""

    start: int
    end: int
    text: str
    span: Span | None


@dataclass(frozen=True)
class Protected:
    """A sentence whose `spans` are to be copied; the model reads its `kept` characters.

    `strings` are the protected texts; a span may hold several of them, with what is glued to them.
    """

    source: str
    spans: list[Span]
    strings: frozenset[str]
    kept: list[int]

    @property
    def text(self) -> str:
        return "".join(self.source[index] for index in self.kept)

    @property
    def plain(self) -> bool:
        """Whether the sentence has words that are not protected."""
        protected = {index for span in self.spans for index in range(*span)}
        return any(is_letter(self.source[index]) for index in self.kept if index not in protected)

    def is_whole(self, start: int, end: int) -> bool:
        """Returns whether these characters of `text` stand so in the source, and none of them is protected."""
        first, last = self.kept[start], self.kept[end - 1]
        return last - first == end - 1 - start and not any(span[0] <= last and first < span[1] for span in self.spans)

    def restore(self, target: str, links: Sequence[Link], fixed: Sequence[Span] = ()) -> tuple[str, list[Link]]:
        """Returns the translation of `source`, from that of `text`, with its links.

        It holds every span as often as the source does: an occurrence in `target` counts, one too many goes, and one
        that is missing replaces the words that attend to it, but none of what is `fixed`, or else is put where it
        belongs.
        """
        if not self.spans:
            return target, list(links)
        if not self.plain:
            return self._copy()
        missing = list(self.spans)
        edits: list[_Edit] = []
        for start, end in occurrences(target, self.strings | {self.source[start:end] for start, end in self.spans}):
            span = next((span for span in missing if self.source[slice(*span)] == target[start:end]), None)
            edits.append(_Edit(start, end, "" if span is None else target[start:end], span))
            if span is not None:
                missing.remove(span)
        for span in missing:
            start, end = self._place(span, target, links, [*edits, *(_Edit(*place, "", None) for place in fixed)])
            edits.append(_Edit(start, end, self.source[slice(*span)], span))
        result, moved = _edited(target, edits, [self._from_source(link) for link in links])
        if self._count(result) != self._count(self.source):
            return self._copy()  # a span and the text beside it read as another span
        return result, moved

    def _count(self, text: str) -> Counter[str]:
        return Counter(text[start:end] for start, end in occurrences(text, self.strings))

    def _copy(self) -> tuple[str, list[Link]]:
        return self.source, [Link(start, end, start, end) for start, end in words(self.source)]

    def _place(self, span: Span, target: str, links: Sequence[Link], edits: Sequence[_Edit]) -> Span:
        """Returns the part of `target` that gives way to a span: the longest run of words that attend to it."""
        start, end = bisect_left(self.kept, span[0]), bisect_left(self.kept, span[1])
        runs: list[Span] = []
        for link in sorted(links, key=lambda link: link.target_start):
            word = (link.target_start, link.target_end)
            attends = link.source_start < end and start < link.source_end
            if not attends or category(target[word[0]])[0] == "P" or any(_meet(word, edit) for edit in edits):
                continue
            if runs and not target[runs[-1][1] : word[0]].strip() and not any(
                runs[-1][1] <= edit.start <= word[0] for edit in edits
            ):  # fmt: skip
                runs[-1] = (runs[-1][0], word[1])
            else:
                runs.append(word)
        if runs:
            return max(runs, key=lambda run: run[1] - run[0])
        position = position_after(start, self.text, target, links)
        position = next((edit.end for edit in edits if edit.start < position < edit.end), position)
        return position, position

    def _from_source(self, link: Link) -> Link:
        """Returns a link from `text` as one from `source`."""
        start, end = self.kept[link.source_start], self.kept[link.source_end - 1] + 1
        return Link(start, end, link.target_start, link.target_end)


def _meet(span: Span, edit: _Edit) -> bool:
    return (span[0] < edit.end and edit.start < span[1]) or (edit.start == edit.end and span[0] < edit.start < span[1])


def _edited(target: str, edits: Sequence[_Edit], links: Sequence[Link]) -> tuple[str, list[Link]]:
    """Returns `target` with its edits, which do not overlap, and the links that remain and those of the spans.

    Of several spans at one position, the first of the source comes first. Words of letters stay apart from the spans.
    """
    parts: list[str] = []
    moved: list[Link] = []
    length = cursor = span_end = 0

    def add(text: str) -> None:
        nonlocal length
        parts.append(text)
        length += len(text)

    def add_between(end: int) -> None:
        for link in links:
            if cursor <= link.target_start and link.target_end <= end and link.target_start < end:
                moved.append(link.moved(0, length - cursor))
        add(target[cursor:end])

    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end, edit.span or (0, 0))):
        add_between(edit.start)
        before, after = "".join(parts)[-1:], target[edit.end : edit.end + 1]
        unchanged = target[edit.start : edit.end] == edit.text
        if edit.text:
            if not unchanged and before and (span_end == length or _apart(before, OPENING)):
                add(" ")
            assert edit.span is not None
            moved.append(Link(*edit.span, length, length + len(edit.text)))
            add(edit.text)
            span_end = length
            if not unchanged and after and _apart(after, CLOSING + ")]}»”’"):
                add(" ")
            cursor = edit.end
        else:
            cursor = edit.end + (after == " " and before in ("", " "))
    add_between(len(target))
    return "".join(parts), moved


def _apart(char: str, close: str) -> bool:
    """Returns whether a span and this character beside it, if it is none of `close`, have a space between them."""
    return not (char.isspace() or UNSPACED.match(char) or char in close)
