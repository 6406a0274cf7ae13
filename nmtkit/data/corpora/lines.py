"""Lines of text files.

Files are bytes. A line ends at \\n only; the last line may lack its \\n. Every reader removes a byte-order mark at the
beginning of a file and a carriage return at the end of a line. `LineDecoder.warn` logs a warning with the number of
removed carriage returns. Bytes that are not UTF-8 raise an error with file and line.
"""

import codecs
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from nmtkit.data.corpora.compression import is_compressed, open_bytes

CHUNK = 1 << 20
WINDOW = 1024  # lines or rows of a corpus that are read at a time
COUNTED = 1 << 31  # maximum bytes of a file whose lines are counted in advance; counting takes about a second

log = logging.getLogger("nmtkit")


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
    """Decodes the lines of one file, several whole lines at a time. Counts the removed carriage returns."""

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
            log.warning("%s: the byte-order mark at the beginning is removed", self.path)
        if self.carriage_returns:
            count = self.carriage_returns
            log.warning(
                "%s: the carriage return at the end of %s is removed", self.path,
                "1 line" if count == 1 else f"{count:,} lines",
            )  # fmt: skip


def without_carriage_returns(text: bytes, begins_file: bool) -> bytes:
    """Removes a byte-order mark and carriage returns at line ends, like `LineDecoder`. Every line must end in \\n."""
    if begins_file:
        text = text.removeprefix(codecs.BOM_UTF8)
    return text.replace(b"\r\n", b"\n") if b"\r" in text else text


def lists_of_lines(path: Path, longest: int) -> Iterator[list[str]]:
    """Yields all lines of a file in order, decoded by `LineDecoder`, in lists of whole lines.

    A line of more than `longest` bytes is yielded as "" if it is read in several chunks of CHUNK bytes.
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


def line_windows(path: Path, size: int = WINDOW) -> Iterator[list[str]]:
    """Yields the lines of a file, which may be compressed, `size` lines at a time.

    Raises OSError if the file cannot be read, and ValueError if the file is empty or is not UTF-8.
    """
    decoder = LineDecoder(path)
    with open_bytes(path) as file:
        while raw := list(islice(file, size)):
            yield decoder.lines(b"".join(raw))
    if decoder.next_line == 1:
        raise ValueError(f"{path} is empty")
    decoder.warn()


def count_lines(paths: Sequence[Path]) -> int | None:
    """Returns the number of lines of all files together, to show progress.

    Returns None if counting is not cheap: for a missing or compressed file, a pipe, and a large file.
    """
    count = 0
    for path in paths:
        if is_compressed(path) or not path.is_file():
            return None
        with path.open("rb") as file:
            lines = count_lines_ahead(file)
        if lines is None:
            return None
        count += lines
    return count


def count_lines_ahead(file: BinaryIO) -> int | None:
    """Returns the number of lines from the position of an unread file to its end. The position does not change.

    Returns None for a pipe and for a large file.
    """
    try:
        descriptor = file.fileno()
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > COUNTED:
            return None
        position, count, last = os.lseek(descriptor, 0, os.SEEK_CUR), 0, b"\n"
        while chunk := os.pread(descriptor, CHUNK, position):
            count, position, last = count + chunk.count(b"\n"), position + len(chunk), chunk[-1:]
    except OSError:  # a stream without a file, or a file that cannot be read
        return None
    return count + (last != b"\n")
