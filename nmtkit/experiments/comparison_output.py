"""Writes a comparison of runs: as a table in several formats, as an HTML page, and as a file of curves."""

import io
import math
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from nmtkit.config import setting_text
from nmtkit.config.extras import imported
from nmtkit.config.files import atomic_write, write_atomically
from nmtkit.experiments import tables
from nmtkit.experiments.comparison import RunSummary, ValidationScore, as_plain, differing, setting
from nmtkit.jobs.progress import duration
from nmtkit.pages.charts import Point, legend, line_chart
from nmtkit.pages.document import Html, render
from nmtkit.training.report import CURVES, KINDS, LOGARITHMIC, UNDRAWN, UNITS, points
from nmtkit.training.run_log import numbers_of

LEAST_NAME = 16  # minimum width of the column of run names
CHANGED = "earlier settings"  # heading of the settings that changed when a run was resumed
FIGURES = (".pdf", ".svg", ".png")
CURVE_FILES = (".csv", *FIGURES)


# --- tables -----------------------------------------------------------------------------------------------------------


def formatted(runs: Sequence[RunSummary], format: str) -> str:
    """Returns the comparison as a text table (format "text"), TSV, CSV, a LaTeX or Markdown table, or JSON."""
    header, lines = cells(runs)
    settings = differing(runs)
    return tables.formatted(
        format,
        header,
        lines,
        plain=[as_plain(run, settings) for run in runs],
        unrounded=lambda: unrounded(runs),
        text=lambda: table(header, lines, len(settings)),
    )


def metrics_of(runs: Sequence[RunSummary]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.best))


def cells(runs: Sequence[RunSummary]) -> tuple[list[str], list[list[str]]]:
    """Returns the headings and the rows of the table of runs.

    If settings of a run changed when it was resumed, the last column has the old settings.
    """
    settings, metrics = differing(runs), metrics_of(runs)
    header = ["run", *settings, *(f"best {name}" for name in metrics), "tokens/s", "time", "updates", "state"]
    header += [CHANGED] * any(run.changed for run in runs)
    lines = []
    for run in runs:
        speed = "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}"
        ended = f"{run.state}: {run.reason}" if run.state in ("failed", "stopped") and run.reason else run.state
        values = [setting_text(setting(run, name)) for name in settings]
        scores = [score_text(run.best[name]) if name in run.best else "" for name in metrics]
        line = [run.name, *values, *scores, speed, duration(run.seconds), f"{run.update:,}", ended]
        lines.append([*line, before_changes(run)][: len(header)])
    return header, lines


def before_changes(run: RunSummary) -> str:
    """Returns the settings that changed when the run was resumed, such as "lr 0.1 until update 10"."""
    changed = (f"{each.name} {setting_text(each.before)} until update {each.update:,}" for each in run.changed)
    return ", ".join(changed)


def score_text(score: ValidationScore) -> str:
    """Returns a score with its standard deviation over seeds, or with its update."""
    digits = 2 if abs(score.value) >= 10 else 3
    form = f".{digits}f" if abs(score.value) < 1e7 else ".3g"  # the perplexity of a run that diverged has 300 digits
    value = f"{score.value:{form}}" if math.isfinite(score.value) else "none"
    return f"{value} at {score.update:,}" if score.deviation is None else f"{value} ± {score.deviation:.{digits}f}"


def unrounded(runs: Sequence[RunSummary]) -> list[list[str]]:
    """Returns the headings and the rows of the table for other programs: each cell has one text or unrounded number."""
    settings, metrics = differing(runs), metrics_of(runs)
    scores = [f"best {name}{part}" for name in metrics for part in ("", " update", " deviation")]
    rows = [["run", *settings, *scores, "tokens/s", "seconds", "updates", "state", "reason", CHANGED]]
    for run in runs:
        facts: list[float | None] = []
        for score in (run.best.get(name) for name in metrics):
            facts += [score.value, score.update, score.deviation] if score else [None] * 3
        facts += [run.tokens_per_second, run.seconds, run.update]
        numbers = ["" if value is None else f"{value:.10g}" for value in facts]
        texts = [setting_text(setting(run, name)) for name in settings]
        rows.append([run.name, *texts, *numbers, run.state, run.reason, before_changes(run)])
    return tables.without_empty(rows)


