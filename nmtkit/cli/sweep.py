"""`nmtkit sweep`: trains the runs of a sweep file one after another and compares them."""

import logging
import re
import shlex
import sys
from pathlib import Path

import click

from nmtkit.cli.command import Command, echo, stderr
from nmtkit.cli.flags import PATH, given_flags
from nmtkit.config import FlagRule, check_flags
from nmtkit.config.files import check_outputs
from nmtkit.jobs import progress

RULES = (
    FlagRule("--optuna", excludes=("--shard",), reason="with --optuna, machines that share the folder share one study"),
    FlagRule("--optuna", excludes=("--only",), reason="Optuna chooses the runs"),
    FlagRule("--dry-run", excludes=("--report",), reason="nothing is run"),
)


@click.command(cls=Command)
@click.argument("file", type=PATH, metavar="SWEEP.TOML")
@click.argument("train_flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- TRAIN FLAGS…]")
@click.option("--dry-run", is_flag=True, help="List the runs and their commands without training.")
@click.option(
    "--only", metavar="PATTERN,…", help="Train only runs with matching names, such as 'base,*'; --dry-run lists names."
)
@click.option("--shard", metavar="I/N", help="Train part I of N of the runs, on one of N machines.")
@click.option("--optuna", is_flag=True, help="Use Optuna to choose the random settings and to end bad runs early.")
@click.option(
    "--format", type=click.Choice(["text", "tsv", "json"]), default="text", help="Output format.  [default: text]"
)
@click.option("--report", type=PATH, metavar="FILE", help="Also write an HTML page with the curves of all runs.")
def command(
    file: Path,
    train_flags: tuple[str, ...],
    dry_run: bool,
    only: str | None,
    shard: str | None,
    optuna: bool,
    format: str,
    report: Path | None,
) -> None:
    """Train the runs of a sweep file: a config file whose table [sweep] lists the settings that vary.

    To continue the sweep, repeat the command: finished runs are kept, interrupted runs are resumed, and failed runs are
    repeated. At the end, the command compares all runs; for several seeds, it shows means and standard deviations.

    \b
    nmtkit sweep lr.toml --dry-run
    nmtkit sweep lr.toml
    nmtkit sweep lr.toml --shard 2/3 -- --threads 4
    """
    from nmtkit.experiments import comparison, comparison_output
    from nmtkit.experiments import sweep as sweeps
    from nmtkit.experiments.optuna_study import OptunaStudy
    from nmtkit.experiments.sweep_runner import SweepStoppedError, SweepTrainer, chosen

    check_flags(RULES, given_flags(), given_flags())
    check_outputs({"--report": report}, [file])
    sweep = sweeps.read(file)
    part, parts = shard_of(shard)
    study = OptunaStudy(sweep) if optuna else None
    runs = chosen(sweep.runs(), only) if study is None else []
    for run in runs:
        sweep.command(run)  # finds mistakes in all runs before the first run starts
    of_part = runs[part - 1 :: parts]
    if dry_run:
        lines = [f"# {run.name}\n{shlex.join(sweep.command(run, train_flags))}" for run in of_part]
        echo("".join(f"{line}\n" for line in (study.described() if study else lines)), nl=False)
        return
    quiet = ["--quiet"] if logging.getLogger("nmtkit").level > logging.INFO else []
    trainer = SweepTrainer(sweep, [*train_flags, *quiet])
    progress.close()  # each run shows its own progress
    try:
        failed = study.run(trainer.train) if study else trainer.train_all(of_part)
    except SweepStoppedError as stopped:
        arguments = shlex.join(["nmtkit", *sys.argv[1:]])
        stderr.print(f"{stopped.received.name}. To continue: {arguments}", markup=False, soft_wrap=True)
        sys.exit(128 + stopped.received)
    folders = [sweep.folder / run.name for run in (study.runs() if study else runs)]
    begun = [comparison.summarize(folder) for folder in folders if (folder / "log.jsonl").is_file()]
    if begun:
        rows = comparison.means_over_seeds(begun) if len(sweep.seeds) > 1 else begun
        echo(comparison_output.formatted(rows, format), nl=False)
        if report:
            comparison_output.write_page(report, begun, rows)
    for name, reason in failed.items():
        stderr.print(f"nmtkit: failed: {name}: {reason}", markup=False, soft_wrap=True)
    sys.exit(1 if failed else 0)


def shard_of(text: str | None) -> tuple[int, int]:
    """Returns the numbers I and N of "I/N". Raises ValueError for other texts."""
    match = re.fullmatch(r"(\d+)/(\d+)", text or "1/1")
    part, parts = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= part <= parts:
        raise ValueError(f"--shard {text} is not I/N with I from 1 to N: 1/3, 2/3 and 3/3 on three machines")
    return part, parts
