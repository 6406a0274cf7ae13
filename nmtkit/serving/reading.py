"""Reads requests with limited memory: the fields of the query string and the body, and the lines of their texts.

A text, a web page or an uploaded document is split into lines. The translated lines are joined to a whole text again.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import PurePath
from typing import Any, TypeVar
from urllib.parse import parse_qs

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from nmtkit.config.files import parse_json
from nmtkit.serving.fair_queue import LineResult
from nmtkit.serving.refusal import RETRY, Refusal
from nmtkit.text.alignment import words
from nmtkit.text.documents import EXTENSIONS as DOCUMENT_EXTENSIONS
from nmtkit.text.documents import Document, ReadOptions, TagRules, WebPage, check_text, format_of, read_document
from nmtkit.text.documents.encoding import Encoding, decode
from nmtkit.text.markup import marked

BYTES_PER_CHARACTER = 12  # maximum bytes of a character in JSON: two escapes of six bytes each
OTHER_BYTES = 65_536  # maximum bytes of a body in addition to its text
BODIES_BYTES = 256 * 2**20  # maximum bytes of the bodies of all requests together, apart from short bodies
LONG_TEXT = 10_000  # texts with more characters or bytes are handled by the thread of long texts
MAX_FIELDS = 5000
DISCONNECTED = "the client has disconnected"  # the work for the client is cancelled with this message
MEDIA_TYPES = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data", "")  # "": not declared
EXTENSIONS = (".txt", *DOCUMENT_EXTENSIONS)  # extensions of files that can be uploaded

T = TypeVar("T")

_BOUNDARY = re.compile(rb"[ !#-\[\]-~]{1,200}")  # boundary of a multipart form
_NEWLINE = re.compile(r"\r\n|\r|\n")
_LINE = re.compile(r"\S(?:[^\r\n]*\S)?")  # a line without the white space around the line
_WHOLE = re.compile(r"\S(?:.*\S)?", re.DOTALL)  # a whole text without the white space around the text


def body_fields(headers: Headers, body: bytes) -> dict[str, Any]:
    """Returns the fields of a body that is a JSON object or a form. A repeated field of a form has a list of values.

    Raises Refusal for an invalid body. Takes time for a long body, so it is called in a thread.
    """
    media_type = _media_type(headers)
    if media_type == "multipart/form-data":
        return asyncio.run(_multipart(headers, body))
    if media_type != "application/json" and (media_type or body.lstrip()[:1] != b"{"):
        return decoded_form(body, "form")
    try:
        fields = parse_json(body)
    except ValueError as error:
        raise Refusal(400, "Invalid request: the body is not JSON in UTF-8") from error
    if not isinstance(fields, dict):
        raise Refusal(400, "Invalid request: the JSON is not an object")
    return fields


def _media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


class BodyMemory:
    """Bounds the memory of the bodies of all requests.

    Beyond BODIES_BYTES, only a body of at most OTHER_BYTES is accepted, so slow clients with large bodies do not
    block short requests.
    """

    bytes = 0  # size of the bodies in memory

    @contextlib.contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that counts bytes and raises Refusal 429 at the limit. Releases the bytes at the end."""
        size = 0

        def hold(count: int) -> None:
            nonlocal size
            if size + count > OTHER_BYTES and self.bytes + count > BODIES_BYTES:
                message = "the server receives too many large requests; try again later"
                raise Refusal(429, message, {**RETRY, "Connection": "close"})
            size += count
            self.bytes += count

        try:
            yield hold
        finally:
            self.bytes -= size


class TextThreads:
    """Runs work on texts in threads, so that the event loop stays free.

    All long texts share one thread, so short texts do not wait for long ones. Work that has not begun is dropped if its
    client disconnects.
    """

    def __init__(self) -> None:
        self.short = ThreadPoolExecutor(thread_name_prefix="short-texts")
        self.long = ThreadPoolExecutor(1, thread_name_prefix="long-texts")

    async def run(self, length: int, function: Callable[..., T], *arguments: Any) -> T:
        """Returns the result of a function that reads or writes texts of this length, in characters or bytes."""
        executor = self.long if length > LONG_TEXT else self.short
        return await asyncio.get_running_loop().run_in_executor(executor, partial(function, *arguments))