def table(header: list[str], lines: list[list[str]], settings: int) -> str:
    """Returns a table of runs as text that fits the terminal.

    The first column has the names of the runs. The next columns have settings; `settings` is their number. Earlier
    settings of resumed runs are below the table. If the table is too wide, four steps make the table
    narrower until it fits. First, the columns nll and ppl are removed. Second, the settings move below the table, or
    are removed if the names of the runs contain them. Third, the reasons of failures move below the table. Fourth, the
    names of the runs are folded to several lines, and if this is not enough, speeds and then times are removed.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    text = io.StringIO()
    console = Console(file=text, width=Console().width, highlight=False)
    folder, names = without_common_folder([line[0] for line in lines])
    lines = [[name, *line[1:]] for name, line in zip(names, lines, strict=True)]
    title = f"in {folder}:\n" if folder else ""
    if _width(header, lines) > console.width:
        header, *lines = _without(("best nll", "best ppl"), header, lines)
    below: list[str] = []
    if CHANGED in header:
        below = [f"{line[0]}: {line[-1]}" for line in lines if line[-1]]
        header, *lines = _without((CHANGED,), header, lines)
    if _width(header, lines) > console.width:
        names = header[1 : 1 + settings]
        if not all(value in line[0] for line in lines for value in line[1 : 1 + settings]):
            for line in lines:
                pairs = [f"{name} {value}" for name, value in zip(names, line[1:], strict=False) if value]
                below.append(f"{line[0]}: {', '.join(pairs)}")
        header, *lines = [[row[0], *row[1 + settings :]] for row in (header, *lines)]
    if _width(header, lines) > console.width:
        ended = [(line[0], *line[-1].partition(": ")) for line in lines]
        below += [f"{name} {state}: {reason}" for name, state, _, reason in ended if reason]
        lines = [[*line[:-1], line[-1].partition(": ")[0]] for line in lines]
    for name in ("tokens/s", "time"):
        folded = [[line[0][:LEAST_NAME], *line[1:]] for line in lines]
        if _width(header, folded) > console.width:
            header, *lines = _without((name,), header, lines)
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, *cells_below in zip(header, *lines, strict=True):
        longest = max(map(len, (name, *cells_below)))
        align: Literal["right", "left"] = "right" if name in ("tokens/s", "updates") else "left"
        least = min(longest, LEAST_NAME) if name == "run" else longest
        drawn.add_column(Text(name), overflow="fold", justify=align, no_wrap=name != "run", min_width=least)
    for line in lines:
        drawn.add_row(*(Text(cell) for cell in line))
    console.print(drawn)
    drawn_lines = [line.rstrip() for line in text.getvalue().split("\n")[:-1]]
    filled = [textwrap.fill(line, console.width, subsequent_indent="  ") for line in below]
    return title + "\n".join([*drawn_lines, *([""] if below else []), *filled]) + "\n"


def without_common_folder(names: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the folder that contains all runs, and the name of each run inside this folder.

    The folder is "" if the paths of the runs have no folder in common.
    """
    parents = [Path(name).parent for name in names]
    comparable = len({parent.is_absolute() for parent in parents}) == 1
    folder = os.path.commonpath(parents) if comparable else ""
    return folder, [os.path.relpath(name, folder) if folder else name for name in names]


def _without(names: Sequence[str], header: list[str], lines: list[list[str]]) -> list[list[str]]:
    kept = [index for index, name in enumerate(header) if name not in names]
    return [[row[index] for index in kept] for row in (header, *lines)]


def _width(header: Sequence[str], lines: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) + 2 for column in zip(header, *lines, strict=True)) - 2


# --- curves -----------------------------------------------------------------------------------------------------------


def panels(runs: Sequence[RunSummary]) -> Iterator[tuple[str, str, dict[str, list[Point]]]]:
    """Yields each curve in `CURVES` that a run has: its heading, its title in `CURVES`, and the points of each run."""
    for title, lines in CURVES.items():
        for field, kind in lines:
            drawn = {run.name: points(run.records, kind, field) for run in runs}
            if any(drawn.values()):
                yield f"{title} ({'validation' if kind == 'valid' else 'training'})", title, drawn


def check_figure(path: Path | None, flag: str, suffixes: Sequence[str] = FIGURES) -> None:
    """Checks that a figure can be written to `path`, the value of `flag`. Commands call this check before their work.

    Raises ValueError if the file has none of the `suffixes`, and ImportError if a figure needs matplotlib, but
    matplotlib is missing.
    """
    if path is None:
        return
    if path.suffix not in suffixes:
        raise ValueError(f"{flag} {path}: give a file with one of these suffixes: {', '.join(suffixes)}")
    if path.suffix in FIGURES:
        load_pyplot()


