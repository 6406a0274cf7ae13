"""Sends batches to workers, replaces dead workers, and loads new models. Runs in the server."""

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
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from nmtkit.serving import messages
from nmtkit.serving.fair_queue import Batch, BatchKey, FairQueue, Pair, Result, TranslationJob

RESTART_SECONDS = 1.0  # pause between two attempts to restart workers
STREAM_SHARE = 2  # a streaming worker (GPU) holds up to STREAM_SHARE * `max_tokens` tokens
STREAM_PARTS = 16  # batches for a streaming worker have `max_tokens` / STREAM_PARTS tokens
FEW_LINES = 8  # fewer lines are not divided among workers: the fixed cost of a search step equals about 8 lines
ABANDONED_SECONDS = 1.0  # delay between the disconnection of all clients of a worker and the end of the worker
GATHER_SECONDS = 0.004  # longest time that a small batch waits for more lines while other workers are busy
GATHER_SHARE = 0.2  # the same limit as a share of the duration of the last batch

logger = logging.getLogger("nmtkit")


class ModelProcess:
    """The process that loads the models and forks the workers. `start` creates it, `close` ends it."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self.process, self.control = process, control
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter
        self.pairs: list[Pair] = []
        self.device, self.worker_count, self.streams, self.max_tokens = "", 0, False, 0
        self.asking = asyncio.Lock()

    @staticmethod
    async def start(settings: Mapping[str, Any]) -> "ModelProcess":
        """Starts a process and waits for its models. Raises ValueError if a model cannot be loaded."""
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
        """Starts a worker. Raises OSError if the process has ended."""
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
    """A process that translates batches: one after another on a CPU, several at once on a GPU ("streaming")."""

    def __init__(
        self, parent: ModelProcess, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.parent, self.pid, self.reader, self.writer = parent, pid, reader, writer
        self.batches: dict[int, Batch] = {}  # id -> batch that the worker translates
        self.sent_at = 0.0  # time when the last batch was sent
        self.task: asyncio.Task[None] | None = None
        self.retired = self.ended = False

    @property
    def is_abandoned(self) -> bool:
        """Whether all clients of this worker have disconnected. A streaming worker is never abandoned."""
        return bool(self.batches) and not self.parent.streams and all(map(is_abandoned, self.batches.values()))

    def capacity(self) -> tuple[int, float]:
        """Returns the maximum tokens of the next batch (0 if the worker is full) and of a line in this batch.

        A CPU worker translates a long line in parts. Meanwhile the worker also takes a batch of short lines and
        translates this batch between two parts. A line is long if it alone has more than `max_tokens` tokens.
        """
        max_tokens = self.parent.max_tokens
        batches = list(self.batches.values())
        if self.parent.streams:
            tokens = sum(line.cost for batch in batches for line in batch)
            return (max_tokens // STREAM_PARTS if tokens < STREAM_SHARE * max_tokens else 0), math.inf
        if not batches:
            return max_tokens, math.inf
        has_one_long_line = len(batches) == 1 and len(batches[0]) == 1 and batches[0][0].cost > max_tokens
        return (max_tokens if has_one_long_line and not is_abandoned(batches[0]) else 0), max_tokens

    def end_if_abandoned(self, sent_at: float) -> None:
        """Kills the process if it is abandoned and has not received a batch since `sent_at`."""
        if self.sent_at == sent_at and self.is_abandoned and not self.ended:
            self.ended = True
            os.kill(self.pid, signal.SIGKILL)


def is_abandoned(batch: Batch) -> bool:
    """Returns whether all clients of the batch have disconnected."""
    return all(line.job.done.done() for line in batch)


class Pool:
    """The workers, and the queue of the lines that they translate. A pool is an asynchronous context manager."""

    def __init__(self, settings: Mapping[str, Any], max_queue: int) -> None:
        self.settings = settings
        self.queue = FairQueue(max_queue)
        self.models: ModelProcess | None = None
        self.workers: list[Worker] = []
        self.death_count = self.reload_count = self.batch_count = 0
        self.closing = False
        self.background: set[asyncio.Task[None]] = set()
        self.planned_dispatch: asyncio.TimerHandle | None = None
        self.waiting_since = math.inf  # arrival time of the first line after the last dispatch
        self.batch_seconds = 0.0  # duration of the last batch
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

    async def translate(self, key: BatchKey, lines: Sequence[str]) -> list[list[Result]]:
        """Returns the translations of each line, best first. Cancelling this call drops the waiting lines.

        Raises QueueFull if too many lines wait, and TranslationError if a line cannot be translated.
        """
        if not lines:
            return []
        job = TranslationJob(key, lines, asyncio.get_running_loop().create_future())
        self.queue.add(job)
        self._plan_dispatch()
        try:
            return await job.done
        finally:
            self.queue.drop(job)
            if job.missing:
                self._end_abandoned_later()

    def _plan_dispatch(self) -> None:
        """Schedules the next dispatch. If few lines wait and a worker is busy, waits a short time for more lines.

        Clients tend to send their next request right after an answer. Without the wait, these requests would always
        arrive just after a batch has been sent, so batches would stay small.
        """
        now = asyncio.get_running_loop().time()
        delay = 0.0
        if self.queue.size and self.models is not None and not self.models.streams:
            self.waiting_since = min(self.waiting_since, now)
            few = self.queue.size < self._share() and self.queue.tokens < self.models.max_tokens
            if few and any(worker.batches for worker in self.workers):
                delay = min(GATHER_SECONDS, self.waiting_since + GATHER_SHARE * self.batch_seconds - now)
        if self.planned_dispatch is not None:
            self.planned_dispatch.cancel()
        self.planned_dispatch = asyncio.get_running_loop().call_later(max(0.0, delay), self._dispatch)

    def _share(self) -> int:
        """Returns the maximum number of lines of a batch. This limit divides all lines evenly among the workers."""
        if self.models is None or self.models.streams:
            return self.queue.limit
        lines = self.queue.size + sum(len(batch) for worker in self.workers for batch in worker.batches.values())
        return max(FEW_LINES, -(-lines // max(1, len(self.workers))))

    def _dispatch(self) -> None:
        self.planned_dispatch = None
        self.waiting_since = math.inf
        open_workers = [worker for worker in self.workers if not worker.retired]
        while open_workers:
            worker = min(open_workers, key=lambda worker: len(worker.batches))
            max_tokens, longest = worker.capacity()
            batch = self.queue.next_batch(max_tokens, self._share(), longest) if max_tokens else []
            if batch:
                self._send(worker, batch)
            else:
                open_workers.remove(worker)

    def _send(self, worker: Worker, batch: Batch) -> None:
        self.batch_count += 1
        key = batch[0].job.key
        task = {"id": self.batch_count, **dataclasses.asdict(key), "texts": [line.text for line in batch]}
        worker.batches[self.batch_count] = batch
        worker.sent_at = time.monotonic()
        worker.writer.write(messages.packed(task))

    def _end_abandoned_later(self) -> None:
        """Ends and replaces abandoned workers after `ABANDONED_SECONDS`, because one line may take minutes."""
        for worker in self.workers:
            if worker.is_abandoned:
                asyncio.get_running_loop().call_later(ABANDONED_SECONDS, worker.end_if_abandoned, worker.sent_at)

    # --- workers ------------------------------------------------------------------------------------------------------

    async def _add_workers(self, models: ModelProcess) -> None:
        """Starts workers until `models.worker_count` workers exist."""
        async with self.adding:  # without the lock, two simultaneous deaths could start three workers
            while sum(worker.parent is models for worker in self.workers) < models.worker_count:
                worker = await models.new_worker()
                self.workers.append(worker)
                worker.task = self._in_background(self._listen(worker))
        self._plan_dispatch()

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return task

    async def _listen(self, worker: Worker) -> None:
        """Receives the answers of a worker until the worker ends."""
        while (answer := await messages.read(worker.reader)) is not None:
            batch = worker.batches.pop(answer["id"])
            self.batch_seconds = time.monotonic() - worker.sent_at
            if "error" in answer and len(batch) > 1:
                self.queue.give_back(batch)  # smaller batches isolate the line that fails
            elif "error" in answer:
                batch[0].job.fail(answer["error"])
            else:
                for line, result in zip(batch, answer["lines"], strict=True):
                    line.job.finish(line.index, result)
            if worker.retired and not worker.batches:
                break
            self._end_abandoned_later()
            self._plan_dispatch()
        worker.writer.close()
        self.workers.remove(worker)
        if self.closing or (worker.retired and not worker.batches):
            return
        if worker.ended:
            logger.info(
                "ended worker process %d, whose clients have disconnected; a new worker replaces it", worker.pid
            )
        else:
            self.death_count += 1
            logger.warning(
                "worker process %d died; a new worker replaces it and translates its lines again", worker.pid
            )
        for batch in worker.batches.values():
            self.queue.give_back(batch)
        self._plan_dispatch()
        if not worker.retired:
            await self._replace(worker.parent)

    async def _replace(self, models: ModelProcess) -> None:
        """Replaces missing workers. On a GPU, or if the model process has ended, loads the models again instead."""
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
        """Loads the models again and switches to them. Workers with the old models finish their batches.

        Returns False if loading fails: the log gives the reason, and the old models stay.
        """
        async with self.reloading:
            before = time.monotonic()
            try:
                models = await ModelProcess.start(self.settings)
                await self._add_workers(models)
            except (ValueError, OSError) as error:
                logger.warning("could not reload the models, so the old ones stay: %s", error)
                return False
            old, self.models = self.models, models
            for worker in list(self.workers):
                if worker.parent is not models:
                    worker.retired = True
                    if not worker.batches:
                        worker.writer.close()
            if old is not None:
                self._in_background(self._close_later(old))
            self.reload_count += 1
            logger.info("reloaded the models in %.1f s", time.monotonic() - before)
            return True

    async def _close_later(self, models: ModelProcess) -> None:
        """Closes a model process after all its workers have ended."""
        while any(worker.parent is models for worker in self.workers):
            await asyncio.sleep(0.1)
        models.close()
        await models.process.wait()
