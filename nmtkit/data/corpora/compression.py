"""Opens compressed files for reading and writing. The suffix of a file selects the compression."""

import bz2
import gzip
import io
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from nmtkit.config.extras import imported

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSIONS = (*_OPENERS, ".zst")
CHUNK = 1 << 20
ZSTD_CHUNK = 1 << 10  # number of compressed bytes to decompress at a time; the result has at most 32 MiB


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSIONS


def open_bytes(path: Path) -> io.BufferedReader:
    """Opens a file for reading. The suffix selects the decompression.

    Reading raises ValueError with the path if compressed data is damaged or truncated. Raises ImportError if the
    package for .zst is missing.
    """
    if not is_compressed(path):
        return path.open("rb")
    suffix = path.suffix.lower()
    file = _ZstdFile(path) if suffix == ".zst" else _OPENERS[suffix](path)
    return io.BufferedReader(_Decompressed(file, path), CHUNK)


def _zstandard(path: Path, purpose: str) -> Any:
    return imported("zstandard", need=f"{path} is compressed with zstd; pip install 'nmtkit[zstd]' {purpose}")


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
        except Exception as error:
            if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
                raise
            # Each package has its own error classes. gzip and bz2 report bad data as an OSError without errno.
            name, suffix = self._path, self._path.suffix
            raise ValueError(f"{name} is damaged or truncated, or is not a {suffix} file: {error}") from error
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class _ZstdFile:
    """A decompressed .zst file. Reading raises EOFError at the end of a truncated file.

    The stream reader of the package zstandard does not report a truncated file, so this class reads frame by frame.
    """

    def __init__(self, path: Path) -> None:
        self._decompressor = _zstandard(path, "to read it").ZstdDecompressor()
        self._file = path.open("rb")
        self._frame: Any = None  # None between two frames
        self._rest = b""  # compressed bytes after the last frame
        self._text = memoryview(b"")  # decompressed bytes that are not read yet; slices of a memoryview copy nothing

    def read(self, size: int) -> memoryview:
        while not self._text and (data := self._rest or self._file.read(ZSTD_CHUNK)):
            self._frame = self._frame or self._decompressor.decompressobj()
            self._text, self._rest = memoryview(self._frame.decompress(data)), b""
            if self._frame.eof:
                self._frame, self._rest = None, self._frame.unused_data
        if not self._text and self._frame is not None:
            raise EOFError("the file ends within a frame")
        text, self._text = self._text[:size], self._text[size:]
        return text

    def close(self) -> None:
        self._file.close()


@contextmanager
def compressed(file: BinaryIO, path: Path) -> Iterator[BinaryIO]:
    """Yields a file whose bytes are compressed and written to `file`. The suffix of `path` selects the compression.

    Raises ImportError if the package for .zst is missing.
    """
    stream: Any
    suffix = path.suffix.lower()
    if suffix == ".zst":
        stream = _zstandard(path, "to write it").open(file, "wb", closefd=False)
    elif suffix == ".gz":
        stream = gzip.GzipFile("", "wb", 6, file, 0)  # the time is 0, so that equal text gives equal bytes
    elif suffix in _OPENERS:
        stream = _OPENERS[suffix](file, "wb")
    else:
        yield file
        return
    with stream:
        yield stream
