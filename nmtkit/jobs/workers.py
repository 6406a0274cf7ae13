"""One scheduler for work in other processes: `preprocess`, `clean`, shards, `generate --workers`, torchrun and `serve`.

A `Scheduler` knows the workers and their unfinished tasks. It offers work to the worker with the fewest tasks, and
receives results. Messages pass through a `Channel`, which has two implementations: sockets of processes on this machine
(`processes.py`), and the store of torchrun for ranks on any machine (`ranks.py`). `Workers` is the scheduler of a
command. `nmtkit serve` has the same scheduler in its event loop, and chooses there which lines come next.

Tasks in: a task is a method of the worker's object with arguments, `(Encoder.encode, block, files)`. Tasks are taken
from an iterable only when a worker needs them. A worker has at most `tasks_ahead` tasks, and at most `RESULTS_AHEAD`
tasks for each worker are under way, waiting results included.
Results out: in the order of the tasks (`imap`), or as they arrive (`imap_unordered`, `share`).
An exception of a task is raised by the scheduler's process, with the traceback of the worker as a note.
A dead worker ends the work with ChildProcessError, which names the signal. `nmtkit serve` starts a new worker instead.
A hanging worker is stopped after `timeout` seconds without an answer, and then counts as dead. Time counts only while
the scheduler waits, so a suspended command continues.
A full pipe: the scheduler never waits while it sends; it keeps the rest of a message and reads results meanwhile. A
worker waits until the scheduler reads. So messages may have any size.
"""

import pickle
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from nmtkit.config.plugins import PluginError, plugin_message

T = TypeVar("T")

Task = tuple[Any, ...]  # method of the worker's object, and its arguments
TASKS_AHEAD = 2  # tasks that a worker has at the same time, so that it never waits
RESULTS_AHEAD = 4  # maximum number of sent tasks, per worker, whose results have not been yielded
END_SECONDS = 5.0  # time for a worker to end after it has closed its channel
CHECK_SECONDS = 1.0  # time between two checks for hanging workers


class Channel(Protocol):
    """One end of a connection between a scheduler and a worker. Messages arrive completely and in order."""

    def send(self, message: Any) -> None:
        """Sends a message that is not None. If the other end is closed, the message is lost."""

    def receive(self, wait: bool) -> Any:
        """Returns the next message, or None if `wait` is false and no message has arrived.

        Raises EOFError if the other end is closed and all its messages have been received.
        """

    def close(self) -> None:
        """Closes this end. The other end then raises EOFError."""


@dataclass(eq=False)
class RemoteWorker:
    """A worker as the scheduler sees it. `stop` waits some seconds for its end, else ends it, and says how it ended."""

    name: str  # for messages, such as "worker process 2"
    channel: Any  # a Channel; Any, because each transport uses more methods of its own channels
    stop: Callable[[float], str]  # for example, stop(5.0) returns SIGKILL
    tasks: dict[int, Any] = field(default_factory=dict)  # number -> unfinished task, oldest first
    quiet: float = 0.0  # seconds that the scheduler has waited since the last answer


class Scheduler:
    """Gives tasks to workers and receives their results. The callers choose the tasks."""

    def __init__(self) -> None:
        self.workers: list[Any] = []  # RemoteWorkers
        self.sent = 0

    @property
    def busy(self) -> bool:
        return any(worker.tasks for worker in self.workers)

    def dispatch(self, next_task: Callable[[Any], tuple[Any, Any] | None]) -> None:
        """Sends tasks to the workers with the fewest tasks, until `next_task` has no task for any worker.

        `next_task` takes a worker. It returns a task as the scheduler keeps it and as the worker receives it, or None.
        """
        willing = list(self.workers)
        while willing:
            worker = min(willing, key=lambda worker: len(worker.tasks))
            task = next_task(worker)
            if task is None:
                willing.remove(worker)
            else:
                self.send(worker, *task)

    def send(self, worker: Any, task: Any, message: Any) -> None:
        if not worker.tasks:
            worker.quiet = 0.0
        worker.tasks[self.sent] = task
        worker.channel.send((self.sent, message))
        self.sent += 1

    def receive(self, worker: Any) -> Iterator[tuple[Any, Any]]:
        """Yields the tasks that a worker has finished, with their results. A failed task has an exception as result.

        Raises the error of a message without a number. If the worker has ended, removes the worker and raises
        ChildProcessError; its unfinished tasks stay in `worker.tasks`.
        """
        try:
            while (answer := worker.channel.receive(wait=False)) is not None:
                number, result = answer
                worker.quiet = 0.0
                if number is None:
                    raise result
                yield worker.tasks.pop(number), result
        except EOFError:
            self.workers.remove(worker)
            worker.channel.close()
            how = worker.stop(END_SECONDS)
            raise ChildProcessError(
                f"{worker.name} ended unexpectedly ({how}); if the memory was full, use fewer --workers"
            ) from None


