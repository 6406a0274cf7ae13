"""Searches in several processes of one thread each, fed from one queue."""

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NoReturn

import torch

from nmtkit.generation.options import SearchOptions
from nmtkit.generation.translator import Found, Job, Translator

AHEAD = 2  # batches a worker has in hand: one to work on, one to go on with


class Workers:
    """`number` forked copies of a translator. Use as a context manager; `run` is a `Runner`.

    Forked, so that they share the weights in memory and have every plug-in. Create them before other threads.
    """

    def __init__(self, translator: Translator, options: SearchOptions, number: int) -> None:
        context: Any = multiprocessing.get_context("fork")
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        for _ in range(number):
            ours, theirs = context.Pipe()
            arguments = (translator, options, theirs, [*self.connections, ours])
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[int, Found]]:
        """Results as they come. Raises ChildProcessError when a worker dies, and what a worker raises."""
        queue = enumerate(jobs)
        in_hand: list[deque[int]] = [deque() for _ in self.connections]
        exhausted = False
        while not exhausted or any(in_hand):
            free = min(range(len(in_hand)), key=lambda index: len(in_hand[index]))
            if not exhausted and len(in_hand[free]) < AHEAD:
                number, job = next(queue, (-1, None))
                if job is None:
                    exhausted = True
                elif not job:
                    yield number, []
                else:
                    self.send(free, job)
                    in_hand[free].append(number)
                    if any(len(jobs_of) < AHEAD for jobs_of in in_hand):
                        continue
            patience = None if exhausted or min(map(len, in_hand)) == AHEAD else 0
            for ready in wait(self.connections, patience):
                worker = self.connections.index(ready)  # type: ignore[arg-type]
                found = self.receive(worker)
                yield in_hand[worker].popleft(), found

    def send(self, worker: int, job: Job) -> None:
        try:
            self.connections[worker].send(job)
        except OSError:
            self.died(worker)

    def receive(self, worker: int) -> Found:
        try:
            result = self.connections[worker].recv()
        except (EOFError, OSError):
            self.died(worker)
        if isinstance(result, BaseException):
            raise result
        return result

    def died(self, worker: int) -> NoReturn:
        self.processes[worker].join(1)
        code = self.processes[worker].exitcode
        cause = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        raise ChildProcessError(
            f"a worker process died ({cause}; out of memory?); the output is not complete"
        ) from None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.terminate()
            process.join()


def _work(translator: Translator, options: SearchOptions, queue: Connection, others: list[Connection]) -> None:
    """A worker's life: a batch in, its hypotheses out, until the parent closes the connection or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    for connection in others:
        connection.close()
    torch.set_num_threads(1)
    while True:
        try:
            job = queue.recv()
        except (EOFError, OSError):
            return
        try:
            result: Found | Exception = translator.search(job, options)
        except Exception as error:
            result = error
        try:
            queue.send(result)
        except OSError:
            return
