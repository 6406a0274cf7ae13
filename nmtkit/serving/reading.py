"""Reads requests: bodies in bounded memory, fields from JSON or a form. Raises refusals."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

BYTES_PER_CHARACTER = 12  # of JSON, where a character outside the basic plane is two escapes
OTHER_BYTES = 65_536  # of a body, beside its text
MAX_FIELDS = 5000


class Refusal(Exception):  # noqa: N818  # an answer, not a mistake of ours
    """A request that is answered with an error; the message is for whoever asked."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})


async def body_of(request: Request, char_limit: int) -> bytes:
    """Returns the body. Raises Refusal 413 for one that is too large, without reading it to its end."""
    limit = BYTES_PER_CHARACTER * char_limit + OTHER_BYTES
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal(415, "send the text as it is, without a Content-Encoding")
    too_large = Refusal(413, f"the request is larger than {limit} bytes", {"Connection": "close"})
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


async def fields_of(request: Request, char_limit: int) -> dict[str, Any]:
    """Returns the fields of a JSON object or of a form; a field that a form repeats is a list. Raises Refusal."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await body_of(request, char_limit)
    if kind == "multipart/form-data":
        return await _multipart(request, body)
    try:
        if kind == "application/json" or (not kind and body.lstrip()[:1] == b"{"):
            fields = json.loads(body)
            if not isinstance(fields, dict):
                raise Refusal(400, "Invalid request: the JSON is not an object")
            return fields
        if kind in ("application/x-www-form-urlencoded", ""):
            text = body.decode()
            found = parse_qs(text, keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
            return {name: values if len(values) > 1 else values[0] for name, values in found.items()}
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "Invalid request: the body is neither JSON nor a form, in UTF-8") from error
    raise Refusal(415, "Invalid request: send JSON (application/json) or a form")


async def _multipart(request: Request, body: bytes) -> dict[str, Any]:
    async def stream() -> AsyncIterator[bytes]:
        yield body

    parser = MultiPartParser(
        request.headers, stream(), max_files=1, max_fields=MAX_FIELDS, max_part_size=max(1, len(body))
    )
    parser.spool_max_size = len(body) + 1  # nothing goes to a disk
    try:
        form = await parser.parse()
    except (MultiPartException, HTTPException, ValueError, LookupError) as error:
        raise Refusal(400, "Invalid request: the form is damaged") from error
    fields: dict[str, Any] = {}
    for name in form:
        values = form.getlist(name)
        fields[name] = values if len(values) > 1 else values[0]
    return fields


def string(fields: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Returns a field that must be a text. Raises Refusal where it is missing or something else."""
    value = fields.get(name, default)
    if value is None:
        raise Refusal(400, f"Invalid request: missing {name} parameter")
    if not isinstance(value, str):
        raise Refusal(400, f"Invalid request: {name} parameter is not a string")
    return checked(value, name)


def checked(text: str, name: str) -> str:
    """Returns the text. Raises Refusal for half a character, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refusal(400, f"Invalid request: {name} holds half of a surrogate pair") from error
    return text


def texts_of(fields: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Returns the texts of q, and whether it is a list. Raises Refusal."""
    q = fields.get("q")
    if q is None:
        raise Refusal(400, "Invalid request: missing q parameter")
    texts = q if isinstance(q, list) else [q]
    if not all(isinstance(text, str) for text in texts):
        raise Refusal(400, "Invalid request: q parameter is not a string or a list of strings")
    return [checked(text, "q") for text in texts], isinstance(q, list)


def whole_number(fields: Mapping[str, Any], name: str, largest: int) -> int:
    """Returns a field that must be a number from 0 to `largest`; 0 where it is missing. Raises Refusal."""
    value = fields.get(name) or 0
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
        raise Refusal(400, f"Invalid request: {name} parameter is not a number from 0 to {largest}")
    return value


def truth(fields: Mapping[str, Any], name: str) -> bool:
    """Returns a field that must be true or false; false where it is missing. Raises Refusal."""
    value = fields.get(name) or False
    if value in ("true", "false"):  # a form has nothing but strings
        value = value == "true"
    if not isinstance(value, bool):
        raise Refusal(400, f"Invalid request: {name} parameter is neither true nor false")
    return value
