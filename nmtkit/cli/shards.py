"""Runs a job in shards (`--output-dir`): shows progress, stops on signals, says how to continue."""

import logging
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from nmtkit.cli.command import exit_stopped, program
from nmtkit.jobs import progress
from nmtkit.jobs.processes import restore_handlers
from nmtkit.jobs.shard_options import ShardOptions, part_of
from nmtkit.jobs.shard_plan import Plan, Shard, described
from nmtkit.jobs.shard_processes import ShardResults

log = logging.getLogger("nmtkit")


def this_command() -> str:
    """Returns the command line of this process without --shard, as a command that makes all shards."""
    words = iter(sys.argv[1:])
    kept = []
    for word in words:
        if word == "--shard":
            next(words, None)
        elif not word.startswith("--shard="):
            kept.append(word)
    return shlex.join([*program(), *kept])


def run_shards(options: ShardOptions, plan: Plan, run: Callable[[Sequence[Shard]], ShardResults]) -> None:
    """Calls `run` to make the unfinished shards of the part --shard I/N, and shows the progress.

    Without --shard, all unfinished shards are made. Prints how to continue after a stop, and how to join the shards.
    Raises SystemExit if a signal stops the job.
    """
    part, parts = part_of(options.shard)
    unfinished = plan.unfinished(part, parts)
    if len(unfinished) < len(plan.shards[part - 1 :: parts]):
        log.info("%s: continuing, %s left", plan.folder, described(unfinished) if unfinished else "no shard is")
    try:
        with stop_on_signals():
            if unfinished:
                progress.begin("Working", "lines", sum(shard.lines for shard in unfinished))
                finished = 0
                for _, record in run(unfinished):
                    finished += record["lines"]
                    progress.reach(finished)
    except KeyboardInterrupt as stop:
        exit_stopped(stop.args[0] if stop.args else signal.SIGINT)
    finally:
        plan.remove_temporary_files(unfinished)
    if missing := plan.unfinished():
        log.info("%s: this part is done; %s of %s left", plan.folder, described(missing), len(plan.shards))
    else:
        log.info("To join the shards: %s --output FILE", shlex.join([*program(), "merge", str(plan.folder)]))


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raises KeyboardInterrupt, with the signal as its argument, for SIGINT and SIGTERM."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number))

    earlier = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        restore_handlers(earlier)
