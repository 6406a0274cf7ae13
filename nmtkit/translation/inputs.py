"""Reads requests in windows: from files, from a dataset, or from a stream whose writer may be slow."""

import dataclasses
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from nmtkit.data.corpora.corpus import ColumnNames, format_of
from nmtkit.data.corpora.lines import LineDecoder, line_windows
from nmtkit.data.corpora.pairs import windows_of_side
from nmtkit.data.dataset.binarized import Split
from nmtkit.translation.search.types import Request

CHUNK = 1 << 16  # bytes that are read from a stream at a time
TIMEOUT = 0.1  # seconds to wait for more lines of a window


def lines_of_stream(stream: BinaryIO, name: str, size: int) -> Iterator[list[str]]:
    """Yields the lines of a pipe or terminal as they arrive, up to `size` lines at a time.

    If no line arrives for a while, yields the lines that have arrived, or an empty list, so that the caller can flush
    its results. At most a few chunks are read in advance. Raises ValueError in the same cases as `line_windows`.
    """
    chunks: queue.Queue[bytes | OSError] = queue.Queue(maxsize=16)

    def read() -> None:
        try:
            while chunk := stream.read1(CHUNK):  # type: ignore[attr-defined]  # buffered streams have `read1`
                chunks.put(chunk)
            chunks.put(b"")
        except OSError as error:
            chunks.put(error)

    threading.Thread(target=read, daemon=True).start()
    lines: list[str] = []
    rest, decoder = b"", LineDecoder(Path(name))
    while True:
        try:
            chunk = chunks.get(timeout=TIMEOUT)
        except queue.Empty:
            yield lines
            lines = []
            continue
        if isinstance(chunk, OSError):
            raise chunk
        whole, newline, rest = (rest + chunk).rpartition(b"\n") if chunk else (rest, rest[:1] and b"\n", b"")
        if newline:
            lines += decoder.lines(whole + newline)
        while len(lines) >= size:
            yield lines[:size]
            lines = lines[size:]
        if not chunk:
            decoder.warn()
            yield lines
            return


def text_requests(
    paths: Sequence[Path], stream: BinaryIO | None, window: int,
    languages: tuple[str | None, str | None] | None = None, columns: ColumnNames | None = None,
) -> Iterator[list[Request]]:  # fmt: skip
    """Yields requests for the lines of `stream` (standard input), or else for the lines of the files in `paths`.

    With `languages`, the source side of a corpus file such as a .tmx is read. All other files are read as lines.
    `columns` are the columns of both sides in such corpus files.
    """
    if stream is None:
        windows: Iterable[list[str]] = chain.from_iterable(
            line_windows(path, window)
            if languages is None or format_of(path) is None
            else windows_of_side(path, 0, languages, columns, window)
            for path in paths
        )
    else:
        windows = lines_of_stream(stream, "standard input", window)
    for lines in windows:
        yield [Request(line) for line in lines]


def segment_requests(segments: Sequence[str], window: int) -> Iterator[list[Request]]:
    """Yields requests for the segments of a document."""
    for start in range(0, len(segments), window):
        yield [Request(segment) for segment in segments[start : start + window]]


def dataset_requests(split: Split, window: int, with_references: bool) -> Iterator[list[Request]]:
    """Yields requests for the sentences of a subset of a dataset."""
    try:
        texts: Sequence[str] | None = split.source_lines()
    except ValueError:  # a dataset does not store the raw text of its training set
        texts = None
    references = split.references() if with_references else None
    for start in range(0, len(split), window):
        rows = range(start, min(start + window, len(split)))
        ids = [split.source.sentence(row) for row in rows]
        sources = [split.tokenizer.decode_source(row) for row in ids] if texts is None else texts[start : rows.stop]
        yield [
            Request(source, sentence, reference=None if references is None else references[row])
            for row, source, sentence in zip(rows, sources, ids, strict=True)
        ]


def with_fields(windows: Iterable[list[Request]], files: Mapping[str, Path]) -> Iterator[list[Request]]:
    """Adds fields to the requests. `files` maps a field to a file with one value per input line.

    Tabs separate the phrases of `required` and `avoided`. Raises ValueError, with the file and the number of lines, if
    a file is shorter or longer than the input.
    """
    streams = {name: chain.from_iterable(line_windows(path, 1024)) for name, path in files.items()}
    count = 0
    for window in windows:
        columns = {name: list(islice(stream, len(window))) for name, stream in streams.items()}
        for name, lines in columns.items():
            if len(lines) < len(window):
                raise ValueError(f"{files[name]} has {count + len(lines)} lines, fewer than the input")
        count += len(window)
        yield [
            dataclasses.replace(request, **{name: field_value(name, lines[row]) for name, lines in columns.items()})
            for row, request in enumerate(window)
        ]
    for name, stream in streams.items():
        if next(stream, None) is not None:
            raise ValueError(f"{files[name]} has more lines than the input, which has {count}")


def field_value(name: str, line: str) -> Any:
    """Returns the value of a field of a request from a line of a file: phrases, or the line itself."""
    return [phrase for phrase in line.split("\t") if phrase.strip()] if name in ("required", "avoided") else line
