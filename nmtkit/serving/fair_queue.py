"""Queues the lines of all waiting requests, and forms batches of these lines.

The order is self-clocked fair queueing (Golestani 1994). Every request has a finishing time: the cost of its next line
plus the finishing time of its previous line. For the first line, the time of the queue replaces the finishing time of
the previous line. The request with the earliest finishing time is served first, and its finishing time becomes the time
of the queue. A short request therefore enters the next batch even if many lines wait, and a long request gets its share
even if many short requests arrive. The next lines in this order are candidates for a batch. The batch gets the
candidates whose length is nearest to the length of the first line.
"""

import asyncio
import heapq
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from nmtkit.serving.refusal import RETRY, Refusal

SIMILAR = 4  # maximum ratio between the lengths of the first line and of any other line of a batch
SHORT = 16  # lines of at most this many tokens count as lines of similar length
CHOICE = 2  # number of batches that the candidates for one batch could fill
GLOSSARY_WEIGHT = 4  # weight of a line with a glossary
FAILED = "a line of this text cannot be translated"  # message for the client
MAX_DEATHS = 3  # a line fails after this many workers have died while translating only this line

Pair = tuple[str, str]  # codes of the source and the target language


class LineResult(TypedDict):
    """A translation of a line or of a text."""

    text: str
    alignment: NotRequired[list[list[Any]]]  # links: start and end in the source, start and end in `text` (code points)
    decoded_again: NotRequired[bool]  # whether the first translation repeated a text again and again (a loop)
    quality: NotRequired[Any]  # fields of nmtkit.text.quality.Quality; for a text, a list with an element for each line


