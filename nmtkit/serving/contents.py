"""Contents of requests: texts, web pages, files; each as segments, and again with their translations."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from starlette.datastructures import UploadFile

from nmtkit.documents import EXTENSIONS, Document, ReadOptions, WebPage, format_of, read_document
from nmtkit.documents.encoding import Encoding
from nmtkit.serving.fair_queue import Found
from nmtkit.serving.reading import Refusal

FILES = (".txt", *EXTENSIONS)  # extensions of those that are translated

_NEWLINE = re.compile(r"(\r\n|\r|\n)")


class Text:
    """A text, its lines, and the white space around them, which comes out as it went in."""

    protects = False

    def __init__(self, text: str) -> None:
        self.text = text
        self.parts: list[str] = []  # white space and lines in turn
        for part in _NEWLINE.split(text):
            line = part.strip()
            before, _, after = part.partition(line) if line else (part, "", "")
            self.parts += [before, line, after]
        self.indices = [index for index in range(1, len(self.parts), 3) if self.parts[index]]

    @property
    def segments(self) -> list[str]:
        return [self.parts[index] for index in self.indices]

    def translated(self, lines: Sequence[Found]) -> Found:
        """Returns the text with `lines` in place of its own, and their alignments, if all have one, as that of all."""
        parts, links = list(self.parts), []
        for index, line in zip(self.indices, lines, strict=True):
            parts[index] = line["text"]
        before = [(0, 0)]  # characters before each part, of the source and of the translation
        for old, new in zip(self.parts, parts, strict=True):
            before.append((before[-1][0] + len(old), before[-1][1] + len(new)))
        for index, line in zip(self.indices, lines, strict=True):
            source, target = before[index]
            links += [[a + source, b + source, c + target, d + target] for a, b, c, d in line.get("alignment", ())]
        aligned = all("alignment" in line for line in lines)
        return {"text": "".join(parts), **({"alignment": links} if aligned else {})}

    def encoded(self, text: str) -> bytes:
        return text.encode()


Content = Text | Document


def rendered(document: Document, translations: Sequence[Found]) -> Found:
    return {"text": document.render([translation["text"] for translation in translations])}


def web_page(text: str, target: str) -> Document:
    return WebPage(text, Encoding(), ReadOptions(target))


async def upload(fields: Mapping[str, Any], char_limit: int) -> tuple[str, bytes]:
    """Returns the extension and the bytes of an uploaded file. Raises Refusal for one that is not translated here."""
    file = fields.get("file")
    if not isinstance(file, UploadFile) or not file.filename:
        raise Refusal(400, "Invalid request: missing file parameter")
    extension = PurePath(file.filename).suffix.lower()
    if extension not in FILES:
        raise Refusal(400, f"Invalid request: file format not supported; known: {', '.join(FILES)}")
    data = await file.read()
    if len(data) > 4 * char_limit:  # no encoding has more bytes for a character
        raise Refusal(413, f"Invalid request: request exceeds text limit ({char_limit})")
    return extension, data


def content_of(extension: str, data: bytes, target: str) -> Content:
    """Reads an uploaded file. Raises Refusal, with the line, for what is none of its format."""
    format = format_of(f"file{extension}")
    try:
        if format is None:
            return Text(data.decode("utf-8-sig"))
        return read_document(data, format, "the file", ReadOptions(target))
    except UnicodeDecodeError as error:
        raise Refusal(400, "Invalid request: the file is not UTF-8") from error
    except ValueError as error:
        raise Refusal(400, f"Invalid request: {error}") from error
