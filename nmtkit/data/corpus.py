"""Raw parallel text: files found by prefix and language, opened whatever their compression, cut in blocks of lines.

Files are bytes. A line ends at \\n and nowhere else; the last one may lack it. Bytes that are no UTF-8 are an error
that names the file and the line.
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


def locate(prefix: str, language: str) -> Path:
    """The file `prefix.language`, perhaps compressed.

    Raises FileNotFoundError when there is none, ValueError when there are several or it is empty. Warns of a
    byte-order mark and of Windows line ends, which stay in the text.
    """
    plain = f"{prefix}.{language}"
    found = [path for path in (Path(plain + suffix) for suffix in ("", *COMPRESSIONS)) if path.is_file()]
    if not found:
        raise FileNotFoundError(f"no such file: {plain} (nor with {', '.join(COMPRESSIONS)})")
    if len(found) > 1:
        raise ValueError(f"both {found[0]} and {found[1]} exist; remove or rename one")
    with open_bytes(found[0]) as file:
        start = read(file, 1 << 16, found[0])
    if not start:
        raise ValueError(f"{found[0]} is empty")
    if start.startswith(codecs.BOM_UTF8):
        log.warning("%s starts with a byte-order mark, which stays in its first line", found[0])
    if start.count(b"\r\n") == start.count(b"\n") > 0:
        log.warning("the lines of %s end in \\r\\n; the \\r stays in the text (sed 's/\\r$//' takes it out)", found[0])
    return found[0]


def is_compressed(path: Path) -> bool:
    return path.suffix in COMPRESSIONS


def open_bytes(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed as its name says. Raises ImportError when .zst needs a package that is missing."""
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
    """Up to `size` bytes. Raises ValueError naming the path when the compressed data is damaged or cut short."""
    try:
        return file.read(size)
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error
    except OSError as error:
        if is_compressed(path) and error.errno is None:  # gzip's and bz2's word for bad data
            raise ValueError(f"{path} is damaged or no {path.suffix} file: {error}") from error
        raise
    except Exception as error:
        if path.suffix != ".zst":  # whose package has an error class of its own
            raise
        raise ValueError(f"{path} is damaged: {error}") from error


def decode(text: bytes, path: Path, first_line: int) -> str:
    """Strict UTF-8 of one or many lines, the first of which is line `first_line` (from 1) of `path`.

    Raises ValueError naming file and line.
    """
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + text.count(b"\n", 0, error.start)
        byte = error.start - text.rfind(b"\n", 0, error.start)
        raise ValueError(f"{path}:{line}: byte {byte} of the line is no UTF-8 ({error.reason})") from error


# --- blocks of pairs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Bytes of a file: whole lines, the last of which may lack its \\n. `spool` says that we made it, to be removed."""

    path: Path
    start: int
    size: int
    spool: bool = False

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.start)
            text = file.read(self.size)
        if self.spool:
            self.path.unlink()
        if len(text) != self.size:
            raise ValueError(f"{self.path} has become shorter while it was read")
        return text if text.endswith(b"\n") else text + b"\n"


@dataclass(frozen=True)
class Block:
    """Lines of the two sides that belong together; the first is line `first_line` (from 1) of both files."""

    first_line: int
    lines: int
    source: Span
    target: Span


class LineCutter:
    """Finds where lines end in one file, some lines ahead of what has been taken. Keeps text only if compressed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.compressed = is_compressed(path)
        self.taken_bytes = 0
        self.taken_lines = 0
        self._file = open_bytes(path)
        self._read = 0
        self._ends: npt.NDArray[np.int64] = np.empty(
            0, np.int64
        )  # of lines not taken yet, counted in bytes of the file
        self._text = bytearray()  # from taken_bytes on
        self._done = False

    def look_ahead(self, lines: int) -> npt.NDArray[np.int64]:
        """Where the next lines end, at most so many, in bytes from the first; fewer only at the end of the file."""
        found = [self._ends]
        count = len(self._ends)
        while count < lines and not self._done:
            chunk = read(self._file, CHUNK, self.path)
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == LINE_FEED) + (self._read + 1)
            self._read += len(chunk)
            if not chunk:
                self._done = True
                last = next((int(part[-1]) for part in reversed(found) if len(part)), self.taken_bytes)
                if self._read > last:  # the last line lacks its line feed
                    ends = np.array([self._read])
            found.append(ends)
            count += len(ends)
            if self.compressed:
                self._text += chunk
        self._ends = np.concatenate(found)
        return self._ends[:lines] - self.taken_bytes

    def take(self, lines: int, size: int, spool: Path | None) -> Span:
        """The next `lines` lines, which are `size` bytes; from a compressed file, written to `spool`."""
        span = Span(self.path, self.taken_bytes, size)
        if self.compressed:
            assert spool is not None
            with spool.open("wb") as file:
                file.write(memoryview(self._text)[:size])
            del self._text[:size]
            span = Span(spool, 0, size, spool=True)
        self._advance(lines, size)
        return span

    def drop(self, lines: int, size: int) -> None:
        """Passes over the next `lines` lines, which are `size` bytes."""
        del self._text[:size]
        self._advance(lines, size)

    def _advance(self, lines: int, size: int) -> None:
        self.taken_bytes += size
        self.taken_lines += lines
        self._ends = self._ends[lines:]

    def close(self) -> None:
        self._file.close()


def blocks(source: Path, target: Path, spool: Path, part: tuple[int, int] = (1, 1)) -> Iterator[Block]:
    """A pair of files in blocks of up to BLOCK_LINES lines and about BLOCK_BYTES per side.

    Where blocks begin depends on the text alone. Of `part` (i, n), every n-th block is given. Compressed text is put
    in files in the folder `spool`, which reading the span removes.

    Raises ValueError when one file has more lines than the other, giving both counts.
    """
    sides = LineCutter(source), LineCutter(target)
    try:
        for index in range(1 << 62):
            ends = [side.look_ahead(BLOCK_LINES) for side in sides]
            lines = min(len(ends[0]), len(ends[1]))
            if lines == 0:
                break
            lines = max(1, min(int(np.searchsorted(end[:lines], BLOCK_BYTES, side="right")) for end in ends))
            first_line, sizes = sides[0].taken_lines + 1, [int(end[lines - 1]) for end in ends]
            if index % part[1] == part[0] - 1:
                files = [spool / f"{index}.{name}" for name in ("source", "target")]
                spans = [side.take(lines, size, file) for side, size, file in zip(sides, sizes, files, strict=True)]
                yield Block(first_line, lines, *spans)
            else:
                for side, size in zip(sides, sizes, strict=True):
                    side.drop(lines, size)
        check_line_counts((source, target), [_count_lines(side) for side in sides])
    finally:
        for side in sides:
            side.close()


def check_line_counts(files: tuple[Path, Path], lines: list[int]) -> None:
    """Raises ValueError unless both files have as many lines."""
    if lines[0] != lines[1]:
        raise ValueError(
            f"{files[0]} has {lines[0]:,} lines, but {files[1]} has {lines[1]:,}: "
            "line i of one must be the translation of line i of the other"
        )


def _count_lines(side: LineCutter) -> int:
    while len(ends := side.look_ahead(BLOCK_LINES)):
        side.drop(len(ends), int(ends[-1]))
    return side.taken_lines
