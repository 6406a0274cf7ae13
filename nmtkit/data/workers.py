"""Worker processes that answer small messages; or, when there is one worker, this process itself.

Each has a handler of its own: a function of a message. Messages and answers pass through pipes, so they must be small:
text and ids travel by file. A worker answers its messages in order.
"""

import contextlib
import multiprocessing
import multiprocessing.process
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

Handler = Callable[[Any], Any]
MESSAGES_AHEAD = 2  # tasks a worker has before it, so that it need not wait for the next
ANSWERS_AHEAD = 4  # tasks per worker that may be taken before the earliest of them is answered


class Workers:
    """`count` workers with handlers made by `make_handler`, which must be picklable where processes cannot fork.

    A ValueError or OSError of a handler is raised in this process; of several, that of the earliest message. A worker
    that was killed raises ChildProcessError.
    """

    def __init__(self, count: int, make_handler: Callable[[], Handler]) -> None:
        self.count = count
        self._handler = make_handler() if count == 1 else None
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection[Any, Any]] = []
        if count > 1:
            method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
            context: Any = multiprocessing.get_context(method)
            for _ in range(count):
                ours, theirs = context.Pipe()
                others = [*self._connections, ours]
                process = context.Process(target=_serve, args=(theirs, make_handler, others), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exception: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.terminate()
            process.join()

    def tell(self, worker: int, message: Any) -> None:
        """A message that gets no answer; should it fail, `each` or `finish` raises its error."""
        if self._handler is not None:
            self._handler(message)
        else:
            self._send(worker, (False, message))

    def each(self, messages: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """For every message, in their order, the worker that took it and its answer. Takes messages as workers do."""
        if self._handler is not None:
            for message in messages:
                yield 0, self._handler(message)
            return
        coming = enumerate(messages)
        given: list[deque[int]] = [deque() for _ in range(self.count)]  # to each worker, not answered yet
        ready: dict[int, tuple[int, Any]] = {}
        first = taken = 0  # first message whose answer is still to be given out; messages taken so far
        more = True
        while True:
            while first in ready:
                worker, answer = ready.pop(first)
                if isinstance(answer, Exception):
                    raise answer
                first += 1
                yield worker, answer
            worker = min(range(self.count), key=lambda index: len(given[index]))
            if more and len(given[worker]) < MESSAGES_AHEAD and taken - first < ANSWERS_AHEAD * self.count:
                try:
                    taken, message = next(coming)
                except StopIteration:
                    more = False
                except (ValueError, OSError) as error:
                    more, ready[taken] = False, (worker, error)
                else:
                    given[worker].append(taken)
                    self._send(worker, (True, message))
                    taken += 1
            elif any(given):
                worker, answer = self._receive()
                ready[given[worker].popleft()] = (worker, answer)
                more = more and not isinstance(answer, Exception)
            else:
                return

    def finish(self, message: Any) -> list[Any]:
        """The answer of every worker to one last message."""
        if self._handler is not None:
            return [self._handler(message)]
        for worker in range(self.count):
            self._send(worker, (True, message))
        answers = [self._receive()[1] for _ in range(self.count)]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _send(self, worker: int, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end is reported by `_receive`
            self._connections[worker].send(message)

    def _receive(self) -> tuple[int, Any]:
        connection: Any = wait(self._connections)[0]
        worker = self._connections.index(connection)
        try:
            asked, answer = connection.recv()
        except (EOFError, ConnectionResetError):
            self._processes[worker].join()
            code = self._processes[worker].exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise ChildProcessError(
                f"worker process {worker + 1} ended unexpectedly ({how}); if memory ran out, use fewer --workers"
            ) from None
        if not asked:
            raise answer
        return worker, answer


def _serve(connection: Any, make_handler: Callable[[], Handler], others: list[Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    for other in others:  # copies of the parent's ends, which would keep pipes open when the parent is killed
        other.close()
    handler = make_handler()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has gone
        while True:
            asked, message = connection.recv()
            try:
                answer = handler(message)
            except (ValueError, OSError) as error:
                connection.send((asked, error))
            else:
                if asked:
                    connection.send((asked, answer))