class Transport(Protocol):
    """Starts workers, waits for their messages, and ends the workers."""

    workers: list[RemoteWorker]

    def wait(self, seconds: float) -> None:
        """Waits until a message may have arrived, at most `seconds`."""

    def close(self) -> None:
        """Ends the workers."""


class Workers:
    """`count` workers with objects made by `factory`, as a context manager. A single worker is this process itself.

    Create several workers before this process starts other threads. Without fork, `factory` must be picklable. A worker
    has up to `tasks_ahead` tasks at the same time; 1 distributes long tasks most evenly. A worker that sends no result
    for `timeout` seconds is stopped. With `transport`, its workers are used; `factory` is then None.
    """

    def __init__(
        self,
        count: int,
        factory: Callable[[], Any] | None,
        tasks_ahead: int = TASKS_AHEAD,
        timeout: float | None = None,
        transport: Transport | None = None,
    ) -> None:
        from nmtkit.jobs.processes import Processes

        if factory is not None:
            transport = ThisProcess(factory()) if count == 1 else Processes(count, factory)
        assert transport is not None
        self.count, self.timeout, self.transport = count, timeout, transport
        self.tasks_ahead = 1 if count == 1 else tasks_ahead
        self.scheduler = Scheduler()
        self.scheduler.workers += transport.workers

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.transport.close()

    def send(self, worker: int, task: Task) -> None:
        """Sends a task whose result is dropped. If the task fails, `imap` or `broadcast` raises its error."""
        self.transport.workers[worker].channel.send((None, task))

    def imap(self, tasks: Iterable[Task]) -> Iterator[tuple[int, Any]]:
        """Yields the worker and the result of every task, in order. Takes tasks only when workers need them.

        Raises the error of the earliest failed task. An error of `tasks` itself is raised after all earlier results.
        """
        for _, worker, result in self._results(tasks, ordered=True):
            yield self.transport.workers.index(worker), result

    def imap_unordered(self, tasks: Iterable[Task | None]) -> Iterator[tuple[int, Any]]:
        """Yields the number and the result of every task, in the order in which results arrive.

        `tasks` may yield None if no task is available at the moment. This method then yields the results that are
        ready. The None counts as a task with the result None.
        """
        for number, _, result in self._results(tasks, ordered=False):
            yield number, result

    def _results(self, tasks: Iterable[Task | None], ordered: bool) -> Iterator[tuple[int, Any, Any]]:
        """Yields the number, the worker and the result of every task."""
        coming = enumerate(tasks)
        results: dict[int, tuple[Any, Any]] = {}
        taken = yielded = 0
        more, paused = True, False

        def next_task(worker: Any) -> tuple[int, Task] | None:
            nonlocal more, paused, taken
            ahead = taken - yielded >= RESULTS_AHEAD * self.count
            if not more or paused or ahead or len(worker.tasks) >= self.tasks_ahead:
                return None
            try:
                number, task = next(coming)
            except StopIteration:
                more = False
                return None
            except (ValueError, OSError) as error:  # raised by `tasks` itself
                more, results[taken] = False, (worker, error)
                return None
            taken += 1
            if task is None:
                paused, results[number] = True, (worker, None)
                return None
            return number, task

        while True:
            while yielded in results if ordered else results:
                number = yielded if ordered else next(iter(results))
                worker, result = results.pop(number)
                if isinstance(result, Exception):
                    raise result
                yielded += 1
                yield number, worker, result
            paused = False
            self.scheduler.dispatch(next_task)
            if not (more or results or self.scheduler.busy):
                return
            ready = yielded in results if ordered else bool(results)
            for worker, number, result in self._received(wait=not ready):
                results[number] = worker, result
                more = more and not isinstance(result, Exception)

    def share(
        self, tasks: Iterable[T], executor: Callable[[Iterable[T]], Iterator[tuple[int, Any]]]
    ) -> Iterator[tuple[int, Any]]:
        """Yields the number and the result of every task as results arrive. This process executes tasks, too.

        `executor` takes tasks when it has room for them, and yields the number of each of its tasks with the result. An
        empty task stays here, because it only asks for the results that are ready.
        """
        own: list[int] = []  # numbers of the tasks of this process
        finished = 0

        def own_tasks() -> Iterator[T]:
            for number, task in enumerate(tasks):
                worker = min(self.scheduler.workers, key=lambda worker: len(worker.tasks))
                if task and len(worker.tasks) < len(own) - finished + TASKS_AHEAD:
                    self.scheduler.send(worker, number, task)
                else:
                    own.append(number)
                    yield task

        for index, result in executor(own_tasks()):
            finished += 1
            yield own[index], result
            for _, number, other in self._received(wait=False):
                yield number, other
        while self.scheduler.busy:
            for _, number, other in self._received(wait=True):
                yield number, other

    def broadcast(self, task: Task) -> list[Any]:
        """Lets every worker execute `task` after its other tasks. Returns the results in order of workers."""
        for worker in self.transport.workers:
            self.scheduler.send(worker, None, task)
        results: dict[int, Any] = {}
        while self.scheduler.busy:
            results.update((id(worker), result) for worker, _, result in self._received(wait=True))
        for result in results.values():
            if isinstance(result, Exception):
                raise result
        return [results[id(worker)] for worker in self.transport.workers]

    def _received(self, wait: bool) -> list[tuple[Any, Any, Any]]:
        """Returns the worker, the task and the result of each answer. With `wait`, waits for at least one answer.

        Raises the error of a task of `send`. Raises ChildProcessError for a worker that has ended, and for a hanging
        worker, which it stops.
        """
        while True:
            start = time.monotonic()
            self.transport.wait(CHECK_SECONDS if wait else 0.0)
            waited = min(time.monotonic() - start, CHECK_SECONDS)  # longer means that this process was suspended
            for worker in self.scheduler.workers:
                worker.quiet += waited
            answers = [
                (worker, *answer)
                for worker in list(self.scheduler.workers)
                for answer in self.scheduler.receive(worker)
            ]
            if answers or not wait:
                return answers
            for worker in self.scheduler.workers:
                if self.timeout is not None and worker.tasks and worker.quiet > self.timeout:
                    worker.stop(0)
                    raise ChildProcessError(f"{worker.name} hangs: it sent no result for {self.timeout:g} seconds")


