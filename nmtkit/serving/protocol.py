"""uvicorn's HTTP/1.1, stricter: with a time limit for the head of a request, and without heads that are ambiguous."""

import asyncio
import re
from typing import Any

from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10  # that a client may take for the head of a request

_HOST = re.compile(rb"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")


class HttpProtocol(H11Protocol):
    """Closes a connection whose client begins a request and does not finish its head in time."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.deadline = self.loop.call_later(HEADER_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        reading_head = self.cycle is None or self.cycle.response_complete
        if not reading_head and self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        elif reading_head and self.deadline is None and not self.transport.is_closing():
            self.deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        super().connection_lost(exc)


class UnambiguousRequests:
    """An ASGI application around another, which gets no request that a proxy before it might read otherwise.

    h11 takes a body's length from Transfer-Encoding where there is a Content-Length too; a proxy that does not would
    take the rest of the body for the next request, of whoever comes next. The connection of such a request is closed.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        wrong = ambiguity(scope["headers"]) if scope["type"] == "http" else None
        respond = self.app if wrong is None else JSONResponse({"error": wrong}, 400, {"Connection": "close"})
        await respond(scope, receive, send)


def ambiguity(headers: list[tuple[bytes, bytes]]) -> str | None:
    """Returns what can be understood in two ways in the head of a request, or None."""
    names = [name for name, _ in headers]
    if b"content-length" in names and b"transfer-encoding" in names:
        return "Invalid request: it has both a Content-Length and a Transfer-Encoding"
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or not all(_HOST.fullmatch(host) for host in hosts):
        return "Invalid request: its Host is no name or address"
    return None
