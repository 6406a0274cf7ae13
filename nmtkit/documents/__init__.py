"""Documents: files that hold text between what is no text. A format is a class with `read`, `segments` and `render`."""

from pathlib import PurePath

from nmtkit.documents.gettext_po import Catalogue
from nmtkit.documents.interface import Document, ReadOptions
from nmtkit.documents.subtitles import SubRip, WebVTT
from nmtkit.documents.web import WebPage
from nmtkit.documents.xliff import Xliff

__all__ = ["EXTENSIONS", "FORMATS", "Document", "ReadOptions", "WebPage", "format_of", "read_document"]

FORMATS: dict[str, type[Document]] = {"html": WebPage, "srt": SubRip, "vtt": WebVTT, "po": Catalogue, "xliff": Xliff}
EXTENSIONS = {
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".srt": "srt",
    ".vtt": "vtt",
    ".po": "po",
    ".pot": "po",
    ".xlf": "xliff",
    ".xliff": "xliff",
}


def format_of(name: str) -> str | None:
    """Returns the format that the extension of a file's name stands for; None for text."""
    return EXTENSIONS.get(PurePath(name).suffix.lower())


def read_document(data: bytes, format: str, name: str, options: ReadOptions | None = None) -> Document:
    """Reads a file that is called `name`. Raises ValueError, with name and line, for what is none of this format."""
    try:
        return FORMATS[format].read(data, options or ReadOptions())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