@dataclass(frozen=True)
class BatchKey:
    """Settings of a translation. All lines of a batch have the same settings.

    The settings of a request have no pair, because its texts may have different languages.
    """

    pair: Pair = ("", "")
    alternatives: int = 0
    html: bool = False
    alignment: bool = False
    protect: bool = False  # protect placeholders and numbers, even if the server runs without --protect-spans
    placeholders: bool = False  # protect the placeholders of Weblate
    quality: bool = False
    whole: bool = False  # do not split lines into sentences, even if the server runs with --split-sentences
    tag: str | None = None  # a symbol of the vocabulary that begins every line, such as <formal>
    glossary: Path | None = None  # terms of the client, which replace the terms of --glossary

    @property
    def weight(self) -> int:
        """Upper estimate of the time of a line, divided by the time of the same line without these settings.

        With 10 alternatives and a beam of 4, a line takes 2 to 3 times as long. With the alignment and quality of each
        alternative, the line takes 6 times as long. With a glossary, PyTorch repeats the search of a line if its
        translation lacks a term.
        """
        weight = -(-(1 + self.alternatives) // (2 if self.alignment or self.quality else 4))
        return weight * (1 if self.glossary is None else GLOSSARY_WEIGHT)


@dataclass(frozen=True)
class LineBatch:
    """The task of a worker: the texts of a batch, and their common settings.

    The server only estimates the tokens of a text. A text of more than `longest` tokens, and texts that make the batch
    exceed `max_tokens`, are not translated: the answer has their numbers of tokens instead of translations.
    """

    key: BatchKey
    texts: list[str]
    longest: float = inf
    max_tokens: float = inf

    def fitting(self, tokens: Sequence[int]) -> list[int]:
        """Returns the indices of the texts that the worker translates, within the limits of the batch.

        `tokens` are the exact numbers of tokens of all texts.
        """
        chosen: list[int] = []
        width = 0
        for index, length in enumerate(tokens):
            wider = max(width, length)
            if length <= self.longest and (not chosen or wider * (len(chosen) + 1) <= self.max_tokens):
                chosen.append(index)
                width = wider
        return chosen


@dataclass(eq=False, slots=True)
class QueuedLine:
    """One line of a request. `deaths` counts the workers that died while translating only this line."""

    request: "QueuedRequest"
    index: int
    cost: int
    deaths: int = 0

    @property
    def text(self) -> str:
        return self.request.lines[self.index]


QueuedLines = list[QueuedLine]
cost_of = attrgetter("cost")


class QueuedRequest:
    """The lines of one request. `done` gets the translations of each line, best first.

    Only workers of the process `models` translate the lines, so a request keeps its model during a reload.
    """

    number = 0  # requests are numbered in the order of arrival
    start = 0  # time of the queue at arrival
    finish_time = 0  # finishing time of the line that was taken last

    def __init__(
        self, key: BatchKey, lines: Sequence[str], done: "asyncio.Future[list[list[LineResult]]]", models: Any = None
    ) -> None:
        self.key, self.lines, self.done, self.models = key, lines, done, models
        costs = (estimated_tokens(line) * key.weight for line in lines)
        self.waiting = sorted((QueuedLine(self, index, cost) for index, cost in enumerate(costs)), key=cost_of)
        self.results: list[list[LineResult]] = [[] for _ in lines]
        self.missing = len(lines)  # lines without a result

    @property
    def next_finish_time(self) -> int:
        """Finishing time of the next line, which is the longest waiting line."""
        return self.finish_time + self.waiting[-1].cost

    @property
    def cost(self) -> int:
        """Cost of all waiting lines."""
        return sum(map(cost_of, self.waiting))

    def __lt__(self, other: "QueuedRequest") -> bool:
        return self.order < other.order

    @property
    def order(self) -> tuple[int, bool, int]:
        """Sort key: finishing time. For equal times, requests that have not begun come first, then older requests."""
        return self.next_finish_time, self.finish_time > self.start, self.number

    def take(self, row: int) -> QueuedLine:
        """Removes and returns the line at index `row` of `waiting`."""
        line = self.waiting.pop(row)
        self.finish_time += line.cost
        return line

    def put_back(self, line: QueuedLine, cost: int) -> None:
        """Takes back a line, and changes its cost to `cost`."""
        self.finish_time -= line.cost
        line.cost = cost
        insort(self.waiting, line, key=cost_of)

    def finish(self, index: int, result: list[LineResult]) -> None:
        self.results[index] = result
        self.missing -= 1
        if not self.missing and not self.done.done():
            self.done.set_result(self.results)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def estimated_tokens(line: str) -> int:
    """Returns an estimate of the number of tokens of a line: one token per four bytes of UTF-8, plus two."""
    return len(line.encode()) // 4 + 2


class FairQueue:
    """A queue of requests. At most `limit` lines wait, but an empty queue accepts a request of any size."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.requests: list[QueuedRequest] = []
        self.retries: deque[QueuedLines] = deque()  # halves of failed batches
        self.size = self.tokens = 0  # numbers of waiting lines and of their tokens, without `retries`
        self.time = 0
        self.numbers = count()

    def add(self, request: QueuedRequest) -> None:
        """Adds a request. Raises Refusal 429 if too many lines would wait, except in an empty queue."""
        if self.size and self.size + len(request.waiting) > self.limit:
            raise Refusal(429, "too many texts are waiting; try again later", RETRY)
        request.start = request.finish_time = self.time
        request.number = next(self.numbers)
        self.size += len(request.waiting)
        self.tokens += request.cost
        self.requests.append(request)

    def requests_of(self, models: object) -> list[QueuedRequest]:
        """Returns the requests that have waiting lines for these models."""
        waiting = [request for request in self.requests if request.waiting]
        waiting += [line.request for batch in self.retries for line in batch if not line.request.done.done()]
        return [request for request in dict.fromkeys(waiting) if request.models is models]

    @property
    def waiting(self) -> int:
        """The number of waiting lines, including the lines of failed batches."""
        return self.size + sum(map(len, self.retries))

    def drop(self, request: QueuedRequest) -> None:
        """Removes the waiting lines of a request whose client no longer waits."""
        self.size -= len(request.waiting)
        self.tokens -= request.cost
        request.waiting = []

    def put_back(self, line: QueuedLine, cost: int) -> None:
        """Takes back a line that a worker has not translated because its real cost exceeds the estimate."""
        request = line.request
        if request.done.done():
            return
        request.put_back(line, cost)
        self.size += 1
        self.tokens += cost
        if request not in self.requests:
            self.requests.append(request)

    def give_back(self, batch: QueuedLines) -> None:
        """Takes back the lines of a failed batch. They are translated again in two batches, before all other lines.

        Repeated halving isolates a line that kills workers. After `MAX_DEATHS` workers have died while translating only
        this line, the request of this line fails, but no other request.
        """
        if len(batch) == 1:
            batch[0].deaths += 1
            if batch[0].deaths >= MAX_DEATHS:
                batch[0].request.fail(Refusal(500, FAILED))
        half = len(batch) // 2
        self.retries.extend(part for part in (batch[:half], batch[half:]) if part)

    def next_batch(self, max_tokens: int, max_lines: int, longest: float = inf, models: object = None) -> QueuedLines:
        """Returns at most `max_lines` lines for `models`, of the same key and of similar length.

        If all lines are padded to the longest line, they have at most `max_tokens` estimated tokens, unless one line
        alone has more. A request whose longest waiting line exceeds `longest` tokens is skipped, with all its lines.
        The batch is empty if no other request is waiting. A waiting half of a failed batch comes first, as a separate
        batch.
        """
        for _ in range(len(self.retries)):
            batch = [line for line in self.retries.popleft() if not line.request.done.done()]
            if batch and max(line.cost for line in batch) <= longest and batch[0].request.models is models:
                return batch
            if batch:
                self.retries.append(batch)
        self.requests = [request for request in self.requests if request.waiting]
        of_models = [request for request in self.requests if request.models is models]
        requests = [request for request in of_models if request.waiting[-1].cost <= longest]
        if not requests:
            return []
        heapq.heapify(requests)
        self.time = max(self.time, requests[0].next_finish_time)
        first, *others = _candidates(requests, CHOICE * max_tokens, CHOICE * max_lines)
        others.sort(key=lambda line: abs(line.cost - first.cost))  # a stable sort keeps the order of service
        batch, width = [first], first.cost
        for line in others:
            width = max(width, line.cost)
            if len(batch) < max_lines and width * (len(batch) + 1) <= max_tokens:
                batch.append(line)
            else:
                line.request.put_back(line, line.cost)
        self.size -= len(batch)
        self.tokens -= sum(line.cost for line in batch)
        return batch


def _candidates(requests: list[QueuedRequest], max_tokens: int, max_lines: int) -> QueuedLines:
    """Takes the next line and, in order of service, further lines that may share a batch with the next line.

    `requests` is a heap of requests with waiting lines. The function destroys the order of the heap.
    """
    key, first = requests[0].key, requests[0].waiting[-1].cost
    longest, shortest = max(SHORT, SIMILAR * first), first // SIMILAR if first > SHORT else 0
    lines: QueuedLines = []
    tokens = 0
    skipped: list[QueuedRequest] = []
    while requests and tokens < max_tokens and len(lines) < max_lines:
        request = requests[0]
        row = bisect_right(request.waiting, longest, key=cost_of) - 1
        if request.key == key and row >= 0 and request.waiting[row].cost >= shortest:
            lines.append(request.take(row))
            tokens += lines[-1].cost
            if request.waiting:
                heapq.heapreplace(requests, request)
                continue
        skipped.append(heapq.heappop(requests))
    requests += skipped
    return lines
