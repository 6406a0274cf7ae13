"""Raw parallel text: files found by prefix and language, opened whatever their compression, read in blocks of lines.

Files are bytes. A line ends at \\n and nowhere else; the last one may lack it. Bytes that are no UTF-8 are an error that
names the file and the line.
"""

import bz2
import gzip
import io
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
CHUNK = 1 << 20


def locate(prefix: str, language: str) -> Path:
    """The file `prefix.language`, perhaps compressed.

    Raises FileNotFoundError when there is none, ValueError when there are several.
    """
    plain = f"{prefix}.{language}"
    found = [path for path in (Path(plain + suffix) for suffix in ("", *COMPRESSIONS)) if path.is_file()]
    if not found:
        raise FileNotFoundError(f"no such file: {plain} (nor with {', '.join(COMPRESSIONS)})")
    if len(found) > 1:
        raise ValueError(f"both {found[0]} and {found[1]} exist; remove or rename one")
    return found[0]


def open_bytes(path: Path) -> BinaryIO:
    """The file's bytes, decompressed as its name says. Raises ImportError when .zst needs a package that is missing."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".bz2":
        return bz2.open(path, "rb")
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise ImportError(f"{path} is compressed with zstd; pip install 'nmtkit[zstd]' to read it") from error
        return io.BufferedReader(zstandard.open(path, "rb"), CHUNK)
    return path.open("rb")


def read_lines(path: Path) -> list[bytes]:
    """All lines of a small file, without their \\n. Raises ValueError for an empty one."""
    with open_bytes(path) as file:
        text = file.read()
    if not text:
        raise ValueError(f"{path} is empty")
    return (text[:-1] if text.endswith(b"\n") else text).split(b"\n")


def decode(text: bytes, path: Path, first_line: int) -> str:
    """Strict UTF-8 of one or many lines, the first of which is line `first_line` (from 1) of `path`.

    Raises ValueError naming file and line.
    """
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + text.count(b"\n", 0, error.start)
        column = error.start - text.rfind(b"\n", 0, error.start)
        raise ValueError(f"{path}:{line}: byte {column} of the line is no UTF-8 ({error.reason})") from error


def blocks(path: Path, lines: int) -> Iterator[bytes]:
    """The file in pieces of `lines` lines (fewer in the last), every line with its \\n."""
    with open_bytes(path) as file:
        rest = b""
        while chunk := file.read(CHUNK):
            rest += chunk
            while rest.count(b"\n") >= lines:
                end = -1
                for _ in range(lines):
                    end = rest.index(b"\n", end + 1)
                yield rest[: end + 1]
                rest = rest[end + 1 :]
        if rest:
            yield rest if rest.endswith(b"\n") else rest + b"\n"