class ThisProcess:
    """The transport of a single worker, which is this process: a task is executed when it is sent."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.workers = [RemoteWorker("this process", self, lambda seconds: "")]
        self.answers: list[Any] = []

    def send(self, message: Any) -> None:
        self.answers += [] if (answer := answer_to(self.worker, message, here=True)) is None else [answer]

    def receive(self, wait: bool) -> Any:
        return self.answers.pop(0) if self.answers else None

    def wait(self, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass


class Shared(Generic[T]):
    """A factory that gives forked workers the object `value` of this process.

    Forked workers share its memory. A spawned worker has no access to it, and calls `make`, which must be picklable.
    """

    def __init__(self, value: T, make: Callable[[], T]) -> None:
        self.value: T | None = value
        self.make = make

    def __call__(self) -> T:
        return self.make() if self.value is None else self.value

    def __getstate__(self) -> dict[str, Any]:
        return {"value": None, "make": self.make}


# --- in a worker ------------------------------------------------------------------------------------------------------


def execute_tasks(channel: Channel, worker: Any) -> None:
    """Executes tasks with the object `worker`, in order, until the scheduler closes the channel."""
    while True:
        try:
            message = channel.receive(wait=True)
        except EOFError:
            return
        answer = answer_to(worker, message)
        if answer is not None:
            try:
                channel.send(answer)
            except Exception as error:  # the result cannot be pickled
                channel.send((answer[0], portable(error)))


def answer_to(worker: Any, message: tuple[int | None, Task], here: bool = False) -> tuple[int | None, Any] | None:
    """Executes a task. Returns the number of the task and the result or the error, or None if nobody wants the result.

    `here` means that the answer stays in this process.
    """
    number, (method, *arguments) = message
    try:
        result = method(worker, *arguments)
        return None if number is None else (number, result)
    except Exception as error:
        return number, error if here else portable(error)


def portable(error: Exception) -> Exception:
    """Returns an error that can be sent to another process: `error` with its traceback as a note, or a substitute."""
    message = plugin_message(error)
    if message is not None:
        return PluginError(message)
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # unpickling can fail if the constructor takes different arguments
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
