"""Small requests do not wait for large requests: the test plays the workers, and counts the batches of each worker."""

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nmtkit.jobs.processes import SocketChannel
from nmtkit.serving import pool as pools
from nmtkit.serving.config import ModelFacts, ServeConfig, ServeJob
from nmtkit.serving.fair_queue import BatchKey, LineBatch, LineResult
from nmtkit.serving.model_process import PoolWorker
from nmtkit.serving.pool import Pool
from nmtkit.translation.options import DeviceOptions, TextOptions, TranslatorOptions
from nmtkit.translation.search.options import SearchOptions

PAIR = ("en", "de")
KEY = BatchKey(PAIR)
EVERYTHING = BatchKey(PAIR, alternatives=10, alignment=True, quality=True)
MAX_TOKENS = 1000
SHORT = "A dog runs."
LARGE = {
    "a long line": (KEY, ["word " * 20_000]),
    "long lines": (KEY, ["word " * 800] * 24),
    "many lines": (KEY, ["Two men are walking in the snow."] * 1000),
    "a line with alternatives": (EVERYTHING, ["word " * 100]),
    "a line with a glossary": (BatchKey(PAIR, glossary=Path("terms.tsv")), [SHORT]),
    "lines with alternatives": (EVERYTHING, ["Two men are walking in the snow."] * 12),
}


class FakeModels:
    """Starts workers without processes. The test reads the batches of a worker from the other end of its channel."""

    retired = False
    process = SimpleNamespace(returncode=None)

    def __init__(self, facts: ModelFacts) -> None:
        self.facts, self.pids = facts, itertools.count(1_000_000)
        self.ends: list[tuple[PoolWorker, SocketChannel]] = []

    async def new_worker(self, is_large: bool) -> PoolWorker:
        ours, theirs = socket.socketpair()
        channel: Any = SocketChannel(ours, buffers=True)
        parent: Any = self
        worker = PoolWorker("fake", channel, parent=parent, pid=next(self.pids), is_large=is_large)
        self.ends.append((worker, SocketChannel(theirs, buffers=False)))
        return worker

    def received(self, is_large: bool) -> list[LineBatch]:
        """Returns the batches that the workers for large or for small requests have received, without an answer."""
        found = []
        for worker, channel in self.ends:
            while worker.is_large == is_large and (message := channel.receive(wait=False)) is not None:
                found.append(message[1])
        return found

    def answer(self, is_large: bool, tokens: Mapping[str, int] | None = None) -> list[LineBatch]:
        """Answers all batches that the workers have received. Returns the batches.

        `tokens` has the real number of tokens of some texts. A worker does not translate texts that do not fit.
        """
        found = []
        for worker, channel in self.ends:
            while worker.is_large == is_large and (message := channel.receive(wait=False)) is not None:
                number, batch = message
                counts = [(tokens or {}).get(text, 1) for text in batch.texts]
                chosen = batch.fitting(counts)
                answer: list[Any] = list(counts)
                for index in chosen:
                    answer[index] = [LineResult(text=batch.texts[index].upper())]
                channel.send((number, answer))
                found.append(batch)
        return found


def run(test: Callable[[Pool, FakeModels], Awaitable[None]], *, forks: bool = True) -> None:
    """Runs a test with a pool of two workers."""

    async def with_pool() -> None:
        job = ServeJob(
            config=ServeConfig(workers=2), paths=[], plugins=[], search=SearchOptions(), devices=DeviceOptions(),
            translator=TranslatorOptions(), text=TextOptions(), processors={},
        )  # fmt: skip
        facts = ModelFacts([PAIR], "cpu", 2, forks=forks, streams=False, max_tokens=MAX_TOKENS, engines={}, waits=False)
        pool, models = Pool(job), FakeModels(facts)
        pool.models = models  # type: ignore[assignment]
        await pool._add_workers(models)  # type: ignore[arg-type]
        await test(pool, models)
        for worker in list(pool.workers):
            pool.workers.remove(worker)
            loop = asyncio.get_running_loop()
            loop.remove_reader(worker.channel)
            loop.remove_writer(worker.channel)
            worker.channel.close()

    asyncio.run(with_pool())


async def settled() -> None:
    """Waits until the pool has sent all batches that the workers can take: some steps of the event loop."""
    for _ in range(50):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("name", LARGE)
def test_a_small_request_is_the_next_batch_whatever_large_requests_wait(name: str) -> None:
    async def test(pool: Pool, models: FakeModels) -> None:
        key, texts = LARGE[name]
        attackers = [asyncio.create_task(pool.translate(key, texts)) for _ in range(4)]
        await settled()
        assert models.received(is_large=False) == []
        normal = asyncio.create_task(pool.translate(KEY, [SHORT]))
        await settled()
        assert [batch.texts for batch in models.answer(is_large=False)] == [[SHORT]]
        assert await normal == [[{"text": SHORT.upper()}]]
        batches = models.received(is_large=True)
        assert batches and all(text in texts for batch in batches for text in batch.texts)
        assert sum(worker.is_large for worker in pool.workers) == 2
        for task in attackers:
            task.cancel()

    run(test)


