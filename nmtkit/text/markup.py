"""Removes inline HTML and XML markup before translation, and puts the tags around the translated words afterwards."""

import html
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from nmtkit.text.alignment import Link, PositionMap, Span, has_letter, units, words
from nmtkit.text.patterns import NAMED_CONVERSION, is_message
from nmtkit.text.template_code import codes, masked


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A tag as in the HTML standard (section 13.2.5): slash, name, attributes. The number of attributes is limited so that a
# search takes linear time.
TAG = re.compile(r"<(/?)([A-Za-z][^\s/><]*+)((?>[^<>=]++|=\s*+(?>\"[^\"]*+\"|'[^']*+'|)){0,1000}+)>")
VOID = names("area base br col embed hr img input link meta param source track wbr")  # elements without an end tag
MAX_TAGS = 200  # in a line with more tags, the tags keep their order
_CONVERSION = re.compile(f"%%|{NAMED_CONVERSION.pattern}")
_END_TAG = re.compile(r"</(\w+)")
_DECLARATION = re.compile(r"<[!?][^<>]*+>")
_LONG_REFERENCE = re.compile(r"&#(?=[0-9]{8})0*+([0-9]*+)")
# Scores of a target word for an element: for a word that is linked to a source word inside the element, for a word that
# is linked to a source word outside the element, and for a word without a link.
_INSIDE, _OUTSIDE, _UNLINKED = 1.0, -1.0, -0.25

Role = Literal["opening", "closing", "alone", "text"]


class Tag(NamedTuple):
    """A tag, comment, declaration or template code of a text, or the text between two of these.

    `name` is the name of the element in small letters.
    """

    role: Role
    start: int
    end: int
    name: str = ""


def unescape_entities(text: str) -> str:
    """Replaces entities and character references by characters, like a browser.

    A number that is not a character becomes U+FFFD. Long numbers are shortened first, because `html.unescape` raises
    ValueError for more than 4,300 digits.
    """
    return html.unescape(
        _LONG_REFERENCE.sub(lambda match: f"&#{match[1] or 0}" if len(match[1]) < 8 else "&#99999999", text)
    )


def tags(line: str) -> Iterator[Tag]:
    """Yields the tags, comments, declarations and template code such as <?php … ?> of a line.

    A tag may hold code of templates. A comment without an end is text, and so is a placeholder such as %<PRIu64>.
    """
    if "<" not in line:
        return
    # code such as {{ <g0/> }} is ignored: it may be text with tags that stand for the inline codes of a document
    spans = [code for code in codes(line) if line[code.start] == "<" or "<" not in line[code.start : code.end]]
    ends = {code.start: code.end for code in spans if line[code.start] == "<"}
    placeholders = _placeholders(line)
    position = 0
    text, line = line, masked(line, spans)
    last_comment_end = line.rfind("-->")
    while (start := text.find("<", position)) >= 0:
        position = start + 1
        if start in ends:
            position = ends[start]
            yield Tag("alone", start, position)
        elif start in placeholders:
            continue
        elif (match := TAG.match(line, start)) is not None:
            name = match[2].lower()
            alone = not match[1] and (name in VOID or match[3].endswith("/"))
            yield Tag("closing" if match[1] else "alone" if alone else "opening", *match.span(), name)
            position = match.end()
        elif line.startswith("<!--", start) and start + 4 <= last_comment_end:
            position = line.index("-->", start + 4) + 3
            yield Tag("alone", start, position)
        elif (match := _DECLARATION.match(line, start)) is not None:
            yield Tag("alone", *match.span())
            position = match.end()


def _placeholders(line: str) -> set[int]:
    """Returns the position of < in each placeholder such as %<count>d. In 50%<br> or 50%<b>off</b>, < begins a tag."""
    matches = [match for match in _CONVERSION.finditer(line) if match[2] is not None]
    names = VOID.union(name.lower() for name in _END_TAG.findall(line)) if matches else ()
    return {match.start(1) for match in matches if match[2].lower() not in names}


def partners(roles_and_names: Sequence[tuple[str, str]]) -> dict[int, int]:
    """Maps the index of each tag that has a partner to the index of its partner. Pairs are properly nested.

    A closing tag closes the last open element of the same name. If elements inside this element are still open, their
    tags get no partner.
    """
    pairs: dict[int, int] = {}
    waiting: list[int] = []
    names: Counter[str] = Counter()  # name -> number of open tags
    for index, (role, name) in enumerate(roles_and_names):
        if role == "opening":
            waiting.append(index)
            names[name] += 1
        elif role == "closing" and names[name]:
            while True:
                opening = waiting.pop()
                other = roles_and_names[opening][1]
                names[other] -= 1
                if other == name:
                    break
            pairs[opening], pairs[index] = index, opening
    return pairs


@dataclass(eq=False)
class Element:
    """A start tag, an end tag and the content between them, or a single tag without content."""

    opening: str
    start: int  # positions in the text after the tags are removed
    end: int
    closing: str = ""
    children: list["Element"] = field(default_factory=list)


