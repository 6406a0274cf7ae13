"""`nmtkit compare`: several runs side by side."""

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

if TYPE_CHECKING:
    from nmtkit.training.comparison import RunSummary, Score


@click.command(cls=Command)
@click.argument("runs", type=Path, nargs=-1, required=True, metavar="RUN…")
@click.option("--mean-over-seeds", is_flag=True, help="One row for runs that differ in nothing but the seed.")
@click.option("--format", type=click.Choice(["text", "tsv", "json"]), default="text", help="Output.  [default: text]")
@click.option("--report", type=Path, metavar="FILE", help="Also write a page of HTML with the curves of all runs.")
def command(runs: tuple[Path, ...], mean_over_seeds: bool, format: str, report: Path | None) -> None:
    """Compare training runs by their folders: settings that differ, best scores, speed, time and state.

    A run that is still going on, and a folder of runs such as that of a sweep, may be given too.

    \b
    nmtkit compare runs/one runs/two
    nmtkit compare runs/lr --mean-over-seeds
    nmtkit compare runs/lr --format tsv --report lr.html
    """
    from nmtkit.training import comparison

    summaries = [comparison.summarize(folder) for folder in folders_of(runs)]
    rows = comparison.means_over_seeds(summaries) if mean_over_seeds else summaries
    click.echo(formatted(rows, format), nl=False)
    if report:
        from nmtkit.training import comparison_page

        comparison_page.write(report, summaries, *cells(rows))


def folders_of(paths: Sequence[Path]) -> list[Path]:
    """Returns the runs' folders: those given, and of a folder that holds several runs, all of these."""
    found: list[Path] = []
    for path in paths:
        inside = [] if (path / "log.jsonl").is_file() else sorted(log.parent for log in path.glob("*/log.jsonl"))
        found += inside or [path]
    return list(dict.fromkeys(found))


def formatted(rows: Sequence["RunSummary"], format: str) -> str:
    """Returns the comparison as the text of a table, TSV or JSON."""
    from nmtkit.training import comparison

    if format == "json":
        columns = comparison.differing(rows)
        return json.dumps([comparison.as_plain(run, columns) for run in rows], ensure_ascii=False, indent=1) + "\n"
    header, lines = cells(rows)
    if format == "tsv":
        text = io.StringIO()
        csv.writer(text, delimiter="\t", lineterminator="\n").writerows([header, *lines])
        return text.getvalue()
    return table(rows, header, lines)


def cells(rows: Sequence["RunSummary"]) -> tuple[list[str], list[list[str]]]:
    """Returns the headings and the texts of a table of runs."""
    from nmtkit.training import comparison
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


def score_text(score: "Score") -> str:
    """Returns a score with its deviation over seeds, or the update it was reached at."""
    digits = 2 if abs(score.value) >= 10 else 3
    value = f"{score.value:.{digits}f}" if math.isfinite(score.value) else "none"
    return f"{value} at {score.update:,}" if score.deviation is None else f"{value} ± {score.deviation:.{digits}f}"


def table(rows: Sequence["RunSummary"], header: list[str], lines: list[list[str]]) -> str:
    """Returns a table as wide as the terminal.

    One too wide for it leaves out metrics that say the same in other words, then has the settings below it, or in the
    runs' names alone where they are part of these.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from nmtkit.training import comparison

    console = Console(file=io.StringIO(), width=Console().width, highlight=False)
    title, common = "", os.path.commonpath([Path(line[0]).parent for line in lines])
    if common:
        lines = [[os.path.relpath(line[0], common), *line[1:]] for line in lines]
        title = f"in {common}:\n"
    if _width(header, lines) > console.width:
        kept = [index for index, name in enumerate(header) if name not in ("best nll", "best ppl")]
        header, lines = [header[index] for index in kept], [[line[index] for index in kept] for line in lines]
    count, below = len(comparison.differing(rows)), []
    if _width(header, lines) > console.width and count:
        if not all(all(value in line[0] for value in line[1 : 1 + count]) for line in lines):
            below = ["", *(_settings(header, line, count, console.width) for line in lines)]
        header, lines = [header[0], *header[1 + count :]], [[line[0], *line[1 + count :]] for line in lines]
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in header:
        folds = name in ("run", "state")
        align: Literal["right", "left"] = "right" if name in ("tokens/s", "updates") else "left"
        drawn.add_column(Text(name), overflow="fold", justify=align, no_wrap=not folds, min_width=len(name))
    for line in lines:
        drawn.add_row(*(Text(cell) for cell in line))
    console.print(drawn)
    assert isinstance(console.file, io.StringIO)
    return title + "\n".join([*(line.rstrip() for line in console.file.getvalue().split("\n")[:-1]), *below]) + "\n"


def _settings(header: Sequence[str], line: Sequence[str], count: int, width: int) -> str:
    """Returns a run's first `count` settings in lines that fit."""
    pairs = [f"{name} {value}" for name, value in zip(header[1 : 1 + count], line[1:], strict=False) if value]
    return textwrap.fill(f"{line[0]}: {', '.join(pairs)}", width, subsequent_indent="  ")


def _width(header: Sequence[str], lines: Sequence[Sequence[str]]) -> int:
    return sum(max(len(row[column]) for row in [header, *lines]) + 2 for column in range(len(header)))
