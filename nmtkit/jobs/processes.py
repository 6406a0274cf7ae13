"""Worker processes of this machine: messages over socket pairs, and the start and end of the processes.

Messages are pickles, because both ends run this program for the same user. Messages of `nmtkit serve` contain the texts
of clients as `str`; nothing that a client sends is unpickled.

If the system can fork, the workers are forked from this process. A fork takes 10 ms and shares all memory, such as
weights and plug-ins. A spawned worker imports its modules again (0.3 s of a core for `clean`, 2 s with torch) and loads
its own copy of a model. So forking is faster, but is not required.
"""

import gc
import multiprocessing
import os
import pickle
import selectors
import signal
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nmtkit.config.plugins import load_plugins, loaded_plugins
from nmtkit.jobs.scheduler import RemoteWorker, execute_tasks

# the signals that ask a process to stop; schedulers of clusters send SIGUSR1, which Windows does not have
STOP_SIGNALS = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
LENGTH = struct.Struct("!Q")  # number of bytes of a message, sent before the message
WORKER = "worker process"  # beginning of the names of worker processes
CHUNK = 1 << 18  # maximum bytes of one call of `send` or `recv`


def is_first() -> bool:
    """Returns False in all worker processes but the first, so that only one process logs a message."""
    name = multiprocessing.current_process().name
    return name == f"{WORKER} 1" or not name.startswith(WORKER)


def restore_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    """Installs the signal handlers that calls of `signal.signal` have returned.

    Python cannot install a handler that a program in C has installed (None), so the default handler is installed.
    """
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


class SocketChannel:
    """A channel over a socket.

    A scheduler must not wait for a busy worker: with `buffers`, `send` keeps the bytes that the socket does not take at
    once, and `flush` sends them later. In a worker, without `buffers`, `send` waits until the scheduler reads.
    """

    def __init__(self, connection: socket.socket, buffers: bool) -> None:
        self.connection, self.buffers = connection, buffers
        self.outgoing, self.incoming = bytearray(), bytearray()

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Any) -> None:
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self.outgoing += LENGTH.pack(len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Sends the bytes that `send` has kept, as many as the socket takes."""
        self.connection.settimeout(0 if self.buffers else None)
        try:
            while self.outgoing:
                del self.outgoing[: self.connection.send(self.outgoing[:CHUNK])]
        except BlockingIOError:
            pass
        except OSError:  # the other end is closed; `receive` reports this
            self.outgoing.clear()

    def receive(self, wait: bool) -> Any:
        while (message := self._first_message()) is None:
            self.connection.settimeout(None if wait else 0)
            try:
                data = self.connection.recv(CHUNK)
            except BlockingIOError:
                return None
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError
            self.incoming += data
        return message

    def _first_message(self) -> Any:
        if len(self.incoming) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self.incoming)[0]
        if len(self.incoming) < end:
            return None
        message = pickle.loads(self.incoming[LENGTH.size : end])
        del self.incoming[:end]
        return message

    def close(self) -> None:
        self.connection.close()


@dataclass(eq=False, kw_only=True)
class WorkerProcess(RemoteWorker):
    process: Any  # a Process of multiprocessing


class Processes:
    """The transport of worker processes on this machine. Each process makes its object with `factory`."""

    def __init__(self, count: int, factory: Callable[[], Any]) -> None:
        self.workers: list[WorkerProcess] = []
        forks = hasattr(os, "fork")
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        for number in range(1, count + 1):
            name = f"{WORKER} {number}"
            ours, theirs = socket.socketpair()
            if forks:
                # A forked worker has copies of the parent's ends of the connections. The worker closes the copies,
                # because they would keep the connections open after the parent has ended.
                copies = [ours, *(worker.channel.connection for worker in self.workers)]
                process = context.Process(target=_run, name=name, args=(theirs, factory, copies), daemon=True)
            else:
                arguments = theirs, pickle.dumps(factory), loaded_plugins()
                process = context.Process(target=_run_spawned, name=name, args=arguments, daemon=True)
            process.start()
            theirs.close()
            channel = SocketChannel(ours, buffers=True)
            self.workers.append(WorkerProcess(name, channel, process=process))

    def wait(self, seconds: float) -> None:
        """Waits for a message, at most `seconds`. Meanwhile sends the bytes that `SocketChannel.send` has kept."""
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                writes = selectors.EVENT_WRITE if worker.channel.outgoing else 0
                selector.register(worker.channel, selectors.EVENT_READ | writes, worker.channel)
            for key, events in selector.select(seconds):
                if events & selectors.EVENT_WRITE:
                    key.data.flush()

    def stop(self, worker: WorkerProcess, seconds: float) -> str:
        worker.process.join(seconds)
        if worker.process.exitcode is None:
            worker.process.kill()
            worker.process.join()
        code = worker.process.exitcode
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def close(self) -> None:
        for worker in self.workers:
            worker.channel.close()
            self.stop(worker, 0)


def _run(connection: socket.socket, factory: Callable[[], Any], copies: Sequence[socket.socket] = ()) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # replaces the handler of the parent
    for copy in copies:
        copy.close()
    gc.freeze()  # garbage collection would write to all objects, and so copy the memory that is shared with the parent
    execute_tasks(SocketChannel(connection, buffers=False), factory())


def _run_spawned(connection: socket.socket, factory: bytes, plugins: Sequence[str]) -> None:
    load_plugins(plugins)  # before `factory` is unpickled, because it may refer to the plug-ins
    _run(connection, pickle.loads(factory))
