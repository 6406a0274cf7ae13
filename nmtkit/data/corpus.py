"""Raw parallel text: finds and opens the files of a corpus, decompresses them and divides them into blocks of lines.

Files are bytes. A line ends at \\n only; the last line may lack its \\n. Every reader removes a byte-order mark at the
beginning of a file and a carriage return at the end of a line, and logs a warning with the number of removed carriage
returns. Bytes that are not UTF-8 raise an error with file and line. Memory is bounded, because the text of a line
that exceeds a size limit is not kept.
"""

import bz2
import codecs
import gzip
import io
import logging
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
CHUNK = 1 << 20
BLOCK_LINES = 8192
BLOCK_BYTES = 4 << 20  # per side; a single line may exceed this size
LINE_FEED = ord("\n")
# A frame begins with one of these numbers (RFC 8878). The last 4 bits of the second number may have any value.
ZSTD_MAGIC, ZSTD_SKIPPABLE_MAGIC = 0xFD2FB528, 0x184D2A50

log = logging.getLogger("nmtkit")


@dataclass(frozen=True)
class ParallelFiles:
    """The two files of a corpus, a tag to put before every source line, and a file with the word alignments."""

    source: Path
    target: Path
    tag: str | None = None
    alignments: Path | None = None

    def paths(self) -> list[Path]:
        return [self.source, self.target, *([] if self.alignments is None else [self.alignments])]


def locate(prefix: str, language: str) -> Path:
    """Returns the path of the file `prefix.language`, with the suffix of its compression if the file is compressed.

    Raises FileNotFoundError if no such file exists, and ValueError if several exist or the file is empty.
    """
    plain = f"{prefix}.{language}"
    paths = [path for path in (Path(plain + suffix) for suffix in ("", *COMPRESSIONS)) if path.is_file()]
    if not paths:
        raise FileNotFoundError(f"no such file: {plain} (with or without the suffix {', '.join(COMPRESSIONS)})")
    if len(paths) > 1:
        raise ValueError(f"both {paths[0]} and {paths[1]} exist; remove or rename one")
    with open_bytes(paths[0]) as file:
        if not file.read(1):
            raise ValueError(f"{paths[0]} is empty")
    return paths[0]


# --- compressed files -----------------------------------------------------------------------------------------------


def is_compressed(path: Path) -> bool:
    return path.suffix in COMPRESSIONS


def open_bytes(path: Path) -> io.BufferedReader:
    """Opens a file for reading. The suffix selects the decompression.

    Reading raises ValueError with the path if compressed data is damaged or truncated. Raises ImportError if the
    package for .zst is missing.
    """
    file: Any
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise ImportError(f"{path} is compressed with zstd; pip install 'nmtkit[zstd]' to read it") from error
        file = zstandard.open(path, "rb")
    elif path.suffix in COMPRESSIONS:
        openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        file = openers[path.suffix](path)
    else:
        return path.open("rb")
    return io.BufferedReader(_Decompressed(file, path), CHUNK)


class _Decompressed(io.RawIOBase):
    """A decompressed file. Reading raises ValueError with `path` if the data is damaged or truncated."""

    def __init__(self, file: Any, path: Path) -> None:
        self._file, self._path = file, path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        try:
            data = self._file.read(len(view))
        except (EOFError, zlib.error, lzma.LZMAError) as error:
            raise ValueError(f"{self._path} is damaged or truncated: {error}") from error
        except OSError as error:
            if error.errno is not None:
                raise
            # gzip and bz2 report bad data as an OSError without errno
            raise ValueError(f"{self._path} is damaged or is not a {self._path.suffix} file: {error}") from error
        except Exception as error:
            if self._path.suffix != ".zst":  # the error class of zstandard is not imported here
                raise
            raise ValueError(f"{self._path} is damaged: {error}") from error
        if not data and self._path.suffix == ".zst":
            check_zstd_end(self._path)
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def check_zstd_end(path: Path) -> None:
    """Raises ValueError if the last frame of a .zst file is incomplete. The package zstandard does not report this.

    Reads the headers of all frames and blocks (RFC 8878, section 3.1).
    """
    import zstandard

    size = path.stat().st_size
    position = 0
    with path.open("rb") as file:
        while position < size:
            file.seek(position)
            start = file.read(18)  # size of the largest frame header
            magic = int.from_bytes(start[:4], "little")
            if magic & ~0xF == ZSTD_SKIPPABLE_MAGIC:
                position += 8 + int.from_bytes(start[4:8], "little")
                continue
            try:
                position += zstandard.frame_header_size(start)
            except zstandard.ZstdError:
                break  # the file ends inside a header; the error is raised below
            last = False
            while not last and position < size:
                file.seek(position)
                header = int.from_bytes(file.read(3), "little")
                last, kind = bool(header & 1), header >> 1 & 3
                position += 3 + (1 if kind == 1 else header >> 3)  # a block of kind 1 (RLE) holds one byte
            position += 4 if start[4] & 4 else 0  # size of the checksum
            if not last:
                position = size + 1
    if position != size:
        raise ValueError(f"{path} is damaged or truncated: it ends within a frame")