@dataclass(frozen=True)
class Marked:
    """A line with markup: its `text` without tags and with decoded entities, and its outermost elements."""

    source: str
    text: str
    elements: list[Element]
    tags: list[tuple[int, str]]  # position in the text, and tag

    def restore(self, target: str, links: Sequence[Link]) -> str:
        """Returns a translation of `text` with entities, and with each tag once, nested as in the source.

        An element surrounds the run of words that translate most of the words of the element. If the translation splits
        these words into several runs, the smaller runs stay outside the element. In a line with more than 200 tags, the
        tags keep their order: each tag follows the translation of the previous word, or the previous tag. The result
        is the source line if `text` has no letter, if `target` equals `text`, or if `text` is an ICU message with
        branches.
        """
        if not has_letter(self.text) or target == self.text or is_message(self.text):
            return self.source
        if len(self.tags) > MAX_TAGS:
            return self._in_order(target, links)
        placement = _Placement(self.text, target, links)
        return placement.markup(self.elements, (0, len(placement.words)), (0, len(target)))

    def _in_order(self, target: str, links: Sequence[Link]) -> str:
        positions = PositionMap(self.text, target, links)
        parts = []
        cursor = 0
        for position, tag in self.tags:
            end = _tag_position(positions, position, cursor, closing=tag.startswith("</"))
            parts += [html.escape(target[cursor:end], quote=False), tag]
            cursor = end
        return "".join([*parts, html.escape(target[cursor:], quote=False)])


def marked(line: str) -> Marked:
    """Separates the text of a line from its markup. A tag without a partner becomes an element without content."""
    line_tags = list(tags(line))
    pairs = partners([(tag.role, tag.name) for tag in line_tags])
    parts: list[str] = []
    length = cursor = 0
    root = Element("", 0, 0)
    open_elements = [root]
    positions = []
    for index, tag in enumerate(line_tags):
        text = unescape_entities(line[cursor : tag.start])
        parts.append(text)
        length += len(text)
        cursor = tag.end
        raw = line[tag.start : tag.end]
        positions.append((length, raw))
        if pairs.get(index, index) < index:
            element = open_elements.pop()
            element.end, element.closing = length, raw
            continue
        element = Element(raw, length, length)
        open_elements[-1].children.append(element)
        if index in pairs:
            open_elements.append(element)
    return Marked(line, "".join([*parts, unescape_entities(line[cursor:])]), root.children, positions)


def _tag_position(positions: PositionMap, position: int, least: int = 0, closing: bool = False) -> int:
    """Returns the position in the translation for a tag at `position` of the source. The result is at least `least`.

    If a source word begins directly after the tag, the tag comes after the white space at this position of the
    translation. A closing tag stays before the white space.
    """
    if position <= positions.content_start:
        return least
    if position >= positions.content_end:
        return len(positions.target)
    result = max(least, positions.target_position(position))
    if not closing and positions.source[position].strip():
        while positions.target[result : result + 1].isspace():
            result += 1
    return result


class _Placement:
    """Places the elements of a line in one translation."""

    def __init__(self, source: str, target: str, links: Sequence[Link]) -> None:
        self.source, self.target = source, target
        self.words = units(target, ((link.target_start, link.target_end) for link in links))
        source_words = words(source)
        self.first, self.last = (source_words[0][0], source_words[-1][1]) if source_words else (0, 0)
        by_start = {link.target_start: link for link in links}
        self.linked = [by_start.get(start) for start, _ in self.words]
        self.positions = PositionMap(source, target, links)

    def markup(self, elements: Sequence[Element], inside: Span, characters: Span) -> str:
        """Returns the range `characters` of the translation, with the tags of `elements`.

        `inside` is the same range, counted in words.
        """
        placed: list[tuple[Span, int, Element, Span]] = []
        taken: list[Span] = []
        unplaced: list[tuple[int, Element]] = []
        for index, element in sorted(enumerate(elements), key=lambda item: item[1].start - item[1].end):
            run = self.run(element, inside, taken)
            if run is None:
                unplaced.append((index, element))
            else:
                taken.append(run)
                whole = run == inside and self.covers(element)
                span = characters if whole else (self.words[run[0]][0], self.words[run[1] - 1][1])
                placed.append((span, index, element, run))
        for index, element in sorted(unplaced, key=lambda item: item[1].start == item[1].end):
            position = self.position(element, characters, taken)
            run = self.nearest(element, position, inside, taken)
            if run is None:
                placed.append(((position, position), index, element, (0, 0)))
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
        return element.start <= self.first and self.last <= element.end

    def run(self, element: Element, inside: Span, taken: Sequence[Span]) -> Span | None:
        """Returns the run of words with the highest score for an element, or None if no run scores above 0.

        The run is inside the range `inside`, and overlaps none of the runs in `taken`.
        """
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
                total += self.score(index, element)
                if total > 0 and (best is None or total > best[0]):
                    best = total, (start, index + 1)
        return best[1] if best else None

    def score(self, index: int, element: Element) -> float:
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

    def nearest(self, element: Element, position: int, inside: Span, taken: Sequence[Span]) -> Span | None:
        """Returns the word nearest to `position` that is not in `taken`, for an element whose words have no links."""
        if not has_letter(self.source[element.start : element.end]):
            return None
        free = (index for first, last in self.free(inside, taken) for index in range(first, last))
        lettered = [index for index in free if has_letter(self.target[slice(*self.words[index])])]
        best = min(lettered, key=lambda index: abs(self.words[index][0] - position), default=None)
        return None if best is None else (best, best + 1)

    def position(self, element: Element, characters: Span, taken: Sequence[Span]) -> int:
        """Returns the position of an element without words, between the words of its parent."""
        position = _tag_position(self.positions, element.start)
        for first, last in taken:
            if self.words[first][0] < position < self.words[last - 1][1]:
                position = self.words[last - 1][1]
        return min(max(position, characters[0]), characters[1])
