"""Several runs on one page of HTML that needs no network: a table, and curves of all runs in each chart."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from nmtkit.files import atomic_write
from nmtkit.training.comparison import RunSummary
from nmtkit.training.report import CURVES, LOGARITHMIC, STYLE, chart, points

PALETTE = ("#3572b0", "#c4512d", "#3a8f4d", "#8458a8", "#b3862b", "#2f9c9c", "#c2548f", "#6b6b6b", "#7a4a2b", "#5a7d1e")


def write(path: Path, runs: Sequence[RunSummary], header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Writes the page: `rows` are those of the table under `header`. Raises OSError."""
    with atomic_write(path) as file:
        file.write(html(runs, header, rows).encode())


def html(runs: Sequence[RunSummary], header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    colours = {run.name: PALETTE[index % len(PALETTE)] for index, run in enumerate(runs)}
    title = f"{len(runs)} runs"
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>',
        f"<h1>{title}</h1><table><tr>{''.join(f'<th>{escape(name)}</th>' for name in header)}</tr>",
        *("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows),
        "</table><p>"
        + " ".join(f'<span style="color:{colour}">&#9644; {escape(name)}</span>' for name, colour in colours.items())
        + "</p>",
    ]
    for name, lines in CURVES.items():
        for field, kind in lines:
            drawn = {run.name: points(run.records, kind, field) for run in runs}
            if any(drawn.values()):
                heading = f"{name} ({'validation' if kind == 'valid' else 'training'})"
                parts.append(chart(heading, drawn, name in LOGARITHMIC, colours))
    return "\n".join([*parts, "</html>"])