async def body(request: Request, char_limit: int, hold: Callable[[int], None]) -> bytes:
    """Returns the body. `hold` counts its bytes, as in `BodyMemory.body`.

    Raises Refusal 415 for an unsupported body, 413 as soon as the body is too large, and the errors of `hold`.
    """
    limit = BYTES_PER_CHARACTER * char_limit + OTHER_BYTES
    if _media_type(request.headers) not in MEDIA_TYPES:
        raise Refusal(415, "Invalid request: send JSON (application/json) or a form", {"Connection": "close"})
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
        raise Refusal(415, "Invalid request: the body is compressed; send it without Content-Encoding")
    too_large = Refusal(413, f"Invalid request: the body is larger than {limit} bytes", {"Connection": "close"})
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        hold(len(part))
        parts.append(part)
    return b"".join(parts)


async def unless_disconnected(request: Request, work: Awaitable[Any]) -> Any:
    """Returns the result of `work`. If the client disconnects, cancels the work and raises ClientDisconnect.

    The cancellation has the message DISCONNECTED, so that the work can distinguish it from a timeout.
    """

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            tasks[0].cancel(DISCONNECTED)
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            if not task.cancelling():
                task.cancel()


def decoded_form(data: bytes, name: str) -> dict[str, Any]:
    """Returns the fields of a form. A repeated field has a list of values.

    Raises Refusal if the form is invalid. The message calls the form `name`.
    """
    try:
        fields = parse_qs(data.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise Refusal(400, f"Invalid request: the {name} is not a form in UTF-8") from error
    return _unlisted(fields)


def _unlisted(fields: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Returns the fields. The value of a field that occurs once replaces the list of its values."""
    return {name: values if len(values) > 1 else values[0] for name, values in fields.items()}


class _Utf8Parser(MultiPartParser):
    """A parser of forms in UTF-8. Starlette's parser reads a text that is not UTF-8 as Latin-1."""

    def on_part_end(self) -> None:
        if self._current_part.file is None:
            self._current_part.data.decode()
        super().on_part_end()


async def _multipart(headers: Headers, body: bytes) -> dict[str, Any]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    # The `charset` of the client is not used: some codecs take quadratic time, and Python caches every unknown name.
    _, options = parse_options_header(headers["content-type"])
    boundary = options.get(b"boundary", b"")
    if not _BOUNDARY.fullmatch(boundary):
        raise Refusal(400, "Invalid request: the form has no valid boundary")
    utf8_headers = Headers({"content-type": f'multipart/form-data; boundary="{boundary.decode()}"'})
    parser = _Utf8Parser(utf8_headers, stream(), max_files=1, max_fields=MAX_FIELDS, max_part_size=max(1, len(body)))
    parser.spool_max_size = len(body) + 1  # keeps the parts of the form in memory, not on disk
    try:
        form = await parser.parse()
    except (MultiPartException, HTTPException, ValueError, LookupError) as error:
        raise Refusal(400, "Invalid request: the form is damaged") from error
    return _unlisted({name: form.getlist(name) for name in form})


# --- texts and documents ----------------------------------------------------------------------------------------------


class PlainText:
    """A plain text, split into lines and the white space around each line. Translations keep the white space.

    Without `by_line`, the text is translated as a single line, and a line end within it counts as a space. The bytes of
    the translation have the encoding and the byte order mark of `encoding`.
    """

    protects = False

    def __init__(self, text: str, by_line: bool = True, encoding: Encoding | None = None) -> None:
        self.text, self.encoding = text, encoding or Encoding()
        # start and end of each line, or of the whole text, without the white space around it
        self.spans = [match.span() for match in (_LINE if by_line else _WHOLE).finditer(text)]

    @property
    def segments(self) -> list[str]:
        return [_NEWLINE.sub(" ", self.text[start:end]) for start, end in self.spans]

    def rendered(self, lines: Sequence[LineResult]) -> LineResult:
        """Returns the translation of the whole text, with the line ends and the white space of the source.

        `lines` are the translations of `segments`. If all of them have an alignment, the result also has an alignment:
        the same links, but with positions in the whole source and in the whole translation.
        """
        parts: list[str] = []
        # position: end of the last line in the source; length: number of characters of the translation so far
        links, position, length = [], 0, 0
        for (start, end), line in zip(self.spans, lines, strict=True):
            offset = length + start - position
            links += [[a + start, b + start, c + offset, d + offset] for a, b, c, d in line.get("alignment", ())]
            parts += [self.text[position:start], line["text"]]
            position, length = end, offset + len(line["text"])
        result: LineResult = {"text": "".join([*parts, self.text[position:]])}
        if all("alignment" in line for line in lines):
            result["alignment"] = links
        return result

    def encoded(self, text: str) -> bytes:
        return self.encoding.encode(text)


Content = PlainText | Document


def rendered(content: Content, lines: Sequence[LineResult]) -> LineResult:
    """Returns the translation of a text or a document. `lines` are the translations of its segments.

    Only the translation of a plain text can have an alignment.
    """
    if isinstance(content, PlainText):
        return content.rendered(lines)
    return {"text": content.render([line["text"] for line in lines])}


def without_markup(content: Content) -> str:
    """Returns the translatable text of a plain text or a document, without tags."""
    if isinstance(content, PlainText):
        return content.text
    return "\n".join(marked(segment).text for segment in content.segments)


def unchanged(line: str) -> LineResult:
    """Returns a line as its own translation: every word is linked to itself."""
    return {"text": line, "alignment": [[*span, *span] for span in words(line)]}


def web_page(text: str, target: str, tags: TagRules | None = None) -> Document:
    return WebPage(text, Encoding(), ReadOptions(target, tags=tags or TagRules()))


def listed(texts: Any) -> list[Any]:
    """Returns the texts of a field, which is a text or a list of texts, as a list."""
    return texts if isinstance(texts, list) else [texts]


async def upload(file: Any, char_limit: int, name: str | None = None) -> tuple[str, bytes]:
    """Returns the extension and the bytes of an uploaded file. `name` replaces the name of the file.

    Raises Refusal if the file is missing, is too large, or has an unknown extension.
    """
    if not isinstance(file, UploadFile) or not file.filename:
        raise Refusal(400, "Invalid request: missing file parameter")
    extension = PurePath(name or file.filename).suffix.lower()
    if extension not in EXTENSIONS:
        raise Refusal(400, f"Invalid request: this file format is not supported; supported: {', '.join(EXTENSIONS)}")
    data = await file.read()
    if len(data) > 4 * char_limit:  # a character has at most four bytes in every encoding
        raise Refusal(413, f"Invalid request: the file exceeds the text limit ({char_limit} characters)")
    return extension, data


def content_of(extension: str, data: bytes, *, source: str, target: str, warn: Callable[[str], None]) -> Content:
    """Returns the text or the document in an uploaded file. `source` is the code of its language, or auto.

    `warn` is called with each warning about the document, now and when the document is rendered. Raises Refusal if
    `data` is not a valid file of the format that `extension` names.
    """
    format = format_of(f"file{extension}")
    try:
        if format is None:
            check_text(data, "the file")
            text, encoding = decode(data)
            return PlainText(text, encoding=encoding)
        known = None if source.lower() == "auto" else source
        return read_document(data, format, "the file", ReadOptions(target, source_language=known, warn=warn))
    except ValueError as error:
        raise Refusal(400, f"Invalid request: {str(error).removeprefix('the file: ')}") from error
