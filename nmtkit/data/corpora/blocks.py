"""Divides a corpus into blocks of lines for the workers of `preprocess`.

A block has only the positions of its lines in the files. Workers read and decode the text. Memory is bounded, because
the text of a line above a size limit is not kept.
"""

import codecs
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nmtkit.data.corpora.compression import is_compressed, open_bytes
from nmtkit.data.corpora.corpus import Corpus, check_line_counts
from nmtkit.data.corpora.lines import LineDecoder, without_carriage_returns
from nmtkit.data.corpora.pairs import pairs

CHUNK = 1 << 20
BLOCK_LINES = 8192
BLOCK_BYTES = 4 << 20  # maximum bytes of a side of a block; a single line may exceed this size
LINE_FEED = ord("\n")


@dataclass(frozen=True)
class LineSpan:
    """A range of whole lines of a file. The last line may lack its \\n. If `temporary`, `read` deletes the file."""

    path: Path
    start: int  # position in bytes
    size: int  # size in bytes
    temporary: bool = False
    begins_file: bool = False

    def read(self) -> bytes:
        """Returns the lines, each with \\n at its end. Removes a byte-order mark and carriage returns at line ends.

        Raises ValueError if the file has become shorter.
        """
        with self.path.open("rb") as file:
            file.seek(self.start)
            text = file.read(self.size)
        if self.temporary:
            self.path.unlink()
        if len(text) != self.size:
            raise ValueError(f"{self.path} became shorter while preprocess was reading it")
        text = text if text.endswith(b"\n") else text + b"\n"
        return without_carriage_returns(text, self.begins_file)


@dataclass(frozen=True)
class LineBlock:
    """A range of lines of a corpus, with a span for each file: the place of these lines in the file.

    `first_line` is the position of the first line in the file, counted from 1. `lines` is the number of lines. An
    `over_long` block has one line that is too long to be read. The pair of this line counts as dropped. Reports show
    the sizes of both sides in bytes, instead of the text.
    """

    first_line: int
    lines: int
    spans: tuple[LineSpan, ...]
    over_long: bool = False


class LineReader:
    """Reads a file ahead and finds the ends of the next lines. `take` returns the span of the next lines.

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
        self._ends: npt.NDArray[np.int64] = np.empty(0, np.int64)  # byte positions of the ends of lines not taken yet
        # if the file is compressed: the text of the lines not taken yet, then the text of the open line
        # (the open line is the line whose end has not been read yet)
        self._text = bytearray()
        self._open_kept = 0  # number of bytes of the open line at the end of `_text`
        self._at_end = False
        self._removed = LineDecoder(path)  # counts the carriage returns that `LineSpan.read` removes
        self._removed.has_byte_order_mark = self._file.peek(3).startswith(codecs.BOM_UTF8)
        self._ends_in_return = False  # whether the last chunk ends in \r

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
                if self._read > self._last_end:  # the last line has no line feed
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

    def take(self, lines: int, size: int, temporary: Path | None) -> LineSpan:
        """Returns the span of the next `lines` lines, which have `size` bytes, and removes these lines from the reader.

        If the file is compressed and `temporary` is not None, writes the lines to the file `temporary`.
        """
        span = LineSpan(self.path, self.taken_bytes, size, begins_file=self.taken_bytes == 0)
        if self._compressed and not (lines == 1 and size > self._longest):
            if temporary is not None:
                with temporary.open("wb") as file, memoryview(self._text) as text:
                    file.write(text[:size])
                span = replace(span, path=temporary, start=0, temporary=True)
            del self._text[:size]
        self.taken_bytes += size
        self.taken_lines += lines
        self._ends = self._ends[lines:]
        return span

    def count_lines(self) -> int:
        """Reads the rest of the file. Returns the number of lines in the file. Logs the warnings of `LineDecoder`."""
        self._compressed = False  # text is not kept from here on
        while len(ends := self.look_ahead()):
            self.take(len(ends), int(ends[-1]), None)
        self._removed.warn()
        return self.taken_lines

    def close(self) -> None:
        self._file.close()


def blocks(paths: Sequence[Path], folder: Path, longest: int, shard: tuple[int, int] = (1, 1)) -> Iterator[LineBlock]:
    """Yields the lines of several files in blocks of up to BLOCK_LINES lines and about BLOCK_BYTES per file.

    The division into blocks depends only on the text. A `shard` (i, n) has every n-th block, starting with block i. i
    counts from 1.

    Text that is decompressed or extracted is written to files in `folder`. `LineSpan.read` deletes these files. A line
    of more than `longest` bytes and more than BLOCK_BYTES is a separate `over_long` block.

    Raises ValueError with the counts if the files have different numbers of lines.
    """
    longest = max(longest, BLOCK_BYTES)
    with ExitStack() as stack:
        readers = [stack.enter_context(closing(LineReader(path, longest))) for path in paths]
        for index in count():
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
                yield LineBlock(first_line, lines, tuple(spans), over_long)
        check_line_counts(list(paths), [reader.count_lines() for reader in readers])


def extracted_blocks(
    corpus: Corpus, folder: Path, longest: int, shard: tuple[int, int] = (1, 1)
) -> Iterator[LineBlock]:
    """Yields the blocks of a corpus whose single file has both sides, such as .tmx. See `blocks` for the parameters."""
    longest = max(longest, BLOCK_BYTES)
    for index, part in enumerate(pairs(corpus, BLOCK_LINES, BLOCK_BYTES)):
        if index % shard[1] != shard[0] - 1:
            continue
        texts = ["".join(line + "\n" for line in lines).encode() for lines in (part.sources, part.targets)]
        spans = [LineSpan(folder / f"{index}.{i}", 0, len(text), temporary=True) for i, text in enumerate(texts)]
        over_long = len(part) == 1 and max(map(len, texts)) > longest + 1  # the texts end in a line feed
        for span, text in zip(spans, texts, strict=True):
            if not over_long:
                span.path.write_bytes(text)
        yield LineBlock(part.first, len(part), tuple(spans), over_long)
