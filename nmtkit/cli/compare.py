"""`nmtkit compare`: compares several runs in a table or on an HTML page."""

from pathlib import Path

import click

from nmtkit.cli.command import Command, echo
from nmtkit.cli.flags import PATH
from nmtkit.config.files import check_outputs

FORMATS = ("text", "tsv", "csv", "latex", "json")


@click.command(cls=Command)
@click.argument("runs", type=PATH, nargs=-1, required=True, metavar="RUN…")
@click.option("--mean-over-seeds", is_flag=True, help="Show one row for runs that differ only in the seed.")
@click.option("--format", type=click.Choice(FORMATS), default="text", help="Output format.  [default: text]")
@click.option("--report", type=PATH, metavar="FILE", help="Also write an HTML page with the curves of all runs.")
@click.option(
    "--curves", type=PATH, metavar="FILE", help="Also write the curves of all runs to FILE: .csv, .pdf, .svg or .png."
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
    from nmtkit.experiments import comparison, comparison_output

    if curves and not curves.parent.is_dir():
        raise FileNotFoundError(f"--curves {curves}: the folder {curves.parent} does not exist")
    folders = comparison.folders_of(runs)
    inputs = [folder / name for folder in folders for name in ("log.jsonl", "config.toml")]
    check_outputs({"--report": report, "--curves": curves}, inputs)
    summaries = [comparison.summarize(folder) for folder in folders]
    rows = comparison.means_over_seeds(summaries) if mean_over_seeds else summaries
    echo(comparison_output.formatted(rows, format), nl=False)
    if report:
        comparison_output.write_page(report, summaries, rows)
    if curves:
        comparison_output.write_curves(curves, summaries)
