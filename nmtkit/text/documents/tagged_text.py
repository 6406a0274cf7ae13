"""Texts with tags of any XML format, such as the entries of a content management system.

The structure of the text decides where sentences end. If an element has words beside it, in the same parent, then all
tags with the name of this element are inside sentences. Sentences end at all other tags.
"""

from collections.abc import Iterator, Sequence

from nmtkit.text import markup
from nmtkit.text.documents.encoding import Encoding
from nmtkit.text.documents.inline import Inline, Piece, has_words, split_markup, translatable
from nmtkit.text.documents.interface import Document, ReadOptions, without_white_space
from nmtkit.text.documents.lines import TextPart, edits_of
from nmtkit.text.documents.web import written
from nmtkit.text.edits import Replacement


class TaggedText(Document):
    """A text with tags, without an XML declaration.

    If `finds_structure` is false, sentences end only at the tags in `options.tags.splitting`.
    """

    def __init__(self, text: str, options: ReadOptions, finds_structure: bool = True) -> None:
        super().__init__(text, Encoding(), options)
        self.parts = list(_parts(text))
        self.partners = markup.partners([(part.role, part.name) for part in self.parts])
        self.splitting = options.tags.splitting
        if finds_structure:
            names = {part.name for part in self.parts if part.name}
            self.splitting |= names - self.names_beside_text() - options.tags.inline - options.tags.untranslated
        self.runs = [
            TextPart(*without_white_space(text, run[0].start, run[-1].end), Inline(run), written)
            for run in map(translatable, self.sentences())
            if run
        ]
        self.segments = [run.inline.markup for run in self.runs]

    def names_beside_text(self) -> set[str]:
        """Returns the names of the elements that have words beside them, in the same parent."""
        names_by_parent: dict[int, set[str]] = {}
        with_text: set[int] = set()
        around = [-1]  # indices of the start tags of the open elements; -1 stands for the whole text
        for index, part in enumerate(self.parts):
            if self.partners.get(index, index) < index:
                around.pop()
            elif part.role != "text":
                names_by_parent.setdefault(around[-1], set()).add(part.name)
                around += [index] if index in self.partners else []
            elif has_words([part]):
                with_text.add(around[-1])
        return set().union(*(names for parent, names in names_by_parent.items() if parent in with_text))

    def sentences(self) -> Iterator[list[Piece]]:
        """Yields the runs of text and tags between the tags at which sentences end."""
        run: list[Piece] = []
        index = 0
        while index < len(self.parts):
            part = self.parts[index]
            if part.name in self.options.tags.untranslated and part.role in ("opening", "alone"):
                index = self.partners.get(index, index)
                raw = self.text[part.start : self.parts[index].end]
                run.append(Piece("alone", "", raw, part.name, True, part.start, self.parts[index].end))
            elif part.name in self.splitting:
                yield run
                run = []
            else:
                run.append(part)
            index += 1
        yield run

    def edits(self, translations: Sequence[str]) -> list[Replacement]:
        return edits_of(self.runs, iter(translations))


def _parts(text: str) -> Iterator[Piece]:
    """Yields the texts and tags of a text. Comments and declarations are tags without a name."""
    for role, start, end, name in split_markup(text):
        if name:  # XML has no void elements: <br> needs an end tag
            role = "closing" if text.startswith("</", start) else "alone" if text[end - 2] == "/" else "opening"
        raw = text[start:end]
        yield Piece(role, markup.unescape_entities(raw) if role == "text" else "", raw, name, start=start, end=end)
