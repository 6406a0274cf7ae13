"""A translator for each device: the processes that torchrun started, fed by the first, which writes for all."""

import os
import pickle
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is documented

from nmtkit import distributed
from nmtkit.generation.translator import Found, Job, Runner

AHEAD = 2  # jobs that another process has in hand beyond what the first has, so that it need not wait for it
POLL = 0.005  # seconds between two looks into an empty mailbox
TIMEOUT_MINUTES = 30  # without a sign of life, after which a process is taken to hang


def place(device: str, workers: int) -> str:
    """The device of this process: under torchrun each has its own GPU. Raises ValueError where it has none."""
    if not distributed.launched():
        return device
    if workers > 1:
        raise ValueError("--workers and torchrun cannot be combined: torchrun has started the processes")
    if device != "cuda":
        return device
    own, there = distributed.local_rank(), torch.cuda.device_count()
    if own >= there:
        raise ValueError(f"process {own} of this machine has no GPU of its own: there are {there}; start so many")
    torch.cuda.set_device(own)
    return f"cuda:{own}"


@contextmanager
def together() -> Iterator[int]:
    """Meets the processes that torchrun started, if it did; gives their number. An error in one ends all."""
    distributed.init_process_group(torch.device("cpu"), TIMEOUT_MINUTES)  # tensors stay where they are: no NCCL
    try:
        yield distributed.world_size()
    except BaseException as error:
        distributed.abort(f"rank {distributed.rank()}: {error}")
        raise
    distributed.destroy_process_group()


def spread(runner: Runner) -> Runner | None:
    """A runner that has the other processes work too; in these it works until all is done, and gives None."""
    if distributed.world_size() == 1:
        return runner
    mail = Mail()
    if distributed.is_rank_zero():
        return Ranks(runner, mail).run
    serve(runner, mail)
    return None


class Mail:
    """Messages between processes, each of which gets its own in the order they were sent. All are to make one."""

    def __init__(self) -> None:
        first = distributed.is_rank_zero()
        port = 0 if first else distributed.broadcast(None)
        self.store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=first, wait_for_workers=False)
        if first:
            distributed.broadcast(self.store.port)
        self.count: dict[str, int] = {}  # messages sent or received, by channel

    def send(self, channel: str, message: Any) -> None:
        self.store.set(self._next(channel), pickle.dumps(message))  # type: ignore[arg-type]  # bytes will do
        self.count[channel] += 1

    def receive(self, channel: str) -> Any:
        """The next message; None while there is none."""
        name = self._next(channel)
        if not self.store.check([name]):
            return None
        message = pickle.loads(self.store.get(name))
        self.store.delete_key(name)
        self.count[channel] += 1
        return message

    def _next(self, channel: str) -> str:
        return f"{channel} {self.count.setdefault(channel, 0)}"


class Ranks:
    """The first process's part: `run` is a `Runner` that keeps some jobs for its own and sends out the others."""

    def __init__(self, runner: Runner, mail: Mail) -> None:
        self.runner, self.mail = runner, mail
        self.others = range(1, distributed.world_size())
        self.in_hand = dict.fromkeys((0, *self.others), 0)  # jobs given to each and not come back
        self.own: dict[int, int] = {}  # which job is its own runner's first, second, …

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[int, Found]]:
        for index, found in self.runner(self.kept(jobs)):
            self.in_hand[0] -= 1
            yield self.own.pop(index), found
            yield from self.come()
        while any(self.in_hand.values()):
            time.sleep(POLL)
            distributed.heartbeat()
            yield from self.come()
        for other in self.others:
            self.mail.send(f"to {other}", "end")

    def kept(self, jobs: Iterable[Job]) -> Iterator[Job]:
        index = 0
        for number, job in enumerate(jobs):
            distributed.heartbeat()
            load = {rank: jobs_of - (AHEAD if rank else 0) for rank, jobs_of in self.in_hand.items()}
            rank = min(load, key=load.__getitem__) if job else 0  # an empty job asks for what is ready
            self.in_hand[rank] += 1
            if rank:
                self.mail.send(f"to {rank}", (number, job))
            else:
                self.own[index] = number
                index += 1
                yield job

    def come(self) -> Iterator[tuple[int, Found]]:
        """What the others have sent so far."""
        for other in self.others:
            while (result := self.mail.receive(f"from {other}")) is not None:
                self.in_hand[other] -= 1
                yield result


def serve(runner: Runner, mail: Mail) -> None:
    """The other processes' part: searches what the first sends, until it says that this is all."""
    rank = distributed.rank()
    numbers: dict[int, int] = {}  # which job is the runner's first, second, …

    def jobs() -> Iterator[Job]:
        index = 0
        while (message := mail.receive(f"to {rank}")) != "end":
            distributed.heartbeat()
            if message is None:  # nothing has come: what is in hand may be finished
                time.sleep(POLL)
                yield []
            else:
                numbers[index], job = message
                yield job
            index += 1

    for index, found in runner(jobs()):
        if index in numbers:
            mail.send(f"from {rank}", (numbers.pop(index), found))
