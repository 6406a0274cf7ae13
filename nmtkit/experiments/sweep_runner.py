"""Trains the runs of a sweep one after another, each in a child process."""

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import FrameType
from typing import IO

from nmtkit.config import setting_text
from nmtkit.config.plugins import source_digests
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.experiments import comparison, run_translations
from nmtkit.experiments.comparison import RunSummary
from nmtkit.experiments.sweep import Sweep, SweepRun
from nmtkit.jobs.processes import STOP_SIGNALS, restore_handlers
from nmtkit.training.config import JobConfig, flat_settings
from nmtkit.training.plan import resolve
from nmtkit.training.resume import EXPECTED_CHANGES, Change, changes, table
from nmtkit.training.run_facts import input_fingerprints
from nmtkit.training.setup import validating_where_possible

log = logging.getLogger("nmtkit")

POLL_SECONDS = 0.5
ENDS = ("max_update", "max_epoch", "stop_time_hours", "patience")  # settings that end a run


class SweepStoppedError(Exception):
    """A signal has stopped the sweep. The same command continues the sweep."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(received.name)
        self.received = received


@dataclass
class Runner:
    """Runs commands one after another as child processes. Forwards SIGINT, SIGTERM and SIGUSR1 to the running child.

    Between two commands and after the last command, these signals end the sweep like any other program.
    """

    received: signal.Signals | None = None
    process: "subprocess.Popen[str] | None" = None
    errors: list[str] = field(default_factory=list)  # error messages of the last process, which can have several lines
    ended_early: bool = False  # whether `watch` ended the last process

    def _receive(self, number: int, frame: FrameType | None = None) -> None:
        self.received = signal.Signals(number)
        if self.process and number == signal.SIGINT and hasattr(os, "killpg"):
            # Like a terminal, signal the whole group: the launcher of several processes does not forward Ctrl-C.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
        elif self.process:
            self.process.send_signal(number)

    def run(self, command: Sequence[str], watch: Callable[[], bool] = lambda: True) -> int:
        """Runs an nmtkit command and returns its exit code. Ends the command early if `watch` returns False."""
        self.errors, self.ended_early = [], False
        words = [sys.executable, "-m", *command]
        handlers = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        try:
            self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
            if self.received:  # a signal came while the process was starting
                self._receive(self.received)
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
        finally:
            if self.process and self.process.poll() is None:  # `watch` has raised an error
                self.process.terminate()
            self.process = None
            restore_handlers(handlers)
        return code if code >= 0 else 128 - code

    def _copy(self, lines: IO[str]) -> None:
        for line in lines:
            sys.stderr.write(line)
            if line.startswith("nmtkit: error: "):
                self.errors.append(line.removeprefix("nmtkit: error: ").strip())
            elif self.errors and line.startswith("  "):  # continues the error message
                self.errors[-1] += "\n" + line.rstrip()


class SweepTrainer:
    """Trains the runs of a sweep, each with a child process `nmtkit train`. `flags` are added to each command.

    Commands in the log begin with `program`, the words with which the user started nmtkit.
    """

    def __init__(self, sweep: Sweep, flags: Sequence[str], *, program: Sequence[str]) -> None:
        self.sweep, self.flags, self.program = sweep, flags, program
        self.runner = Runner()

    def train_all(self, runs: Sequence[SweepRun]) -> dict[str, str]:
        """Trains the runs that are not finished. Returns the names of failed runs with their reasons."""
        failed = {}
        for index, run in enumerate(runs, 1):
            title = f"run {index} of {len(runs)}, {run.name}"
            if not self.flags and is_finished(self.sweep, run):
                log.info("%s: already finished", title)
                reason = self.translate(run)
            else:
                log.info("%s: %s", title, self._as_typed(self.sweep.command(run, self.flags)))
                reason = self.train(run)
            if reason:
                failed[run.name] = reason
                log.warning("%s failed: %s", title, reason)
        return failed

    def train(self, run: SweepRun, watch: Callable[[], bool] = lambda: True) -> str | None:
        """Trains one run, which ends early if `watch` returns False, and translates with the finished model.

        Returns the reason of a failure, else None. Also returns None if another machine trains in the same folder.
        Raises SweepStoppedError after a signal.
        """
        if not set(self.flags) - {"--quiet"} and (changed := changes_after_end(self.sweep, run)):
            return (
                f"the run is finished, but its settings differ from {self.sweep.file}:\n{table(changed)}\n"
                f"to train it again, delete {self.sweep.folder / run.name}, or give another save_dir in [sweep]"
            )
        reason = self._run(self.sweep.command(run, self.flags), watch)
        if reason and "is in use by" in reason:
            log.info("%s", reason)
            return None
        return reason or self.translate(run)

    def translate(self, run: SweepRun) -> str | None:
        """Makes the translations of [sweep.generate] for a finished run, unless they exist.

        Returns the reason of a failure, else None. Raises SweepStoppedError after a signal.
        """
        commands = self.sweep.translation_commands(run)
        if not commands:
            return None
        job = self.sweep.job(run)
        summary = comparison.summarize(job.run.save_dir)
        flags = commands[-1][5:-2]  # without the dataset, the model and the output
        settings = run_translations.settings_of(self.sweep.average, self.sweep.generate or {}, flags)
        if summary.state != "finished" or run_translations.is_current(summary, settings):
            return None
        # removes the record, so that translations that are being replaced are not compared
        (job.run.save_dir / run_translations.RECORD).unlink(missing_ok=True)
        for command in commands:
            log.info("%s", self._as_typed(command))
            if reason := self._run(command):
                return reason
        assert job.data is not None
        run_translations.write_record(summary, job.data, settings, self._flop(run, summary.update))
        return None

    def _as_typed(self, command: Sequence[str]) -> str:
        return shlex.join([*self.program, *command[1:]])

    def _run(self, command: Sequence[str], watch: Callable[[], bool] = lambda: True) -> str | None:
        """Runs a command. Returns the reason of a failure, else None. Raises SweepStoppedError after a signal."""
        code = self.runner.run(command, watch)
        if self.runner.received:
            raise SweepStoppedError(self.runner.received)
        if code == 0 or self.runner.ended_early:
            return None
        return self.runner.errors[-1] if self.runner.errors else ended_by(code)

    def _flop(self, run: SweepRun, updates: int) -> float | None:
        """Returns the estimated cost of a run, or None for an architecture whose cost cannot be estimated."""
        try:
            return updates * self.sweep.cost(run).flops
        except ValueError as error:
            log.warning("%s", error)
            return None


def ended_by(code: int) -> str:
    """Returns an explanation of an exit code above 0, for a process that wrote no error message."""
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return f"exit code {code}"
    cause = ", perhaps because the memory was full" if name == "SIGKILL" else ""
    return f"ended by {name}{cause}; to resume the run, repeat the sweep command"


def is_finished(sweep: Sweep, run: SweepRun) -> bool:
    """Returns whether a run is finished with the current settings, dataset and code of plug-ins.

    For any other run, `nmtkit train` decides: it resumes the run, rejects a different dataset, and warns of different
    plug-in code.
    """
    job = sweep.job(run)
    summary = finished_summary(job)
    if summary is None or changed_settings(job, summary) or summary.plugin_sources != source_digests(job.plugins):
        return False
    assert job.data is not None
    with contextlib.suppress(OSError, ValueError):  # `nmtkit train` explains errors of the dataset
        return summary.dataset == Dataset.open(job.data).fingerprint[:12]
    return False


def finished_summary(job: JobConfig) -> RunSummary | None:
    """Returns the summary of the run in the `save_dir` of a job, or None if this folder has no finished run."""
    if not (job.run.save_dir / "log.jsonl").is_file():
        return None
    summary = comparison.summarize(job.run.save_dir)
    return summary if summary.state == "finished" else None


def changed_settings(job: JobConfig, summary: RunSummary) -> list[Change]:
    """Returns the settings of a job that differ from the settings of its finished run, which `summary` describes.

    The log of a run has resolved settings: without a valid set, validation is off, and the batch size depends on the
    number of processes. So the job is resolved in the same way before the comparison. The job is resolved for a GPU,
    even if this machine has no GPU: no compared setting depends on the device. A setting that names files, such as
    --finetune-from or --teacher, also counts as changed if the contents of the files have changed.
    """
    assert job.data is not None
    with contextlib.suppress(OSError, ValueError):  # `nmtkit train` explains errors of the dataset
        job = validating_where_possible(job, Dataset.open(job.data))
    processes = next((record.get("processes", 1) for record in summary.records if record["kind"] == "start"), 1)
    anywhere = replace(job, run=replace(job.run, device="cuda"))
    wanted = flat_settings(resolve(anywhere, processes, estimate=True).job.tables())
    changed = changes(summary.settings, {name: value for name, value in wanted.items() if name not in comparison.OWN})
    known = {name for name, _, _ in changed}
    with contextlib.suppress(OSError, ValueError):  # a finished run does not need its files
        for name, digits in input_fingerprints(job).items():
            before = summary.inputs.get(name, digits)
            if name not in known and digits != before:
                files = setting_text(wanted[name])
                changed.append((name, f"{files} ({before})", f"{files} ({digits})"))
    return changed


def changes_after_end(sweep: Sweep, run: SweepRun) -> list[Change]:
    """Returns the settings that were changed after a run had finished.

    The result is empty if `nmtkit train` would continue the training with the changed settings. The result has no
    settings that are newer than the version of nmtkit that has trained the run.
    """
    job = sweep.job(run)
    summary = finished_summary(job)
    if summary is None or not (changed := changed_settings(job, summary)):
        return []
    done = {"max_update": summary.update, "max_epoch": max(record.get("epoch", 0) for record in summary.records)}
    left = {name: limit - done[name] for name in done if (limit := getattr(job.run, name)) is not None}
    if any(name in ENDS for name, _, _ in changed) and all(updates > 0 for updates in left.values()):
        return []
    known = [change for change in changed if change[0] in summary.settings]
    return [change for change in known if change[0] not in EXPECTED_CHANGES or left.get(change[0], 0) < 0]


def chosen(runs: Sequence[SweepRun], only: str | None) -> list[SweepRun]:
    """Returns the runs with a name that matches one of the patterns of --only, or all runs if there are no patterns.

    Commas separate patterns, but names also contain commas: `base,seed=1` is one pattern if a run has this name. Raises
    ValueError for a pattern that matches no run.
    """
    if only is None:
        return list(runs)
    parts = only.split(",")
    names: set[str] = set()
    while parts:
        for count in range(len(parts), 0, -1):  # takes the longest matching pattern
            matching = {run.name for run in runs if fnmatchcase(run.name, ",".join(parts[:count]))}
            if matching:
                break
        else:
            raise ValueError(
                f"--only {parts[0]} matches no run; the runs are called {', '.join(run.name for run in runs)}"
            )
        names |= matching
        parts = parts[count:]
    return [run for run in runs if run.name in names]
