"""The workers as the server sees them: it hands them batches, replaces those that die, and loads new models."""

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nmtkit.serving import messages
from nmtkit.serving.fair_queue import Batch, FairQueue, Found, Job, Kind, Pair

RESTART_SECONDS = 1.0  # between two tries to start what has ended
STREAM_SHARE = 2  # batches of `max_tokens` that a worker which takes sentences as they come has in hand
STREAM_PARTS = 16  # pieces that such a batch goes out in
FEW_LINES = 8  # fewer are not shared out between workers: a step costs as much as eight lines besides its own
ABANDONED_SECONDS = 1.0  # that a worker may go on with lines that nobody waits for any more
GATHER_SECONDS = 0.004  # that a batch waits for the next line, while other workers are busy and it is less than a share
GATHER_SHARE = 0.2  # of the time of the last batch, for which it waits at most

logger = logging.getLogger("nmtkit")


class ModelProcess:
    """The process that has loaded the models; `start` makes one. It ends when it is closed."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self.process, self.control = process, control
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter
        self.pairs: list[Pair] = []
        self.device, self.worker_count, self.streams, self.max_tokens = "", 0, False, 0
        self.asking = asyncio.Lock()

    @staticmethod
    async def start(settings: Mapping[str, Any]) -> "ModelProcess":
        """Starts a process and waits until it has loaded the models. Raises ValueError for what it cannot load."""
        ours, theirs = socket.socketpair()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "nmtkit.serving.model_process", str(theirs.fileno()),
            stdin=asyncio.subprocess.DEVNULL, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        self = ModelProcess(process, ours.dup())
        self.control.setblocking(False)
        self.reader, self.writer = await asyncio.open_connection(sock=ours)
        self.writer.write(messages.packed(settings))
        try:
            answer = await messages.read(self.reader)
        except BaseException:
            self.close()
            raise
        if answer is None or "error" in answer:
            self.close()
            code = await process.wait()
            raise ValueError(answer["error"] if answer else f"loading the models failed (exit code {code})")
        self.pairs = [(source, target) for source, target in answer["pairs"]]
        self.device, self.worker_count = answer["device"], answer["workers"]
        self.streams, self.max_tokens = answer["streams"], answer["max_tokens"]
        return self

    async def new_worker(self) -> "Worker":
        """Starts a worker. Raises OSError where this process has ended."""
        ours, theirs = socket.socketpair()
        async with self.asking:
            try:
                socket.send_fds(self.control, [b"w"], [theirs.fileno()])
            finally:
                theirs.close()
            answer = await messages.read(self.reader)
        if answer is None:
            ours.close()
            raise ConnectionResetError("the process that loaded the models has ended")
        reader, writer = await asyncio.open_connection(sock=ours)
        return Worker(self, answer["pid"], reader, writer)

    def close(self) -> None:
        self.writer.close()
        self.control.close()


class Worker:
    """A process that translates batches, in order or as they come."""

    def __init__(
        self, parent: ModelProcess, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.parent, self.pid, self.reader, self.writer = parent, pid, reader, writer
        self.in_hand: dict[int, Batch] = {}
        self.begun = 0.0  # when it got its last batch
        self.task: asyncio.Task[None] | None = None
        self.retired = self.ended = False

    @property
    def batch_tokens(self) -> int:
        """Most tokens of the batch that it can take now; 0 while it should get none."""
        if not self.parent.streams:
            return 0 if self.in_hand else self.parent.max_tokens
        tokens = sum(item.cost for batch in self.in_hand.values() for item in batch)
        return self.parent.max_tokens // STREAM_PARTS if tokens < STREAM_SHARE * self.parent.max_tokens else 0

    @property
    def abandoned(self) -> bool:
        """Whether all it does is for requests that have ended. One that takes lines as they come goes on."""
        items = [item for batch in self.in_hand.values() for item in batch]
        return bool(items) and not self.parent.streams and all(item.job.done.done() for item in items)

    def end_if_abandoned(self, begun: float) -> None:
        """Ends the process if it still has the batch that it began then, and nobody waits for that."""
        if self.begun == begun and self.abandoned and not self.ended:
            self.ended = True
            os.kill(self.pid, signal.SIGKILL)


class Pool:
    """Translates lines of many requests with the workers there are. Use as an asynchronous context manager."""

    def __init__(self, settings: Mapping[str, Any], max_queue: int) -> None:
        self.settings = settings
        self.queue = FairQueue(max_queue)
        self.models: ModelProcess | None = None
        self.workers: list[Worker] = []
        self.deaths = self.reloads = self.batches = 0
        self.numbers = 0
        self.closing = False
        self.background: set[asyncio.Task[Any]] = set()
        self.dispatch_planned: asyncio.TimerHandle | None = None
        self.waiting_since = math.inf  # when the first line came that no batch has been made of since
        self.batch_seconds = 0.0  # that the last one took
        self.reloading, self.adding = asyncio.Lock(), asyncio.Lock()

    async def __aenter__(self) -> "Pool":
        self.models = await ModelProcess.start(self.settings)
        await self._add_workers(self.models)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.closing = True
        for task in list(self.background):
            task.cancel()
        for worker in self.workers:
            worker.writer.close()
        if self.models is not None:
            self.models.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.models.process.wait(), 5)

    @property
    def pairs(self) -> list[Pair]:
        return self.models.pairs if self.models is not None else []

    @property
    def ready(self) -> bool:
        return any(not worker.retired for worker in self.workers)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def translate(self, kind: Kind, texts: Sequence[str]) -> list[list[Found]]:
        """Returns the translations of each text, best first. When it is cancelled, what waits is forgotten.

        Raises QueueFull where too many lines wait, and TranslationError.
        """
        if not texts:
            return []
        job = Job(kind, texts, asyncio.get_running_loop().create_future())
        self.queue.add(job)
        self._plan_dispatch()
        try:
            return await job.done
        finally:
            self.queue.drop(job)
            if job.missing:
                self._end_abandoned_later()

    def _plan_dispatch(self) -> None:
        """Hands out batches soon: at once if all workers are idle, else when a share of the lines has come in.

        Clients that have an answer tend to ask again: batches that did not wait for those of the last one would stay
        small, since a third part of the lines would always wait for the two workers that have the others.
        """
        now = asyncio.get_running_loop().time()
        delay = 0.0
        if self.queue.size and self.models is not None and not self.models.streams:
            self.waiting_since = min(self.waiting_since, now)
            few = self.queue.size < self._share() and self.queue.tokens < self.models.max_tokens
            if few and any(worker.in_hand for worker in self.workers):
                delay = min(GATHER_SECONDS, self.waiting_since + GATHER_SHARE * self.batch_seconds - now)
        if self.dispatch_planned is not None:
            self.dispatch_planned.cancel()
        self.dispatch_planned = asyncio.get_running_loop().call_later(max(0.0, delay), self._dispatch)

    def _share(self) -> int:
        """Returns the lines of a batch so that all workers have as many."""
        if self.models is None or self.models.streams:
            return self.queue.limit
        lines = self.queue.size + sum(len(batch) for worker in self.workers for batch in worker.in_hand.values())
        return max(FEW_LINES, -(-lines // max(1, len(self.workers))))

    def _dispatch(self) -> None:
        self.dispatch_planned = None
        self.waiting_since = math.inf
        open_workers = [worker for worker in self.workers if not worker.retired]
        while open_workers:
            worker = min(open_workers, key=lambda worker: len(worker.in_hand))
            tokens = worker.batch_tokens
            batch = self.queue.next_batch(tokens, self._share()) if tokens else []
            if not batch:
                return
            self._send(worker, batch)

    def _send(self, worker: Worker, batch: Batch) -> None:
        self.numbers += 1
        self.batches += 1
        kind = batch[0].job.kind
        task = {"id": self.numbers, **dataclasses.asdict(kind), "texts": [item.text for item in batch]}
        worker.in_hand[self.numbers] = batch
        worker.begun = time.monotonic()
        worker.writer.write(messages.packed(task))

    def _end_abandoned_later(self) -> None:
        """Ends workers, soon, whose clients have all gone: a line may take minutes. They are replaced at once."""
        for worker in self.workers:
            if worker.abandoned:
                asyncio.get_running_loop().call_later(ABANDONED_SECONDS, worker.end_if_abandoned, worker.begun)

    # --- workers ------------------------------------------------------------------------------------------------------

    async def _add_workers(self, models: ModelProcess) -> None:
        """Starts as many workers as are missing of those that `models` should have."""
        async with self.adding:  # two that died at a time are not replaced by three
            while sum(worker.parent is models for worker in self.workers) < models.worker_count:
                worker = await models.new_worker()
                self.workers.append(worker)
                worker.task = self._in_background(self._listen(worker))
        self._plan_dispatch()

    def _in_background(self, coroutine: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(coroutine)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return task

    async def _listen(self, worker: Worker) -> None:
        """Takes the answers of a worker until it ends."""
        while (answer := await messages.read(worker.reader)) is not None:
            batch = worker.in_hand.pop(answer["id"])
            self.batch_seconds = time.monotonic() - worker.begun
            if "error" in answer and len(batch) > 1:
                self.queue.give_back(batch)  # which line it was shows when it is alone
            elif "error" in answer:
                batch[0].job.fail(answer["error"])
            else:
                for item, found in zip(batch, answer["lines"], strict=True):
                    item.job.finish(item.index, found)
            if worker.retired and not worker.in_hand:
                break
            self._plan_dispatch()
        worker.writer.close()
        self.workers.remove(worker)
        if self.closing or (worker.retired and not worker.in_hand):
            return
        if worker.ended:
            logger.info("worker process %d was ended and is replaced: nobody waits for its lines any more", worker.pid)
        else:
            self.deaths += 1
            logger.warning(
                "worker process %d ended unexpectedly; it is replaced, its lines are translated again", worker.pid
            )
        for batch in worker.in_hand.values():
            self.queue.give_back(batch)
        self._plan_dispatch()
        if not worker.retired:
            await self._replace(worker.parent)

    async def _replace(self, models: ModelProcess) -> None:
        """Brings the workers to their number again, starting a new process for the models where it has ended too."""
        while self.models is models:
            try:
                if models.streams or models.process.returncode is not None:
                    raise ConnectionResetError
                return await self._add_workers(models)
            except OSError:
                if await self.reload():
                    return
            await asyncio.sleep(RESTART_SECONDS)

    async def reload(self) -> bool:
        """Loads the models anew and goes over to them; workers of the old ones finish what they have in hand.

        Returns whether it could; if not, the log says why and the old ones go on.
        """
        async with self.reloading:
            before = time.monotonic()
            try:
                models = await ModelProcess.start(self.settings)
                await self._add_workers(models)
            except (ValueError, OSError) as error:
                logger.warning("the models were not loaded anew: %s", error)
                return False
            old, self.models = self.models, models
            for worker in list(self.workers):
                if worker.parent is not models:
                    worker.retired = True
                    if not worker.in_hand:
                        worker.writer.close()
            if old is not None:
                self._in_background(self._close_later(old))
            self.reloads += 1
            logger.info("models loaded anew in %.1f s", time.monotonic() - before)
            return True

    async def _close_later(self, models: ModelProcess) -> None:
        """Closes a process for models when its workers have finished."""
        while any(worker.parent is models for worker in self.workers):
            await asyncio.sleep(0.1)
        models.close()
        await models.process.wait()


def pids(pool: Pool) -> list[int]:
    """Returns the process ids of the workers, this process aside."""
    return [worker.pid for worker in pool.workers if worker.pid != os.getpid()]
