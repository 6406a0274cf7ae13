"""Inline markup of HTML and XML: taken out of a line, and put around the words that translate those it stood around."""

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nmtkit.text.alignment import Link, Span, is_letter, position_after, words

TAG = re.compile(r"<!--.*?-->|<[!?][^<>]*>|</?[A-Za-z](?:[^<>\"']|\"[^\"]*\"|'[^']*')*>")
VOID = ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr")
_INSIDE, _OUTSIDE, _UNLINKED = 1.0, -1.0, -0.25  # what a word counts for and against being between two tags


@dataclass(eq=False)
class Element:
    """A start tag, an end tag and what is between; or one tag alone, without an end, around nothing."""

    opening: str
    start: int  # characters of the text without tags
    end: int
    closing: str = ""
    children: list["Element"] = field(default_factory=list)


@dataclass(frozen=True)
class Marked:
    """A line with markup: its `text`, with entities decoded, and the elements at its top."""

    source: str
    text: str
    elements: list[Element]

    def restore(self, target: str, links: Sequence[Link]) -> str:
        """Returns a translation of `text` with the markup: every tag once, nested as it was, and entities encoded.

        An element surrounds the run of words that translate its own best. Where a part of them stands elsewhere, that
        part is left out, for a tag is not doubled.
        """
        if not any(is_letter(char) for char in self.text):
            return self.source
        placement = _Placement(self.text, target, links)
        return placement.markup(self.elements, (0, len(placement.words)), (0, len(target)))


def marked(line: str) -> Marked:
    """Takes the markup out of a line. A tag that has no partner in the line stands alone."""
    parts: list[str] = []
    length = cursor = 0
    root = Element("", 0, 0)
    open_elements = [root]

    for match in [*TAG.finditer(line), None]:
        text = html.unescape(line[cursor : match.start() if match else len(line)])
        parts.append(text)
        length += len(text)
        if match is None:
            break
        cursor = match.end()
        tag = match[0]
        name = _name(tag)
        if tag.startswith("</"):
            partner = next((e for e in reversed(open_elements[1:]) if _name(e.opening) == name), None)
            if partner is not None:
                while open_elements[-1] is not partner:
                    _stand_alone(open_elements)
                partner.end, partner.closing = length, tag
                open_elements.pop()
                continue
        element = Element(tag, length, length)
        open_elements[-1].children.append(element)
        if not (tag.startswith(("</", "<!", "<?")) or tag.endswith("/>") or name in VOID):
            open_elements.append(element)
    while len(open_elements) > 1:
        _stand_alone(open_elements)
    return Marked(line, "".join(parts), root.children)


def _name(tag: str) -> str:
    match = re.match(r"</?([^\s/>]+)", tag)
    return match[1].lower() if match else ""


def _stand_alone(open_elements: list[Element]) -> None:
    """Makes of the last open element, which has no end tag, a tag alone; what it holds follows it."""
    element = open_elements.pop()
    open_elements[-1].children += element.children
    element.children = []
    element.end = element.start


def _units(target: str, links: Sequence[Link]) -> list[Span]:
    """Returns the words of a translation; what one link holds, as a protected text does, is one word."""
    linked = sorted((link.target_start, link.target_end) for link in links)
    units: list[Span] = []
    for start, end in words(target):
        start, end = next(((a, b) for a, b in linked if a <= start and end <= b), (start, end))
        if units and start < units[-1][1]:
            start, end = units[-1][0], max(end, units.pop()[1])
        units.append((start, end))
    return units


class _Placement:
    """Where elements go in one translation."""

    def __init__(self, source: str, target: str, links: Sequence[Link]) -> None:
        self.source, self.target, self.links = source, target, links
        self.words = _units(target, links)
        self.source_words = words(source)
        by_start = {link.target_start: link for link in links}
        self.linked = [by_start.get(start) for start, _ in self.words]  # of each word of the target

    def markup(self, elements: Sequence[Element], inside: Span, characters: Span) -> str:
        """Returns the text of these words (and characters) with the elements that are in it."""
        placed: list[tuple[Span, int, Element, Span]] = []
        taken: list[Span] = []
        without: list[tuple[int, Element]] = []
        for index, element in sorted(enumerate(elements), key=lambda item: item[1].start - item[1].end):
            run = self.run(element, inside, taken)
            if run is None:
                without.append((index, element))
            else:
                taken.append(run)
                whole = run == inside and self.covers(element)
                place = characters if whole else (self.words[run[0]][0], self.words[run[1] - 1][1])
                placed.append((place, index, element, run))
        for index, element in sorted(without, key=lambda item: item[1].start == item[1].end):
            at = self.position(element, characters, taken)
            run = self.nearest(element, at, inside, taken)
            if run is None:
                placed.append(((at, at), index, element, (0, 0)))
            else:
                taken.append(run)
                placed.append((self.words[run[0]], index, element, run))
        parts, cursor = [], characters[0]
        for (start, end), _, element, run in sorted(placed, key=lambda item: item[:2]):
            parts.append(html.escape(self.target[cursor:start], quote=False))
            parts += [element.opening, self.markup(element.children, run, (start, end)), element.closing]
            cursor = end
        return "".join([*parts, html.escape(self.target[cursor : characters[1]], quote=False)])

    def covers(self, element: Element) -> bool:
        return all(element.start <= start and end <= element.end for start, end in self.source_words)

    def run(self, element: Element, inside: Span, taken: Sequence[Span]) -> Span | None:
        """Returns the run of free words with the most of those that translate the element's, or None without any."""
        if element.start == element.end:
            return None
        if self.covers(element) and not taken and inside[0] < inside[1]:
            return inside
        best: tuple[float, Span] | None = None
        for first, last in self.free(inside, taken):
            total, start = 0.0, first
            for index in range(first, last):
                if total <= 0:
                    total, start = 0.0, index
                total += self.value(index, element)
                if total > 0 and (best is None or total > best[0]):
                    best = total, (start, index + 1)
        return best[1] if best else None

    def value(self, index: int, element: Element) -> float:
        link = self.linked[index]
        if link is None:
            return _UNLINKED
        return _INSIDE if link.source_start < element.end and element.start < link.source_end else _OUTSIDE

    def free(self, inside: Span, taken: Sequence[Span]) -> Iterator[Span]:
        start = inside[0]
        for first, last in sorted(taken):
            yield start, first
            start = last
        yield start, inside[1]

    def nearest(self, element: Element, place: int, inside: Span, taken: Sequence[Span]) -> Span | None:
        """Returns the free word nearest to where an element belongs whose words none attends to: a link needs one."""
        if not any(is_letter(char) for char in self.source[element.start : element.end]):
            return None
        free = (index for first, last in self.free(inside, taken) for index in range(first, last))
        lettered = [index for index in free if is_letter(self.target[self.words[index][0]])]
        best = min(lettered, key=lambda index: abs(self.words[index][0] - place), default=None)
        return None if best is None else (best, best + 1)

    def position(self, element: Element, characters: Span, taken: Sequence[Span]) -> int:
        """Returns the character where an element without words goes: between the words of its parent."""
        place = position_after(element.start, self.source, self.target, self.links)
        after = self.source[element.start : element.start + 1]
        if not self.source[: element.start].strip():
            place = 0
        elif not self.source[element.start :].strip():
            place = len(self.target)
        elif after and not after.isspace() and self.target[place : place + 1].isspace():
            place += len(self.target[place:]) - len(self.target[place:].lstrip())
        for first, last in taken:
            if self.words[first][0] < place < self.words[last - 1][1]:
                place = self.words[last - 1][1]
        return min(max(place, characters[0]), characters[1])
