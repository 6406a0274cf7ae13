"""Writes an HTML page that compares runs: a table, and charts with a curve for each run. It needs no network."""

from collections.abc import Sequence
from pathlib import Path

from nmtkit.files import atomic_write
from nmtkit.pages.charts import legend, line_chart
from nmtkit.pages.document import document, table
from nmtkit.training.comparison import RunSummary
from nmtkit.training.report import CURVES, LOGARITHMIC, points


def write(path: Path, runs: Sequence[RunSummary], header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Writes the page with a table of `header` and `rows`. Raises OSError."""
    with atomic_write(path) as file:
        file.write(html(runs, header, rows).encode())


def html(runs: Sequence[RunSummary], header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    charts = []
    for name, lines in CURVES.items():
        for field, kind in lines:
            drawn = {run.name: points(run.records, kind, field) for run in runs}
            if any(drawn.values()):
                heading = f"{name} ({'validation' if kind == 'valid' else 'training'})"
                charts.append(line_chart(heading, drawn, name in LOGARITHMIC, keys=False))
    keys = f'<p class="keys">{legend([run.name for run in runs])}</p>' if charts else ""
    return document(
        f"{len(runs)} runs", table(header, rows, wide=True), keys, f'<div class="charts">{"".join(charts)}</div>'
    )
