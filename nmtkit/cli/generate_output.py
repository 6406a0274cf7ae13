"""Writes the translations of `nmtkit generate`: as lines, or as a JSON object for each line."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO

from nmtkit.cli.command import stderr
from nmtkit.translation.output_lines import output_line

if TYPE_CHECKING:
    from nmtkit.translation.requests import Translation


def write(translations: Iterable["Translation"], format: str, scores: bool, out: BinaryIO) -> None:
    """Writes and flushes a line for each translation. With `scores`, the line is the score instead of the text."""
    for translation in translations:
        out.write(output_line(translation, format, scores) + b"\n")
        out.flush()


def counted(translations: Iterable["Translation"]) -> Iterator["Translation"]:
    """Yields translations, and shows their count in a terminal."""
    with ExitStack() as stack:
        show = stderr.is_terminal and not sys.stdout.isatty()
        status = stack.enter_context(stderr.status("Translating")) if show else None
        for count, translation in enumerate(translations, 1):
            yield translation
            if status is not None and count % 100 == 0:
                status.update(f"{count:,} lines translated")
