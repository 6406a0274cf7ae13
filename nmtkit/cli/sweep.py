"""`nmtkit sweep`: trains the runs of a sweep file one after another and compares them."""

import contextlib
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

import click

from nmtkit.cli.command import Command, stderr
from nmtkit.cli.flags import given_flags
from nmtkit.config import FlagRule, check_flags
from nmtkit.config.files import check_outputs
from nmtkit.config.plugins import source_digests

if TYPE_CHECKING:
    from nmtkit.experiments.comparison import RunSummary
    from nmtkit.experiments.sweep import Sweep, SweepRun

log = logging.getLogger("nmtkit")

RULES = (
    FlagRule("--optuna", excludes=("--shard",), reason="with --optuna, machines that share the folder share one study"),
    FlagRule("--optuna", excludes=("--only",), reason="Optuna chooses the runs"),
    FlagRule("--dry-run", excludes=("--report",), reason="nothing is run"),
)
POLL_SECONDS = 0.5


@dataclass
class Runner:
    """Runs commands one after another as child processes. Forwards SIGINT, SIGTERM and SIGUSR1 to the running child."""

    received: signal.Signals | None = None
    process: "subprocess.Popen[str] | None" = None
    errors: list[str] = field(default_factory=list)  # lines of the error message of the last process
    ended_early: bool = False  # whether `watch` ended the last process

    def __post_init__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if self.process and number == signal.SIGINT:
            # Like a terminal, signal the whole group: the launcher of several processes does not forward Ctrl-C.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
        elif self.process:
            self.process.send_signal(number)

    def run(self, command: Sequence[str], watch: Callable[[], bool] = lambda: True) -> int:
        """Runs an nmtkit command and returns its exit code. Ends the command early if `watch` returns False."""
        self.errors, self.ended_early = [], False
        words = [sys.executable, "-m", *command]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stderr is not None
        reader = threading.Thread(target=self._copy, args=(self.process.stderr,), daemon=True)
        reader.start()
        while True:
            try:
                code = self.process.wait(POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if not self.ended_early and not watch():
                    self.process.terminate()
                    self.ended_early = True
        reader.join()
        self.process = None
        return code if code >= 0 else 128 - code

    def _copy(self, lines: IO[str]) -> None:
        for line in lines:
            sys.stderr.write(line)
            if line.startswith("nmtkit: error: "):
                self.errors.append(line.removeprefix("nmtkit: error: ").strip())
            elif self.errors and line.startswith("  "):  # continues the error message
                self.errors[-1] += "\n" + line.rstrip()


@click.command(cls=Command)
@click.argument("file", type=Path, metavar="SWEEP.TOML")
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
@click.option("--report", type=Path, metavar="FILE", help="Also write an HTML page with the curves of all runs.")
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
    from nmtkit.experiments import sweep as sweeps

    check_flags(RULES, given_flags(), given_flags())
    check_outputs({"--report": report}, [file])
    sweep = sweeps.read(file)
    part, parts = shard_of(shard)
    quiet = ["--quiet"] if log.level > logging.INFO else []
    if optuna:
        from nmtkit.experiments.sweep_search import Search

        search = Search(sweep)
        if dry_run:
            click.echo("\n".join(search.described()))
            return
        runner = Runner()
        failed = search.run(
            lambda run, watch: attempt(runner, sweep, run, [*train_flags, *quiet], watch), lambda: stop(runner)
        )
        runs = search.runs()
    else:
        runs = chosen(sweep.runs(), only)
        for run in runs:
            sweep.command(run)  # finds mistakes in all runs before the first run starts
        of_part = runs[part - 1 :: parts]
        if dry_run:
            for run in of_part:
                click.echo(f"# {run.name}\n{shlex.join(sweep.command(run, train_flags))}")
            return
        failed = make(sweep, of_part, [*train_flags, *quiet])
    show(sweep, runs, format, report)
    for name, reason in failed.items():
        stderr.print(f"nmtkit: failed: {name}: {reason}", markup=False, soft_wrap=True)
    sys.exit(1 if failed else 0)


def chosen(runs: "Sequence[SweepRun]", only: str | None) -> "list[SweepRun]":
    """Returns the runs with a name that matches one of the patterns, or all runs if there are no patterns.

    Commas separate patterns, but names also contain commas: `base,seed=1` is one pattern if a run has this name. Raises
    ValueError for a pattern that matches no run.
    """
    if only is None:
        return list(runs)
    parts = only.split(",")
    runs_by_id: dict[str, SweepRun] = {}
    while parts:
        for count in range(len(parts), 0, -1):  # takes the longest matching pattern
            pattern = ",".join(parts[:count])
            matching = {run.name: run for run in runs if fnmatchcase(run.name, pattern)}
            if matching:
                break
        else:
            raise ValueError(
                f"--only {parts[0]} matches no run; the runs are called {', '.join(run.name for run in runs)}"
            )
        runs_by_id |= matching
        parts = parts[count:]
    return [run for run in runs if run.name in runs_by_id]


def shard_of(text: str | None) -> tuple[int, int]:
    """Returns the numbers I and N of "I/N". Raises ValueError for other texts."""
    match = re.fullmatch(r"(\d+)/(\d+)", text or "1/1")
    part, parts = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= part <= parts:
        raise ValueError(f"--shard {text} is not I/N with I from 1 to N: 1/3, 2/3 and 3/3 on three machines")
    return part, parts


def make(sweep: "Sweep", runs: Sequence["SweepRun"], flags: Sequence[str]) -> dict[str, str]:
    """Trains all runs that are not finished. Returns the names of failed runs with their reasons."""
    runner = Runner()
    failed = {}
    for index, run in enumerate(runs, 1):
        title = f"run {index} of {len(runs)}, {run.name}"
        if not flags and is_finished(sweep, run):
            log.info("%s: finished before", title)
            continue
        log.info("%s: %s", title, shlex.join(sweep.command(run, flags)))
        reason = attempt(runner, sweep, run, flags)
        if reason:
            failed[run.name] = reason
            log.warning("%s failed: %s", title, reason)
        stop(runner)
    return failed


def attempt(
    runner: Runner, sweep: "Sweep", run: "SweepRun", flags: Sequence[str], watch: Callable[[], bool] = lambda: True
) -> str | None:
    """Trains one run. Returns the reason of a failure, else None.

    Also returns None if the run was stopped on request, or if another machine trains in the same folder.
    """
    code = runner.run(sweep.command(run, flags), watch)
    if code == 0 or runner.received or runner.ended_early:
        return None
    reason = runner.errors[-1] if runner.errors else ended_by(code)
    if "is in use by" in reason:
        log.info("%s", reason)
        return None
    return reason


def ended_by(code: int) -> str:
    """Returns an explanation of an exit code above 0, for a process that wrote no error message."""
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return f"exit code {code}"
    cause = ", perhaps because the memory was full" if name == "SIGKILL" else ""
    return f"ended by {name}{cause}; to resume the run, repeat the sweep command"


def stop(runner: Runner) -> None:
    """Exits if a signal has asked to stop."""
    if runner.received:
        arguments = shlex.join(["nmtkit", *sys.argv[1:]])
        stderr.print(f"{runner.received.name}. To continue: {arguments}", markup=False, soft_wrap=True)
        sys.exit(128 + runner.received)


def is_finished(sweep: "Sweep", run: "SweepRun") -> bool:
    """Returns whether a run is finished with the current settings, dataset and code of plug-ins.

    For any other run, `nmtkit train` decides: it resumes the run, rejects a different dataset, and warns of different
    plug-in code.
    """
    from nmtkit.data.dataset.binarized import Dataset
    from nmtkit.experiments import comparison
    from nmtkit.training.differences import flat
    from nmtkit.training.run_facts import fingerprint

    job = sweep.job(run)
    if not (job.run.save_dir / "log.jsonl").is_file():
        return False
    summary = comparison.summarize(job.run.save_dir)
    wanted = {name: value for name, value in flat(job.tables()).items() if name not in comparison.OWN}
    if summary.state != "finished" or any(
        summary.settings.get(name) != value for name, value in wanted.items() if value is not None
    ):
        return False
    if summary.plugin_sources != source_digests(job.plugins):
        return False
    assert job.data is not None
    with contextlib.suppress(OSError, ValueError):  # `nmtkit train` explains errors of the dataset
        return summary.dataset == fingerprint(Dataset.open(job.data))
    return False


def show(sweep: "Sweep", runs: Sequence["SweepRun"], format: str, report: Path | None) -> None:
    """Writes the comparison of all runs that have begun."""
    from nmtkit.cli.compare import cells, formatted
    from nmtkit.experiments import comparison, comparison_page

    folders = [sweep.folder / run.name for run in runs]
    begun = [comparison.summarize(folder) for folder in folders if (folder / "log.jsonl").is_file()]
    if not begun:
        return
    rows: list[RunSummary] = comparison.means_over_seeds(begun) if len(sweep.seeds) > 1 else begun
    click.echo(formatted(rows, format), nl=False)
    if report:
        comparison_page.write(report, begun, *cells(rows))
