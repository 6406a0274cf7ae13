"""One scheduler for work in other processes: `preprocess`, `clean`, shards, `generate --workers`, torchrun and `serve`.

A `Scheduler` knows the workers and their unfinished tasks. It offers work to the worker with the fewest tasks, and
receives results. Messages pass through a `Channel`, which has two implementations: sockets of processes on this machine
(`processes.py`), and a store of torch for ranks on any machine (`ranks.py`). `Workers` (`workers.py`) is the
blocking loop of a command. `nmtkit serve` has the scheduler in its event loop, and chooses which lines come next.

- Tasks: each worker has one object, such as an `Encoder`. A task is a method of this object with its arguments, such as
  `(Encoder.encode, block, files)`. A task is taken from an iterable only when a worker needs it. The number of tasks
  whose results have not been yielded is bounded.
- Results: yielded in the order of the tasks (`imap`), or as they arrive (`imap_unordered`, `share`).
- Exceptions: raised in the scheduler's process, with the traceback of the worker as a note.
- Dead workers: ChildProcessError, which names the signal, ends the work. `nmtkit serve` starts a new worker instead.
- Hanging workers: `Workers` stops a worker that has a task but sends no answer for `timeout` seconds, and then raises
  ChildProcessError. Time counts only while the scheduler waits, so a command that was suspended continues.
- Full pipes: the scheduler never waits while it sends; it keeps the rest of a message and reads results meanwhile. A
  worker waits until the scheduler reads. So messages may have any size.
"""

import pickle
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from nmtkit.config.plugins import PluginError, plugin_message

Task = tuple[Any, ...]  # method of the worker's object, and its arguments


class Channel(Protocol):
    """One end of a connection between a scheduler and a worker. Messages arrive completely and in order."""

    def send(self, message: Any) -> None:
        """Sends a message that is not None. If the other end is closed, the message is lost."""

    def receive(self, wait: bool) -> Any:
        """Returns the next message, or None if `wait` is false and no message has arrived.

        Raises EOFError if the other end is closed and all its messages have been received.
        """

    def close(self) -> None:
        """Closes this end. `receive` of the other end then raises EOFError."""


@dataclass(eq=False)
class RemoteWorker:
    """The scheduler's record of a worker: its channel and its unfinished tasks."""

    name: str  # for messages, such as "worker process 2"
    channel: Any  # a Channel; Any, because a transport also uses methods that only its channels have
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

        `next_task` takes a worker. It returns None, or a task in two forms: the first is kept, the second is sent.
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

        Raises the error of a task that was sent without a number. If the worker has ended, removes the worker and
        raises EOFError; its unfinished tasks stay in `worker.tasks`.
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
            raise


class Transport(Protocol):
    """Starts workers, waits for their messages, and ends the workers."""

    workers: list[Any]  # RemoteWorkers

    def stop(self, worker: Any, seconds: float) -> str:
        """Ends a worker, unless it ends by itself within `seconds`. Returns the cause of its end, such as "SIGKILL"."""

    def wait(self, seconds: float) -> None:
        """Waits until a message may have arrived, at most `seconds`."""

    def close(self) -> None:
        """Ends the workers."""


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
    """Executes a task. Returns its number and its result or error, or None if a task without a number succeeds.

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
