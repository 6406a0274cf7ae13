"""Web pages: HTML and XHTML.

The tokenizer follows the HTML standard (section 13.2.5) to separate text, tags, attributes, comments and raw text.
html5lib, lxml and selectolax build a tree and write a different file, with other entities, quotes and white space.
`html.parser` reports positions, but its rules for tags change between releases of Python, and damaged input can take
quadratic time. This module replaces only the ranges of the texts, so all other bytes of the file stay the same. All
its regular expressions take linear time.

Code of templates (PHP, ERB, Jinja, …) is found first, and is masked for the tokenizer: such code may stand inside a tag
or an attribute. A value, such as {{ name }}, is a part of a sentence. No sentence continues after a statement, such
as {% if … %}.
"""

import html
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from nmtkit.text.documents.encoding import XML_ENCODING, Encoding
from nmtkit.text.documents.inline import Inline, Piece, has_words, translatable
from nmtkit.text.documents.interface import Document, ReadOptions, TagRules, without_white_space
from nmtkit.text.documents.lines import sentence_ranges
from nmtkit.text.edits import Parts, Replacement, spliced
from nmtkit.text.languages import is_right_to_left
from nmtkit.text.markup import TAG, VOID, Role, Tag, names, partners, unescape_entities
from nmtkit.text.template_code import codes, masked

INLINE = names(
    "a abbr acronym b bdi bdo big br button cite code data del dfn em font i img ins kbd label mark math meter nobr "
    "output picture progress q rb rp rt rtc ruby s samp slot small source span strike strong sub sup svg time tt u var "
    "wbr"
)
# Inline elements that often stand side by side. Unless text stands beside them, the text of each element is a separate
# segment. The same rule applies to custom elements, whose names have a hyphen.
SEPARATE = names("a button label meter output progress slot")
# elements that contain no tags, only text
RAW = names("iframe noembed noframes plaintext script style textarea title xmp")
# Elements whose text is not translated, unless they have translate="yes".
UNTRANSLATED = names("code kbd math pre rp rt rtc samp svg var") | (RAW - {"title"})
# The start tags that end an element whose end tag may be left out (section 13.1.2.4).
ENDED_BY = {
    "p": names("address article aside blockquote details div dl fieldset figcaption figure footer form h1 h2 h3 h4 h5 "
        "h6 header hgroup hr main menu nav ol p pre section table ul"),
    "li": names("li"), "dt": names("dt dd"), "dd": names("dt dd"), "td": names("td th tr tbody tfoot"),
    "th": names("td th tr tbody tfoot"), "tr": names("tr tbody tfoot"), "option": names("option optgroup"),
}  # fmt: skip
# start of a construct that may contain ">" -> end of the construct
ENDS = {"<!--": "-->", "<![CDATA[": "]]>", "<?php": "?>", "<?=": "?>", "<?xml": "?>"}
ATTRIBUTES = names("abbr alt aria-description aria-label aria-placeholder placeholder summary title")
LABELLED = names("optgroup option track")  # elements whose attribute label is shown
BUTTONS = names("button reset submit")  # types of <input> whose value is shown
DESCRIPTIONS = names(
    "description og:description og:title og:image:alt twitter:description twitter:title twitter:image:alt"
)

_MESSAGE = "{"  # the name of a piece that is a message of ICU
# a tag as in the HTML standard, which may contain <; TAG does not allow < inside a tag
_TAG = re.compile(TAG.pattern.replace("<>", ">"))
_TAG_START = re.compile("</?[A-Za-z]")
_ATTRIBUTE = re.compile(r"([^\s>/=]++)(?:\s*+=\s*+(?>\"([^\"]*+)\"|'([^']*+)'|([^\s>]++)))?")
_PRESERVED = re.compile(r"\bwhite-space(?:-collapse)?\s*+:\s*+(?:pre|break-spaces)", re.IGNORECASE)
_CHARSET = re.compile(rb"<meta[^<>]*?charset\s*=\s*[\"']?\s*([\w:.-]+)", re.IGNORECASE)


