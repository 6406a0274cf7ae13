"""Lines as they come in: from files, or from a stream whose writer may be slow."""

import queue
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from nmtkit.data import corpus

CHUNK = 1 << 16  # bytes
PATIENCE = 0.1  # seconds that a window waits for more lines before it goes off with what it has


def from_file(path: Path, size: int) -> Iterator[list[str]]:
    """The lines of a file, perhaps compressed, `size` at a time.

    Raises OSError when it cannot be read, ValueError when it is empty or no UTF-8, naming it and the line.
    """
    first = 1
    with corpus.open_bytes(path) as file:
        while raw := list(islice(file, size)):
            yield corpus.decode(b"".join(raw).removesuffix(b"\n"), path, first).split("\n")
            first += len(raw)
    if first == 1:
        raise ValueError(f"{path} is empty")


def from_stream(stream: BinaryIO, name: str, size: int) -> Iterator[list[str]]:
    """The lines of a pipe or terminal, up to `size` at a time, as they come.

    When none comes for a while, the lines so far go off, or no lines at all: the reader may flush what is ready. At
    most a few chunks are read ahead. Raises ValueError as `from_file` does.
    """
    chunks: queue.Queue[bytes | OSError] = queue.Queue(maxsize=16)

    def read() -> None:
        try:
            while chunk := stream.read1(CHUNK):  # type: ignore[attr-defined]  # buffered streams have it
                chunks.put(chunk)
            chunks.put(b"")
        except OSError as error:
            chunks.put(error)

    threading.Thread(target=read, daemon=True).start()
    lines: list[str] = []
    rest, first = b"", 1
    while True:
        try:
            chunk = chunks.get(timeout=PATIENCE)
        except queue.Empty:
            yield lines
            lines = []
            continue
        if isinstance(chunk, OSError):
            raise chunk
        whole, newline, rest = (rest + chunk).rpartition(b"\n") if chunk else (rest, rest[:1] and b"\n", b"")
        if newline:
            fresh = corpus.decode(whole, Path(name), first).split("\n")
            first += len(fresh)
            lines += fresh
        while len(lines) >= size:
            yield lines[:size]
            lines = lines[size:]
        if not chunk:
            yield lines
            return
