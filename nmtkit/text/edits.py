"""Replaces or removes parts of a translation, and updates the word alignment (links) of the remaining words."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nmtkit.text.alignment import UNSPACED, Link, Span

CLOSING = ".,;:!?…\"'-/"  # punctuation that has no space before it
OPENING = "([{«“„‘¿¡\"'-/（「"  # punctuation that has no space after it


Replacement = tuple[int, int, str]  # start and end of a part of a text, and its new text


class Edit(NamedTuple):
    """A part of a translation, its new text, and the source span of this text. The span is None to remove the part."""

    start: int
    end: int
    text: str
    span: Span | None


class Parts:
    """Sorted disjoint parts of a text. A part of length 0 marks a position."""

    def __init__(self, parts: Iterable[Span] = ()) -> None:
        self.parts = sorted(parts)

    def add(self, start: int, end: int) -> None:
        insort(self.parts, (start, end))

    def before(self, position: int) -> Span:
        """Returns the last part that starts before `position`, or an empty part at 0."""
        index = bisect_left(self.parts, (position,))
        return self.parts[index - 1] if index else (0, 0)

    def meet(self, start: int, end: int) -> bool:
        """Returns whether any part overlaps the range from `start` to `end`, or is a position inside this range."""
        other = self.before(end)
        return start < other[1] if other[0] < other[1] else start < other[0]

    def lie_between(self, start: int, end: int) -> bool:
        index = bisect_left(self.parts, (start,))
        return index < len(self.parts) and self.parts[index][0] <= end

    def outside(self, position: int) -> int:
        """Returns `position`, or the end of the part that contains `position`."""
        return max(position, self.before(position)[1])


def edited(target: str, edits: Sequence[Edit], links: Sequence[Link]) -> tuple[str, list[Link]]:
    """Applies disjoint edits to `target`. Returns the new text, and the links of the kept words and inserted texts.

    Texts that are inserted at the same position have the order of their source spans. Spaces separate inserted texts
    from words. The removal of a part also removes one neighbouring space.
    """
    parts: list[str] = []
    moved: list[Link] = []
    waiting = deque(sorted(links, key=lambda link: link.target_start))
    length = cursor = 0
    source_end = -1  # end of the source span of the last inserted text
    span_end = -1  # position in the result after the last inserted text
    before = ""  # last character of the result so far

    def add(text: str) -> None:
        nonlocal length, before
        parts.append(text)
        length += len(text)
        before = text[-1:] or before

    def add_until(end: int) -> None:
        while waiting and waiting[0].target_start < end:
            link = waiting.popleft()
            if cursor <= link.target_start and link.target_end <= end:
                moved.append(link.moved(0, length - cursor))
        add(target[cursor:end])

    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end, edit.span or (0, 0))):
        add_until(edit.start)
        after = target[edit.end : edit.end + 1]
        if edit.span is None:
            cursor = edit.end + (after == " " and before in ("", " "))
            if before == " " and after in ("", *CLOSING) and parts[-1]:
                parts[-1] = parts[-1][:-1]
                length -= 1
                before = next((part[-1] for part in reversed(parts) if part), "")
            continue
        unchanged = target[edit.start : edit.end].lower() == edit.text.lower()
        touches = span_end == length and source_end == edit.span[0]
        if not (unchanged or touches) and before and (span_end == length or _needs_space(before, OPENING)):
            add(" ")
        moved.append(Link(*edit.span, length, length + len(edit.text)))
        add(edit.text)
        span_end, source_end = length, edit.span[1]
        if not unchanged and after and _needs_space(after, CLOSING + ")]}»”’"):
            add(" ")
        cursor = edit.end
    add_until(len(target))
    return "".join(parts), moved


def spliced(text: str, edits: Sequence[Replacement], start: int = 0, end: int | None = None) -> str:
    """Returns the text from `start` to `end` with the edits of this range. The edits are sorted and disjoint."""
    end = len(text) if end is None else end
    parts, cursor = [], start
    for index in range(bisect_left(edits, (start, start, "")), len(edits)):
        first, last, new = edits[index]
        if last > end:
            break
        assert cursor <= first <= last
        parts += [text[cursor:first], new]
        cursor = last
    return "".join([*parts, text[cursor:end]])


def _needs_space(char: str, close: str) -> bool:
    """Returns whether a space must separate an inserted text from `char`. Characters in `close` need no space."""
    return not (char.isspace() or UNSPACED.match(char) or char in close)
