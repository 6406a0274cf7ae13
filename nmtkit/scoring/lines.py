"""Texts to score, as lists of lines whose counts are compared before anything else is."""

from collections.abc import Mapping
from pathlib import Path

from nmtkit.data import corpus


def lines_of(text: bytes, name: Path) -> list[str]:
    """The lines of a text. A newline ends a line, so that the last one starts no empty line after it.

    Raises ValueError when there is no line, and for bytes that are no UTF-8, naming `name` and the line.
    """
    if not text:
        raise ValueError(f"{name} is empty")
    return corpus.decode(text.removesuffix(b"\n"), name, 1).split("\n")


def read_lines(path: Path) -> list[str]:
    """The lines of a file, which may be compressed; raises as `lines_of`, and OSError when it cannot be read."""
    with corpus.open_bytes(path) as file:
        return lines_of(file.read(), path)


def check_equal_counts(texts: Mapping[str, list[str]]) -> None:
    """Raises ValueError naming the first text and the first that has another number of lines, with both counts."""
    (first, lines), *rest = texts.items()
    for name, other in rest:
        if len(other) != len(lines):
            raise ValueError(
                f"line counts differ: {first} has {len(lines)}, {name} has {len(other)}; "
                "line i of one must translate what line i of the other does"
            )
