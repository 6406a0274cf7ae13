"""Batches of the queue are fair to all requests, limited in size, of one key and of similar lengths."""

import asyncio
from collections.abc import Iterator

import pytest

from nmtkit.serving.fair_queue import BatchKey, FairQueue, QueuedRequest, estimated_tokens
from nmtkit.serving.refusal import Refusal

KEY = BatchKey(("en", "de"), 0)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def job(loop: asyncio.AbstractEventLoop, *texts: str, key: BatchKey = KEY) -> QueuedRequest:
    return QueuedRequest(key, texts, loop.create_future())


def drained(queue: FairQueue, max_tokens: int, max_lines: int = 1000) -> list[list[str]]:
    return [[item.text for item in batch] for batch in iter(lambda: queue.next_batch(max_tokens, max_lines), [])]


def test_every_line_is_taken_once_in_batches_that_keep_to_the_tokens(loop: asyncio.AbstractEventLoop) -> None:
    queue = FairQueue(1000)
    texts = [f"{number:03d}" + "x" * (7 * number % 90) for number in range(200)]
    for start in range(0, 200, 40):
        queue.add(job(loop, *texts[start : start + 40]))
    batches = drained(queue, 100)
    assert sorted(text for batch in batches for text in batch) == sorted(texts)
    assert all(len(batch) * max(map(estimated_tokens, batch)) <= 100 for batch in batches)
    assert queue.size == queue.tokens == 0


def test_a_short_request_goes_into_the_next_batch_whatever_waits(loop: asyncio.AbstractEventLoop) -> None:
    queue = FairQueue(10_000)
    queue.add(job(loop, *["a line of a long document"] * 1000))
    for _ in range(5):
        queue.next_batch(100, 1000)
    queue.add(job(loop, "short"))
    assert "short" in [item.text for item in queue.next_batch(100, 1000)]


def test_a_long_request_gets_its_share_while_short_ones_keep_coming(loop: asyncio.AbstractEventLoop) -> None:
    queue = FairQueue(10_000)
    queue.add(job(loop, *["a line of a long document"] * 200))
    served, clients = 0, 10  # each of which sends the next line when it has its answer
    for _ in range(100):
        for _ in range(clients):
            queue.add(job(loop, "a line of 1 of the clients"))
        batch = queue.next_batch(60, 1000)
        clients = sum(item.text.endswith("clients") for item in batch)
        served += len(batch) - clients
    assert (
        len(batch)
        == 60 // estimated_tokens("a line of a long document")
        == 60 // estimated_tokens("a line of 1 of the clients")
        == 7
    )
    assert 0.7 * 700 / 11 <= served <= 1.2 * 700 / 11  # of eleven requests that wait, it is one


def test_a_batch_has_lines_of_one_kind_and_of_similar_length(loop: asyncio.AbstractEventLoop) -> None:
    queue = FairQueue(1000)
    other = BatchKey(("de", "en"), 0)
    queue.add(job(loop, "x" * 400, "y" * 390, "short", "brief"))
    queue.add(job(loop, "kurz", key=other))
    assert [sorted(batch) for batch in drained(queue, 10_000)] == [["kurz"], ["x" * 400, "y" * 390], ["brief", "short"]]


def test_a_full_queue_refuses_and_a_dropped_job_makes_room(loop: asyncio.AbstractEventLoop) -> None:
    queue = FairQueue(10)
    first = job(loop, *["a"] * 30)
    queue.add(first)  # the queue was empty
    with pytest.raises(Refusal, match="too many texts"):
        queue.add(job(loop, "b"))
    queue.drop(first)
    queue.add(job(loop, "b"))
    assert drained(queue, 100) == [["b"]]


