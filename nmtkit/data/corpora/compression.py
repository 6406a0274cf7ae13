"""Opens compressed files for reading and writing. The suffix of a file selects the compression."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from nmtkit.config.extras import imported

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSIONS = (*_OPENERS, ".zst")
CHUNK = 1 << 20
# A frame begins with one of these numbers (RFC 8878). The last 4 bits of the second number may have any value.
ZSTD_MAGIC, ZSTD_SKIPPABLE_MAGIC = 0xFD2FB528, 0x184D2A50


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
    file = _zstandard(path, "to read it").open(path, "rb") if suffix == ".zst" else _OPENERS[suffix](path)
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
        except (EOFError, zlib.error, lzma.LZMAError) as error:
            raise ValueError(f"{self._path} is damaged or truncated: {error}") from error
        except OSError as error:
            if error.errno is not None:
                raise
            # gzip and bz2 report bad data as an OSError without errno
            raise ValueError(f"{self._path} is damaged or is not a {self._path.suffix} file: {error}") from error
        except Exception as error:
            if self._path.suffix.lower() != ".zst":  # zstandard is optional, so its error class is not imported
                raise
            raise ValueError(f"{self._path} is damaged: {error}") from error
        if not data and self._path.suffix.lower() == ".zst":
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
            start = file.read(18)  # 18 bytes: the largest frame header
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
        raise ValueError(f"{path} is damaged or truncated: the file ends within a frame")


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
