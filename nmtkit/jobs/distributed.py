"""Process groups: rank and world size, collectives, a watchdog, and the launcher. This module is independent of models.

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
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous
from torch.utils._python_dispatch import TorchDispatchMode

from nmtkit.jobs.processes import STOP_SIGNALS, restore_handlers

GRACE_SECONDS = 5.0  # time for other processes to print their errors and end, after one process has failed
POLL_SECONDS = 0.1  # time between two checks whether a process has ended
GROUP_TIMEOUT_MINUTES = 30  # a rank of `generate` without a heartbeat for this long counts as hanging
LONG_OPERATION_SECONDS = 3600.0  # time limit of a long operation, which sends no heartbeats
TOLD_SECONDS = 2.0  # time until all watchdogs have noticed the failure of a process


class PeerError(RuntimeError):
    """Another process has failed in work that the processes share. The other process prints the reason."""


def launched() -> bool:
    """Returns whether a launcher started this process, even if it is the only process."""
    return "WORLD_SIZE" in os.environ


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Returns the index of this process on its machine, which is also the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def rank_device(device: str, workers: int) -> str:
    """Returns the device of this process. Under torchrun each process has its own GPU.

    The device "auto" is "cuda" if there is a GPU and `workers` is 1, otherwise "cpu". Raises ValueError if there is no
    GPU for this process, or if `workers` is above 1 under torchrun.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and workers == 1 else "cpu"
    if not launched():
        return device
    if workers > 1:
        raise ValueError("--workers and torchrun cannot be combined: torchrun has started the processes")
    if device != "cuda":
        return device
    rank, gpus = local_rank(), torch.cuda.device_count()
    if not gpus:
        raise ValueError("--device cuda needs a GPU, and PyTorch finds no GPU on this machine")
    if rank >= gpus:
        raise ValueError(f"process {rank} of this machine has no GPU of its own: start {gpus} processes, one per GPU")
    torch.cuda.set_device(rank)
    return f"cuda:{rank}"


