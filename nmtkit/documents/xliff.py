"""XLIFF 1.2 and 2.x (OASIS): units with a source, into which a target is written.

Read with expat, which says where in the file everything stands, so that only targets, their states and a missing target
language are written, and the rest is byte for byte what it was; lxml and ElementTree write a file of their own
(quotes, entities, empty elements, namespaces). A document type is refused, and with it every entity but the five of
XML, so that none expands or reads a file.

A unit is translated where it has no target, an empty one, or one whose state is new, initial or needs-translation;
with `overwrite` any that is neither approved nor final. Machine translations are marked as such: in 1.2
state="needs-review-translation" state-qualifier="mt-suggestion", in 2.x state="translated" subState="nmtkit:mt".
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any
from xml.parsers import expat

from nmtkit.documents.encoding import Encoding, decode
from nmtkit.documents.inline import MAX_CODES, Inline, Piece, has_words, trimmed
from nmtkit.documents.interface import Document, Edit, ReadOptions, newline_of, spliced, without_white_space

DEPTH = 200  # of elements within each other
NAMESPACE = re.compile(r"urn:oasis:names:tc:xliff:document:(1\.[12]|2\.\d)")
UNTRANSLATED = ("new", "initial", "needs-translation")  # states in which there is no translation yet
FINAL = ("final", "signed-off")
MACHINE = {1: {"state": "needs-review-translation", "state-qualifier": "mt-suggestion"},
           2: {"state": "translated", "subState": "nmtkit:mt"}}  # fmt: skip
NESTED = ("g", "pc", "mrk")  # inline elements with text in them; others are codes, with what they hold
STARTS = {"bpt": "id", "bx": "id", "sc": "id"}  # the attribute by which a code is known to its partner
ENDS = {"ept": "id", "ex": "id", "ec": "startRef"}

_DECLARED = re.compile(rb"<\?xml[^>]*?encoding\s*=\s*[\"']([\w:.-]+)")
_INVALID = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass
class Node:
    """An element: its name without a prefix, and the places of its tags in the file; ends are exclusive."""

    name: str
    attributes: dict[str, str]
    xliff: bool  # of XLIFF's own namespace
    start: int
    inner: int = 0  # where its content begins
    inner_end: int = 0
    end: int = 0
    content: list["Node | tuple[int, int, str]"] = field(default_factory=list)  # elements, and texts with their places
    parent: "Node | None" = field(default=None, repr=False)

    def children(self, *names: str) -> list["Node"]:
        return [child for child in self.content if isinstance(child, Node) and child.xliff and child.name in names]

    def inherited(self, name: str) -> str | None:
        node: Node | None = self
        while node is not None:
            if name in node.attributes:
                return node.attributes[name]
            node = node.parent
        return None


def parse(text: str) -> Node:
    """Returns the root element. Raises ValueError, beginning with the line."""
    return _Reader(text).read()


class _Reader:
    """Makes nodes of the events of expat, which says where one begins: it ends where the next begins."""

    def __init__(self, text: str) -> None:
        self.text, self.data = text, text.encode()
        self.character = _character_places(text)
        self.root: Node | None = None
        self.open: list[Node] = []
        self.waiting: list[tuple[Node, str]] = []  # fields that are the place of the next event
        self.characters: tuple[int, str] | None = None  # a text that ends there
        self.cdata: tuple[int, list[str]] | None = None  # a section: where it begins, what it says
        parser: Any = expat.ParserCreate("utf-8", "\n")
        parser.StartElementHandler, parser.EndElementHandler = self.start_element, self.end_element
        parser.CharacterDataHandler = self.text_found
        parser.StartCdataSectionHandler, parser.EndCdataSectionHandler = self.start_cdata, self.end_cdata
        parser.StartDoctypeDeclHandler = self.doctype
        parser.CommentHandler = parser.ProcessingInstructionHandler = parser.DefaultHandler = self.other
        self.parser = parser

    def read(self) -> Node:
        try:
            self.parser.Parse(self.data, True)
        except expat.ExpatError as error:
            raise ValueError(f"line {error.lineno}: it is no XML: {expat.ErrorString(error.code)}") from None
        self.settle(len(self.text))
        assert self.root is not None
        return self.root

    def place(self) -> int:
        """Returns where the event is, and gives this place to what waited for it."""
        here = self.character(self.parser.CurrentByteIndex)
        self.settle(here)
        return here

    def settle(self, here: int) -> None:
        for node, name in self.waiting:
            setattr(node, name, here)
        self.waiting.clear()
        if self.characters is not None:
            start, said = self.characters
            self.open[-1].content.append((start, here, said))
            self.characters = None

    def start_element(self, full: str, attributes: dict[str, str]) -> None:
        here = self.place()
        uri, _, name = full.rpartition("\n")
        if len(self.open) >= DEPTH:
            self.refuse(f"more than {DEPTH} elements within each other")
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
        here = self.place()
        node = self.open.pop()
        node.inner_end = node.end = here
        if not self.text.endswith("/>", 0, node.inner):  # else expat says that it ends after its only tag
            self.waiting.append((node, "end"))

    def text_found(self, said: str) -> None:
        if self.cdata is not None:
            self.cdata[1].append(said)
            return
        here = self.place()
        if self.open:
            self.characters = here, said

    def start_cdata(self) -> None:
        self.cdata = self.place(), []

    def end_cdata(self) -> None:
        assert self.cdata is not None
        (start, parts), self.cdata = self.cdata, None
        end = self.character(self.parser.CurrentByteIndex) + len("]]>")
        self.open[-1].content.append((start, end, "".join(parts)))

    def other(self, *_: str) -> None:
        self.place()

    def doctype(self, *_: Any) -> None:
        self.refuse("a document type, which XLIFF does not have, is refused")

    def refuse(self, what: str) -> None:
        raise ValueError(f"line {self.parser.CurrentLineNumber}: {what}")


def _character_places(text: str) -> Any:
    """Returns a function from a byte of the text in UTF-8 to its character."""
    if text.isascii():
        return lambda byte: byte
    step = 4096
    known = [0]
    for first in range(0, len(text), step):
        known.append(known[-1] + len(text[first : first + step].encode()))

    def character(byte: int) -> int:
        block = min(bisect_right(known, byte) - 1, len(known) - 1)
        first = block * step
        return first + len(text[first : first + step].encode()[: byte - known[block]].decode())

    return character


@dataclass(frozen=True)
class Unit:
    """A source to translate: `content` is the element whose content the target gets, `parts` what of it changes."""

    source: Node
    content: Node
    target: Node | None
    parts: list[tuple[int, int, Inline]]


class Xliff(Document):
    """An XLIFF file."""

    protects = True

    @classmethod
    def read(cls, data: bytes, options: ReadOptions) -> "Xliff":
        declared = _DECLARED.match(data[:1024])
        text, encoding = decode(data, declared[1].decode() if declared else None)
        return cls(text, encoding, options)

    def __init__(self, text: str, encoding: Encoding, options: ReadOptions) -> None:
        super().__init__(text, encoding, options)
        self.root = parse(text)
        version = self.root.attributes.get("version", "")
        if self.root.name != "xliff" or version[:2] not in ("1.", "2."):
            raise ValueError(f"it is no XLIFF 1.2 or 2.x, but <{self.root.name[:40]}> of version {version[:20]!r}")
        self.version = int(version[0])
        self.units = [unit for node in self.nodes(self.root) if (unit := self.unit(node)) is not None]
        self.segments = [inline.markup for unit in self.units for _, _, inline in unit.parts]

    def nodes(self, node: Node) -> Iterator[Node]:
        """Yields the units of XLIFF 1, the segments of XLIFF 2."""
        for child in node.content:
            if isinstance(child, Node) and child.xliff:
                if child.name == ("trans-unit" if self.version == 1 else "segment"):
                    yield child
                elif child.name in ("file", "body", "group", "unit"):
                    yield from self.nodes(child)

    def unit(self, node: Node) -> Unit | None:
        """Returns what to translate of a unit or segment, None if there is nothing."""
        sources, targets = node.children("source"), node.children("target")
        if not sources or node.inherited("translate") == "no":
            return None
        target = targets[0] if targets else None
        state = (target.attributes if self.version == 1 and target else node.attributes).get("state")
        if state in FINAL or node.attributes.get("approved") == "yes":
            return None
        if target is not None and target.content and state not in UNTRANSLATED and not self.options.overwrite:
            return None
        segmented = node.children("seg-source")
        content = segmented[0] if segmented else sources[0]
        marks = [mark for mark in content.children("mrk") if mark.attributes.get("mtype") == "seg"]
        parts = [part for container in marks or [content] if (part := self.part(container)) is not None]
        return Unit(sources[0], content, target, parts) if parts else None

    def part(self, container: Node) -> tuple[int, int, Inline] | None:
        pieces = list(self.pieces(container))
        first, last = trimmed(pieces)
        pieces = pieces[first:last]
        if not has_words(pieces) or sum(piece.role != "text" for piece in pieces) > MAX_CODES:
            return None
        return *without_white_space(self.text, pieces[0].start, pieces[-1].end), Inline(pieces)

    def pieces(self, node: Node) -> Iterator[Piece]:
        for child in node.content:
            if not isinstance(child, Node):
                yield Piece("text", child[2], start=child[0], end=child[1])
                continue
            kept = child.attributes.get("translate") == "no" or child.attributes.get("mtype") == "protected"
            if child.xliff and child.name in NESTED and not kept and child.inner < child.end:
                name = f"{child.name} {child.start}"
                yield self.code("opening", child.start, child.inner, name)
                yield from self.pieces(child)
                yield self.code("closing", child.inner_end, child.end, name)
                continue
            role = "opening" if child.name in STARTS else "closing" if child.name in ENDS else "alone"
            key = {**STARTS, **ENDS}.get(child.name, "")
            name = child.attributes.get("rid", child.attributes.get(key, ""))
            yield self.code(role, child.start, child.end, name)

    def code(self, role: str, start: int, end: int, name: str) -> Piece:
        return Piece(role, "", self.text[start:end], name, role == "alone", start, end)  # type: ignore[arg-type]

    def edits(self, translations: Sequence[str]) -> list[Edit]:
        edits: list[Edit] = []
        following = iter(translations)
        files: dict[int, Node] = {}
        for unit in self.units:
            inner: list[Edit] = []
            for start, end, inline in unit.parts:
                pieces = inline.restored(next(following))
                if pieces is not None:
                    new = [piece.raw if piece.role != "text" else written(piece.text) for piece in pieces]
                    inner.append((start, end, "".join(new)))
            edits += self.target_edits(unit, spliced(self.text, inner, unit.content.inner, unit.content.inner_end))
            file = unit.source
            while file.parent is not None and file.name != ("file" if self.version == 1 else "xliff"):
                file = file.parent
            files[file.start] = file
        language = (self.options.target_language or "").replace("_", "-")
        name = "target-language" if self.version == 1 else "trgLang"
        for file in files.values():
            if language and name not in file.attributes:
                edits.append(self.start_tag(file, {name: language}))
        return edits

    def target_edits(self, unit: Unit, content: str) -> Iterator[Edit]:
        """Yields what puts the content into the target, which is made if there is none, and sets the state."""
        state, holder = MACHINE[self.version], unit.source.parent
        assert holder is not None
        if self.version == 2:
            yield self.start_tag(holder, state)
            state = {}
        source_tag = self.text[unit.source.start : unit.source.inner]
        name = source_tag[1 : re.search(r"[\s/>]", source_tag).start()]  # type: ignore[union-attr]
        name = name.removesuffix("source") + "target"
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

    def start_tag(self, node: Node, attributes: dict[str, str]) -> Edit:
        """Returns what sets attributes of an element."""
        tag = self.text[node.start : node.inner]
        for name, value in attributes.items():
            found = re.search(rf"\s{re.escape(name)}\s*=\s*(\"[^\"]*\"|'[^']*')", tag)
            if found:
                tag = f'{tag[: found.start(1)]}"{escape(value)}"{tag[found.end(1) :]}'
            else:
                end = len(tag) - (2 if tag.endswith("/>") else 1)
                tag = f'{tag[:end].rstrip()} {name}="{escape(value)}"{tag[end:]}'
        return node.start, node.inner, tag

    def encoded(self, text: str) -> bytes:
        return self.encoding.encode(text, "xmlcharrefreplace")


def written(text: str) -> str:
    """Returns a text as XML, without the characters that XML does not have."""
    return escape(_INVALID.sub("", text), quote=False)
