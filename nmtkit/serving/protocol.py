"""An HTTP/1.1 protocol for uvicorn that rejects slow requests, and a middleware that rejects ambiguous requests."""

import asyncio
import json
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10  # maximum seconds for the head of a request
FREE_CHUNKS = 1000  # a body of up to this many chunks may have chunks of any size
CHUNK_BYTES = 256  # minimum mean size of the chunks of a body with more than FREE_CHUNKS chunks
ERRORS = {
    413: "Invalid request: the body has too many small chunks",
    431: "Invalid request: the head of the request is too large",
    501: "Invalid request: this Transfer-Encoding is not supported",
}

_ABSOLUTE = re.compile(r"https?://([^/]*)", re.IGNORECASE)
_HOST = re.compile(rb"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")


class BoundedConnection(h11.Connection):
    """A connection that rejects a body of many tiny chunks, because h11 blocks the event loop for 20 µs per chunk."""

    chunks = size = 0  # chunks and bytes of the current body
    status = 400  # status of the answer to an invalid request

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self.chunks = self.size = 0
            elif isinstance(event, h11.Data):
                self.chunks += event.chunk_start
                self.size += len(event.data)
                if self.chunks > FREE_CHUNKS and self.size < CHUNK_BYTES * self.chunks:
                    raise h11.RemoteProtocolError("the chunks are too small", error_status_hint=413)
        except h11.RemoteProtocolError as error:
            self.status = error.error_status_hint
            raise
        return event


class HttpProtocol(H11Protocol):
    """A protocol that closes the connection if a client does not finish the head of a request in time.

    `refused` is called with the status of each request that is not valid HTTP.
    """

    deadline: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, refused: Callable[[int], None], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.conn: BoundedConnection = BoundedConnection(h11.SERVER)
        self.refused = refused

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

    def send_400_response(self, msg: str) -> None:
        """Answers an invalid request with a JSON error and closes the connection."""
        status = HTTPStatus(self.conn.status)
        self.refused(status)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"error": ERRORS.get(status, "Invalid request: this is not valid HTTP/1.1")}).encode()
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("X-Content-Type-Options", "nosniff"),
                ("Connection", "close"),
            ]
            head = h11.Response(status_code=status, headers=headers, reason=status.phrase.encode())
            events = head, h11.Data(data=body), h11.EndOfMessage()
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()


class UnambiguousRequests:
    """Middleware that rejects requests whose length or host is ambiguous, and adds `nosniff` to every answer.

    A proxy in front of the server might interpret an ambiguous request differently. For example, h11 ignores
    Content-Length if there is a Transfer-Encoding. A proxy that ignores Transfer-Encoding would treat the rest of the
    body as the next request, perhaps of a different client. The connection of such a request is closed.

    A request target in absolute form, such as `GET http://example.org/health`, is read according to RFC 9112, section
    3.2.2: the host of the target replaces the header Host.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = None
        if scope["type"] == "http":
            # A proxy of WebSockets may send X-Forwarded-Proto: wss, which uvicorn takes as the scheme.
            scope["scheme"] = "https" if scope["scheme"] in ("https", "wss") else "http"
            if (match := _ABSOLUTE.match(scope["path"])) is not None:
                others = [(name, value) for name, value in scope["headers"] if name != b"host"]
                scope["headers"] = [(b"host", match[1].encode()), *others]
                scope["path"] = scope["path"][match.end() :] or "/"
            reason = ambiguity(scope["headers"])

        async def send_nosniff(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-content-type-options", b"nosniff")]
            await send(message)

        respond = self.app if reason is None else JSONResponse({"error": reason}, 400, {"Connection": "close"})
        await respond(scope, receive, send_nosniff)


def ambiguity(headers: list[tuple[bytes, bytes]]) -> str | None:
    """Returns the reason why the head of a request is ambiguous, or None."""
    names = [name for name, _ in headers]
    if b"content-length" in names and b"transfer-encoding" in names:
        return "Invalid request: it has both a Content-Length and a Transfer-Encoding"
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or not all(_HOST.fullmatch(host) for host in hosts):
        return "Invalid request: its Host must be a single name or address"
    return None