def tokens(text: str) -> Iterator[Tag]:
    """Yields the tags and texts of the whole page in order. Comments and other constructs have the role "alone".

    A comment without an end extends to the end of the page. A tag without an end extends to the next <, so that the
    rest of a damaged page is read. A browser drops the rest.
    """
    grammar = _TAG
    role: Role
    cursor = 0  # start of the text that has not been yielded
    position = 0
    while (at := text.find("<", position)) >= 0:
        tag = grammar.match(text, at)
        incomplete = tag is None and _TAG_START.match(text, at)
        if incomplete:
            grammar = TAG  # TAG stops at the next <, so a long tag without an end is read only once
            tag = grammar.match(text, at)
        if tag is not None:
            role, end, name = ("closing" if tag[1] else "opening"), tag.end(), tag[2].lower()
        elif text[at + 1 : at + 2] in ("!", "?") or re.match(r"</[^A-Za-z]", text[at : at + 3]):
            mark = next((end for start, end in ENDS.items() if text.startswith(start, at)), ">")
            close = text.find(mark, at + 2)
            role, end, name = "alone", close + len(mark) if close >= 0 else len(text), ""
        elif incomplete:
            following = text.find("<", at + 1)
            role, end, name = "alone", following if following >= 0 else len(text), ""
        else:
            position = at + 1
            continue
        if cursor < at:
            yield Tag("text", cursor, at)
        yield Tag(role, at, end, name)
        cursor = position = end
        if role == "opening" and name in RAW and not (text[end - 2] == "/" and is_xml(text)):
            close_tag = re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE).search(text, end)
            cursor = position = close_tag.start() if close_tag else len(text)
            if end < cursor:
                yield Tag("text" if name == "title" else "alone", end, cursor)
    if cursor < len(text):
        yield Tag("text", cursor, len(text))


def is_xml(text: str) -> bool:
    return text.startswith("<?xml")


def is_separate(name: str) -> bool:
    return name in SEPARATE or "-" in name


def attributes(text: str, tag: Tag) -> dict[str, tuple[int, int, str]]:
    """Returns start, end and value of each attribute of a start tag, by name. If a name is repeated, the first counts.

    The range from start to end includes the quotes. Entities in the value are decoded.
    """
    by_name: dict[str, tuple[int, int, str]] = {}
    for match in _ATTRIBUTE.finditer(text, tag.start + 1 + len(tag.name), tag.end - 1):
        group = match.lastindex or 1  # 1: no value; 2 and 3: a value in quotes; 4: a value without quotes
        start, end = match.span(group) if group > 1 else (match.end(), match.end())
        quotes = int(group in (2, 3))
        by_name.setdefault(match[1].lower(), (start - quotes, end + quotes, unescape_entities(text[start:end])))
    return by_name


def shown_attributes(name: str, by_name: dict[str, tuple[int, int, str]]) -> list[str]:
    """Returns the attributes of the element `name` that are shown to readers. `by_name` has all attributes."""
    shown = [attribute for attribute in by_name if attribute in ATTRIBUTES]
    if name in LABELLED and "label" in by_name:
        shown.append("label")
    if name == "input" and "value" in by_name and by_name.get("type", (0, 0, ""))[2].lower() in BUTTONS:
        shown.append("value")
    if name == "meta" and "content" in by_name:
        kind = by_name.get("name", by_name.get("property", (0, 0, "")))[2].lower()
        shown += ["content"] if kind in DESCRIPTIONS else []
    return shown


class OpenElement(NamedTuple):
    """An element whose end tag has not been read."""

    name: str
    translated: bool
    preserved: bool  # whether the lines of the text are preserved


