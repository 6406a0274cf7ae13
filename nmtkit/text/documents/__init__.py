"""Document formats: files that hold translatable text among other content."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePath

from nmtkit.text.documents.gettext_po import Catalogue
from nmtkit.text.documents.interface import Document, ReadOptions, TagRules
from nmtkit.text.documents.recognition import check_text, notice
from nmtkit.text.documents.subtitles import SubRip, WebVTT
from nmtkit.text.documents.tagged_text import TaggedText
from nmtkit.text.documents.web import WebPage
from nmtkit.text.documents.xliff import Xliff

__all__ = [
    "EXTENSIONS", "FORMATS", "Document", "ReadOptions", "TagRules", "TaggedText", "WebPage", "check_text", "format_of",
    "notice", "read_document", "translated_pairs",
]  # fmt: skip

FORMATS: dict[str, type[Document]] = {"html": WebPage, "srt": SubRip, "vtt": WebVTT, "po": Catalogue, "xliff": Xliff}
EXTENSIONS = {
    ".html": "html", ".htm": "html", ".xhtml": "html", ".srt": "srt", ".vtt": "vtt", ".po": "po", ".pot": "po",
    ".xlf": "xliff", ".xliff": "xliff",
}  # fmt: skip


def format_of(name: str) -> str | None:
    """Returns the format for the extension of a file name, or None for plain text."""
    return EXTENSIONS.get(PurePath(name).suffix.lower())


def read_document(data: bytes, format: str, name: str, options: ReadOptions | None = None) -> Document:
    """Returns the document in `data`. Raises ValueError, with `name` and the line, if `data` is not in `format`."""
    check_text(data, name)
    try:
        return FORMATS[format].read(data, replace(options or ReadOptions(), name=name))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def translated_pairs(
    data: bytes, format: str, name: str, languages: tuple[str | None, str | None] = (None, None)
) -> Iterator[tuple[str, str]]:
    """Yields source and translation of each translated unit of a PO or XLIFF file.

    Warns if the languages in the file differ from `languages`. Raises ValueError, with the name of the file, if the
    file is not in `format`.
    """
    source, target = languages
    options = ReadOptions(target, overwrite=True, source_language=source)
    yield from read_document(data, format, name, options).pairs()
