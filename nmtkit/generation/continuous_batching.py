"""Continuous batching: sentences take the slots of those that are done, so that a GPU always steps with full slots.

The device runs a burst of steps; meanwhile the host encodes what waits and hands over what was found. Then it looks
which slots are done, has their results copied, and fills them again.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.generation.beam_search import Hypothesis
from nmtkit.generation.constraints import NO_CONSTRAINTS
from nmtkit.generation.graph_runner import CudaGraphRunner, Plain, Recorder, Steps
from nmtkit.generation.graph_search import GraphBeamSearch
from nmtkit.generation.lines import Sentence
from nmtkit.generation.options import SearchOptions
from nmtkit.layers.static_kv_cache import CacheLengths
from nmtkit.packed import Layout, Packed

# B sentences, Z translations wanted of each

BURST = 4  # steps between two looks of the host: more waste the slots of sentences that ended, fewer the host's time
FEW = 16  # slots that cost a GPU no more than one
REFILL = 1 / 16  # share of the slots that must be free for a refill to pay
SHARE = 0.5  # of a GPU's free memory that slots may take; recorded steps and encoders need some too

logger = logging.getLogger("nmtkit")


@dataclass
class Ticket:
    """A sentence on its way: number `place` of job `job`."""

    job: int
    place: int
    sentence: Sentence
    longest: int  # the most tokens of its translation, without eos
    steps: int = 0

    @property
    def needs(self) -> CacheLengths:
        """Positions, of target and source."""
        return CacheLengths(self.longest + 1, len(self.sentence.ids))


@dataclass
class Encoded:
    """Sentences whose memories, one of each model, are ready; `used` of them have found a slot."""

    tickets: list[Ticket]
    memories: list[Packed]
    used: int = 0

    def left(self) -> int:
        return len(self.tickets) - self.used

    def take(self, number: int) -> tuple[list[Ticket], list[Packed]]:
        """The next `number`, or as many as are left."""
        start, end = self.used, min(self.used + number, len(self.tickets))
        self.used = end
        before, lengths = (
            [len(one.sentence.ids) for one in part] for part in (self.tickets[:start], self.tickets[start:end])
        )
        first, tokens = sum(before), sum(lengths)
        taken = []
        for memory in self.memories:
            layout = Layout(memory.layout.lengths[start:end], max(lengths), tokens)
            taken.append(Packed(memory.values[first : first + tokens], layout))
        return self.tickets[start:end], taken


class Fetched:
    """Tensors on their way to the host: asked for at once, waited for when read."""

    def __init__(self, *tensors: Tensor) -> None:
        self.copies = [tensor.to("cpu", non_blocking=True, copy=True) for tensor in tensors]
        self.event = torch.cuda.Event() if tensors[0].is_cuda else None
        if self.event is not None:
            self.event.record(torch.cuda.current_stream(tensors[0].device))

    def read(self) -> list[Tensor]:
        if self.event is not None:
            self.event.synchronize()
        return self.copies


class Continuous:
    """Searches jobs (lists of sentences) with at most `slots` sentences at a time; `run` is a `Runner`.

    `device_search.suits` must hold. Jobs with constraints go to `otherwise`. The state grows when a sentence does not
    fit or many wait, and is kept from run to run, with all that is recorded.
    """

    def __init__(
        self,
        models: Sequence[Architecture],
        options: SearchOptions,
        slots: int,
        otherwise: Callable[[list[Sentence]], list[list[Hypothesis]]],
        device: torch.device,
        recorder: Callable[[], Recorder] | None = None,
    ) -> None:
        self.models, self.options, self.otherwise, self.device = models, options, otherwise, device
        self.recorder = recorder or ((lambda: CudaGraphRunner(device)) if device.type == "cuda" else Plain)
        self.slots = self.most = slots  # `most` is less where memory is short
        limits = [one.max_target_positions for one in models if one.max_target_positions is not None]
        self.limit = min(limits, default=None)
        self.search: GraphBeamSearch | None = None
        self.steps: Steps[CacheLengths] | None = None
        self.start_afresh()

    def start_afresh(self) -> None:
        """Nothing is waiting, and no slot taken."""
        self.waiting: deque[Ticket] = deque()
        self.encoded = Encoded([], [])
        self.live: dict[int, Ticket] = {}  # slot -> its sentence
        self.ended: deque[tuple[list[Ticket], Fetched]] = deque()
        self.found: dict[int, list[list[Hypothesis]]] = {}  # of jobs under way
        self.missing: dict[int, int] = {}  # sentences of theirs that are
        if self.search is not None:
            self.search.clear()

    @property
    def busy(self) -> bool:
        return bool(self.missing)

    def run(self, jobs: Iterable[list[Sentence]]) -> Iterator[tuple[int, list[list[Hypothesis]]]]:
        """Yields each job's number and hypotheses as they are ready.

        An empty job says that no more has come in yet: then all that is under way is finished before asking again.
        Raises RuntimeError while another run is under way.
        """
        if self.busy:
            raise RuntimeError("another stream with the same options is under way; finish or close it first")
        try:
            yield from self.finished(jobs)
        finally:
            self.start_afresh()

    def finished(self, jobs: Iterable[list[Sentence]]) -> Iterator[tuple[int, list[list[Hypothesis]]]]:
        queue = enumerate(jobs)
        idle = exhausted = False
        while not exhausted or self.busy:
            while not exhausted and not (idle and self.busy) and len(self.waiting) < self.slots:
                number, job = next(queue, (-1, None))
                exhausted, idle = job is None, not job
                if job is None:
                    break
                if not job or any(sentence.constraints != NO_CONSTRAINTS for sentence in job):
                    yield number, self.otherwise(job) if job else []
                else:
                    self.enlist(number, job)
            if self.busy:
                yield from self.advance()

    def enlist(self, number: int, job: list[Sentence]) -> None:
        self.found[number], self.missing[number] = [[] for _ in job], len(job)
        for place, sentence in enumerate(job):
            longest = self.options.max_length(len(sentence.ids) - 1)
            self.waiting.append(
                Ticket(number, place, sentence, longest if self.limit is None else min(longest, self.limit - 1))
            )

    @torch.inference_mode()
    def advance(self) -> list[tuple[int, list[list[Hypothesis]]]]:
        """A burst of steps; returns the jobs that are complete."""
        if not self.live and not self.encoded.left() and self.outgrown():
            self.grow()
        self.refill()
        flags = self.burst() if self.live else None
        self.encode()
        complete = self.delivered()
        if flags is not None:
            done = flags.read()[0].tolist()
            self.collect([slot for slot in self.live if done[slot]])
        return complete

    # --- slots ------------------------------------------------------------------------------------------------------

    def outgrown(self) -> bool:
        """Whether what waits should have another state than there is."""
        if self.search is None:
            return True
        many = len(self.waiting) >= 2 * self.search.slots and self.search.slots < self.most
        return bool(self.waiting) and (many or not self.fits(self.waiting[0]))

    def fits(self, ticket: Ticket) -> bool:
        search = self.search
        return (
            search is not None
            and ticket.needs.target <= search.capacity
            and ticket.needs.source <= search.source_capacity
        )

    def grow(self) -> None:
        """Makes a state for what waits, no smaller than the last one."""
        capacity = source = slots = 0
        if self.search is not None:
            capacity, source, slots = self.search.capacity, self.search.source_capacity, self.search.slots
        capacity = max([capacity, *(rounded(one.needs.target) for one in self.waiting)])
        source = max([source, *(rounded(one.needs.source) for one in self.waiting)])
        capacity = capacity if self.limit is None else min(capacity, self.limit)
        self.search = None  # the last one's memory is free from here on
        self.steps = None
        shape = capacity, source, self.device
        one = GraphBeamSearch(self.models, self.options, 1, *shape).nbytes
        self.most = max(1, min(self.slots, room(self.device) // one))
        slots = min(self.most, max(FEW, slots, rounded(len(self.waiting))))
        self.search = GraphBeamSearch(self.models, self.options, slots, *shape)
        self.steps = Steps(self.search.step, self.recorder())

    def refill(self) -> None:
        """Puts sentences into free slots, when these are many enough."""
        assert self.search is not None
        free = [slot for slot in range(self.search.slots) if slot not in self.live]
        if self.live and len(free) < REFILL * self.search.slots:
            return
        while free:
            if not self.encoded.left():
                self.encode()
            if not self.encoded.left():
                return
            tickets, memories = self.encoded.take(len(free))
            slots, free = free[: len(tickets)], free[len(tickets) :]
            numbers = torch.tensor([slots, [ticket.longest for ticket in tickets]])
            on_device = self.to_device(numbers)
            self.search.insert(on_device[0], memories, on_device[1])
            self.live.update(zip(slots, tickets, strict=True))

    def encode(self) -> None:
        """Gets the next sentences ready, as many as there are slots, if none are."""
        if self.encoded.left() or self.search is None:
            return
        tickets: list[Ticket] = []
        while self.waiting and len(tickets) < self.search.slots and not self.outgrown():
            tickets.append(self.waiting.popleft())
        if tickets:
            lengths = [len(ticket.sentence.ids) for ticket in tickets]
            ids = self.to_device(torch.tensor([id for ticket in tickets for id in ticket.sentence.ids]))
            source = Packed(ids, Layout(self.to_device(torch.tensor(lengths)), max(lengths), sum(lengths)))
            self.encoded = Encoded(tickets, [model.encode(source) for model in self.models])

    def to_device(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()  # else the copy waits for all that the device has been given to do
        return tensor.to(self.device, non_blocking=True)

    # --- steps ------------------------------------------------------------------------------------------------------

    def burst(self) -> Fetched:
        """Some steps; on their way then: which slots are done."""
        assert self.search is not None and self.steps is not None
        tickets = self.live.values()
        for ticket in tickets:
            ticket.steps += BURST
        target = max(min(ticket.steps, ticket.needs.target) for ticket in tickets)
        source = max(ticket.needs.source for ticket in tickets)
        lengths = CacheLengths(
            min(rounded(target), self.search.capacity), min(rounded(source), self.search.source_capacity)
        )
        for _ in range(BURST):
            self.steps(lengths)
        return Fetched(self.search.done)

    def collect(self, slots: list[int]) -> None:
        """Frees these slots, once their results are on the way."""
        if not slots:
            return
        assert self.search is not None
        tickets = [self.live.pop(slot) for slot in slots]
        longest = min(max(ticket.steps for ticket in tickets), self.search.capacity)
        results = self.search.results(self.to_device(torch.tensor(slots)), longest)
        self.ended.append((tickets, Fetched(*results)))

    def delivered(self) -> list[tuple[int, list[list[Hypothesis]]]]:
        """Results to hypotheses, and those to their jobs; the jobs that lack none."""
        complete = []
        while self.ended:
            tickets, results = self.ended.popleft()
            for ticket, hypotheses in zip(tickets, hypotheses_of(*results.read()), strict=True):
                self.found[ticket.job][ticket.place] = hypotheses
                self.missing[ticket.job] -= 1
                if not self.missing[ticket.job]:
                    del self.missing[ticket.job]
                    complete.append((ticket.job, self.found.pop(ticket.job)))
        return complete


def rounded(number: int) -> int:
    """The next 2^n or 3/2 2^n, from 16 on: few shapes, none much larger than asked for."""
    size = 16
    while size < number:
        size += size // 2 if size & (size - 1) == 0 else size // 3
    return size


def room(device: torch.device) -> int:
    """Bytes that slots may take."""
    if device.type != "cuda":
        return 1 << 62
    torch.cuda.empty_cache()
    return int(SHARE * torch.cuda.mem_get_info(device)[0])


def hypotheses_of(scores: Tensor, totals: Tensor, sizes: Tensor, outputs: Tensor) -> list[list[Hypothesis]]:
    """What `GraphBeamSearch.results` gives, as each sentence's hypotheses, best first."""
    found = []
    for row in zip(scores.tolist(), totals.tolist(), sizes.tolist(), outputs.tolist(), strict=True):
        kept = zip(*row, strict=True)
        hypotheses = [
            Hypothesis(tokens[:size], score, total) for score, total, size, tokens in kept if score > -math.inf
        ]
        if not hypotheses:
            logger.warning("a sentence has no finite score (did the model overflow?); its translation is empty")
            hypotheses.append(Hypothesis([], -math.inf, -math.inf))
        found.append(hypotheses)
    return found