class _PageReader:
    """Finds the runs of text and inline tags of a page, and the attributes to translate."""

    def __init__(self, text: str, tags: TagRules) -> None:
        self.text, self.xml, self.tags = text, is_xml(text), tags
        self.inline, self.untranslated = INLINE | tags.inline | tags.untranslated, UNTRANSLATED | tags.untranslated
        self.codes = codes(text)
        self.masked = masked(text, self.codes)
        self.runs: list[list[Piece]] = []
        self.attributes: list[tuple[int, int]] = []  # start and end of each value to translate, with its quotes
        self.root: Tag | None = None  # the start tag <html …>
        self.run: list[Piece] = []
        self.open = [OpenElement("", translated=True, preserved=False)]  # the first element stands for the page
        self.names: Counter[str] = Counter()  # names of the open elements
        # an element of the run that is copied unchanged: its start, the number of open elements around it, and whether
        # it is a drawing
        self.copied: tuple[int, int, bool] | None = None

    def is_inline(self, name: str) -> bool:
        return (name in self.inline or "-" in name) and name not in self.tags.splitting

    def read(self) -> None:
        for token in tokens(self.masked):
            if token.role == "opening":
                self.start_tag(token)
            elif token.role == "closing":
                self.end_tag(token)
            elif token.role == "text":
                for piece in self.pieces(token.start, token.end):
                    self.add(piece)
            elif self.text.startswith("<!--", token.start):
                self.add(Piece("alone", "", "", "", False, token.start, token.end))
            elif self.copied is None:
                self.flush()
        self.flush()

    def pieces(self, start: int, end: int) -> Iterator[Piece | None]:
        """Yields the texts and the code of a part of the page, and None for each statement or preserved line end."""
        cursor = start
        first, last = (bisect_left(self.codes, position, key=attrgetter("start")) for position in (start, end))
        for code in self.codes[first:last]:
            yield from self.text_pieces(cursor, code.start)
            name = _MESSAGE if code.role == "message" else ""
            shown = code.role in ("value", "message")
            yield None if code.role == "statement" else Piece("alone", "", "", name, shown, code.start, code.end)
            cursor = code.end
        yield from self.text_pieces(cursor, end)

    def text_pieces(self, start: int, end: int) -> Iterator[Piece | None]:
        preserved = self.open[-1].preserved
        while start < end:
            stop = (self.text.find("\n", start, end) + 1 or end) if preserved else end
            yield Piece("text", unescape_entities(self.text[start:stop]), "", "", False, start, stop)
            if preserved and self.text[stop - 1] == "\n":
                yield None
            start = stop

    def add(self, piece: Piece | None) -> None:
        """Adds a piece to the run if the open element is translated. None ends the run."""
        if self.copied is None:
            if piece is None or not self.open[-1].translated:
                self.flush()
            else:
                self.run.append(piece)

    def add_tag(self, role: str, tag: Tag) -> None:
        spaced = tag.name in ("br", "img") or (role == "alone" and "-" in tag.name)
        self.add(Piece(role, "", "", tag.name, spaced, tag.start, tag.end))

    def start_tag(self, tag: Tag) -> None:
        name = tag.name
        while name in ENDED_BY.get(self.open[-1].name, ()):
            self.pop(tag.start)
        if name == "html" and self.root is None:
            self.root = tag
        _, inherited, preserved = self.open[-1]
        by_name = attributes(self.masked, tag)
        translate = by_name.get("translate", (0, 0, "none"))[2].lower()
        if "notranslate" in by_name.get("class", (0, 0, ""))[2].split():
            translate = "no"
        if inherited and translate != "no":
            self.attributes += [by_name[key][:2] for key in shown_attributes(name, by_name)]
        translates = translate in ("yes", "") or (inherited and translate != "no" and name not in self.untranslated)
        alone = name in VOID or ((self.xml or "-" in name) and self.text[tag.end - 2] == "/")
        if not self.is_inline(name):
            self.flush_at_block()
        elif alone:
            self.add_tag("alone", tag)
        elif self.copied is None and inherited and not translates:
            self.copied = tag.start, len(self.open), name in ("svg", "math")
        else:
            self.add_tag("opening", tag)
        if not alone:
            style = by_name.get("style", (0, 0, ""))[2]
            preserved = preserved or name == "pre" or _PRESERVED.search(style) is not None
            self.open.append(OpenElement(name, translates, preserved))
            self.names[name] += 1

    def end_tag(self, tag: Tag) -> None:
        if self.names[tag.name]:
            while self.open[-1].name != tag.name:
                self.pop(tag.start)
            self.pop(tag.end)
        if not self.is_inline(tag.name):
            self.flush_at_block()
        # if the tag ended the copied element, that element is already in the run
        elif not self.run or self.run[-1].end < tag.end:
            self.add_tag("closing", tag)

    def pop(self, position: int) -> None:
        """Closes the last open element. `position` is the end of the element. An end tag is a part of the element."""
        name = self.open.pop().name
        self.names[name] -= 1
        if self.copied is not None and len(self.open) <= self.copied[1]:
            start, self.copied = self.copied[0], None
            self.run.append(Piece("alone", "", "", name, True, start, position))

    def flush_at_block(self) -> None:
        """Ends the run at a tag that is not inline, unless the tag is a part of a drawing."""
        if self.copied is None or not self.copied[2]:
            self.flush()

    def flush(self) -> None:
        """Ends the run. If a copied element is still open, it is left out of the run."""
        self.copied = None
        if self.run:
            self.runs += [part for run in _separated(self.run) for part in _sentences_of(run)]
            self.run = []