def write_curves(path: Path, runs: Sequence[RunSummary]) -> None:
    """Writes the curves of `runs` in the format of the suffix, one of `CURVE_FILES` (see `check_figure`).

    A CSV table has a row for each logged number: run, kind (train or valid), name, update, value. Raises OSError, and
    ValueError for a figure of runs without curves. A CSV table may be empty.
    """
    if path.suffix != ".csv":
        write_figure(path, runs)
        return
    rows = [["run", "kind", "name", "update", "value"]]
    for run in runs:
        for kind in KINDS:
            records = [record for record in run.records if record["kind"] == kind]
            for name in dict.fromkeys(name for record in records for name in numbers_of(record, UNDRAWN)):
                for update, value in points(records, kind, name):
                    rows.append([run.name, kind, name, str(int(update)), repr(value)])
    write_atomically(path, tables.separated(rows))


def load_pyplot() -> Any:
    """Returns the module matplotlib.pyplot. Raises ImportError with the name of the extra."""
    matplotlib = imported("matplotlib", "pyplot", need="a figure needs matplotlib: pip install 'nmtkit[plots]'")
    matplotlib.use("agg")
    return matplotlib.pyplot


def write_figure(path: Path, runs: Sequence[RunSummary]) -> None:
    """Writes a figure with a panel for each curve in `CURVES`. A panel has a line for each run."""
    pyplot = load_pyplot()
    drawn = list(panels(runs))
    if not drawn:
        raise ValueError("the runs have no curves yet; wait for their first log line")
    rows = (len(drawn) + 1) // 2
    with pyplot.rc_context({"svg.hashsalt": "nmtkit", "font.size": 8}):
        drawing, axes = pyplot.subplots(rows, 2, figsize=(7, 2.2 * rows), squeeze=False, layout="constrained")
        for axis, (heading, title, curves) in zip(axes.flat, drawn, strict=False):
            for name, curve in curves.items():
                axis.plot([update for update, _ in curve], [value for _, value in curve], label=name, linewidth=1)
            axis.set_title(heading)
            axis.set_xlabel("update")
            axis.set_ylabel(UNITS.get(title, ""))
            axis.set_yscale("log" if title in LOGARITHMIC else "linear")
        for axis in axes.flat[len(drawn) :]:
            axis.set_axis_off()
        drawing.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        write_figure_file(path, drawing)


def write_figure_file(path: Path, drawing: Any, **options: Any) -> None:
    """Writes a figure of matplotlib in the format of the suffix, and closes the figure.

    The file has no date, so that equal figures are equal files.
    """
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with atomic_write(path) as file:
        drawing.savefig(file, format=path.suffix[1:], metadata=metadata, **options)
    load_pyplot().close(drawing)


# --- the page ---------------------------------------------------------------------------------------------------------


def write_page(
    path: Path, runs: Sequence[RunSummary], rows: Sequence[RunSummary], differences: Mapping[str, object] | None = None
) -> None:
    """Writes an HTML page: scores, charts with a curve for each run, and the settings that differ. Raises OSError.

    The tables have `rows`, which may be means of `runs`. The table of `differences` to a base is the first table; see
    `differences_output.for_page`.
    """
    folder, names = without_common_folder([run.name for run in (*runs, *rows)])
    renamed = [replace(run, name=name) for run, name in zip((*runs, *rows), names, strict=True)]
    runs, rows = renamed[: len(runs)], renamed[len(runs) :]
    header, lines = cells(rows)
    charts = [
        Html(line_chart(heading, drawn, title in LOGARITHMIC, keys=False, unit=UNITS.get(title, "")))
        for heading, title, drawn in panels(runs)
    ]
    # the first column is the run, then come the settings, then the scores
    first_score = 1 + len(differing(rows))
    page = render(
        "comparison.html",
        title=f"{len(runs)} runs" + (f" in {folder}" if folder else ""),
        differences=differences,
        scores=_columns(header, lines, [0, *range(first_score, len(header))]),
        settings=_settings(header, lines, range(1, first_score)),
        keys=Html(legend([run.name for run in runs])),
        body=charts,
    )
    write_atomically(path, page)


def _settings(header: Sequence[str], lines: Sequence[Sequence[str]], columns: Sequence[int]) -> dict[str, object]:
    """Returns the table of settings. If there are more settings than runs, each run is a column, else a row."""
    if len(columns) <= len(lines):
        return _columns(header, lines, [0, *columns])
    return {
        "header": ["", *(line[0] for line in lines)],
        "rows": [[header[column], *(line[column] for line in lines)] for column in columns],
    }


def _columns(header: Sequence[str], lines: Sequence[Sequence[str]], columns: Sequence[int]) -> dict[str, object]:
    picked, *rows = [[line[column] for column in columns] for line in (header, *lines)]
    return {"header": picked, "rows": rows}
