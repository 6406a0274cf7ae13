"""Writes the curves of several runs to a file: CSV for other programs, or a figure for a paper."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from nmtkit.config.files import atomic_write
from nmtkit.experiments.comparison import RunSummary
from nmtkit.pages.charts import Point
from nmtkit.training.report import CURVES, KINDS, LOGARITHMIC, UNDRAWN, UNITS, points

FIGURES = (".pdf", ".svg", ".png")


def write(path: Path, runs: Sequence[RunSummary]) -> None:
    """Writes the curves of `runs` in the format of the suffix: .csv, .pdf, .svg or .png.

    Raises OSError, ValueError for any other suffix, and ImportError if a figure is requested without matplotlib.
    """
    if path.suffix == ".csv":
        content = as_csv(runs)
    elif path.suffix in FIGURES:
        content = figure(runs, path.suffix[1:])
    else:
        raise ValueError(
            f"--curves {path}: curves are written to .csv, {', '.join(FIGURES)}; give one of these suffixes"
        )
    with atomic_write(path) as file:
        file.write(content)


def as_csv(runs: Sequence[RunSummary]) -> bytes:
    """Returns a CSV table with a row for each logged number: run, kind (train or valid), name, update, value."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["run", "kind", "name", "update", "value"])
    for run in runs:
        for kind in KINDS:
            for name in _names(run, kind):
                for update, value in points(run.records, kind, name):
                    table.writerow([run.name, kind, name, int(update), repr(value)])
    return text.getvalue().encode()


def _names(run: RunSummary, kind: str) -> list[str]:
    """Returns the names of the numbers in the records of a kind ("train" or "valid"), except names in `UNDRAWN`."""
    names = [
        name
        for record in run.records
        if record["kind"] == kind
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in UNDRAWN
    ]
    return list(dict.fromkeys(names))


def figure(runs: Sequence[RunSummary], format: str) -> bytes:
    """Returns a figure with a panel for each curve in `CURVES`. A panel has a line for each run."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError(
            "a figure of curves needs matplotlib: pip install 'nmtkit[plots]'; a .csv file does not need it"
        ) from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = [
        (title, field, kind)
        for title, fields in CURVES.items()
        for field, kind in fields
        if any(points(run.records, kind, field) for run in runs)
    ]
    if not panels:
        raise ValueError("the runs have no curves yet; wait for their first log line")
    rows = (len(panels) + 1) // 2
    with pyplot.rc_context({"svg.hashsalt": "nmtkit", "font.size": 8}):
        drawing, axes = pyplot.subplots(rows, 2, figsize=(7, 2.2 * rows), squeeze=False, layout="constrained")
        for axis, (title, field, kind) in zip(axes.flat, panels, strict=False):
            for run in runs:
                axis.plot(*_columns(points(run.records, kind, field)), label=run.name, linewidth=1)
            axis.set_title(f"{title} ({'validation' if kind == 'valid' else 'training'})")
            axis.set_xlabel("update")
            axis.set_ylabel(UNITS.get(title, ""))
            axis.set_yscale("log" if title in LOGARITHMIC else "linear")
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        drawing.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        content = io.BytesIO()
        drawing.savefig(content, format=format, metadata={"Date": None} if format == "svg" else None)
        pyplot.close(drawing)
    return content.getvalue()


def _columns(curve: Iterable[Point]) -> tuple[list[float], list[float]]:
    pairs = list(curve)
    return [update for update, _ in pairs], [value for _, value in pairs]
