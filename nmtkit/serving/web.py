"""Routes for browsers: the translator, the interface as a page, and the files that these ask for."""

import hashlib
from functools import cache

from starlette.requests import Request
from starlette.responses import Response

from nmtkit.pages.document import asset

TRANSLATOR = "translator.html"
FILES = {
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

# No script but these files, nothing from elsewhere, and no page around these pages.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def file(request: Request, name: str) -> Response:
    """Returns a file of the pages, or 304 where the browser has it already."""
    return _answer(request, asset(name).encode(), FILES[name])


def page(request: Request, html: str) -> Response:
    return _answer(request, html.encode(), "text/html")


def _answer(request: Request, contents: bytes, kind: str) -> Response:
    headers = {
        "Content-Security-Policy": POLICY,
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # asked for again each time, and sent again where it has changed
        "ETag": _tag(contents),
    }
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(contents, media_type=kind, headers=headers)


@cache
def _tag(contents: bytes) -> str:
    return f'"{hashlib.sha256(contents).hexdigest()[:20]}"'
