"""Processes that work on shards: worker processes of this machine, or actors of a Ray cluster (extra `nmtkit[ray]`).

All machines of a cluster must see the output folder of the job, for example on a shared file system. Ray transfers the
positions of shards and their records, but no text. If an actor dies, another actor gets its shard.
"""

import logging
import multiprocessing
import platform
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from nmtkit.config.extras import imported
from nmtkit.jobs.shard_options import ShardOptions
from nmtkit.jobs.shard_plan import PLAN, Plan, Shard, read_plan
from nmtkit.jobs.workers import Workers

log = logging.getLogger("nmtkit")

ATTEMPTS = 4  # the job fails if this many actors die while working on the same shard
SECONDS_TO_PLACE = 120.0  # time limit for the start of an actor

ShardResults = Iterator[tuple[Shard, dict[str, Any]]]  # finished shards with their records


class ShardWorker(Protocol):
    """An object that computes the output of shards, on this machine or in a Ray cluster."""

    def output(self, shard: Shard, counts: Counter[str]) -> Iterator[bytes]:
        """Yields the output of a shard in parts. Adds statistics of the shard to `counts`."""


Factory = Callable[[int | None], ShardWorker]  # argument: number of CPU threads of the worker; None: the default


class ShardWriter:
    """Writes the shards that a worker computes."""

    def __init__(self, factory: Factory, plan: Plan, threads: int | None = None) -> None:
        self.worker, self.plan = factory(threads), plan

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


class LocalProcesses:
    """`count` processes of this machine. If `count` is 1, this process does the work itself."""

    def __init__(self, count: int) -> None:
        self.count = count

    def run(self, factory: Factory, plan: Plan, shards: Sequence[Shard]) -> ShardResults:
        """Makes a worker in each process, and writes `shards`. Yields each finished shard with its record."""
        with Workers(self.count, partial(ShardWriter, factory, plan), tasks_ahead=1) as pool:
            for _, result in pool.imap_unordered((ShardWriter.write, shard) for shard in shards):
                yield result


