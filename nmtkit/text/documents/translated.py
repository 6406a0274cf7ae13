"""Extracts the translations that a PO or XLIFF file already has."""

from collections.abc import Iterator

from nmtkit.text.documents.gettext_po import Catalogue
from nmtkit.text.documents.interface import Document, ReadOptions
from nmtkit.text.documents.xliff import Node, Xliff, texts_of

READERS: dict[str, type[Document]] = {"po": Catalogue, "xliff": Xliff}


def translated_pairs(data: bytes, format: str, name: str) -> Iterator[tuple[str, str]]:
    """Yields source and translation of each unit that has a translation. Fuzzy entries of PO files are left out.

    Inline codes of XLIFF are left out. Raises ValueError, with the name of the file, if its format is wrong.
    """
    try:
        document = READERS[format].read(data, ReadOptions(overwrite=True))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if isinstance(document, Catalogue):
        yield from _of_catalogue(document)
    elif isinstance(document, Xliff):
        for node in document.nodes(document.root):
            yield from _of_unit(node)


def _of_catalogue(catalogue: Catalogue) -> Iterator[tuple[str, str]]:
    for entry in catalogue.all_entries:
        flags = catalogue.text[slice(*entry.flags)] if entry.flags else ""
        if entry is catalogue.header or "fuzzy" in flags:
            continue
        forms = [form.text for form in entry.forms.values()]
        if forms[0]:
            yield entry.messages["msgid"].text, forms[0]
        if "msgid_plural" in entry.messages and len(forms) > 1 and forms[-1]:
            yield entry.messages["msgid_plural"].text, forms[-1]


def _of_unit(node: Node) -> Iterator[tuple[str, str]]:
    sources, targets = node.children("source"), node.children("target")
    if sources and targets:
        source, target = ("".join(texts_of(side[0])) for side in (sources, targets))
        if source.strip() and target.strip():
            yield source, target
