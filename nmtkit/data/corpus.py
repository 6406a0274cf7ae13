"""Raw parallel text: files found by prefix and language, opened whatever their compression, cut into blocks of lines.

Files are bytes. A line ends at \\n and nowhere else; the last one may lack it. Bytes that are not UTF-8 are an error
that names the file and the line. Memory is bounded: of a line longer than a limit, only the size is kept.
"""

import bz2
import codecs
import gzip
import io
import logging
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
CHUNK = 1 << 20
BLOCK_LINES = 8192
BLOCK_BYTES = 4 << 20  # of one side; a block holds at least one line, however long
LINE_FEED = ord("\n")

log = logging.getLogger("nmtkit")


@dataclass(frozen=True)
class ParallelFiles:
    """The two files of a corpus, the tag that goes before its source lines, and the word alignments of its pairs."""

    source: Path
    target: Path
    tag: str | None = None
    alignments: Path | None = None

    def paths(self) -> list[Path]:
        return [self.source, self.target, *([] if self.alignments is None else [self.alignments])]


def locate(prefix: str, language: str) -> Path:
    """Returns the file `prefix.language`, perhaps compressed.

    Raises FileNotFoundError when there is none, ValueError when there are several or it is empty. Warns of a
    byte-order mark and of Windows line ends, which stay in the text.
    """
    plain = f"{prefix}.{language}"
    paths = [path for path in (Path(plain + suffix) for suffix in ("", *COMPRESSIONS)) if path.is_file()]
    if not paths:
        raise FileNotFoundError(f"no such file: {plain} (nor with {', '.join(COMPRESSIONS)})")
    if len(paths) > 1:
        raise ValueError(f"both {paths[0]} and {paths[1]} exist; remove or rename one")
    path = paths[0]
    with open_bytes(path) as file:
        start = read(file, 1 << 16, path)
    if not start:
        raise ValueError(f"{path} is empty")
    if start.startswith(codecs.BOM_UTF8):
        log.warning("%s starts with a byte-order mark, which stays in its first line", path)
    if start.count(b"\r\n") == start.count(b"\n") > 0:
        log.warning("the lines of %s end in \\r\\n; the \\r stays in the text (sed 's/\\r$//' removes it)", path)
    return path


def is_compressed(path: Path) -> bool:
    return path.suffix in COMPRESSIONS


def open_bytes(path: Path) -> IO[bytes]:
    """Opens a file for reading, decompressed by its suffix. Raises ImportError when the package for .zst is missing."""
    openers: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    file: Any
    if path.suffix in openers:
        file = openers[path.suffix](path)
    elif path.suffix == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise ImportError(f"{path} is compressed with zstd; pip install 'nmtkit[zstd]' to read it") from error
        file = io.BufferedReader(zstandard.open(path, "rb"), CHUNK)
    else:
        file = path.open("rb")
    return file


def read(file: IO[bytes], size: int, path: Path) -> bytes:
    """Reads up to `size` bytes. Raises ValueError naming the path when compressed data is damaged or cut short."""
    try:
        return file.read(size)
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error
    except OSError as error:
        if is_compressed(path) and error.errno is None:  # how gzip and bz2 report bad data
            raise ValueError(f"{path} is damaged or not a {path.suffix} file: {error}") from error
        raise
    except Exception as error:
        if path.suffix != ".zst":  # whose package has an error class of its own
            raise
        raise ValueError(f"{path} is damaged: {error}") from error


def decode(text: bytes, path: Path, first_line: int) -> str:
    """Decodes strict UTF-8 of one or more lines, the first of which is line `first_line` (from 1) of `path`.

    Raises ValueError naming file and line.
    """
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + text.count(b"\n", 0, error.start)
        byte = error.start - text.rfind(b"\n", 0, error.start)
        raise ValueError(f"{path}:{line}: byte {byte} of the line is not UTF-8 ({error.reason})") from error


def line_lists(path: Path, longest: int) -> Iterator[list[str]]:
    """Yields all lines of a file in order, a list at a time.

    A line that is longer than a chunk and than `longest` bytes comes as "". Raises ValueError as `read` and `decode`.
    """
    number = 1
    open_line = bytearray()  # bytes read of the line whose end has not been read
    open_size = 0
    with open_bytes(path) as file:
        while chunk := read(file, CHUNK, path):
            first, last = chunk.find(b"\n"), chunk.rfind(b"\n")
            head = chunk if first < 0 else chunk[:first]
            open_size += len(head)
            if open_size <= longest:
                open_line += head
            else:
                open_line.clear()
            if first < 0:
                continue
            lines = decode(bytes(open_line) + chunk[first:last], path, number).split("\n")
            yield lines
            number += len(lines)
            open_line = bytearray(chunk[last + 1 :])
            open_size = len(open_line)
    if open_size:
        yield [decode(bytes(open_line), path, number)]


# --- blocks of pairs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Whole lines of a file, the last of which may lack its \\n. A `temporary` file is removed by reading it."""

    path: Path
    start: int  # bytes
    size: int  # bytes
    temporary: bool = False

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.start)
            text = file.read(self.size)
        if self.temporary:
            self.path.unlink()
        if len(text) != self.size:
            raise ValueError(f"{self.path} has become shorter while it was read")
        return text if text.endswith(b"\n") else text + b"\n"


@dataclass(frozen=True)
class Block:
    """Lines of the two sides that belong together; the first is line `first_line` (from 1) of both files.

    A block that is `over_long` is a single pair, a line of which is too long to be read: its spans only have sizes.
    """

    first_line: int
    lines: int
    source: Span
    target: Span
    alignments: Span | None = None
    over_long: bool = False


