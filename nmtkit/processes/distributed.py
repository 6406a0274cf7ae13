"""Process groups: launching, rank and world size, collectives, and a watchdog. This module knows no model.

A launcher (torchrun, or `launch` here) starts the processes and describes them in the environment: RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, … Collectives are no-ops in a single process.
"""

import contextlib
import datetime
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

GRACE_SECONDS = 5.0  # that the other processes get to say why, and end, after one has failed


def launched() -> bool:
    """Returns whether a launcher started this process, even if it is the only one."""
    return "WORLD_SIZE" in os.environ


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Returns this process's index on its machine, which is also the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_rank_zero() -> bool:
    """Returns whether this process is the one that writes files and log lines."""
    return rank() == 0


def init_process_group(device: torch.device, timeout_minutes: float) -> None:
    """Joins the process group that the launcher describes, and starts the watchdog; does nothing without a launcher.

    Collectives run on gloo for CPU tensors and on NCCL for tensors on a GPU.
    """
    global _watchdog
    if not launched() or dist.is_initialized():
        return
    store, own_rank, ranks = next(rendezvous("env://"))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # a minute longer than the watchdog waits, which can name the process that hangs
    limit = datetime.timedelta(minutes=timeout_minutes + 1)
    dist.init_process_group(backend, store=store, rank=own_rank, world_size=ranks, timeout=limit)
    _watchdog = Watchdog(store, timeout_minutes * 60)


def destroy_process_group() -> None:
    """Leaves the process group. Every process must call it."""
    if dist.is_initialized():
        barrier()
        if _watchdog:
            _watchdog.close()
        dist.destroy_process_group()


def heartbeat(stage: int | None = None) -> None:
    """Tells the watchdog that this process is alive, and how far it has come: `stage` counts updates."""
    if _watchdog:
        _watchdog.beat(stage)


@contextlib.contextmanager
def long_operation(seconds: float = 3600.0) -> Iterator[None]:
    """The context of a call without heartbeats, such as compiling or writing a file: the watchdog waits for longer."""
    if _watchdog:
        _watchdog.busy_until = time.monotonic() + seconds
    try:
        yield
    finally:
        if _watchdog:
            _watchdog.busy_until = 0.0
            _watchdog.beat(None)


def is_connection_error(error: BaseException) -> bool:
    """Returns whether an error only reports that another process of the group has ended."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "closed by peer"))
    )


def abort(message: str) -> None:
    """Tells the other processes that this one ends with an error; they end within seconds."""
    if _watchdog:
        _watchdog.failed(message)


def all_reduce(tensor: Tensor) -> Tensor:
    """Sums a tensor over all processes, in place, and returns it."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def barrier() -> None:
    """Waits until every process has called it."""
    all_reduce(torch.zeros(1))


def broadcast(value: Any) -> Any:
    """Returns rank 0's value, a plain Python object, on every rank."""
    return _broadcast_from(0, value) if world_size() > 1 else value


def _broadcast_from(source: int, value: Any) -> Any:
    objects = [value]
    dist.broadcast_object_list(objects, src=source, device=torch.device("cpu"))
    return objects[0]


def all_gather_object(value: Any) -> list[Any]:
    """Returns every rank's value, a plain Python object, in order of rank, on every rank."""
    if world_size() == 1:
        return [value]
    # torch's all_gather_object goes through the GPU under NCCL; a broadcast from each rank does not
    return [_broadcast_from(source, value if source == rank() else None) for source in range(world_size())]


class AsyncMax:
    """The maximum of a few integers over all ranks, available one call later, so that no rank waits for another."""

    def __init__(self) -> None:
        self.pending: Tensor | None = None
        self.work: Any = None

    def maximum(self, *values: int) -> list[int]:
        """Returns the maxima of the values of the previous call (zeros at the first), the same on every rank.

        A single process gets the values of this call.
        """
        if world_size() == 1:
            return list(values)
        agreed = [0] * len(values)
        if self.pending is not None:
            self.work.wait()
            agreed = self.pending.tolist()
        self.pending = torch.tensor(values, dtype=torch.int64)
        self.work = dist.all_reduce(self.pending, dist.ReduceOp.MAX, async_op=True)
        return agreed