# --- lines ----------------------------------------------------------------------------------------------------------


def decode(text: bytes, path: Path, first_line: int) -> str:
    """Decodes strict UTF-8. `first_line` is the number, from 1, of the first line of `text` in the file `path`.

    Raises ValueError with file and line for bytes that are not UTF-8.
    """
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + text.count(b"\n", 0, error.start)
        byte = error.start - text.rfind(b"\n", 0, error.start)
        raise ValueError(f"{path}:{line}: byte {byte} of the line is not UTF-8 ({error.reason})") from error


@dataclass
class LineDecoder:
    """Decodes the lines of one file. Each call gets some whole lines. Counts the removed carriage returns."""

    path: Path
    next_line: int = 1
    carriage_returns: int = 0  # number of carriage returns removed from the ends of lines
    has_byte_order_mark: bool = False

    def lines(self, text: bytes) -> list[str]:
        """Decodes the next lines of the file. The last line may lack its \\n.

        Raises ValueError with file and line for bytes that are not UTF-8.
        """
        if self.next_line == 1 and text.startswith(codecs.BOM_UTF8):
            self.has_byte_order_mark = True
            text = text[len(codecs.BOM_UTF8) :]
        text = text.removesuffix(b"\n")
        if b"\r" in text:
            self.carriage_returns += text.count(b"\r\n") + text.endswith(b"\r")
            text = text.replace(b"\r\n", b"\n").removesuffix(b"\r")
        lines = decode(text, self.path, self.next_line).split("\n")
        self.next_line += len(lines)
        return lines

    def warn(self) -> None:
        """Logs a warning if a byte-order mark or carriage returns were removed."""
        if self.has_byte_order_mark:
            log.warning("%s: the byte-order mark at its beginning is removed", self.path)
        if self.carriage_returns:
            count = self.carriage_returns
            log.warning(
                "%s: the carriage return at the end of %s is removed", self.path,
                "1 line" if count == 1 else f"{count:,} lines",
            )  # fmt: skip


def without_line_ends_of_windows(text: bytes, begins_file: bool) -> bytes:
    """Removes a byte-order mark and carriage returns at line ends, like `LineDecoder`. Every line must end in \\n."""
    if begins_file:
        text = text.removeprefix(codecs.BOM_UTF8)
    return text.replace(b"\r\n", b"\n") if b"\r" in text else text


def line_lists(path: Path, longest: int) -> Iterator[list[str]]:
    """Yields all lines of a file in order, decoded by `LineDecoder`, in lists of whole lines.

    A line of more than CHUNK bytes and more than `longest` bytes is yielded as "".
    """
    decoder = LineDecoder(path)
    open_line = bytearray()  # text of the last line, whose end has not been read yet
    open_size = 0
    with open_bytes(path) as file:
        while chunk := file.read(CHUNK):
            first, last = chunk.find(b"\n"), chunk.rfind(b"\n")
            head = chunk if first < 0 else chunk[:first]
            open_size += len(head)
            if open_size <= longest:
                open_line += head
            else:
                open_line.clear()
            if first < 0:
                continue
            yield decoder.lines(bytes(open_line) + chunk[first : last + 1])
            open_line = bytearray(chunk[last + 1 :])
            open_size = len(open_line)
    if open_size:
        yield decoder.lines(bytes(open_line))


