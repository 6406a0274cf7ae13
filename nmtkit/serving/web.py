"""Answers requests for the pages: the translator with its files, and the documentation of the HTTP interface."""

import hashlib
import json
import shlex
from functools import lru_cache
from pathlib import PurePath
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nmtkit.pages.document import asset, render
from nmtkit.serving.interface import EXAMPLE_URL, MULTIPART, Json

TRANSLATOR = "translator.html"
LANGUAGES = ("de", "es", "fr", "it", "ja", "pl", "zh")  # the English translator page is translated into these languages
SCRIPTS = ("translator", "files", "page", "words", "client", "alternatives", "messages", "text")
STATIC_FILES = (
    *("style.css", "translator.css", "icon.svg"),
    *(f"{name}.js" for name in SCRIPTS),
    *(f"messages.{code}.json" for code in LANGUAGES),
)
MEDIA_TYPES = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".json": "application/json",
    ".svg": "image/svg+xml",
}  # fmt: skip

# Browsers run only scripts of this server, load nothing from other servers, and do not show these pages in frames.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def file(request: Request, name: str) -> Response:
    """Answers with a file of the pages, or with status 304 if the browser already has this file."""
    return answer(request, asset(name).encode(), MEDIA_TYPES[PurePath(name).suffix])


def answer(request: Request, data: bytes, media_type: str = "text/html") -> Response:
    headers = {
        "Content-Security-Policy": POLICY,
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # browsers ask each time whether the file has changed
        "ETag": _tag(data),
    }
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=media_type, headers=headers)


@lru_cache(64)  # limited, because /docs contains the Host of the request and so has many versions
def _tag(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()[:20]}"'


# --- documentation ----------------------------------------------------------------------------------------------------


def documentation(contents: Json, base_url: str) -> str:
    """Returns the HTML of the page that documents the service for its users.

    `contents` is the OpenAPI document of the service. The page has a section for each path: the fields of the request,
    an example of the answer, the errors, and a curl command. `base_url` is the address of the service in the commands.
    """
    routes = [
        {
            "path": path,
            "methods": [method.upper() for method in operations],
            "summary": operation["summary"],
            "command": command(f"{base_url}{path}", operation.get("requestBody")),
            "fields": _field_rows(operation.get("requestBody")),
            "media_types": list(operation.get("requestBody", {}).get("content", ())),
            "answer": _shown(answer["example"]).replace(EXAMPLE_URL, base_url),
            "errors": [(status, each["description"]) for status, each in operation["responses"].items()][1:],
        }
        for path, operations in contents["paths"].items()
        for operation in [next(iter(operations.values()))]
        for answer in [next(iter(operation["responses"]["200"]["content"].values()))]
    ]
    return render("interface.html", routes=routes, version=contents["info"]["version"])


def command(url: str, body: Json | None) -> str:
    """Returns a curl command that sends the example in `body`, a `requestBody` of OpenAPI. None sends no body."""
    words = [shlex.quote(url)]
    if body is not None:
        media_type, content = next(iter(body["content"].items()))
        example = content["schema"]["examples"][0]
        if media_type == MULTIPART:
            words += [f"-F {shlex.quote(f'{name}={value}')}" for name, value in example.items()]
        else:
            words.append(f"-H {shlex.quote(f'Content-Type: {media_type}')}")
            words.append(f"-d {shlex.quote(json.dumps(example, ensure_ascii=False))}")
    return " \\\n  ".join([f"curl {words[0]}", *words[1:]])


def _field_rows(body: Json | None) -> list[Json]:
    if body is None:
        return []
    schema = next(iter(body["content"].values()))["schema"]
    return [
        {"name": name, "required": name in schema["required"], "about": field["description"], "values": _values(field)}
        for name, field in schema["properties"].items()
    ]


def _values(field: Json) -> str:
    """Describes the allowed values of a field in words."""
    if "enum" in field:
        return ", ".join(field["enum"])
    if "minimum" in field:
        return f"{field['minimum']} to {field['maximum']}"
    return "true, false" if field.get("type") == "boolean" else ""


def _shown(example: Any) -> str:
    return example if isinstance(example, str) else json.dumps(example, ensure_ascii=False, indent=2)