def test_lines_of_a_dead_worker_come_again_and_one_that_kills_fails_by_itself(
    loop: asyncio.AbstractEventLoop,
) -> None:
    queue = FairQueue(1000)
    good, bad = job(loop, "one", "two", "three", "four"), job(loop, "poison")
    queue.add(good)
    queue.add(bad)
    deaths = 0
    while batch := queue.next_batch(100, 1000):
        if any(item.text == "poison" for item in batch):
            queue.give_back(batch)
            deaths += 1
        else:
            for item in batch:
                item.request.finish(item.index, [item.text.upper()])
    assert 4 <= deaths <= 6  # the line is alone after one to three batches, and then its worker dies three times
    assert good.done.result() == [["ONE"], ["TWO"], ["THREE"], ["FOUR"]]
    with pytest.raises(Refusal, match="cannot be translated"):
        bad.done.result()


def test_of_many_lines_a_batch_takes_those_nearest_in_length_to_the_first(loop: asyncio.AbstractEventLoop) -> None:
    queue = FairQueue(1000)
    lengths = [80 + 4 * number for number in range(40)]  # all are similar to the longest
    for length in reversed(lengths):
        queue.add(job(loop, "x" * length))
    queue.next_batch(1000, 1)  # the shortest is the first to end
    batches = [sorted(map(len, batch)) for batch in drained(queue, 10_000, 10)]
    assert batches == [lengths[1 + start : 11 + start] for start in range(0, 39, 10)]
    assert queue.size == queue.tokens == 0


def test_a_batch_has_no_more_lines_than_a_workers_share(loop: asyncio.AbstractEventLoop) -> None:
    queue = FairQueue(1000)
    queue.add(job(loop, *["a line"] * 25))
    assert [len(batch) for batch in drained(queue, 10_000, 10)] == [10, 10, 5]


def test_lines_that_are_put_back_cost_their_request_nothing(loop: asyncio.AbstractEventLoop) -> None:
    queue = FairQueue(1000)
    one, other = job(loop, *["x" * 40] * 6), job(loop, *["x" * 40] * 6)
    queue.add(one)
    queue.add(other)
    for taken in range(1, 4):
        queue.next_batch(10_000, 2)
        assert (len(one.waiting), len(other.waiting)) == (6 - taken, 6 - taken)
        assert one.finish_time == other.finish_time == taken * estimated_tokens("x" * 40)


def test_beside_a_long_line_only_short_lines_are_taken(loop: asyncio.AbstractEventLoop) -> None:
    queue = FairQueue(1000)
    queue.add(job(loop, "x" * 4000))
    queue.add(job(loop, "short", "y" * 4000))
    queue.add(job(loop, "brief"))
    assert [line.text for line in queue.next_batch(100, 10, longest=100)] == ["brief"]
    assert queue.next_batch(100, 10, longest=100) == []  # "short" comes after the long line of its request
    assert [len(text) for (text,) in drained(queue, 100)] == [4000, 4000, 5]
    assert queue.size == queue.tokens == 0


def test_a_batch_of_a_dead_worker_waits_for_a_worker_that_may_take_it(loop: asyncio.AbstractEventLoop) -> None:
    queue = FairQueue(1000)
    queue.add(job(loop, "x" * 4000))
    (long,) = queue.next_batch(100, 10)
    queue.give_back([long])
    assert queue.next_batch(100, 10, longest=100) == []
    assert queue.next_batch(100, 10) == [long]


def test_alternatives_with_alignment_and_quality_make_smaller_batches(loop: asyncio.AbstractEventLoop) -> None:
    """A batch has about the same number of hypotheses, whatever the requests want."""
    sizes = {}
    for alternatives, links in ((0, False), (0, True), (4, True), (10, False), (10, True)):
        queue = FairQueue(1000)
        key = BatchKey(("en", "de"), alternatives, alignment=links, quality=links)
        queue.add(job(loop, *["x" * 40] * 100, key=key))
        sizes[alternatives, links] = len(queue.next_batch(600, 1000))
    assert sizes == {(0, False): 50, (0, True): 50, (4, True): 16, (10, False): 16, (10, True): 8}
