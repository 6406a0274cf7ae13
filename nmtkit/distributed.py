"""Rank, world size, sums and barriers; no-ops on one process. This module knows no model.

A launcher (torchrun, or `launch` here) starts the processes and describes them in the environment: RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, …
"""

import datetime
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous


def launched() -> bool:
    """Whether a launcher started this process, be it as the only one."""
    return "WORLD_SIZE" in os.environ


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Which of this machine's processes we are, hence which of its devices is ours."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_rank_zero() -> bool:
    """Whether this process is the one that writes files and talks."""
    return rank() == 0


def init_process_group(device: torch.device, timeout_minutes: float) -> None:
    """Meets the other processes that the launcher started, and watches over them.

    Collectives run on gloo for CPU tensors and on NCCL for those on a GPU.
    """
    global _watchdog
    if not launched() or dist.is_initialized():
        return
    store, own, ranks = next(rendezvous("env://"))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # a minute more than the watch, which knows whom to blame
    limit = datetime.timedelta(minutes=timeout_minutes + 1)
    dist.init_process_group(backend, store=store, rank=own, world_size=ranks, timeout=limit)
    _watchdog = Watchdog(store, timeout_minutes * 60)


def destroy_process_group() -> None:
    """Parts from the other processes; all of them are to do so."""
    if dist.is_initialized():
        barrier()
        if _watchdog:
            _watchdog.close()
        dist.destroy_process_group()


def heartbeat(stage: int | None = None) -> None:
    """Says that this process is alive, and has come to `stage`: updates made, say."""
    if _watchdog:
        _watchdog.beat(stage)


def is_connection_error(error: BaseException) -> bool:
    """Whether an error is but the end of another process, seen from here."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "closed by peer"))
    )


def abort(message: str) -> None:
    """Tells the other processes that this one ends because of an error; they end within seconds."""
    if _watchdog:
        _watchdog.failed(message)


def all_reduce(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def barrier() -> None:
    """Waits until every process is here."""
    all_reduce(torch.zeros(1))


def broadcast(value: Any) -> Any:
    """What rank 0 has, on every rank; a plain value."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def all_gather_object(value: Any) -> list[Any]:
    """Every rank's plain value, by rank, on every rank."""
    if world_size() == 1:
        return [value]
    values = []  # all_gather_object would go through the GPU under NCCL; a broadcast from each rank does not
    for source in range(world_size()):
        box = [value if source == rank() else None]
        dist.broadcast_object_list(box, src=source, device=torch.device("cpu"))
        values.append(box[0])
    return values


class AsyncMax:
    """The largest of all ranks' numbers, known at the next call, so that nobody waits for them."""

    def __init__(self) -> None:
        self.box: Tensor | None = None
        self.work: Any = None

    def largest(self, *values: int) -> list[int]:
        """Gives the largest of each of `values` of the call before, 0 at the first, on every rank alike; on a single
        process those of this call."""
        if world_size() == 1:
            return list(values)
        agreed = [0] * len(values)
        if self.box is not None:
            self.work.wait()
            agreed = self.box.tolist()
        self.box = torch.tensor(values, dtype=torch.int64)
        self.work = dist.all_reduce(self.box, dist.ReduceOp.MAX, async_op=True)
        return agreed


class Watchdog:
    """A thread on every rank that ends the process when another rank failed or hangs, or the launcher is gone.

    Each rank publishes how far it has come. Rank 0 looks who has not moved for `timeout` seconds; of those, the ones
    furthest behind are to blame, for the others wait for them.
    """

    INTERVAL = 0.5  # seconds

    def __init__(self, store: Any, timeout: float) -> None:
        self.store = store
        self.timeout = timeout
        self.stage = 0
        self.beats = 0
        self.parent = os.getppid()
        self.seen: dict[int, tuple[bytes, float]] = {}  # by rank: what it published, and since when
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.thread.start()

    def beat(self, stage: int | None) -> None:
        self.beats += 1
        if stage is not None:
            self.stage = stage

    def failed(self, message: str) -> None:
        self.closed.set()
        self.store.set("failed", message)

    def close(self) -> None:
        self.closed.set()
        self.thread.join()

    def _run(self) -> None:
        while not self.closed.wait(self.INTERVAL):
            try:
                self.store.set(f"beat {rank()}", f"{self.stage} {self.beats}")
                if self.store.check(["failed"]):
                    os._exit(1)  # that rank has said why
                hanging = self._hanging() if is_rank_zero() else None
            except (RuntimeError, dist.DistError):
                os._exit(1)  # the store went with its process, which has said why
            if hanging:
                print(f"nmtkit: error: {hanging}", file=sys.stderr, flush=True)
                self.store.set("failed", hanging)
                os._exit(1)
            if os.getppid() != self.parent:
                os._exit(1)  # the launcher is gone

    def _hanging(self) -> str | None:
        """What to say when some rank has not moved for too long."""
        now = time.monotonic()
        still: dict[int, int] = {}  # stage by rank, of those that do not move
        for other in range(world_size()):
            name = f"beat {other}"
            published = self.store.get(name) if self.store.check([name]) else b"0 0"
            if published != self.seen.get(other, (None,))[0]:
                self.seen[other] = (published, now)
            if now - self.seen[other][1] > self.timeout:
                still[other] = int(published.split()[0])
        if not still:
            return None
        behind = [str(other) for other, stage in still.items() if stage == min(still.values())]
        who = f"process {behind[0]} hangs" if len(behind) == 1 else f"processes {', '.join(behind)} hang"
        return f"{who} after update {min(still.values())}: no sign of life for {self.timeout / 60:g} minutes"


_watchdog: Watchdog | None = None
