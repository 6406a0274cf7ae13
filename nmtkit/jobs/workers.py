"""Worker processes that execute small tasks. With a single worker, this process executes the tasks itself.

Every worker has its own object. A task is a method of this object with arguments: `(Worker.encode, block, files)`.
Tasks and results pass through pipes, so tasks and results must be small. The text and the ids of a training set pass
through files. Each worker executes its tasks in order. If the system can fork, processes are forked and share memory,
such as weights and plug-ins. Create the workers before this process starts other threads.
"""

import contextlib
import multiprocessing
import multiprocessing.process
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from nmtkit.config.plugins import PluginError, plugin_message

Task = tuple[Any, ...]  # method of the worker object, and its arguments
TASKS_AHEAD = 2  # tasks that a worker has at the same time, so that it never waits
RESULTS_AHEAD = 4  # maximum number of sent tasks, per worker, whose results have not been yielded


class Workers:
    """`count` workers whose objects are made by `factory`. If the system cannot fork, `factory` must be picklable.

    An error of a task is raised in this process. If a worker is killed, this process raises ChildProcessError. A worker
    has up to `tasks_ahead` tasks at the same time; 1 distributes long tasks most evenly.
    """

    def __init__(self, count: int, factory: Callable[[], Any], tasks_ahead: int = TASKS_AHEAD) -> None:
        self.count = count
        self._tasks_ahead = tasks_ahead
        self._object = factory() if count == 1 else None
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection[Any, Any]] = []
        if count > 1:
            method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
            context: Any = multiprocessing.get_context(method)
            for _ in range(count):
                our_end, worker_end = context.Pipe()
                others = [*self._connections, our_end]
                process = context.Process(target=_serve, args=(worker_end, factory, others), daemon=True)
                process.start()
                worker_end.close()
                self._processes.append(process)
                self._connections.append(our_end)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exception: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.terminate()
            process.join()

    def send(self, worker: int, task: Task) -> None:
        """Sends a task whose result is dropped. If the task fails, `imap` or `broadcast` raises its error."""
        if self.count == 1:
            _execute(self._object, task)
        else:
            self._send(worker, False, task)

    def imap(self, tasks: Iterable[Task]) -> Iterator[tuple[int, Any]]:
        """Yields the worker and the result of every task, in order. Takes tasks only when workers need them.

        Raises the error of the earliest failed task. An error of `tasks` itself is raised after all earlier results.
        """
        if self.count == 1:
            for task in tasks:
                yield 0, _execute(self._object, task)
            return
        for _, worker, result in self._results(tasks, ordered=True):
            yield worker, result

    def imap_unordered(self, tasks: Iterable[Task | None]) -> Iterator[tuple[int, Any]]:
        """Yields the number and the result of every task, in the order in which results arrive.

        `tasks` may yield None if no task is available at the moment. This method then yields the results that are
        ready. The None counts as a task with the result None.
        """
        if self.count == 1:
            for number, task in enumerate(tasks):
                yield number, None if task is None else _execute(self._object, task)
            return
        for number, _, result in self._results(tasks, ordered=False):
            yield number, result

    def _results(self, tasks: Iterable[Task | None], ordered: bool) -> Iterator[tuple[int, int, Any]]:
        """Yields the number, the worker and the result of every task."""
        coming = enumerate(tasks)
        pending: list[deque[int]] = [deque() for _ in range(self.count)]  # unfinished tasks of each worker
        results: dict[int, tuple[int, Any]] = {}
        sent = yielded = 0
        more = True
        while True:
            while yielded in results if ordered else results:
                number = yielded if ordered else next(iter(results))
                worker, result = results.pop(number)
                if isinstance(result, Exception):
                    raise result
                yielded += 1
                yield number, worker, result
            worker = min(range(self.count), key=lambda index: len(pending[index]))
            timeout: float | None = None
            if more and len(pending[worker]) < self._tasks_ahead and sent - yielded < RESULTS_AHEAD * self.count:
                try:
                    number, task = next(coming)
                except StopIteration:
                    more = False
                    continue
                except (ValueError, OSError) as error:  # raised by `tasks` itself
                    more, results[sent] = False, (worker, error)
                    continue
                sent += 1
                if task is not None:
                    pending[worker].append(number)
                    self._send(worker, True, task)
                    continue
                results[number], timeout = (worker, None), 0
            elif not any(pending):
                return
            for connection in wait(self._connections, timeout):
                worker, result = self._receive(connection)
                results[pending[worker].popleft()] = worker, result
                more = more and not isinstance(result, Exception)

    def broadcast(self, task: Task) -> list[Any]:
        """Lets every worker execute `task` after its other tasks. Returns the results in order of workers."""
        if self.count == 1:
            return [_execute(self._object, task)]
        for worker in range(self.count):
            self._send(worker, True, task)
        results: dict[int, Any] = {}
        while len(results) < self.count:
            results.update(self._receive(connection) for connection in wait(self._connections))
        for result in results.values():
            if isinstance(result, Exception):
                raise result
        return [results[worker] for worker in range(self.count)]

    def _send(self, worker: int, wanted: bool, task: Task) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_receive` reports that the worker has ended
            self._connections[worker].send((wanted, task))

    def _receive(self, connection: Any) -> tuple[int, Any]:
        """Returns a worker and its next result. Raises the error of a task of `send`."""
        worker = self._connections.index(connection)
        try:
            wanted, result = connection.recv()
        except (EOFError, ConnectionResetError):
            self._processes[worker].join()
            code = self._processes[worker].exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise ChildProcessError(
                f"worker process {worker + 1} ended unexpectedly ({how}); if the memory was full, use fewer --workers"
            ) from None
        if not wanted:
            raise result
        return worker, result


def _execute(worker: Any, task: Task) -> Any:
    method, *arguments = task
    return method(worker, *arguments)


def _serve(connection: Any, factory: Callable[[], Any], others: list[Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the handler of the parent
    for other in others:  # these copies of the parent's connections would keep the pipes open after the parent's exit
        other.close()
    worker = factory()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # ends when the parent has ended
        while True:
            wanted, task = connection.recv()
            try:
                result = _execute(worker, task)
            except Exception as error:
                connection.send((wanted, _portable(error)))
            else:
                if wanted:
                    connection.send((wanted, result))


def _portable(error: Exception) -> Exception:
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
