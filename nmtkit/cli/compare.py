"""`nmtkit compare`: compares several runs in a table or on an HTML page."""

import csv
import io
import json
import math
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from nmtkit.cli.command import Command
from nmtkit.config.files import check_outputs

if TYPE_CHECKING:
    from nmtkit.experiments.comparison import RunSummary, Score

FORMATS = ("text", "tsv", "csv", "latex", "json")
LATEX = {char: f"\\{char}" for char in "&%$#_{}"} | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {"\\": r"\textbackslash{}", "±": r"$\pm$"}  # character -> its LaTeX command
LEAST_NAME = 16  # minimum width of the column of run names


@click.command(cls=Command)
@click.argument("runs", type=Path, nargs=-1, required=True, metavar="RUN…")
@click.option("--mean-over-seeds", is_flag=True, help="Show one row for runs that differ only in the seed.")
@click.option("--format", type=click.Choice(FORMATS), default="text", help="Output format.  [default: text]")
@click.option("--report", type=Path, metavar="FILE", help="Also write an HTML page with the curves of all runs.")
@click.option(
    "--curves", type=Path, metavar="FILE", help="Also write the curves of all runs to FILE: .csv, .pdf, .svg or .png."
)
def command(
    runs: tuple[Path, ...], mean_over_seeds: bool, format: str, report: Path | None, curves: Path | None
) -> None:
    """Compare training runs: settings that differ, best scores, speed, time and state.

    RUN is the folder of a run, which may still be training, or a folder of runs, such as the folder of a sweep.

    \b
    nmtkit compare runs/one runs/two
    nmtkit compare runs/lr --mean-over-seeds
    nmtkit compare runs/lr --format tsv --report lr.html
    nmtkit compare runs/lr --mean-over-seeds --format latex --curves lr.pdf
    """
    from nmtkit.experiments import comparison

    if curves and not curves.parent.is_dir():
        raise FileNotFoundError(f"--curves {curves}: the folder {curves.parent} does not exist")
    folders = folders_of(runs)
    inputs = [folder / name for folder in folders for name in ("log.jsonl", "config.toml")]
    check_outputs({"--report": report, "--curves": curves}, inputs)
    summaries = [comparison.summarize(folder) for folder in folders]
    rows = comparison.means_over_seeds(summaries) if mean_over_seeds else summaries
    click.echo(formatted(rows, format), nl=False)
    if report:
        from nmtkit.experiments import comparison_page

        comparison_page.write(report, summaries, *cells(rows))
    if curves:
        from nmtkit.experiments import comparison_curves

        comparison_curves.write(curves, summaries)


def folders_of(paths: Sequence[Path]) -> list[Path]:
    """Returns the folders of runs. A path of a folder with several runs is replaced by the folders of these runs."""
    folders: list[Path] = []
    for path in paths:
        inside = [] if (path / "log.jsonl").is_file() else sorted(log.parent for log in path.glob("*/log.jsonl"))
        folders += inside or [path]
    return list(dict.fromkeys(folders))


def formatted(rows: Sequence["RunSummary"], format: str) -> str:
    """Returns the comparison as a text table, TSV, CSV, a LaTeX table or JSON."""
    from nmtkit.experiments import comparison

    if format == "json":
        columns = comparison.differing(rows)
        return json.dumps([comparison.as_plain(run, columns) for run in rows], ensure_ascii=False, indent=1) + "\n"
    if format in ("tsv", "csv"):
        text = io.StringIO()
        delimiter = "\t" if format == "tsv" else ","
        csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows(numbers(rows))
        return text.getvalue()
    header, lines = cells(rows)
    if format == "latex":
        return latex(header, lines)
    return table(rows, header, lines)


