"""Writes a table of results in the formats of `--format`: text, TSV, CSV, LaTeX, Markdown, JSON."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from nmtkit.config.tables import aligned, numeric

LATEX = {char: f"\\{char}" for char in "&%$#_{}"} | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {"\\": r"\textbackslash{}", "±": r"$\pm$"}  # character -> its LaTeX command
DELIMITERS = {"tsv": "\t", "csv": ","}

TextRows = Sequence[Sequence[str]]


def formatted(
    format: str,
    header: Sequence[str],
    lines: TextRows,
    *,
    plain: Any,
    unrounded: Callable[[], Sequence[Sequence[Any]]],
    notes: Sequence[str] = (),
    text: Callable[[], str] | None = None,
) -> str:
    """Returns a table in a format of `--format`. Markdown and the aligned text table also have the `notes`.

    `header` and `lines` are texts for readers. For programs, `plain` is the JSON value, and `unrounded` returns the
    headings and the rows of TSV and CSV. `text` returns a text that replaces the aligned table and its notes.
    """
    if format == "json":
        return json.dumps(plain, ensure_ascii=False, indent=1) + "\n"
    if format in DELIMITERS:
        return separated(unrounded(), DELIMITERS[format])
    if format == "latex":
        return latex(header, lines)
    if format == "markdown":
        return "\n".join([markdown(header, lines), *(["\n\n".join(notes) + "\n"] if notes else [])])
    return text() if text else blocks_of_text([aligned(header, lines), notes])


def separated(rows: Sequence[Sequence[Any]], delimiter: str = ",") -> str:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return text.getvalue()


def without_empty(rows: TextRows) -> list[list[str]]:
    """Returns a table without its empty columns, which have only a heading. The first row has the headings."""
    kept = [any(cells) for _, *cells in zip(*rows, strict=True)]
    return [list(compress(row, kept)) for row in rows]


def blocks_of_text(blocks: Sequence[Sequence[str]]) -> str:
    """Returns blocks of lines, with an empty line between two blocks."""
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def latex(header: Sequence[str], lines: TextRows) -> str:
    """Returns a LaTeX table with the rules of the package booktabs. Columns of numbers are aligned to the right."""

    def row(cells: Sequence[str]) -> str:
        return " & ".join("".join(LATEX.get(char, char) for char in cell) for cell in cells) + r" \\"

    alignment = "".join("r" if each else "l" for each in numeric(header, lines))
    top, middle, bottom = r"\toprule", r"\midrule", r"\bottomrule"
    body = [rf"\begin{{tabular}}{{{alignment}}}", top, row(header), middle, *map(row, lines), bottom, r"\end{tabular}"]
    return "\n".join(body) + "\n"


def markdown(header: Sequence[str], lines: TextRows) -> str:
    """Returns a Markdown table. Columns of numbers are aligned to the right."""

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|" + "|".join("---:" if each else "---" for each in numeric(header, lines)) + "|"
    return "\n".join([row(header), rule, *map(row, lines)]) + "\n"
