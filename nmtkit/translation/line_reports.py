"""Tab-separated reports about translated lines."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from nmtkit.config.files import atomic_write
from nmtkit.text.glossary import ALTERNATIVES
from nmtkit.translation.search.types import Translation


class Table:
    """A tab-separated file with a row of column names. The file appears when the `with` block has succeeded."""

    def __init__(self, path: Path | None, names: Sequence[str]) -> None:
        self.path, self.names = path, names
        self.stack = ExitStack()
        self.file: BinaryIO | None = None

    def __enter__(self) -> Self:
        if self.path is not None:
            self.file = self.stack.enter_context(atomic_write(self.path))
            self.write(self.names)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stack.__exit__(kind, error, trace)

    def write(self, row: Sequence[object]) -> None:
        if self.file is not None:
            self.file.write("\t".join(map(str, row)).encode() + b"\n")


class GlossaryReport(Table):
    """A report of glossary use. Each term of a source line has a row, with the target term in the translation."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path, ("line", "result", "term", "targets", "found"))
        self.lines = self.lines_with_terms = self.hits = self.misses = 0

    def observe(self, translations: Iterable[Translation]) -> Iterator[Translation]:
        for translation in translations:
            terms = translation.hypotheses[0].terms or []
            for term in terms:
                result = "miss" if term.found is None else "hit"
                self.write((translation.id + 1, result, term.source, ALTERNATIVES.join(term.targets), term.found or ""))
            met = sum(term.found is not None for term in terms)
            self.hits, self.misses = self.hits + met, self.misses + len(terms) - met
            self.lines, self.lines_with_terms = self.lines + 1, self.lines_with_terms + bool(terms)
            yield translation

    @property
    def totals(self) -> str:
        return (
            f"glossary: {self.hits + self.misses:,} terms in {self.lines_with_terms:,} of {self.lines:,} lines; "
            f"{self.hits:,} translated with a target term, {self.misses:,} without"
        )


class QualityReport(Table):
    """A table of quality estimates. Each line has a row about the best translation of the line."""

    NAMES = ("line", "score", "flags", "mean_probability", "min_probability", "length_ratio", "copied")

    def __init__(self, path: Path) -> None:
        super().__init__(path, self.NAMES)

    def observe(self, translations: Iterable[Translation]) -> Iterator[Translation]:
        for translation in translations:
            quality = translation.hypotheses[0].quality
            assert quality is not None
            numbers = (quality.mean_probability, quality.min_probability, quality.length_ratio, quality.copied)
            flags = ",".join(quality.flags)
            self.write((translation.id + 1, f"{quality.score:.4f}", flags, *(f"{number:.4f}" for number in numbers)))
            yield translation