class Watchdog:
    """A thread on every rank that ends the process when another rank has failed or hangs, or the launcher is gone.

    Each rank publishes how far it has come. Rank 0 looks for ranks that have not moved for `timeout` seconds, and
    blames those furthest behind: the others only wait for them.
    """

    INTERVAL = 0.5  # seconds

    def __init__(self, store: Any, timeout: float) -> None:
        self.store = store
        self.timeout = timeout
        self.stage = 0
        self.beats = 0
        self.busy_until = 0.0  # until then, this thread's own beats say that the process is alive
        self.parent = os.getppid()
        self.seen: dict[int, tuple[bytes, float]] = {}  # rank -> its last message, and when it came
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
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
            if time.monotonic() < self.busy_until:
                self.beats += 1
            try:
                self.store.set(f"beat {rank()}", f"{self.stage} {self.beats}")
                if self.store.check(["failed"]):
                    os._exit(1)  # the rank that failed has printed why
                hanging = self._hanging() if is_rank_zero() else None
            except (RuntimeError, dist.DistError):
                os._exit(1)  # the store ended with its process, which has printed why
            if hanging:
                print(f"nmtkit: error: {hanging}", file=sys.stderr, flush=True)
                self.store.set("failed", hanging)
                os._exit(1)
            if os.getppid() != self.parent:
                os._exit(1)  # the launcher is gone

    def _hanging(self) -> str | None:
        """Returns an error message when some rank has not moved for too long."""
        now = time.monotonic()
        stages: dict[int, int] = {}  # of the ranks that do not move
        for other in range(world_size()):
            name = f"beat {other}"
            published = self.store.get(name) if self.store.check([name]) else b"0 0"
            if published != self.seen.get(other, (None,))[0]:
                self.seen[other] = (published, now)
            if now - self.seen[other][1] > self.timeout:
                stages[other] = int(published.split()[0])
        if not stages:
            return None
        earliest = min(stages.values())
        behind = [str(other) for other, stage in stages.items() if stage == earliest]
        who = f"process {behind[0]} hangs" if len(behind) == 1 else f"processes {', '.join(behind)} hang"
        return f"{who} after update {earliest}: no sign of life for {self.timeout / 60:g} minutes"


_watchdog: Watchdog | None = None


# --- launching ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(arguments: Sequence[str], processes: int) -> int:
    """Runs `python -m nmtkit ARGUMENTS` in `processes` ranks of one group on this machine.

    Returns the exit code of the first rank to fail, 0 when none does. SIGTERM and SIGUSR1 are passed on to all ranks;
    Ctrl-C reaches them from the terminal. torch's elastic_launch is not used: it kills the ranks 30 seconds after a
    signal, which may be before they have saved a checkpoint, and raises an exception instead of returning a rank's
    own exit code.
    """
    group = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    children = []
    for index in map(str, range(processes)):
        environment = os.environ | group | {"RANK": index, "LOCAL_RANK": index}
        children.append(subprocess.Popen([sys.executable, "-m", "nmtkit", *arguments], env=environment))

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGUSR1)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return _wait(children)
    finally:
        for child in children:
            child.kill()
            child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(children: list[subprocess.Popen[bytes]], poll_seconds: float = 0.1) -> int:
    """Returns the exit code of the first child to fail, after giving the others a few seconds to end."""
    while True:
        codes = [child.poll() for child in children]
        failed = [code for code in codes if code]
        if failed:
            end = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < end and any(child.poll() is None for child in children):
                time.sleep(poll_seconds)
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if all(code == 0 for code in codes):
            return 0
        time.sleep(poll_seconds)