# --- blocks of pairs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """A range of whole lines of a file. The last line may lack its \\n. `read` deletes a `temporary` file."""

    path: Path
    start: int  # in bytes
    size: int  # in bytes
    temporary: bool = False
    begins_file: bool = False

    def read(self) -> bytes:
        """Returns the lines. Every line ends in \\n. Removes a byte-order mark and carriage returns at line ends."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            text = file.read(self.size)
        if self.temporary:
            self.path.unlink()
        if len(text) != self.size:
            raise ValueError(f"{self.path} became shorter while preprocess was reading it")
        text = text if text.endswith(b"\n") else text + b"\n"
        return without_line_ends_of_windows(text, self.begins_file)


@dataclass(frozen=True)
class Block:
    """The lines of the same range of line numbers in all files. `first_line` is the first line number, from 1.

    An `over_long` block is a single pair with a line that is too long to be read. Only the sizes of the spans are used.
    """

    first_line: int
    lines: int
    source: Span
    target: Span
    alignments: Span | None = None
    over_long: bool = False


class LineReader:
    """Reads a file ahead and finds the ends of the next lines. `take` then takes some of these lines.

    The reader keeps text only if the file is compressed, and only lines of at most `longest` bytes.
    """

    def __init__(self, path: Path, longest: int) -> None:
        self.path = path
        self.taken_bytes = 0
        self.taken_lines = 0
        self._longest = longest
        self._compressed = is_compressed(path)
        self._file = open_bytes(path)
        self._read = 0  # number of bytes read
        self._last_end = 0  # byte position in the file after the last line feed that was read
        self._ends: npt.NDArray[np.int64] = np.empty(0, np.int64)  # ends of lines not taken yet, as byte positions
        # the text of the lines not taken yet, then the text of the open line, whose end has not been read yet
        self._text = bytearray()
        self._open_kept = 0  # number of bytes of the open line at the end of `_text`
        self._at_end = False
        self._removed = LineDecoder(path)  # counts the carriage returns that `Span.read` removes
        self._removed.has_byte_order_mark = self._file.peek(3).startswith(codecs.BOM_UTF8)
        self._ends_in_return = False  # True if the last chunk ends in \\r

    def look_ahead(self) -> npt.NDArray[np.int64]:
        """Returns the ends of the next lines, as byte positions relative to the start of the first of these lines.

        Returns BLOCK_LINES ends, or fewer ends if the lines exceed BLOCK_BYTES or the file ends.
        """
        parts, count = [self._ends], len(self._ends)
        while not self._at_end and count < BLOCK_LINES and self._last_end - self.taken_bytes <= BLOCK_BYTES:
            chunk = self._file.read(CHUNK)
            self._count_removed(chunk)
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

    def _count_removed(self, chunk: bytes) -> None:
        if b"\r" in chunk:
            self._removed.carriage_returns += chunk.count(b"\r\n")
        if self._ends_in_return and chunk[:1] in (b"\n", b""):
            self._removed.carriage_returns += 1
        self._ends_in_return = chunk.endswith(b"\r")

    def _keep(self, chunk: bytes) -> None:
        """Appends a chunk to the text. Drops the text of the open line once the line exceeds `longest` bytes."""
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
        """Takes the next `lines` lines, which have `size` bytes.

        If the file is compressed and `temporary` is not None, writes the lines to the file `temporary`.
        """
        begins_file = self.taken_bytes == 0
        span = Span(self.path, self.taken_bytes, size, begins_file=begins_file)
        if self._compressed and not (lines == 1 and size > self._longest):
            if temporary is not None:
                with temporary.open("wb") as file, memoryview(self._text) as text:
                    file.write(text[:size])
                span = Span(temporary, 0, size, temporary=True, begins_file=begins_file)
            del self._text[:size]
        self.taken_bytes += size
        self.taken_lines += lines
        self._ends = self._ends[lines:]
        return span

    def count_lines(self) -> int:
        """Reads to the end of the file and returns its number of lines. Logs the warnings of `LineDecoder`."""
        self._compressed = False  # do not keep text from here on
        while len(ends := self.look_ahead()):
            self.take(len(ends), int(ends[-1]), None)
        self._removed.warn()
        return self.taken_lines

    def close(self) -> None:
        self._file.close()


def blocks(files: ParallelFiles, folder: Path, longest: int, shard: tuple[int, int] = (1, 1)) -> Iterator[Block]:
    """Yields the lines of a corpus in blocks of up to BLOCK_LINES lines and about BLOCK_BYTES per side.

    The division into blocks depends only on the text. A `shard` (i, n) consists of every n-th block, from block i on.
    Decompressed text is written to files in `folder`. `Span.read` deletes these files. A line of more than `longest`
    bytes and more than BLOCK_BYTES is an `over_long` block of its own.

    Raises ValueError with the counts if the files have different numbers of lines.
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