def usable_device(name: str) -> torch.device:
    """Returns the device with this name. Raises ValueError with the reason if the device cannot be used."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type == "meta":
            raise RuntimeError("the tensors of this device have no values")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        gpus = torch.cuda.device_count()
        raise ValueError(f"--device {name} cannot be used: {reason}. GPUs here: {gpus}") from error
    return device


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_rank_zero() -> bool:
    """Returns whether this is the process that writes files and log lines."""
    return rank() == 0


def init_process_group(device: torch.device, timeout_minutes: float) -> None:
    """Joins the process group of the launcher and starts the watchdog. Does nothing without a launcher.

    Collectives run on gloo for CPU tensors and on NCCL for GPU tensors.
    """
    global _watchdog, _signs
    if not launched() or dist.is_initialized():
        return
    store, own_rank, ranks = next(rendezvous("env://"))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # Collectives have a longer time limit than the watchdog, because the watchdog can name the process that hangs.
    limit = datetime.timedelta(minutes=timeout_minutes + 1, seconds=LONG_OPERATION_SECONDS)
    dist.init_process_group(backend, store=store, rank=own_rank, world_size=ranks, timeout=limit)
    _signs = SignsOfLife()
    _watchdog = Watchdog(store, timeout_minutes * 60)


def destroy_process_group() -> None:
    """Leaves the process group. Every process must call this function."""
    if dist.is_initialized():
        barrier()
        if _watchdog:
            _watchdog.close()
        dist.destroy_process_group()


@contextlib.contextmanager
def process_group() -> Iterator[int]:
    """Joins the processes of torchrun, if any, and yields the size of the group. An error ends all processes."""
    # the ranks exchange only text, so NCCL is not needed
    init_process_group(torch.device("cpu"), GROUP_TIMEOUT_MINUTES)
    try:
        yield world_size()
    except BaseException as error:
        abort(f"rank {rank()}: {error}")
        raise
    destroy_process_group()


# --- signs of life ----------------------------------------------------------------------------------------------------


@dataclass
class SignsOfLife:
    """The progress of this process, which the watchdog publishes."""

    updates: int = 0
    steps: int = 0  # steps made in the current update
    waiting: bool = False  # whether this process is in a collective
    beats: int = 0
    busy_until: float = 0.0  # until this time, the process counts as alive without heartbeats


_signs = SignsOfLife()


def heartbeat(update: int | None = None) -> None:
    """Tells the watchdog that this process is alive and, if `update` is given, how many updates it has made."""
    _signs.beats += 1
    if update is not None:
        _signs.updates, _signs.steps = update, 0


def advance() -> None:
    """Tells the watchdog that this process has finished another step of its update, such as a forward pass.

    All processes make the same steps. The other processes wait for the process that has made the fewest steps.
    """
    _signs.beats += 1
    _signs.steps += 1


@contextlib.contextmanager
def long_operation() -> Iterator[None]:
    """The context of work without heartbeats, such as compiling, for at most `LONG_OPERATION_SECONDS`."""
    before, _signs.busy_until = _signs.busy_until, time.monotonic() + LONG_OPERATION_SECONDS
    try:
        yield
    finally:
        _signs.busy_until = before
        heartbeat()


def is_connection_error(error: BaseException) -> bool:
    """Returns whether an error only reports that another process of the group has failed."""
    return isinstance(error, dist.DistError | PeerError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "closed by peer"))
    )


def abort(message: str) -> None:
    """Tells the other processes that this process ends with an error. The other processes then end within seconds."""
    if _watchdog:
        _watchdog.failed(message)


# --- collectives ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    """The context of a collective: tells the watchdog that this process waits for the others and does not hang."""
    _signs.waiting = True
    try:
        yield
    finally:
        _signs.waiting = False


def all_reduce(tensor: Tensor) -> Tensor:
    """Sums a tensor over all processes, in place, and returns the tensor."""
    if world_size() > 1:
        with _waiting():
            dist.all_reduce(tensor)
    return tensor


def barrier() -> None:
    """Waits until every process has called this function."""
    all_reduce(torch.zeros(1))


def broadcast(value: Any) -> Any:
    """Returns the value of rank 0 on every rank. The value is a plain Python object."""
    return _broadcast_from(0, value) if world_size() > 1 else value


def _broadcast_from(source: int, value: Any) -> Any:
    objects = [value]
    with _waiting():
        dist.broadcast_object_list(objects, src=source, device=torch.device("cpu"))
    return objects[0]


def all_gather_object(value: Any) -> list[Any]:
    """Returns, on every rank, a list of the values of all ranks in order. The values are plain Python objects."""
    if world_size() == 1:
        return [value]
    # With NCCL, all_gather_object of torch copies the values to the GPU. A broadcast from each rank avoids the copy.
    return [_broadcast_from(source, value if source == rank() else None) for source in range(world_size())]


class AsyncMax:
    """Maxima of a few integers over all ranks. A call returns the result of the previous call, so no rank waits."""

    def __init__(self) -> None:
        self.pending: Tensor | None = None
        self.work: Any = None

    def maximum(self, *values: int) -> list[int]:
        """Returns the maxima of the values of the previous call, the same on every rank. The first call returns zeros.

        In a single process, returns the values of the current call.
        """
        if world_size() == 1:
            return list(values)
        agreed = [0] * len(values)
        if self.pending is not None:
            with _waiting():
                self.work.wait()
            agreed = self.pending.tolist()
        self.pending = torch.tensor(values, dtype=torch.int64)
        self.work = dist.all_reduce(self.pending, dist.ReduceOp.MAX, async_op=True)
        return agreed


class RefuseSharded(TorchDispatchMode):
    """Inside this context, an operation on a sharded tensor (FSDP) raises RuntimeError.

    Only this process would run the operation. The operation would start a collective that the other processes do not
    join, or it would see only a part of the tensor.
    """

    def __init__(self, caller: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.caller = caller

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types) or func.namespace in ("_c10d_functional", "c10d"):
            raise RuntimeError(
                f"{self.caller} reads a sharded parameter or gradient, which needs all processes; set "
                "every_rank = True in the class, or train with --parallel ddp"
            )
        return func(*args, **(kwargs or {}))


# --- the watchdog -----------------------------------------------------------------------------------------------------


class Watchdog:
    """A thread on every rank that ends the process if another rank has failed or hangs, or if the launcher has ended.

    Each rank publishes messages with its progress. A rank hangs if, for `timeout` seconds, its message has not changed
    and no other rank has had less progress. Rank 0 then prints an error. Ranks with more progress do not hang: they
    wait for the rank that hangs. A rank in a collective has more progress than a rank before the collective.
    """

    INTERVAL = 0.5  # seconds between two checks

    def __init__(self, store: Any, timeout: float) -> None:
        self.store = store
        self.timeout = timeout
        self.parent = os.getppid()
        # rank -> (its last message, whether its progress is the least, time since which both are unchanged)
        self.states: dict[int, tuple[bytes, bool, float]] = {}
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.thread.start()

    def failed(self, message: str) -> None:
        self.closed.set()
        self.store.set("failed", message)
        if is_rank_zero():  # rank 0 holds the store; if it ended now, torch would print C++ stacks in other processes
            time.sleep(TOLD_SECONDS)

    def close(self) -> None:
        self.closed.set()
        self.thread.join()

    def _run(self) -> None:
        while not self.closed.wait(self.INTERVAL):
            signs = _signs
            if time.monotonic() < signs.busy_until:
                signs.beats += 1
            try:
                self.store.set(f"beat {rank()}", f"{signs.updates} {signs.steps} {signs.waiting:d} {signs.beats}")
                if self.store.check(["failed"]):
                    os._exit(1)  # The rank that failed has printed the reason.
                hanging = self._hanging() if is_rank_zero() else None
            except (RuntimeError, dist.DistError):
                os._exit(1)  # The store ended together with rank 0, which has printed the reason.
            if hanging:
                print(f"nmtkit: error: {hanging}", file=sys.stderr, flush=True)
                self.failed(hanging)
                os._exit(1)
            if os.getppid() != self.parent:
                os._exit(1)  # The launcher has ended.

    def _hanging(self) -> str | None:
        """Returns an error message with the ranks that hang, or None.

        A rank hangs if, for `timeout` seconds, it has had the least progress and has not changed its message. Before it
        had the least progress, it may have waited for a long operation of another rank, so this time does not count.
        """
        names = [f"beat {other}" for other in range(world_size())]
        messages = [self.store.get(name) if self.store.check([name]) else b"0 0 0 0" for name in names]
        progress = [tuple(map(int, message.split()[:3])) for message in messages]  # updates, steps, waiting
        now, least, behind = time.monotonic(), min(progress), []
        for other, message in enumerate(messages):
            state = (message, progress[other] == least)
            if state != self.states.get(other, ())[:2]:
                self.states[other] = (*state, now)
            if progress[other] == least and now - self.states[other][2] > self.timeout:
                behind.append(str(other))
        if not behind:
            return None
        who = f"process {behind[0]} hangs" if len(behind) == 1 else f"processes {', '.join(behind)} hang"
        return f"{who} after update {least[0]}: no heartbeat for {self.timeout / 60:g} minutes"


_watchdog: Watchdog | None = None


# --- launching ------------------------------------------------------------------------------------------------------


def reserved_port() -> socket.socket:
    """Returns a socket that reserves a free port until the socket is closed. Other programs cannot use the port. The
    store of a group can listen at the port, because the store and the socket set SO_REUSEADDR."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    return reservation


