"""The server's handles for the processes that load models, and for their workers."""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

from nmtkit.jobs.processes import SocketChannel
from nmtkit.jobs.scheduler import RemoteWorker
from nmtkit.serving.config import ModelFacts, ServeJob
from nmtkit.serving.fair_queue import QueuedLines

STREAM_SHARE = 2  # a streaming worker (GPU) holds up to STREAM_SHARE * `max_tokens` tokens
STREAM_PARTS = 16  # a batch for a streaming worker has at most `max_tokens` / STREAM_PARTS tokens
# Niceness of workers for large requests. Such a worker gets a tenth of a core while a small request runs.
LOW_PRIORITY = 10

logger = logging.getLogger("nmtkit")


class ModelProcess:
    """The process that loads the models and starts the workers. `start` starts the process, and `close` ends it."""

    facts: ModelFacts
    retired = False  # whether newer models have replaced the models of this process

    def __init__(self, process: asyncio.subprocess.Process, channel: SocketChannel) -> None:
        self.process, self.channel = process, channel
        self.asking = asyncio.Lock()

    @staticmethod
    async def start(job: ServeJob) -> "ModelProcess":
        """Starts a process and waits until it has loaded the models. Raises ValueError if a model cannot be loaded."""
        ours, theirs = socket.socketpair()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "nmtkit.serving.workers", str(theirs.fileno()),
            stdin=asyncio.subprocess.DEVNULL, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        self = ModelProcess(process, SocketChannel(ours, buffers=True))
        self.channel.send((job, logger.getEffectiveLevel()))
        try:
            answer = await next_message(self.channel)
        except EOFError:
            answer = ValueError(f"loading the models failed (exit code {await process.wait()})")
        except BaseException:
            self.close()
            raise
        if isinstance(answer, ValueError):
            self.close()
            await process.wait()
            raise answer
        self.facts = answer
        return self

    async def new_worker(self, is_large: bool) -> "PoolWorker":
        """Starts a worker for large or for small requests. Raises OSError if the process has ended."""
        ours, theirs = socket.socketpair()
        async with self.asking:
            try:
                niceness = LOW_PRIORITY if is_large else 0
                socket.send_fds(self.channel.connection, [bytes([niceness])], [theirs.fileno()])
                pid = await next_message(self.channel)
            except EOFError:
                ours.close()
                raise ConnectionResetError("the process that loaded the models has ended") from None
            finally:
                theirs.close()
        name, channel = f"worker process {pid}", SocketChannel(ours, buffers=True)
        return PoolWorker(name, channel, parent=self, pid=pid, is_large=is_large)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.connection.shutdown(socket.SHUT_RDWR)  # also ends a `new_worker` that waits


async def next_message(channel: SocketChannel) -> Any:
    """Waits for a message and returns the message. Raises EOFError if the other end is closed."""
    loop = asyncio.get_running_loop()
    while (message := channel.receive(wait=False)) is None:
        readable = asyncio.Event()
        loop.add_reader(channel, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(channel)
    return message


@dataclass(eq=False, kw_only=True)
class PoolWorker(RemoteWorker):
    """A process that translates batches: one after another on a CPU, several at once on a GPU ("streaming")."""

    parent: ModelProcess
    pid: int
    is_large: bool = False  # whether this worker translates large requests, with a low priority
    sent_at: float = 0.0  # time when the last batch was sent
    ended: bool = False

    @property
    def is_abandoned(self) -> bool:
        """Whether all clients that wait for a translation of this worker have disconnected.

        False for a streaming worker, which translates the batches of several clients at once.
        """
        return bool(self.tasks) and not self.parent.facts.streams and all(map(is_abandoned, self.tasks.values()))

    def capacity(self) -> tuple[int, float]:
        """Returns the maximum tokens of the next batch (0 if the worker is full) and of a line in this batch.

        A CPU worker translates a very long line in parts. Meanwhile the worker also takes a batch of shorter lines and
        translates this batch between two parts. A line is very long if it alone has more than `max_tokens` tokens.
        """
        max_tokens = self.parent.facts.max_tokens
        batches: list[QueuedLines] = list(self.tasks.values())
        if self.parent.facts.streams:
            tokens = sum(line.cost for batch in batches for line in batch)
            return (max_tokens // STREAM_PARTS if tokens < STREAM_SHARE * max_tokens else 0), math.inf
        if not batches:
            return max_tokens, math.inf
        has_parts = len(batches) == 1 and len(batches[0]) == 1 and batches[0][0].cost > max_tokens
        return (max_tokens if has_parts and not is_abandoned(batches[0]) else 0), max_tokens

    def end_if_abandoned(self, sent_at: float) -> None:
        """Kills the process if it is abandoned and has not received a batch since `sent_at`."""
        if self.sent_at == sent_at and self.is_abandoned and not self.ended:
            self.ended = True
            os.kill(self.pid, signal.SIGKILL)


def is_abandoned(batch: QueuedLines) -> bool:
    """Returns whether all clients of the batch have disconnected."""
    return all(line.request.done.done() for line in batch)