def _separated(run: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Divides a run at the tags of `is_separate` elements that have no text beside them. Yields the parts."""
    pairs = partners([(piece.role, piece.name) for piece in run])
    around = [-1]  # indices of the start tags of the open separate elements; -1 stands for the run
    parent: dict[int, int] = {}
    with_text: set[int] = set()
    for index, piece in enumerate(run):
        if pairs.get(index, -1) > index and is_separate(piece.name):
            parent[index] = around[-1]
            around.append(index)
        elif pairs.get(index) == around[-1]:
            around.pop()
        elif piece.role == "text" and has_words([piece]):
            with_text.add(around[-1])
    ends = {-1}  # start tags of elements that are not inside a sentence
    part: list[Piece] = []
    for index, piece in enumerate(run):
        if index in parent and parent[index] in ends and parent[index] not in with_text:
            ends.add(index)
        tag = is_separate(piece.name) and piece.role != "alone"
        # old pages have anchors without an end tag in the middle of a sentence
        is_end = index in ends or pairs.get(index) in ends
        if tag and (is_end or (index not in pairs and piece.name != "a")):
            yield part
            part = []
        else:
            part.append(piece)
    yield part


def _sentences_of(run: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yields the parts of a run. A part ends at a <br> unless a sentence continues after it."""
    lines: list[list[Piece]] = [[]]
    breaks: list[Piece] = []
    for piece in run:
        if piece.name == "br":
            breaks.append(piece)
            lines.append([])
        else:
            lines[-1].append(piece)
    for first, last in sentence_ranges(["".join(piece.text for piece in line) for line in lines]):
        part = lines[first]
        for piece, line in zip(breaks[first : last - 1], lines[first + 1 : last], strict=True):
            part += [piece, Piece("text", " ", start=piece.end, end=piece.end), *line]
        yield part


class WebPage(Document):
    """A page of HTML or XHTML, or a part of a page."""

    web = True
    unencodable = "xmlcharrefreplace"

    @classmethod
    def declared_encoding(cls, data: bytes) -> str | None:
        head = data[:1024]
        declared = XML_ENCODING.match(head) or _CHARSET.search(head)
        return declared[1].decode() if declared else None

    def __init__(self, text: str, encoding: Encoding, options: ReadOptions) -> None:
        super().__init__(text, encoding, options)
        reader = self.reader = _PageReader(text, options.tags)
        reader.read()
        self.runs: list[tuple[int, int, Inline]] = []
        self.attributes: list[tuple[int, int, str, Inline]] = []  # start, end, quote, text
        for run in reader.runs:
            if not any(piece.name == _MESSAGE for piece in run) and (pieces := translatable(run)):
                self.runs.append((pieces[0].start, pieces[-1].end, Inline(pieces)))
        for start, end in reader.attributes:
            self.attributes += self.attribute_parts(start, end)
        self.segments = [inline.markup for _, _, inline in self.runs]
        self.segments += [inline.markup for *_, inline in self.attributes]

    def attribute_parts(self, start: int, end: int) -> Iterator[tuple[int, int, str, Inline]]:
        """Yields the parts of the value of an attribute that are translated: the texts between statements."""
        quote = self.text[start] if self.text[start : start + 1] in ('"', "'") else ""
        if quote and not (end - start > 1 and self.text.endswith(quote, start, end)):
            return  # a quote without a partner
        quotes = len(quote)
        parts: list[list[Piece]] = [[]]
        for piece in self.reader.pieces(start + quotes, end - quotes):
            parts.append([]) if piece is None else parts[-1].append(piece)
        if quotes or len(parts) == 1:
            for part in parts:
                if any(piece.name == _MESSAGE for piece in part) or not (pieces := translatable(part)):
                    continue
                if quote:
                    yield *without_white_space(self.text, pieces[0].start, pieces[-1].end), quote, Inline(pieces)
                else:
                    yield start, end, "", Inline(part)

    def raw(self, code: Piece) -> str:
        return self.text[code.start : code.end]

    def edits(self, translations: Sequence[str]) -> list[Replacement]:
        inner = self.language_edits()
        new_values = translations[len(self.runs) :]
        for (start, end, quote, inline), translation in zip(self.attributes, new_values, strict=True):
            value = inline.written(translation, partial(written, quote=quote or '"'), self.raw)
            if value is not None:
                inner.append((start, end, value if quote else f'"{value}"'))
        inner.sort()
        outer: list[Replacement] = []
        for (start, end, inline), translation in zip(self.runs, translations[: len(self.runs)], strict=True):
            new = inline.written(translation, written, lambda code: spliced(self.text, inner, code.start, code.end))
            if new is not None:
                outer.append((*without_white_space(self.text, start, end), new))
        # leaves out inner edits in the ranges of `outer`, because the new texts of `outer` already contain them
        covered = Parts((start, end) for start, end, _ in outer)
        return outer + [edit for edit in inner if covered.outside(edit[0]) == edit[0]]

    def language_edits(self) -> list[Replacement]:
        """Returns the edits of the attributes lang and dir of <html>.

        The list is empty if the target language is unknown, if the page has no <html>, or if the tag <html> contains
        template code.
        """
        language, root = self.options.target_language, self.reader.root
        if language is None or root is None:
            return []
        if self.reader.masked[root.start : root.end] != self.text[root.start : root.end]:  # template code
            return []
        right_to_left = is_right_to_left(language)
        by_name = attributes(self.text, root)
        existing = [name for name in ("lang", "xml:lang") if name in by_name]
        wanted = dict.fromkeys(existing or ["lang"], language.replace("_", "-"))
        self.warn_of_languages(by_name[existing[0]][2] if existing else None)
        if right_to_left or "dir" in by_name:
            wanted["dir"] = "rtl" if right_to_left else "ltr"
        edits: list[Replacement] = []
        missing = ""
        for name, value in wanted.items():
            if name not in by_name:
                missing += f' {name}="{value}"'
            elif by_name[name][2].lower() != value.lower():
                start, end, _ = by_name[name]
                edits.append((start, end, f'="{value}"' if start == end else f'"{value}"'))
        after_name = root.start + len("<html")
        return [*edits, *([(after_name, after_name, missing)] if missing else [])]


def written(text: str, quote: str = "") -> str:
    """Returns a text as HTML. No-break spaces and the character `quote` are written as entities."""
    text = html.escape(text, quote=False).replace("\u00a0", "&#160;")
    return text.replace(quote, "&quot;" if quote == '"' else "&#39;") if quote else text
