"""`Workers` runs the tasks of a command in processes: a blocking loop around the `Scheduler` of `scheduler.py`."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from nmtkit.jobs.processes import Processes
from nmtkit.jobs.scheduler import RemoteWorker, Scheduler, Task, Transport, answer_to

T = TypeVar("T")

TASKS_AHEAD = 2  # tasks that a worker has at the same time, so that it never waits
RESULTS_AHEAD = 4  # maximum number of sent tasks, per worker, whose results have not been yielded
END_SECONDS = 5.0  # time for a worker to end after it has closed its channel
CHECK_SECONDS = 1.0  # time between two checks for hanging workers


class Workers:
    """A context manager with `count` workers. `factory` makes each worker's object. A single worker is this process.

    Create several workers before this process starts other threads. Without fork, `factory` must be picklable. A worker
    has up to `tasks_ahead` tasks at the same time; 1 distributes long tasks most evenly. A worker that sends no result
    for `timeout` seconds is stopped. A given `transport` provides the workers; `factory` is then None.
    """

    def __init__(
        self,
        count: int,
        factory: Callable[[], Any] | None,
        tasks_ahead: int = TASKS_AHEAD,
        timeout: float | None = None,
        transport: Transport | None = None,
    ) -> None:
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
        """Sends a task and drops its result. If the task fails, the next call that receives results raises an error."""
        self.transport.workers[worker].channel.send((None, task))

    def imap(self, tasks: Iterable[Task]) -> Iterator[tuple[int, Any]]:
        """Yields the worker's index and the result of every task, in order. Takes tasks only when workers need them.

        Raises the error of the earliest failed task. An error of `tasks` itself is raised after all earlier results.
        """
        results = self._results(tasks, ordered=True)
        return ((self.transport.workers.index(worker), result) for _, worker, result in results)

    def imap_unordered(self, tasks: Iterable[Task | None]) -> Iterator[tuple[int, Any]]:
        """Yields the number and the result of every task, in the order in which results arrive.

        `tasks` may yield None if no task is available at the moment. This method then yields the results that are
        ready. The None counts as a task with the result None.
        """
        return ((number, result) for number, _, result in self._results(tasks, ordered=False))

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

        `executor` takes tasks when it has room for them. For each of its tasks, it yields the position of the task
        among the tasks that it has taken, and the result. An empty task is never sent to a worker, because it only asks
        for the results that are ready.
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

        Raises the error of a task of `send`. Stops a worker that hangs. Raises ChildProcessError if a worker hangs or
        has ended.
        """
        while True:
            start = time.monotonic()
            self.transport.wait(CHECK_SECONDS if wait else 0.0)
            waited = min(time.monotonic() - start, CHECK_SECONDS)  # a longer time means that this process was suspended
            for worker in self.scheduler.workers:
                worker.quiet += waited
            answers = [(worker, *answer) for worker in list(self.scheduler.workers) for answer in self._answers(worker)]
            if answers or not wait:
                return answers
            for worker in self.scheduler.workers:
                if self.timeout is not None and worker.tasks and worker.quiet > self.timeout:
                    self.transport.stop(worker, 0)
                    raise ChildProcessError(f"{worker.name} hangs: it sent no result for {self.timeout:g} seconds")

    def _answers(self, worker: Any) -> Iterator[tuple[Any, Any]]:
        try:
            yield from self.scheduler.receive(worker)
        except EOFError:
            how = self.transport.stop(worker, END_SECONDS)
            message = f"{worker.name} ended unexpectedly ({how}); if the memory was full, use fewer --workers"
            raise ChildProcessError(message) from None


class ThisProcess:
    """The transport of a single worker, which is this process: a task is executed when it is sent."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.workers = [RemoteWorker("this process", self)]
        self.answers: list[Any] = []

    def send(self, message: Any) -> None:
        self.answers += [] if (answer := answer_to(self.worker, message, here=True)) is None else [answer]

    def receive(self, wait: bool) -> Any:
        return self.answers.pop(0) if self.answers else None

    def wait(self, seconds: float) -> None:
        pass

    def stop(self, worker: Any, seconds: float) -> str:
        return "this process"

    def close(self) -> None:
        pass


class Shared(Generic[T]):
    """A factory that gives forked workers the object `value` of this process.

    Forked workers share the memory of `value`. A spawned worker has no access to `value`, and calls `make`, which must
    be picklable.
    """

    def __init__(self, value: T, make: Callable[..., T]) -> None:
        self.value: T | None = value
        self.make = make

    def __call__(self, *arguments: Any) -> T:
        return self.make(*arguments) if self.value is None else self.value

    def __getstate__(self) -> dict[str, Any]:
        return {"value": None, "make": self.make}
