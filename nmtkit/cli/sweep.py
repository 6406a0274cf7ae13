"""`nmtkit sweep`: trains the runs of a sweep file one after another and compares them."""

import dataclasses
import logging
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from nmtkit.experiments.sweep import Sweep, SweepRun

from nmtkit.cli import generate
from nmtkit.cli.command import PROGRAM, Command, as_started, echo, exit_stopped, print_line, program
from nmtkit.cli.compare import METRICS_OF_ROWS, RowsConfig, show_differences, show_rows
from nmtkit.cli.flags import INPUT, flags, from_flags, given_flags
from nmtkit.cli.score import ScoreConfig
from nmtkit.config import FlagRule, check_flags, option, suggestion
from nmtkit.config.files import check_outputs
from nmtkit.jobs import progress
from nmtkit.jobs.shard_options import part_of

RULES = (
    FlagRule("--optuna", excludes=("--shard",), reason="with --optuna, machines that share the folder share one study"),
    FlagRule("--optuna", excludes=("--only",), reason="Optuna chooses the runs"),
    FlagRule("--dry-run", excludes=("--report", "--plot"), reason="nothing is run"),
    FlagRule("--costs", excludes=("--report", "--plot", "--dry-run", "--optuna"), reason="nothing is run"),
    FlagRule("--costs", excludes=("--shard",), reason="the costs cover the rows of all machines; see --only"),
    FlagRule("--costs", excludes=("TRAIN_FLAGS",), reason="--costs reads the settings of SWEEP.TOML only"),
    FlagRule("--vocab-size", needs=("--costs",)),
    FlagRule("--format", excludes=("--dry-run",), reason="--dry-run prints commands"),
)


@dataclass(frozen=True, kw_only=True)
class SweepConfig(RowsConfig):
    """Settings of `nmtkit sweep`."""

    dry_run: bool = option(False, "list the runs and their commands without training")
    costs: bool = option(False, "print parameters, updates, FLOP and GPU-hours of each row without training")
    vocab_size: int | None = option(
        None, "size of the joint vocabulary for --costs; without this flag, the dataset is read", min=3, max=10_000_000
    )
    only: str | None = option(
        None,
        "train only the runs whose names match a pattern, such as 'base,*'; --dry-run lists the names",
        metavar="PATTERN,…",
    )
    shard: str | None = option(None, "train part I of N of the runs, on one of N machines", metavar="I/N")
    optuna: bool = option(False, "use Optuna to choose the random settings and to end bad runs early")


@click.command(cls=Command)
@click.argument("file", type=INPUT, metavar="SWEEP.TOML")
@click.argument("train_flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- TRAIN FLAGS…]")
def command(file: Path, train_flags: tuple[str, ...], **settings: Any) -> None:
    """Train the runs of a sweep file: a config file whose table [sweep] lists the settings that vary.

    To continue the sweep, repeat the command: finished runs are kept, interrupted runs are resumed, and failed runs are
    repeated. At the end, the command compares all runs; for several seeds, it shows means and standard deviations.
    With base or [sweep.generate] in the file, it shows differences to the base row (by default the first row), with
    confidence intervals and p-values.

    \b
    nmtkit sweep lr.toml --dry-run
    nmtkit sweep lr.toml --costs
    nmtkit sweep lr.toml
    nmtkit sweep lr.toml --shard 2/3 -- --threads 4
    """
    from nmtkit.experiments import comparison, comparison_output, sweep_costs
    from nmtkit.experiments import sweep as sweeps
    from nmtkit.experiments.optuna_study import OptunaStudy
    from nmtkit.experiments.sweep_runner import SweepStoppedError, SweepTrainer, chosen

    check_flags(RULES, given_flags(), given_flags())
    config: SweepConfig = from_flags(SweepConfig, settings)
    check_outputs({"--report": config.report, "--plot": config.plot}, [file])
    comparison_output.check_figure(config.plot, "--plot")
    sweep = dataclasses.replace(sweeps.read(file), vocabulary_size=config.vocab_size)
    if config.plot and not sweep.compares_rows:
        raise ValueError(f'--plot draws differences to a row: give base = "ROW" in [sweep] of {file}')
    part, parts = part_of(config.shard)
    study = OptunaStudy(sweep) if config.optuna else None
    every = sweep.runs() if study is None else []
    names = list(dict.fromkeys(comparison.row_name(run.name) for run in every))
    if sweep.base and every and sweep.base not in names:
        raise ValueError(f"{file}: base {sweep.base!r} of [sweep] is not a row; {suggestion(sweep.base, names)}")
    runs = chosen(every, config.only) if study is None else []
    if config.costs:
        progress.begin("Estimating the costs")
        echo(sweep_costs.formatted(sweep_costs.row_costs(sweep, runs), config.format), nl=False)
        return
    for run in runs:
        sweep.command(run)  # finds mistakes in all runs before the first run starts
        check_translation(sweep, run)
    of_part = runs[part - 1 :: parts]
    if config.dry_run:
        for line in study.described() if study else ():
            echo(line)
        for run in of_part:
            echo(f"# {run.name}")
            for words in (sweep.command(run, train_flags), *sweep.translation_commands(run)):
                echo(as_started(shlex.join(words)))
        return
    quiet = ["--quiet"] if logging.getLogger("nmtkit").level > logging.INFO else []
    os.environ[PROGRAM] = shlex.join(program())
    trainer = SweepTrainer(sweep, [*train_flags, *quiet], program=program())
    progress.close()  # each run shows its own progress
    try:
        failed = study.run(trainer.train) if study else trainer.train_all(of_part)
    except SweepStoppedError as stopped:
        exit_stopped(stopped.received)
    for name, reason in failed.items():
        print_line(f"nmtkit: failed: {name}: {reason}")
    compared = study.runs() if study else every if sweep.compares_rows else runs
    folders = [sweep.folder / run.name for run in compared]
    begun = [comparison.summarize(folder) for folder in folders if (folder / "log.jsonl").is_file()]
    if begun:
        rows = comparison.means_over_seeds(begun) if len(sweep.seeds) > 1 else begun
        if sweep.compares_rows and any(run.state == "finished" for run in begun):
            show_differences(begun, rows, sweep.base, ScoreConfig(metric=METRICS_OF_ROWS), config)
        else:
            show_rows(begun, rows, config)
    sys.exit(1 if failed else 0)


command.params += flags(SweepConfig)


def check_translation(sweep: "Sweep", run: "SweepRun") -> None:
    """Raises ValueError if the run would have no translations to compare, or if [sweep.generate] has a mistake."""
    from nmtkit.data.dataset.binarized import Dataset

    if sweep.base and sweep.generate is None:
        job = sweep.job(run)
        if not job.run.validates or not any(metric.translates for metric in job.metrics().values()):
            raise ValueError(
                f"{sweep.file}, run {run.name}: base of [sweep] compares translations, but this run makes none; add "
                "[sweep.generate], or validate with --metrics bleu"
            )
    for command in sweep.translation_commands(run):
        if command[1] == "generate":
            try:
                with generate.command.make_context("generate", command[2:]) as context:
                    settings = dict(context.params)
                    data, paths, files, plugins = map(settings.pop, ("data", "paths", "inputs", "plugins"))
                    parsed = generate.parsed_job(data, paths, files, plugins, settings)
                if data.is_dir():  # otherwise, `nmtkit train` explains the error
                    Dataset.open(data)[parsed.config.gen_subset]
            except (click.UsageError, ValueError) as error:
                reason = error.format_message() if isinstance(error, click.UsageError) else error
                raise ValueError(f"{sweep.file}: [sweep.generate]: {reason}") from None
