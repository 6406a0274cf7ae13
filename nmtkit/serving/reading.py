"""Reads the fields of a request from its query string and its body, with limited memory."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

BYTES_PER_CHARACTER = 12  # maximum bytes of a character in JSON: two escapes of six bytes each
OTHER_BYTES = 65_536  # maximum bytes of a body in addition to its text
MAX_FIELDS = 5000


class Refusal(Exception):  # noqa: N818  # an answer to the client, not an error of this program
    """An error that becomes the answer to a request, with this status. The message is for the client."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})


def query_fields(request: Request) -> dict[str, Any]:
    """Returns the fields of the query string. A repeated field has a list of values. Raises Refusal."""
    return _decoded_form(request.url.query.encode(), "query string")


async def body_fields(request: Request, char_limit: int) -> dict[str, Any]:
    """Returns the fields of the body, a JSON object or a form. A repeated field of a form has a list of values.

    Raises Refusal for an invalid or unsupported body.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await _body(request, char_limit)
    if media_type == "multipart/form-data":
        return await asyncio.to_thread(lambda: asyncio.run(_multipart(request, body)))
    if media_type == "application/json" or (not media_type and body.lstrip()[:1] == b"{"):
        return await asyncio.to_thread(_json_object, body)
    if media_type in ("application/x-www-form-urlencoded", ""):
        return await asyncio.to_thread(_decoded_form, body, "form")
    raise Refusal(415, "Invalid request: send JSON (application/json) or a form")


async def _body(request: Request, char_limit: int) -> bytes:
    """Returns the body. Raises Refusal 415 for a compressed body, and 413 as soon as the body is too large."""
    limit = BYTES_PER_CHARACTER * char_limit + OTHER_BYTES
    if request.headers.get("content-encoding", "identity") != "identity":
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
        parts.append(part)
    return b"".join(parts)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "Invalid request: the body is not JSON in UTF-8") from error
    if not isinstance(fields, dict):
        raise Refusal(400, "Invalid request: the JSON is not an object")
    return fields


def _decoded_form(data: bytes, name: str) -> dict[str, Any]:
    try:
        fields = parse_qs(data.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise Refusal(400, f"Invalid request: the {name} is not a form in UTF-8") from error
    return {name: values if len(values) > 1 else values[0] for name, values in fields.items()}


async def _multipart(request: Request, body: bytes) -> dict[str, Any]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(
        request.headers, stream(), max_files=1, max_fields=MAX_FIELDS, max_part_size=max(1, len(body))
    )
    parser.spool_max_size = len(body) + 1  # keeps the parts of the form in memory, not on disk
    try:
        form = await parser.parse()
    except (MultiPartException, HTTPException, ValueError, LookupError) as error:
        raise Refusal(400, "Invalid request: the form is damaged") from error
    fields: dict[str, Any] = {}
    for name in form:
        values = form.getlist(name)
        fields[name] = values if len(values) > 1 else values[0]
    return fields
