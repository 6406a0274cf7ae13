"""Lines of all waiting requests, and the batches made of them.

Self-clocked fair queueing (Golestani 1994): the next line of every request has a finishing time, that of the request's
last line, or the queue's own time where it is its first, and the line's cost. The least is served first, and the
least of a batch becomes the queue's. So a short request goes into the next batch whatever waits, and a long one gets
its share however many short ones come. Of the lines that are next, a batch takes those nearest in length to the first.
"""

import asyncio
import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

SIMILAR = 4  # times longer or shorter than the line that a batch begins with: a short line waits for no long one
SHORT = 16  # tokens; lines up to here are similar
CHOICE = 2  # batches of lines among which those nearest in length to the first are chosen
MAX_DEATHS = 3  # workers that may die over one line alone

Pair = tuple[str, str]
Found = dict[str, Any]  # a translation: its text, and where asked for and possible its alignment and quality


@dataclass(frozen=True)
class Kind:
    """Properties that all lines of a batch share."""

    pair: Pair
    alternatives: int
    html: bool = False
    alignment: bool = False
    protect: bool = False  # placeholders, whatever the operator says of them
    quality: bool = False


class QueueFull(Exception):  # noqa: N818  # as queue.Full
    """Too many lines wait."""


class TranslationError(Exception):
    """A line cannot be translated; the message is for whoever asked."""


@dataclass(eq=False)
class Job:
    """The lines of one request. `done` has the translations of each line, best first."""

    kind: Kind
    texts: Sequence[str]
    done: "asyncio.Future[list[list[Found]]]"
    results: list[list[Found]] = field(init=False)
    missing: int = field(init=False)
    pending: list[int] = field(init=False)  # indices of lines that wait, in ascending order of cost
    costs: list[int] = field(init=False)  # theirs
    number: int = 0
    arrived: int = 0  # the queue's time when it came
    served: int = 0  # finishing time of its last line that was taken

    def __post_init__(self) -> None:
        costs = [tokens_of(text) for text in self.texts]
        self.pending = sorted(range(len(costs)), key=costs.__getitem__)
        self.costs = [costs[index] for index in self.pending]
        self.results = [[] for _ in self.texts]
        self.missing = len(self.texts)

    @property
    def time(self) -> int:
        """Finishing time of its next line, the longest that waits."""
        return self.served + self.costs[-1]

    @property
    def order(self) -> tuple[int, bool, int]:
        """At equal times, those that have had nothing come first."""
        return self.time, self.served > self.arrived, self.number

    def __lt__(self, other: "Job") -> bool:
        return self.order < other.order

    def take(self, row: int) -> "Item":
        """Takes the line of this row of `pending`."""
        item = Item(self, self.pending.pop(row), self.costs.pop(row))
        self.served += item.cost
        return item

    def put_back(self, item: "Item") -> None:
        row = bisect_right(self.costs, item.cost)
        self.pending.insert(row, item.index)
        self.costs.insert(row, item.cost)
        self.served -= item.cost

    def finish(self, index: int, found: list[Found]) -> None:
        self.results[index] = found
        self.missing -= 1
        if not self.missing and not self.done.done():
            self.done.set_result(self.results)

    def fail(self, message: str) -> None:
        if not self.done.done():
            self.done.set_exception(TranslationError(message))


@dataclass(eq=False)
class Item:
    """One line of a job; `deaths` counts the workers that died while they had it alone."""

    job: Job
    index: int
    cost: int
    deaths: int = 0

    @property
    def text(self) -> str:
        return self.job.texts[self.index]


Batch = list[Item]


def tokens_of(text: str) -> int:
    """Returns about how many tokens a line has: a piece has some four bytes of UTF-8."""
    return len(text.encode()) // 4 + 2


class FairQueue:
    """Jobs with lines that wait; at most `limit` lines."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.jobs: list[Job] = []
        self.again: deque[Batch] = deque()  # of workers that died, in halves
        self.size = self.tokens = 0  # lines that wait, without these, and their tokens
        self.time = 0
        self.numbers = count()

    def add(self, job: Job) -> None:
        """Raises QueueFull where too many lines would wait; a job that comes to an empty queue is always taken."""
        if self.size and self.size + len(job.pending) > self.limit:
            raise QueueFull
        job.arrived = job.served = self.time
        job.number = next(self.numbers)
        self.size += len(job.pending)
        self.tokens += sum(job.costs)
        self.jobs.append(job)

    def drop(self, job: Job) -> None:
        """Takes out what waits of a job that nobody asks for any more."""
        self.size -= len(job.pending)
        self.tokens -= sum(job.costs)
        job.pending, job.costs = [], []

    def give_back(self, batch: Batch) -> None:
        """Takes the lines of a worker that died: they are translated again, before all others, in two batches.

        So a line that kills workers is alone in the end; when three more have died, its request is answered with an
        error, and no other.
        """
        if len(batch) == 1:
            batch[0].deaths += 1
            if batch[0].deaths >= MAX_DEATHS:
                batch[0].job.fail("a line of this text cannot be translated")
        half = len(batch) // 2
        self.again.extend(part for part in (batch[:half], batch[half:]) if part)

    def next_batch(self, max_tokens: int, max_lines: int) -> Batch:
        """Returns lines of one kind and of similar length, of about `max_tokens` together; none if none wait."""
        while self.again:
            batch = [item for item in self.again.popleft() if not item.job.done.done()]
            if batch:
                return batch
        self.jobs = [job for job in self.jobs if job.pending]
        if not self.jobs:
            return []
        heapq.heapify(self.jobs)
        self.time = max(self.time, self.jobs[0].time)
        first, *others = self._candidates(CHOICE * max_tokens, CHOICE * max_lines)
        others.sort(key=lambda item: abs(item.cost - first.cost))  # stable: of equal ones those that are next
        batch, width = [first], first.cost
        for item in others:
            width = max(width, item.cost)
            if len(batch) < max_lines and width * (len(batch) + 1) <= max_tokens:
                batch.append(item)
            else:
                item.job.put_back(item)
        self.size -= len(batch)
        self.tokens -= sum(item.cost for item in batch)
        return batch

    def _candidates(self, max_tokens: int, max_lines: int) -> Batch:
        """Takes the lines that are next, as far as they can go together with the first; all jobs have lines."""
        kind, first = self.jobs[0].kind, self.jobs[0].costs[-1]
        longest, shortest = max(SHORT, SIMILAR * first), first // SIMILAR if first > SHORT else 0
        found: Batch = []
        tokens = 0
        waiting, aside = self.jobs, []
        while waiting and tokens < max_tokens and len(found) < max_lines:
            job = waiting[0]
            row = bisect_right(job.costs, longest) - 1
            if job.kind == kind and row >= 0 and job.costs[row] >= shortest:
                found.append(job.take(row))
                tokens += found[-1].cost
                if job.pending:
                    heapq.heapreplace(waiting, job)
                    continue
            aside.append(heapq.heappop(waiting))
        self.jobs = waiting + aside
        return found