def latex(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a LaTeX table with the rules of the package booktabs. Columns of numbers are aligned to the right."""

    def row(cells: Sequence[str]) -> str:
        return " & ".join("".join(LATEX.get(char, char) for char in cell) for cell in cells) + r" \\"

    numeric = [all(line[column][:1].isdigit() for line in lines if line[column]) for column in range(len(header))]
    alignment = "".join("r" if each else "l" for each in numeric)
    top, middle, bottom = r"\toprule", r"\midrule", r"\bottomrule"
    body = [rf"\begin{{tabular}}{{{alignment}}}", top, row(header), middle, *map(row, lines), bottom, r"\end{tabular}"]
    return "\n".join(body) + "\n"


def cells(rows: Sequence["RunSummary"]) -> tuple[list[str], list[list[str]]]:
    """Returns the headings and the rows of the table of runs."""
    from nmtkit.experiments import comparison
    from nmtkit.training.differences import shown
    from nmtkit.training.progress import duration

    settings = comparison.differing(rows)
    metrics = list(dict.fromkeys(name for run in rows for name in run.best))
    header = ["run", *settings, *(f"best {name}" for name in metrics), "tokens/s", "time", "updates", "state"]
    lines = []
    for run in rows:
        speed = "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}"
        ended = f"{run.state}: {run.reason}" if run.state in ("failed", "stopped") and run.reason else run.state
        lines.append(
            [
                run.name,
                *(shown(comparison.setting(run, name)) for name in settings),
                *(score_text(run.best[name]) if name in run.best else "" for name in metrics),
                *(speed, duration(run.seconds), f"{run.update:,}", ended),
            ]
        )
    return header, lines


def numbers(rows: Sequence["RunSummary"]) -> list[list[str]]:
    """Returns the headings and the rows of the table for other programs: each cell has one text or unrounded number."""
    from nmtkit.experiments import comparison
    from nmtkit.training.differences import shown

    settings = comparison.differing(rows)
    metrics = list(dict.fromkeys(name for run in rows for name in run.best))
    scores = [f"best {name}{part}" for name in metrics for part in ("", " update", " deviation")]
    table = [["run", *settings, *scores, "tokens/s", "seconds", "updates", "state", "reason"]]
    for run in rows:
        best = [run.best.get(name) for name in metrics]
        values = [(score.value, score.update, score.deviation) if score else (None,) * 3 for score in best]
        facts = [*(value for score in values for value in score), run.tokens_per_second, run.seconds, run.update]
        cells = ["" if value is None else f"{value:.10g}" for value in facts]
        table.append([run.name, *(shown(comparison.setting(run, name)) for name in settings), *cells])
        table[-1] += [run.state, run.reason]
    empty = {column for column, name in enumerate(table[0]) if not any(row[column] for row in table[1:])}
    return [[cell for column, cell in enumerate(row) if column not in empty] for row in table]


def score_text(score: "Score") -> str:
    """Returns a score with its standard deviation over seeds, or with its update."""
    digits = 2 if abs(score.value) >= 10 else 3
    value = f"{score.value:.{digits}f}" if math.isfinite(score.value) else "none"
    return f"{value} at {score.update:,}" if score.deviation is None else f"{value} ± {score.deviation:.{digits}f}"


def table(rows: Sequence["RunSummary"], header: list[str], lines: list[list[str]]) -> str:
    """Returns a text table that fits the terminal.

    If the table is too wide, three steps make it narrower until it fits. First, the columns nll and ppl are removed.
    Second, the settings move below the table, or are removed if the names of the runs contain them. Third, the reasons
    of failures move below the table.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from nmtkit.experiments import comparison

    console = Console(file=io.StringIO(), width=Console().width, highlight=False)
    title, common = "", os.path.commonpath([Path(line[0]).parent for line in lines])
    if common:
        lines = [[os.path.relpath(line[0], common), *line[1:]] for line in lines]
        title = f"in {common}:\n"
    if _width(header, lines) > console.width:
        kept = [index for index, name in enumerate(header) if name not in ("best nll", "best ppl")]
        header, lines = [header[index] for index in kept], [[line[index] for index in kept] for line in lines]
    below: list[str] = []
    count = len(comparison.differing(rows))
    if _width(header, lines) > console.width and count:
        if not all(all(value in line[0] for value in line[1 : 1 + count]) for line in lines):
            below += [_settings(header, line, count, console.width) for line in lines]
        header, lines = [header[0], *header[1 + count :]], [[line[0], *line[1 + count :]] for line in lines]
    if _width(header, lines) > console.width:
        ended = [(line[0], *line[-1].partition(": ")) for line in lines]
        below += [_filled(f"{name} {state}: {reason}", console.width) for name, state, _, reason in ended if reason]
        lines = [[*line[:-1], line[-1].partition(": ")[0]] for line in lines]
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column, name in enumerate(header):
        longest = max(len(line[column]) for line in (header, *lines))
        align: Literal["right", "left"] = "right" if name in ("tokens/s", "updates") else "left"
        least = min(longest, LEAST_NAME) if name == "run" else longest
        drawn.add_column(Text(name), overflow="fold", justify=align, no_wrap=name != "run", min_width=least)
    for line in lines:
        drawn.add_row(*(Text(cell) for cell in line))
    console.print(drawn)
    assert isinstance(console.file, io.StringIO)
    drawn_lines = [line.rstrip() for line in console.file.getvalue().split("\n")[:-1]]
    return title + "\n".join([*drawn_lines, *([""] if below else []), *below]) + "\n"


def _settings(header: Sequence[str], line: Sequence[str], count: int, width: int) -> str:
    """Returns the first `count` settings of a run in lines of at most `width` columns."""
    pairs = [f"{name} {value}" for name, value in zip(header[1 : 1 + count], line[1:], strict=False) if value]
    return _filled(f"{line[0]}: {', '.join(pairs)}", width)


def _filled(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent="  ")


def _width(header: Sequence[str], lines: Sequence[Sequence[str]]) -> int:
    return sum(max(len(row[column]) for row in [header, *lines]) + 2 for column in range(len(header))) - 2
