"""Processes shards on this machine, in worker processes or in this process."""

import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from nmtkit.jobs.shard_plan import Plan, Shard
from nmtkit.jobs.workers import Workers


class ShardWorker(Protocol):
    """An object that computes the output of shards, on this machine or in a Ray cluster."""

    def output(self, shard: Shard, counts: Counter[str]) -> Iterator[bytes]:
        """Yields the output of a shard in parts. Adds statistics of the shard to `counts`."""


class ShardWriter:
    """Writes the shards that a worker computes."""

    def __init__(self, factory: Callable[[], ShardWorker], plan: Plan) -> None:
        self.worker, self.plan = factory(), plan

    def write(self, shard: Shard) -> tuple[Shard, dict[str, Any]]:
        """Computes a shard and writes its files. Returns the shard and its record."""
        counts: Counter[str] = Counter()
        return shard, self.plan.write(shard, while_parent_lives(self.worker.output(shard, counts)), counts)


def while_parent_lives(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yields `parts`. Ends this worker process if its parent was killed, so that no worker keeps running unnoticed."""
    parent = multiprocessing.parent_process()
    for part in parts:
        if parent is not None and not parent.is_alive():
            sys.exit(1)
        yield part


def run_locally(
    factory: Callable[[], ShardWorker], plan: Plan, shards: Sequence[Shard], workers: int
) -> Iterator[tuple[Shard, dict[str, Any]]]:
    """Processes shards in `workers` processes. Yields each finished shard with its record."""
    with Workers(workers, partial(ShardWriter, factory, plan), tasks_ahead=1) as pool:
        for _, result in pool.imap_unordered((ShardWriter.write, shard) for shard in shards):
            yield result