def test_large_requests_are_answered_by_workers_that_then_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "IDLE_SECONDS", 0.1)

    async def test(pool: Pool, models: FakeModels) -> None:
        texts = [f"Line number {number}." for number in range(500)]
        answer = asyncio.create_task(pool.translate(KEY, texts))
        while not answer.done():
            await asyncio.sleep(0.001)
            for batch in models.answer(is_large=True):
                assert sum(len(text) // 4 + 2 for text in batch.texts) <= MAX_TOKENS
        assert await answer == [[{"text": text.upper()}] for text in texts]
        while any(worker.is_large for worker in pool.workers):
            await asyncio.sleep(0.01)
        assert [worker.is_large for worker in pool.workers] == [False, False]

    run(test)


def test_a_worker_without_clients_is_ended_and_disturbs_no_small_request(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []
    monkeypatch.setattr(pools, "ABANDONED_SECONDS", 0.01)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))

    async def test(pool: Pool, models: FakeModels) -> None:
        normal = asyncio.create_task(pool.translate(KEY, [SHORT]))
        attackers = [asyncio.create_task(pool.translate(*LARGE["a long line"])) for _ in range(2)]
        await settled()
        for task in attackers:
            task.cancel()
        await settled()
        large = {(worker.pid, signal.SIGKILL) for worker in pool.workers if worker.is_large}
        assert set(killed) == large and len(large) == 2
        assert pool.queues[True].waiting == 0
        assert [batch.texts for batch in models.answer(is_large=False)] == [[SHORT]]
        await normal

    run(test)


def test_small_requests_of_an_attacker_fill_at_most_one_batch_before_a_normal_request() -> None:
    async def test(pool: Pool, models: FakeModels) -> None:
        texts = ["Two men are walking in the snow."] * 50  # less than half a batch
        attackers = [asyncio.create_task(pool.translate(KEY, texts)) for _ in range(8)]
        await settled()
        normal = asyncio.create_task(pool.translate(BatchKey(PAIR, quality=True), [SHORT]))
        await settled()
        assert all(SHORT not in batch.texts for batch in models.answer(is_large=False))  # sent before it arrived
        await settled()
        assert any(SHORT in batch.texts for batch in models.answer(is_large=False))
        await normal
        assert not any(worker.is_large for worker in pool.workers)
        for task in attackers:
            task.cancel()

    run(test)


def test_without_forks_all_requests_have_the_same_worker() -> None:
    async def test(pool: Pool, models: FakeModels) -> None:
        request = asyncio.create_task(pool.translate(*LARGE["a long line"]))
        await settled()
        assert len(models.received(is_large=False)) == 1 and models.received(is_large=True) == []
        request.cancel()

    run(test, forks=False)


def test_a_short_line_of_many_tokens_becomes_a_large_request() -> None:
    """The server estimates a token for four letters. 400 digits may be 400 tokens."""

    async def test(pool: Pool, models: FakeModels) -> None:
        digits = "1234567890" * 40
        request = asyncio.create_task(pool.translate(KEY, ["One.", digits, "Two."]))
        await settled()
        models.answer(is_large=False, tokens={digits: 400})
        await settled()
        assert not any(worker.tasks for worker in pool.workers if not worker.is_large)
        assert [batch.texts for batch in models.answer(is_large=True, tokens={digits: 400})] == [[digits]]
        assert await request == [[{"text": text.upper()}] for text in ("One.", digits, "Two.")]
        gone = asyncio.create_task(pool.translate(KEY, [digits]))
        await settled()
        models.answer(is_large=False, tokens={digits: 400})
        await asyncio.sleep(0)
        gone.cancel()
        await settled()
        assert pool.queues[False].waiting == pool.queues[True].waiting == 0

    run(test)


def test_a_long_line_that_an_old_worker_did_not_translate_goes_to_the_new_models() -> None:
    """The old worker is idle after its answer, and ends. Its process ends, too."""
    errors: list[Any] = []

    async def test(pool: Pool, models: FakeModels) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        closed: list[FakeModels] = []
        new: Any = FakeModels(models.facts)
        models.close = lambda: closed.append(models)  # type: ignore[attr-defined]
        digits = "1234567890" * 4
        request = asyncio.create_task(pool.translate(KEY, [digits, SHORT]))
        await settled()
        await pool._add_workers(new)
        pool.models, models.retired = new, True
        models.answer(is_large=False, tokens={digits: 100_000})
        await settled()
        assert [batch.texts for batch in new.answer(is_large=True)] == [[digits]]
        assert await request == [[{"text": digits}], [{"text": SHORT.upper()}]]
        assert closed and all(worker.parent is new for worker in pool.workers)

    run(test)
    assert errors == []


def test_lines_beyond_the_tokens_of_a_batch_come_again_with_their_real_cost() -> None:
    """An attacker sends lines of 100 tokens that look like 12. Between two requests, 1,000 tokens are decoded."""

    async def test(pool: Pool, models: FakeModels) -> None:
        texts = [f"{number:03d}" + "!" * 37 for number in range(40)]
        tokens = dict.fromkeys(texts, 100)
        attackers = [asyncio.create_task(pool.translate(KEY, texts)) for _ in range(4)]
        await settled()
        normal = None
        answered = []
        while not all(task.done() for task in attackers):
            for batch in models.answer(is_large=False, tokens=tokens):
                counts = [tokens.get(text, 1) for text in batch.texts]
                assert sum(counts[index] for index in batch.fitting(counts)) <= MAX_TOKENS
                answered.append(len(batch.texts))
            normal = normal or asyncio.create_task(pool.translate(KEY, [SHORT]))
            await asyncio.sleep(0.01)
        assert normal is not None and normal.done()
        assert [await task for task in attackers] == [[[{"text": text.upper()}] for text in texts]] * 4
        assert max(answered[8:]) <= 10  # the real cost is known
        assert pool.queues[False].waiting == pool.queues[False].tokens == 0

    run(test)
