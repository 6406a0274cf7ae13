"""uvicorn's HTTP/1.1 with a time limit for the head of a request, which else could come one byte an hour."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10  # that a client may take for the head of a request


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
