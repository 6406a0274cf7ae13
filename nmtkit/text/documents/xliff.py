"""XLIFF 1.2 and 2.x (OASIS): units with a source and a target.

Only targets, their states and a missing target language are written, at the positions that expat reports. The rest of
the file stays identical. lxml and ElementTree would change quotes, entities, empty elements and namespaces. A
document type is rejected, so no entity can expand or read a file.

A unit needs a translation if it has no target, an empty target, or a target in the state new, initial,
needs-translation or needs-l10n.
With `overwrite`, a target in any other state is also replaced, unless the target is approved or final. Machine
translations are marked: in 1.2 by state="needs-review-translation" state-qualifier="mt-suggestion", in 2.x by
state="translated" subState="nmtkit:mt".

Tags of escaped HTML in a source, such as &lt;b&gt;, are inline codes of the text, and stay escaped.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, Literal
from xml.parsers import expat

import numpy as np

from nmtkit.text.alignment import is_joined
from nmtkit.text.documents.encoding import XML_ENCODING, Encoding
from nmtkit.text.documents.inline import Inline, Piece, has_words, is_markup, split_markup, translatable
from nmtkit.text.documents.interface import Document, ReadOptions, newline_of, without_white_space
from nmtkit.text.documents.lines import TextPart, edits_of, sentence_ranges
from nmtkit.text.documents.web import attributes as tag_attributes
from nmtkit.text.edits import Replacement, spliced
from nmtkit.text.markup import Tag, partners, unescape_entities

MAX_DEPTH = 200  # maximum depth of nested elements
NAMESPACE = re.compile(r"urn:oasis:names:tc:xliff:document:(1\.[12]|2\.\d)")
UNREVIEWED = ("mt-suggestion", "leveraged-mt", "fuzzy-match")  # origins of a target that nobody has checked
UNTRANSLATED = ("new", "initial", "needs-translation", "needs-l10n")  # states of a target that has no translation yet
FINAL = ("final", "signed-off")
MACHINE = {1: {"state": "needs-review-translation", "state-qualifier": "mt-suggestion"},
           2: {"state": "translated", "subState": "nmtkit:mt"}}  # fmt: skip
PLACEHOLDERS = ("x", "ph")
NESTED = ("g", "pc", "mrk")  # inline elements that hold text; any other inline element, with its content, is a code
STARTS = {"bpt": "id", "bx": "id", "sc": "id"}  # element -> attribute that links an opening code to its closing code
ENDS = {"ept": "id", "ex": "id", "ec": "startRef"}

# one character of the text: an entity, \r\n, or the character itself
_CHARACTER = re.compile(r"&[^;\s]{1,10}+;|\r\n|(?s:.)")
_INVALID = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass
class Node:
    """An element: its name without the prefix, and the positions of its tags in the file. Ends are exclusive."""

    name: str
    attributes: dict[str, str]
    xliff: bool  # whether the element is in a namespace of XLIFF or in no namespace
    start: int
    inner: int = 0  # start of the content
    inner_end: int = 0
    end: int = 0
    # child elements, and texts as (start, end, text)
    content: list["Node | tuple[int, int, str]"] = field(default_factory=list)
    parent: "Node | None" = field(default=None, repr=False)

    def children(self, name: str) -> list["Node"]:
        return [child for child in self.content if isinstance(child, Node) and child.xliff and child.name == name]

    def child(self, name: str) -> "Node | None":
        return next(iter(self.children(name)), None)

    def inherited(self, name: str) -> str | None:
        """Returns an attribute of the element or else of the nearest ancestor that has the attribute, or None."""
        if name in self.attributes or self.parent is None:
            return self.attributes.get(name)
        return self.parent.inherited(name)

    def within(self, name: str) -> "Node":
        """Returns the element if it has this name, or else the nearest ancestor with this name, or else the root."""
        return self if self.name == name or self.parent is None else self.parent.within(name)


class _TreeBuilder:
    """Makes nodes from the events of expat. An event ends where the next event starts."""

    def __init__(self, text: str) -> None:
        self.text, self.data = text, text.encode()
        # number of characters before each byte, and before the end of `data`; bytes 10xxxxxx do not begin a character
        self.character_of_byte = np.zeros(len(self.data) + 1, np.int32)
        np.cumsum(np.frombuffer(self.data, np.uint8) & 0xC0 != 0x80, out=self.character_of_byte[1:])
        self.root: Node | None = None
        self.open: list[Node] = []
        self.waiting: list[tuple[Node, str]] = []  # (node, field): fields to set to the position of the next event
        self.characters: tuple[int, list[str]] | None = None  # start and parts of the open text or CDATA section
        parser: Any = expat.ParserCreate("utf-8", "\n")
        parser.StartElementHandler, parser.EndElementHandler = self.start_element, self.end_element
        parser.CharacterDataHandler = self.text_found
        parser.StartCdataSectionHandler = self.start_cdata
        parser.EndCdataSectionHandler = lambda: self.position(len("]]>"))
        parser.StartDoctypeDeclHandler = lambda *_: self.refuse("a document type is not allowed in XLIFF; remove it")
        parser.CommentHandler = parser.ProcessingInstructionHandler = parser.DefaultHandler = lambda *_: self.position()
        self.parser = parser

    def read(self) -> Node:
        """Returns the root element. Raises ValueError with a message that begins with the line."""
        try:
            self.parser.Parse(self.data, True)
        except expat.ExpatError as error:
            raise ValueError(f"line {error.lineno}: it is not valid XML: {expat.ErrorString(error.code)}") from None
        self.settle(len(self.text))
        assert self.root is not None
        return self.root

    def position(self, shift: int = 0) -> int:
        """Returns the position of the current event plus `shift`, and sets the fields that wait for this position."""
        here = int(self.character_of_byte[self.parser.CurrentByteIndex]) + shift
        self.settle(here)
        return here

    def settle(self, here: int) -> None:
        for node, name in self.waiting:
            setattr(node, name, here)
        self.waiting.clear()
        if self.characters is not None:
            start, parts = self.characters
            self.open[-1].content.append((start, here, "".join(parts)))
            self.characters = None

    def start_element(self, full: str, attributes: dict[str, str]) -> None:
        here = self.position()
        uri, _, name = full.rpartition("\n")
        if len(self.open) >= MAX_DEPTH:
            self.refuse(f"elements are nested more than {MAX_DEPTH} levels deep")
        named = {key.rpartition("\n")[2] if key.startswith("http://www.w3.org/XML/") else key: value
                 for key, value in attributes.items()}  # fmt: skip
        node = Node(name, named, not uri or bool(NAMESPACE.fullmatch(uri)), here)
        if self.open:
            node.parent = self.open[-1]
            self.open[-1].content.append(node)
        else:
            self.root = node
        self.open.append(node)
        self.waiting.append((node, "inner"))

    def end_element(self, _: str) -> None:
        here = self.position()
        node = self.open.pop()
        node.inner_end = node.end = here
        if not self.text.endswith("/>", 0, node.inner):  # expat reports the end of <x/> after the tag
            self.waiting.append((node, "end"))

    def text_found(self, text: str) -> None:
        if self.characters is not None:  # expat splits a text at entities and line ends
            self.characters[1].append(text)
        else:
            here = self.position()
            if self.open:
                self.characters = here, [text]

    def start_cdata(self) -> None:
        self.characters = self.position(), []

    def refuse(self, reason: str) -> None:
        raise ValueError(f"line {self.parser.CurrentLineNumber}: {reason}")


def texts_of(node: Node) -> Iterator[str]:
    """Yields the texts of an element, without the content of inline codes.

    A placeholder between two letters, such as a line break, becomes a space.
    """
    before = ""  # the last character of the text
    is_placeholder = False  # whether a placeholder follows the text
    for child in node.content:
        if isinstance(child, Node):
            is_placeholder = child.name in PLACEHOLDERS
            if child.name in NESTED:
                yield from texts_of(child)
            continue
        if is_placeholder and is_joined(before + child[2][:1], 1):
            yield " "
        yield child[2]
        before, is_placeholder = child[2][-1:], False


@dataclass(frozen=True)
class Unit:
    """A source to translate. The new target copies `content` (the source or seg-source), with translated `parts`."""

    source: Node
    content: Node
    target: Node | None
    parts: list[TextPart]


class Xliff(Document):
    """An XLIFF file."""

    protects = True
    unencodable = "xmlcharrefreplace"

    @classmethod
    def declared_encoding(cls, data: bytes) -> str | None:
        declared = XML_ENCODING.match(data[:1024])
        return declared[1].decode() if declared else None

    def __init__(self, text: str, encoding: Encoding, options: ReadOptions) -> None:
        super().__init__(text, encoding, options)
        self.root = _TreeBuilder(text).read()
        version = self.root.attributes.get("version", "")
        if self.root.name != "xliff" or version[:2] not in ("1.", "2."):
            raise ValueError(f"not XLIFF 1.2 or 2.x: the root is <{self.root.name[:40]}> of version {version[:20]!r}")
        self.version = int(version[0])
        self.units = [unit for node in self.nodes(self.root) if (unit := self.unit(node)) is not None]
        self.segments = [part.inline.markup for unit in self.units for part in unit.parts]
        first = self.version == 1
        self.holder, source, self.language = (
            ("file", "source-language", "target-language") if first else ("xliff", "srcLang", "trgLang")
        )
        for named in {(each.attributes.get(source), each.attributes.get(self.language)) for each in self.holders()}:
            self.warn_of_languages(*named)

    def nodes(self, node: Node) -> Iterator[Node]:
        """Yields the units of XLIFF 1, or the segments of XLIFF 2."""
        for child in node.content:
            if isinstance(child, Node) and child.xliff:
                if child.name == ("trans-unit" if self.version == 1 else "segment"):
                    yield child
                elif child.name in ("file", "body", "group", "unit"):
                    yield from self.nodes(child)

    def unit(self, node: Node) -> Unit | None:
        """Returns the unit of an element, or None if it has nothing to translate."""
        source = node.child("source")
        if source is None or node.inherited("translate") == "no":
            return None
        status = self.status(node)
        if status == "final" or (status != "untranslated" and not self.options.overwrite):
            return None
        content = node.child("seg-source") or source
        marks = [mark for mark in content.children("mrk") if mark.attributes.get("mtype") == "seg"]
        parts = [part for container in marks or [content] for part in self.parts(container)]
        return Unit(source, content, node.child("target"), parts) if parts else None

    def status(self, node: Node) -> Literal["untranslated", "unreviewed", "translated", "final"]:
        """Returns whether a unit has a translation, and whether a person has checked or approved the translation.

        A target of only white space is not a translation.
        """
        target = node.child("target")
        state = (target.attributes if self.version == 1 and target else node.attributes).get("state")
        if state in FINAL or node.attributes.get("approved") == "yes":
            return "final"
        empty = target is None or not any(isinstance(child, Node) or child[2].strip() for child in target.content)
        if target is None or empty or state in UNTRANSLATED:
            return "untranslated"
        machine = node.attributes.get("subState") == MACHINE[2]["subState"]
        return "unreviewed" if machine or target.attributes.get("state-qualifier") in UNREVIEWED else "translated"

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yields source and target of each translated unit, without inline codes. Leaves out unchecked suggestions."""
        for node in self.nodes(self.root):
            source, target = node.child("source"), node.child("target")
            if source and target and self.status(node) in ("translated", "final"):
                pair = "".join(texts_of(source)), "".join(texts_of(target))
                if all(map(str.strip, pair)):
                    yield pair

    def parts(self, container: Node) -> Iterator[TextPart]:
        """Yields the parts of a source that are translated separately.

        If xml:space preserves lines, each part has the lines of one sentence. If xml:space does not preserve lines, or
        if the source has a CDATA section, the whole source is one part.
        """
        markup = is_markup("".join(texts_of(container)))
        write = _written_markup if markup else written
        pieces: Sequence[Piece] = list(self.pieces(container, markup))
        has_section = "<![CDATA[" in self.text[container.inner : container.inner_end]
        lines = [pieces]
        if container.inherited("space") == "preserve" and not has_section:
            lines = _preserved_lines(pieces)
        texts = ["".join(piece.text for piece in line) for line in lines]
        for first, last in sentence_ranges(texts):
            joined = [piece for line in lines[first:last] for piece in line]
            kept = joined if has_section else translatable(joined)  # a CDATA section is replaced as a whole
            if has_words(kept):
                start, end = without_white_space(self.text, kept[0].start, kept[-1].end)
                yield TextPart(start, end, Inline(kept), write, last - first, max(map(len, texts[first:last])))

    def pieces(self, node: Node, markup: bool) -> Iterator[Piece]:
        for child in node.content:
            if not isinstance(child, Node):
                yield from self.text_pieces(*child, markup)
                continue
            kept = child.attributes.get("translate") == "no" or child.attributes.get("mtype") == "protected"
            if child.xliff and child.name in NESTED and not kept and child.inner < child.end:
                name = f"{child.name} {child.start}"
                yield self.code("opening", child.start, child.inner, name)
                yield from self.pieces(child, markup)
                yield self.code("closing", child.inner_end, child.end, name)
                continue
            role = "opening" if child.name in STARTS else "closing" if child.name in ENDS else "alone"
            key = {**STARTS, **ENDS}.get(child.name, "")
            name = child.attributes.get("rid", child.attributes.get(key, ""))
            yield self.code(role, child.start, child.end, name)

    def text_pieces(self, start: int, end: int, text: str, markup: bool) -> Iterator[Piece]:
        """Yields the pieces of a text. Tags that are escaped in the file become codes."""
        section = self.text.startswith("<![CDATA[", start)
        offsets = [start + match.start() for match in _CHARACTER.finditer(self.text[start:end])] + [end]
        has_offsets = not section and len(offsets) == len(text) + 1
        split = split_markup(text) if section or has_offsets else [Tag("text", 0, len(text))]
        for role, first, last, name in split:
            part, span = text[first:last], (offsets[first], offsets[last]) if has_offsets else (start, end)
            if role == "text" and has_offsets:
                for line in re.finditer("\n|[^\n]+", part):
                    begin, stop = (offsets[first + index] for index in line.span())
                    yield Piece("text", unescape_entities(line[0]) if markup else line[0], start=begin, end=stop)
            elif role == "text":
                yield Piece("text", unescape_entities(part) if markup else part, start=span[0], end=span[1])
            else:
                raw = written(part) if section else self.text[slice(*span)]
                yield Piece(role, "", raw, f"<{name}", role == "alone", *span)

    def code(self, role: str, start: int, end: int, name: str) -> Piece:
        return Piece(role, "", self.text[start:end], name, role == "alone", start, end)

    def edits(self, translations: Sequence[str]) -> list[Replacement]:
        edits: list[Replacement] = []
        following = iter(translations)
        for unit in self.units:
            inner = edits_of(unit.parts, following)
            edits += self.target_edits(unit, spliced(self.text, inner, unit.content.inner, unit.content.inner_end))
        language = (self.options.target_language or "").replace("_", "-")
        for holder in self.holders():
            if language and self.language not in holder.attributes:
                edits.append(self.start_tag(holder, {self.language: language}))
        return edits

    def holders(self) -> Collection[Node]:
        """Returns the elements of the file whose attributes name the languages of the translation units."""
        nodes = [unit.source.within(self.holder) for unit in self.units]
        return {node.start: node for node in nodes}.values()

    def target_edits(self, unit: Unit, content: str) -> Iterator[Replacement]:
        """Yields the edits that write the target of a unit and its state. A missing target is inserted."""
        state, holder = MACHINE[self.version], unit.source.parent
        assert holder is not None
        if self.version == 2:
            yield self.start_tag(holder, state)
            state = {}
        source_tag = self.text[unit.source.start : unit.source.inner]
        name = re.split(r"[\s/>]", source_tag[1:], maxsplit=1)[0].removesuffix("source") + "target"
        if unit.target is not None:
            start, _, tag = self.start_tag(unit.target, state)
            yield start, unit.target.end, f"{tag.rstrip('/>').rstrip()}>{content}</{name}>"
            return
        if unit.source.attributes.get("space"):
            state = {**state, "xml:space": unit.source.attributes["space"]}
        attributes = "".join(f' {key}="{escape(value)}"' for key, value in state.items())
        line_start = self.text.rfind("\n", 0, unit.source.start) + 1
        indent = self.text[line_start : unit.source.start]
        before = (newline_of(self.text) + indent) if line_start and not indent.strip() else ""
        yield unit.content.end, unit.content.end, f"{before}<{name}{attributes}>{content}</{name}>"

    def start_tag(self, node: Node, attributes: dict[str, str]) -> Replacement:
        """Returns the edit that sets attributes of an element."""
        tag = self.text[node.start : node.inner]
        for name, value in attributes.items():
            span = tag_attributes(tag, Tag("opening", 0, len(tag))).get(name.lower())
            if span:
                tag = f'{tag[: span[0]]}"{escape(value)}"{tag[span[1] :]}'
            else:
                end = len(tag) - (2 if tag.endswith("/>") else 1)
                tag = f'{tag[:end].rstrip()} {name}="{escape(value)}"{tag[end:]}'
        return node.start, node.inner, tag


def _preserved_lines(pieces: Sequence[Piece]) -> list[Sequence[Piece]]:
    """Returns the pieces of each line, with the line feed. If a pair of codes spans lines, all pieces are one line."""
    lines = list(accumulate((piece.text == "\n" for piece in pieces[:-1]), initial=0))  # the line of each piece
    pairs = partners([(piece.role, piece.name) for piece in pieces])
    if any(lines[start] != lines[end] for start, end in pairs.items()):
        return [pieces]
    return [[piece for piece, _ in group] for _, group in groupby(zip(pieces, lines, strict=True), itemgetter(1))]


def written(text: str) -> str:
    """Returns a text as XML, without characters that are not allowed in XML."""
    return escape(_INVALID.sub("", text), quote=False)


def _written_markup(text: str) -> str:
    return written(escape(text, quote=False))
