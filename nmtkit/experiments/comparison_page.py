"""Writes an HTML page that compares runs: scores, a curve for each run, and the settings that differ."""

from collections.abc import Sequence
from pathlib import Path

from nmtkit.config.files import atomic_write
from nmtkit.experiments.comparison import RunSummary
from nmtkit.pages.charts import legend, line_chart
from nmtkit.pages.document import Html, render
from nmtkit.training.report import CURVES, LOGARITHMIC, UNITS, points


def write(path: Path, runs: Sequence[RunSummary], header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Writes the page. `header` and `rows` are the table that `nmtkit compare` prints. Raises OSError."""
    with atomic_write(path) as file:
        file.write(html(runs, header, rows).encode())


def html(runs: Sequence[RunSummary], header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    charts = []
    for name, lines in CURVES.items():
        for field, kind in lines:
            drawn = {run.name: points(run.records, kind, field) for run in runs}
            if any(drawn.values()):
                heading = f"{name} ({'validation' if kind == 'valid' else 'training'})"
                charts.append(line_chart(heading, drawn, name in LOGARITHMIC, keys=False, unit=UNITS.get(name, "")))
    # the first column is the run, then come the settings, then the scores
    first_score = next(i for i, name in enumerate(header) if name.startswith("best ") or name == "tokens/s")
    return render(
        "comparison.html",
        title=f"{len(runs)} runs",
        scores=_columns(header, rows, [0, *range(first_score, len(header))]),
        settings=_settings(header, rows, range(1, first_score)),
        keys=Html(legend([run.name for run in runs])),
        body=[Html(chart) for chart in charts],
    )


def _settings(header: Sequence[str], rows: Sequence[Sequence[str]], columns: Sequence[int]) -> dict[str, object]:
    """Returns the table of settings. If there are more settings than runs, each run is a column, else a row."""
    if len(columns) <= len(rows):
        return _columns(header, rows, [0, *columns])
    return {
        "header": ["", *(row[0] for row in rows)],
        "rows": [[header[column], *(row[column] for row in rows)] for column in columns],
        "numeric": [False] * (1 + len(rows)),
    }


def _columns(header: Sequence[str], rows: Sequence[Sequence[str]], columns: Sequence[int]) -> dict[str, object]:
    return {
        "header": [header[column] for column in columns],
        "rows": [[row[column] for column in columns] for row in rows],
        "numeric": [False] * len(columns),
    }