def launch(arguments: Sequence[str], processes: int) -> int:
    """Runs `python -m nmtkit ARGUMENTS` in `processes` ranks of one group on this machine.

    Returns the exit code of the first rank that fails, or 0 if all succeed. SIGTERM and SIGUSR1 are passed on to all
    ranks. Ctrl-C reaches the ranks from the terminal. torch's elastic_launch is not used for two reasons: it kills the
    ranks 30 seconds after a signal, perhaps before a checkpoint is saved, and it raises an exception instead of
    returning the exit code of a rank.
    """
    reservation = reserved_port()
    group = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reservation.getsockname()[1])}
    children = []
    for index in map(str, range(processes)):
        environment = os.environ | group | {"RANK": index, "LOCAL_RANK": index}
        children.append(subprocess.Popen([sys.executable, "-m", "nmtkit", *arguments], env=environment))

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in STOP_SIGNALS}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return _wait(children)
    finally:
        for child in children:
            child.kill()
            child.wait()
        reservation.close()
        restore_handlers(before)


def _wait(children: list[subprocess.Popen[bytes]]) -> int:
    """Returns 0 when all children have succeeded.

    If a child fails, waits up to `GRACE_SECONDS` for the other children, and returns the exit code of the failed child.
    """
    while True:
        codes = [child.poll() for child in children]
        failed = [code for code in codes if code]
        if failed:
            end = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < end and any(child.poll() is None for child in children):
                time.sleep(POLL_SECONDS)
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if all(code == 0 for code in codes):
            return 0
        time.sleep(POLL_SECONDS)
