"""Text files as lists of lines: split on `\\n` only, strict UTF-8, counted before they are compared."""

from collections.abc import Mapping
from pathlib import Path


def lines_of(text: bytes, name: str) -> list[str]:
    """The lines of a text. A newline ends a line, so that the last one starts no empty line after it.

    Raises ValueError when there is no line, and for bytes that are no UTF-8, naming `name` and the line.
    """
    if not text:
        raise ValueError(f"{name} is empty")
    raw = text.removesuffix(b"\n").split(b"\n")
    try:
        return [line.decode() for line in raw]
    except UnicodeDecodeError:
        number = next(i for i, line in enumerate(raw, start=1) if not _is_utf8(line))
        raise ValueError(f"{name}, line {number}: these bytes are no UTF-8; convert the file with iconv") from None


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_lines(path: Path) -> list[str]:
    """The lines of a file; raises as `lines_of`, and OSError when it cannot be read."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    return lines_of(path.read_bytes(), str(path))


def check_equal_counts(texts: Mapping[str, list[str]]) -> None:
    """Raises ValueError naming the first text and the first that has another number of lines, with both counts."""
    (first, lines), *rest = texts.items()
    for name, other in rest:
        if len(other) != len(lines):
            raise ValueError(
                f"line counts differ: {first} has {len(lines)}, {name} has {len(other)}; "
                "line i of one must translate what line i of the other does"
            )
