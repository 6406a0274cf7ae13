"""JSON messages over sockets between the server and its workers. Four bytes of length precede the UTF-8 text.

`nmtkit.jobs.workers` exchanges pickles through pipes instead. This module uses JSON, because the messages contain
text of clients, and reading JSON cannot run code. The server reads the messages with asyncio.
"""

import asyncio
import json
import socket
import struct
from typing import Any

LENGTH = struct.Struct("!I")


def packed(message: Any) -> bytes:
    body = json.dumps(message, ensure_ascii=False).encode()
    return LENGTH.pack(len(body)) + body


def send(connection: socket.socket, message: Any) -> None:
    connection.sendall(packed(message))


def receive(connection: socket.socket) -> Any:
    """Returns the next message, or None if the connection has been closed."""
    head = _exactly(connection, LENGTH.size)
    body = None if head is None else _exactly(connection, LENGTH.unpack(head)[0])
    return None if body is None else json.loads(body)


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        try:
            part = connection.recv(size)
        except ConnectionError:
            return None
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


async def read(reader: asyncio.StreamReader) -> Any:
    """Returns the next message, or None if the connection has been closed."""
    try:
        head = await reader.readexactly(LENGTH.size)
        return json.loads(await reader.readexactly(LENGTH.unpack(head)[0]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
