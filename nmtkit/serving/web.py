"""Answers requests for the pages and their files."""

import hashlib
from functools import cache

from starlette.requests import Request
from starlette.responses import Response

from nmtkit.pages.document import asset

TRANSLATOR = "translator.html"
STATIC_FILES = {
    "style.css": "text/css",
    "translator.css": "text/css",
    "translator.js": "text/javascript",
    "files.js": "text/javascript",
    "page.js": "text/javascript",
    "words.js": "text/javascript",
    "client.js": "text/javascript",
    "text.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}

# Browsers run only scripts of this server, load nothing from other servers, and do not embed these pages.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def file(request: Request, name: str) -> Response:
    """Answers with a file of the pages, or with status 304 if the browser already has this file."""
    return _response(request, asset(name).encode(), STATIC_FILES.get(name, "text/html"))


def page(request: Request, html: str) -> Response:
    return _response(request, html.encode(), "text/html")


def _response(request: Request, data: bytes, media_type: str) -> Response:
    headers = {
        "Content-Security-Policy": POLICY,
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # browsers ask each time whether the file has changed
        "ETag": _tag(data),
    }
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=media_type, headers=headers)


@cache
def _tag(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()[:20]}"'
