"""The pool of workers: sends batches to workers, replaces dead workers, and loads new models. Runs in the server.

The scheduler of `nmtkit.jobs.scheduler` gives batches to the workers; this module chooses the batches, and connects the
scheduler with the event loop of the server.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from nmtkit.jobs.scheduler import Scheduler
from nmtkit.serving.config import ServeJob
from nmtkit.serving.fair_queue import (
    BatchKey,
    FairQueue,
    LineBatch,
    LineResult,
    Pair,
    QueuedLine,
    QueuedLines,
    QueuedRequest,
)
from nmtkit.serving.model_process import ModelProcess, PoolWorker
from nmtkit.serving.refusal import Refusal

RESTART_SECONDS = 1.0  # pause between two attempts to restart workers
FEW_LINES = 8  # up to 8 lines stay in one batch, because a search step has a fixed cost, equal to about 8 lines
IDLE_SECONDS = 60.0  # time without a batch after which a worker for large requests ends
ABANDONED_SECONDS = 1.0  # delay between the disconnection of all clients of a worker and the end of the worker
GATHER_SECONDS = 0.004  # longest time that a small batch waits for more lines while a worker is busy
GATHER_SHARE = 0.2  # a second limit of this time, as a share of the duration of the last batch

logger = logging.getLogger("nmtkit")


class Pool:
    """The workers, and the queues of the lines that they translate. A pool is an asynchronous context manager.

    Large requests have a separate queue and separate workers. These workers are forked when a large request arrives and
    have a low priority, so small requests do not wait for large requests, whatever the large requests cost.
    """

    def __init__(self, job: ServeJob) -> None:
        self.job = job
        # the queues of small requests (False) and of large requests (True)
        self.queues = {is_large: FairQueue(job.config.max_queue) for is_large in (False, True)}
        self.models: ModelProcess  # the newest models
        self.scheduler = Scheduler()
        self.workers: list[PoolWorker] = self.scheduler.workers
        self.death_count = self.reload_count = self.failed_reload_count = 0
        self.background: set[asyncio.Task[None]] = set()
        self.planned_dispatch: asyncio.TimerHandle | None = None
        self.waiting_since = math.inf  # arrival time of the first line after the last dispatch
        self.batch_seconds = 0.0  # duration of the last batch
        self.reloading, self.adding = asyncio.Lock(), asyncio.Lock()

    async def __aenter__(self) -> "Pool":
        self.models = await ModelProcess.start(self.job)
        await self._add_workers(self.models)
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in list(self.background):
            task.cancel()
        for worker in list(self.workers):
            self._close(worker)
            worker.parent.close()
        self.models.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.models.process.wait(), 5)

    @property
    def pairs(self) -> Sequence[Pair]:
        return self.models.facts.pairs

    @property
    def ready(self) -> bool:
        return any(not worker.parent.retired and not worker.is_large for worker in self.workers)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def translate(self, key: BatchKey, lines: Sequence[str]) -> list[list[LineResult]]:
        """Returns the translations of each line, best first. Cancelling this call drops the waiting lines.

        Raises Refusal if too many lines wait, or if a line cannot be translated.
        """
        if not lines:
            return []
        request = QueuedRequest(key, lines, asyncio.get_running_loop().create_future(), self.models)
        queue = self.queues[self._is_large(request)]
        queue.add(request)
        self._plan_dispatch()
        try:
            return await request.done
        finally:
            queue.drop(request)
            if request.missing:
                self._end_abandoned_later()
            if request.models is not self.models:
                self._end_unneeded(request.models)

    def _is_large(self, request: QueuedRequest) -> bool:
        """Returns whether a request is large. Without forked workers, no request is large.

        A request with a glossary of the client is large: a line full of terms takes up to a hundred times as long.
        """
        facts = self.models.facts
        is_long = request.waiting[-1].cost > facts.longest or request.cost > facts.small_request
        return facts.forks and (is_long or request.key.glossary is not None)

    def _plan_dispatch(self) -> None:
        """Schedules the next dispatch. If few lines wait and a worker is busy, waits a short time for more lines.

        Clients tend to send their next request right after an answer. Without the wait, these requests would always
        arrive just after a batch has been sent, so batches would stay small.
        """
        now = asyncio.get_running_loop().time()
        delay = 0.0
        queue = self.queues[False]
        if queue.size and not self.models.facts.streams:
            self.waiting_since = min(self.waiting_since, now)
            few = queue.size < self._share(False) and queue.tokens < self.models.facts.max_tokens
            if few and any(worker.tasks for worker in self._workers_for(False)):
                delay = min(GATHER_SECONDS, self.waiting_since + GATHER_SHARE * self.batch_seconds - now)
        if self.planned_dispatch is not None:
            self.planned_dispatch.cancel()
        self.planned_dispatch = asyncio.get_running_loop().call_later(max(0.0, delay), self._dispatch)

    def _workers_for(self, is_large: bool) -> list[PoolWorker]:
        return [worker for worker in self.workers if worker.is_large == is_large]

    def _share(self, is_large: bool) -> int:
        """Returns the maximum number of lines of a batch. This limit divides all lines evenly among the workers."""
        queue, workers = self.queues[is_large], self._workers_for(is_large)
        if self.models.facts.streams:
            return queue.limit
        lines = queue.size + sum(len(batch) for worker in workers for batch in worker.tasks.values())
        return max(FEW_LINES, -(-lines // max(1, len(workers))))

    def _dispatch(self) -> None:
        self.planned_dispatch = None
        self.waiting_since = math.inf
        self.scheduler.dispatch(self._next_batch)
        for worker in self.workers:
            self._send_rest(worker)
        if self.queues[True].waiting and not self.adding.locked():
            self._in_background(self._replace(self.models, is_large=True))

    def _next_batch(self, worker: PoolWorker) -> tuple[QueuedLines, LineBatch] | None:
        max_tokens, longest = worker.capacity()
        queue, share = self.queues[worker.is_large], self._share(worker.is_large)
        lines = queue.next_batch(max_tokens, share, longest, worker.parent) if max_tokens else []
        if not lines:
            return None
        worker.sent_at = time.monotonic()
        key, texts = lines[0].request.key, [line.text for line in lines]
        if worker.is_large or not worker.parent.facts.forks:
            return lines, LineBatch(key, texts)
        return lines, LineBatch(key, texts, worker.parent.facts.longest / key.weight, max_tokens / key.weight)

    def _send_rest(self, worker: PoolWorker) -> None:
        """Sends the unsent messages to a worker, as soon as the socket of the worker accepts more bytes."""
        loop = asyncio.get_running_loop()
        worker.channel.flush()
        if worker.channel.outgoing:
            loop.add_writer(worker.channel, self._send_rest, worker)
        else:
            loop.remove_writer(worker.channel)

    def _end_abandoned_later(self) -> None:
        """Ends and replaces abandoned workers after `ABANDONED_SECONDS`, because one line may take minutes."""
        for worker in self.workers:
            if worker.is_abandoned:
                asyncio.get_running_loop().call_later(ABANDONED_SECONDS, worker.end_if_abandoned, worker.sent_at)

    # --- workers ------------------------------------------------------------------------------------------------------

    async def _add_workers(self, models: ModelProcess, is_large: bool = False) -> None:
        """Starts workers until the models have all their workers for large or for small requests."""

        def count() -> int:
            return sum(worker.parent is models for worker in self._workers_for(is_large))

        async with self.adding:  # without the lock, two simultaneous deaths could start three workers
            if models.retired or count() == models.facts.workers:
                return
            while not models.retired and count() < models.facts.workers:
                worker = await models.new_worker(is_large)
                self.workers.append(worker)
                asyncio.get_running_loop().add_reader(worker.channel, self._read, worker)
        if models.retired:
            self._end_unneeded(models)
        self._plan_dispatch()

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    def _read(self, worker: PoolWorker) -> None:
        """Receives the answers that have arrived from a worker. Replaces the worker if it has ended."""
        try:
            for batch, answer in self.scheduler.receive(worker):
                if not worker.is_large:
                    self.batch_seconds = time.monotonic() - worker.sent_at
                if isinstance(answer, Exception) and len(batch) > 1:
                    self.queues[worker.is_large].give_back(batch)  # smaller batches isolate the line that fails
                elif isinstance(answer, Exception):
                    batch[0].request.fail(answer)
                else:
                    for line, result in zip(batch, answer, strict=True):
                        if isinstance(result, int):
                            self._put_back(line, result * line.request.key.weight, worker.parent.facts.longest)
                        else:
                            line.request.finish(line.index, result)
        except EOFError:
            self._close(worker)
            self._recover(worker)
        else:
            if worker.parent.retired:
                self._end_unneeded(worker.parent)
            elif worker.is_large:
                loop = asyncio.get_running_loop()
                loop.call_later(IDLE_SECONDS, self._close_if_idle, worker, worker.sent_at)
            self._end_abandoned_later()
        self._plan_dispatch()

    def _put_back(self, line: QueuedLine, cost: int, longest: float) -> None:
        """Queues a line again with its real cost. A line that costs more than `longest` becomes a large request."""
        whole = line.request
        if cost <= longest or whole.done.done():
            return self.queues[False].put_back(line, cost)
        part = QueuedRequest(whole.key, [line.text], asyncio.get_running_loop().create_future(), whole.models)
        part.waiting[0].cost = cost
        try:
            self.queues[True].add(part)
        except Refusal as error:
            return whole.fail(error)

        def finish(done: "asyncio.Future[list[list[LineResult]]]") -> None:
            if not done.cancelled():
                error = done.exception()
                whole.fail(error) if isinstance(error, Exception) else whole.finish(line.index, done.result()[0])

        def drop(_: "asyncio.Future[list[list[LineResult]]]") -> None:
            part.done.cancel()
            self.queues[True].drop(part)
            self._end_abandoned_later()

        part.done.add_done_callback(finish)
        whole.done.add_done_callback(drop)

    def _close(self, worker: PoolWorker) -> None:
        """Closes the channel of a worker, which ends the worker."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(worker.channel)
        loop.remove_writer(worker.channel)
        worker.channel.close()
        if worker in self.workers:
            self.workers.remove(worker)

    def _close_if_idle(self, worker: PoolWorker, sent_at: float) -> None:
        """Closes a worker that has no batch and has not received a batch since `sent_at`."""
        if not worker.tasks and worker.sent_at == sent_at and worker in self.workers:
            self._close(worker)
            if worker.parent.retired:
                self._end_unneeded(worker.parent)

    def _end_unneeded(self, old: ModelProcess) -> None:
        """Closes the idle workers with old models, unless lines wait for the old models.

        If lines wait but no worker is left, the newest models get the requests of these lines. A request fails if the
        newest models lack its language pair. When no worker with the old models is left, their process ends.
        """
        for is_large, queue in self.queues.items():
            workers = [worker for worker in self._workers_for(is_large) if worker.parent is old]
            waiting = queue.requests_of(old)
            for worker in workers:
                if not waiting and not worker.tasks:
                    self._close(worker)
            if workers:
                continue
            for request in waiting:
                request.models = self.models
                if request.key.pair not in self.pairs:
                    request.fail(Refusal(400, "this language pair is no longer served"))
        if all(worker.parent is not old for worker in self.workers):
            old.close()

    def _recover(self, worker: PoolWorker) -> None:
        """Queues the lines of a worker that has ended, and starts another worker."""
        if worker.ended:
            logger.info(
                "ended worker process %d, whose clients have disconnected; a new worker replaces it", worker.pid
            )
        else:
            self.death_count += 1
            logger.warning("worker process %d died; a new worker translates its lines again", worker.pid)
        for batch in worker.tasks.values():
            self.queues[worker.is_large].give_back(batch)
        if worker.parent.retired:
            self._end_unneeded(worker.parent)
        elif not worker.is_large:  # workers for large requests start when lines wait
            self._in_background(self._replace(worker.parent))

    async def _replace(self, models: ModelProcess, is_large: bool = False) -> None:
        """Starts missing workers. On a GPU, or if the model process has ended, loads the models again instead."""
        while self.models is models:
            with contextlib.suppress(OSError):
                if models.facts.forks and models.process.returncode is None:
                    return await self._add_workers(models, is_large)
            if await self.reload():
                return
            await asyncio.sleep(RESTART_SECONDS)

    async def reload(self, job: ServeJob | None = None) -> bool:
        """Loads the models of `job`; None means the last job. Workers with the old models finish their batches.

        Returns False if loading fails: the log gives the reason, and the old models stay.
        """
        async with self.reloading:
            before = time.monotonic()
            models = None
            try:
                models = await ModelProcess.start(job or self.job)
                await self._add_workers(models)
            except (ValueError, OSError) as error:
                self.failed_reload(error)
                if models is not None:
                    models.retired = True
                    self._end_unneeded(models)
                return False
            self.job = job or self.job
            old, self.models = self.models, models
            old.retired = True
            self._end_unneeded(old)
            self.reload_count += 1
            logger.info("reloaded the models in %.1f s", time.monotonic() - before)
            return True

    def failed_reload(self, error: Exception) -> None:
        self.failed_reload_count += 1
        logger.warning("could not reload the models, so the old ones stay: %s", error)