class RayCluster:
    """A connection to the cluster at RAY_ADDRESS, else to a running cluster, else to a new local cluster.

    Raises ImportError if Ray is not installed, and ValueError if the cluster has no room for `actors` actors.
    """

    def __init__(self, actors: int, cpus: float, gpus: float) -> None:
        ray = imported("ray", need="--executor ray needs the package ray: pip install 'nmtkit[ray]'")
        self._ray = ray
        self._actors, self._cpus, self._gpus = actors, cpus, gpus
        ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
        check_capacity([node["Resources"] for node in ray.nodes() if node["Alive"]], actors, cpus, gpus)

    def run(self, factory: Factory, plan: Plan, shards: Sequence[Shard]) -> ShardResults:
        """Processes shards in actors. Yields each finished shard with its record.

        Raises the errors of workers. Raises ValueError if the first actors do not start. Raises ChildProcessError if
        ATTEMPTS actors die while working on the same shard, or if all actors have died and no new actor starts.
        """
        ray = self._ray
        died = (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnavailableError, ray.exceptions.NodeDiedError)
        actor_class = ray.remote(num_cpus=self._cpus, num_gpus=self._gpus, max_restarts=0)(ShardActor)
        threads = max(1, int(self._cpus))
        attempts: Counter[int] = Counter()
        waiting = deque(shards)
        # pending result -> (actor, shard of the result); the shard is None while the actor starts
        working: dict[Any, tuple[Any, Shard | None]] = {}

        def start() -> Any:
            return actor_class.remote(factory, threads, plan.folder.absolute())

        idle = [start() for _ in range(min(self._actors, len(shards)))]
        try:
            self._check_placed(idle)
            while waiting or any(shard is not None for _, shard in working.values()):
                while waiting and idle:
                    actor, next_shard = idle.pop(), waiting.popleft()
                    working[actor.write.remote(next_shard)] = actor, next_shard
                only_starting = all(shard is None for _, shard in working.values())
                timeout = SECONDS_TO_PLACE if only_starting else None
                ready = ray.wait(list(working), num_returns=1, timeout=timeout)[0] if working else []
                if not ready:
                    raise ChildProcessError("all actors have died, and the cluster has no room for another actor")
                actor, shard = working.pop(ready[0])
                try:
                    result = ray.get(ready[0])
                    idle.append(actor)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except died as error:
                    ray.kill(actor)  # the actor may be alive but unreachable
                    if shard is None:
                        continue
                    attempts[shard.index] += 1
                    if attempts[shard.index] >= ATTEMPTS:
                        raise ChildProcessError(f"{ATTEMPTS} actors died while making {shard.name}: {error}") from None
                    log.warning("%s: its actor died; another actor takes the shard", shard.name)
                    waiting.appendleft(shard)
                    actor = start()  # gets a shard only after its start, because the cluster may be full
                    working[actor.folder_is_visible.remote()] = actor, None
                else:
                    if shard is not None:
                        yield result
        finally:
            for actor in [*idle, *(actor for actor, _ in working.values())]:
                ray.kill(actor)

    def _check_placed(self, actors: Sequence[Any]) -> None:
        """Waits until all actors run. Raises ValueError if an actor does not start or cannot see the folder."""
        ray = self._ray
        results = {actor.folder_is_visible.remote(): actor for actor in actors}
        ready, pending = ray.wait(list(results), num_returns=len(actors), timeout=SECONDS_TO_PLACE)
        if pending:
            raise ValueError(
                f"Ray has started {len(ready)} of {len(actors)} actors within {SECONDS_TO_PLACE:g} s: other jobs use "
                "the cluster, or the model loads slowly; use fewer --workers, or wait"
            )
        for result in ready:
            try:
                host, visible = ray.get(result)
            except ray.exceptions.ActorDiedError as error:
                cause = error.cause if isinstance(getattr(error, "cause", None), Exception) else error
                raise ValueError(f"an actor cannot start: {cause}") from None
            if not visible:
                raise ValueError(f"the machine {host} does not see the folder of the plan; use a shared file system")


class ShardActor:
    """A `ShardWriter` in a process of Ray, which may be on another machine."""

    def __init__(self, factory: Factory, threads: int, folder: Path) -> None:
        self._folder = folder
        self._writer = ShardWriter(factory, read_plan(folder), threads) if self._visible() else None

    def _visible(self) -> bool:
        return (self._folder / PLAN).is_file()

    def folder_is_visible(self) -> tuple[str, bool]:
        return platform.node(), self._visible()

    def write(self, shard: Shard) -> tuple[Shard, dict[str, Any]]:
        assert self._writer is not None
        return self._writer.write(shard)


def check_capacity(nodes: Sequence[Mapping[str, float]], actors: int, cpus: float, gpus: float) -> None:
    """Raises ValueError unless the nodes have room for `actors` actors.

    Each actor needs `cpus` CPUs and `gpus` GPUs of a single node.
    """
    needs = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
    room = sum(int(min(node.get(name, 0.0) / need for name, need in needs.items())) for node in nodes)
    if room < actors:
        described = "; ".join(f"{node.get('CPU', 0):g} CPUs, {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise ValueError(
            f"the Ray cluster has room for {room} actors with {cpus:g} CPUs and {gpus:g} GPUs each, but "
            f"{actors} are needed; its nodes have: {described}. Use fewer --workers, or change --actor-cpus or "
            "--actor-gpus"
        )


def shard_processes(options: ShardOptions, workers: int) -> LocalProcesses | RayCluster:
    """Returns `workers` processes: child processes, or actors of a Ray cluster. `options.executor` chooses the kind.

    Raises ImportError if Ray is not installed, and ValueError if the Ray cluster has no room.
    """
    if options.executor == "local":
        return LocalProcesses(workers)
    return RayCluster(workers, options.actor_cpus, options.actor_gpus)