class LineReader:
    """Finds where lines end in one file, ahead of the lines that were taken.

    Text is kept only if the file is compressed, and then of no line with more than `longest` bytes.
    """

    def __init__(self, path: Path, longest: int) -> None:
        self.path = path
        self.taken_bytes = 0
        self.taken_lines = 0
        self._longest = longest
        self._compressed = is_compressed(path)
        self._file = open_bytes(path)
        self._read = 0  # bytes
        self._last_end = 0  # of the last line that has been read to its end
        self._ends: npt.NDArray[np.int64] = np.empty(0, np.int64)  # of lines not taken yet, in bytes of the file
        self._text = bytearray()  # of lines not taken yet and of the open line, the one whose end has not been read
        self._open_kept = 0  # bytes of the open line at the end of `_text`
        self._at_end = False

    def look_ahead(self) -> npt.NDArray[np.int64]:
        """Returns where the next lines end, in bytes from the first of them.

        They are BLOCK_LINES lines, or as many as exceed BLOCK_BYTES, or those to the end of the file.
        """
        parts, count = [self._ends], len(self._ends)
        while not self._at_end and count < BLOCK_LINES and self._last_end - self.taken_bytes <= BLOCK_BYTES:
            chunk = read(self._file, CHUNK, self.path)
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == LINE_FEED) + (self._read + 1)
            if self._compressed:
                self._keep(chunk)
            self._read += len(chunk)
            if not chunk:
                self._at_end = True
                if self._read > self._last_end:  # the last line lacks its line feed
                    ends = np.array([self._read])
            if len(ends):
                self._last_end = int(ends[-1])
            parts.append(ends)
            count += len(ends)
        self._ends = np.concatenate(parts)
        return self._ends[:BLOCK_LINES] - self.taken_bytes

    def _keep(self, chunk: bytes) -> None:
        """Appends a chunk to the text, but for the open line once that is longer than `longest`."""
        first = chunk.find(b"\n") + 1
        head = chunk[:first] if first else chunk
        if self._read + len(head) - self._last_end > self._longest:
            del self._text[len(self._text) - self._open_kept :]
            self._open_kept = 0
        else:
            self._text += head
            self._open_kept += len(head)
        if first:
            self._text += chunk[first:]
            self._open_kept = len(chunk) - (chunk.rfind(b"\n") + 1)

    def take(self, lines: int, size: int, temporary: Path | None) -> Span:
        """Takes the next `lines` lines of `size` bytes. Text of a compressed file is written to the file `temporary`,
        unless that is None."""
        span = Span(self.path, self.taken_bytes, size)
        if self._compressed and not (lines == 1 and size > self._longest):
            if temporary is not None:
                with temporary.open("wb") as file, memoryview(self._text) as text:
                    file.write(text[:size])
                span = Span(temporary, 0, size, temporary=True)
            del self._text[:size]
        self.taken_bytes += size
        self.taken_lines += lines
        self._ends = self._ends[lines:]
        return span

    def count_lines(self) -> int:
        """Returns the number of lines of the whole file, reading on to its end."""
        self._compressed = False  # from here on, no text is kept
        while len(ends := self.look_ahead()):
            self.take(len(ends), int(ends[-1]), None)
        return self.taken_lines

    def close(self) -> None:
        self._file.close()


def blocks(files: ParallelFiles, folder: Path, longest: int, shard: tuple[int, int] = (1, 1)) -> Iterator[Block]:
    """Yields a pair of files in blocks of up to BLOCK_LINES lines and about BLOCK_BYTES per side.

    Where blocks begin depends on the text alone. Of `shard` (i, n), every n-th block is yielded. Compressed text is
    put into files in `folder`, which reading the span removes. A line of more than `longest` bytes, and more than
    BLOCK_BYTES, is in a block of its own, which is marked as over-long.

    Raises ValueError when one file has more lines than the other, with both counts.
    """
    longest = max(longest, BLOCK_BYTES)
    readers = [LineReader(path, longest) for path in files.paths()]
    try:
        for index in range(1 << 62):
            ends = [reader.look_ahead() for reader in readers]
            lines = min(map(len, ends))
            if lines == 0:
                break
            lines = max(1, min(int(np.searchsorted(end[:lines], BLOCK_BYTES, side="right")) for end in ends))
            first_line, sizes = readers[0].taken_lines + 1, [int(end[lines - 1]) for end in ends]
            over_long = lines == 1 and max(sizes) > longest
            in_shard = index % shard[1] == shard[0] - 1
            spans = [
                reader.take(lines, size, folder / f"{index}.{number}" if in_shard and not over_long else None)
                for number, (reader, size) in enumerate(zip(readers, sizes, strict=True))
            ]
            if in_shard:
                yield Block(first_line, lines, spans[0], spans[1], spans[2] if len(spans) > 2 else None, over_long)
        check_line_counts(files.paths(), [reader.count_lines() for reader in readers])
    finally:
        for reader in readers:
            reader.close()


def check_line_counts(paths: list[Path], lines: list[int]) -> None:
    """Raises ValueError unless all files have the same number of lines."""
    for path, count in zip(paths[1:], lines[1:], strict=True):
        if count != lines[0]:
            raise ValueError(
                f"{paths[0]} has {lines[0]:,} lines, but {path} has {count:,}: line i of each must belong to pair i"
            )
