"""Continuous batching: waiting sentences take the slots of finished sentences, so a GPU always works with full slots.

The host launches a few steps. While the device runs them, the host encodes waiting sentences, yields results, and reads
which slots the previous steps finished. The host starts copying the results of these slots and fills the slots again.
So the device always has steps to run and never waits for the host. A disadvantage is that a finished slot stays idle
until the launched steps have ended.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nmtkit.config import changed_flags
from nmtkit.data.packed import Layout, Packed
from nmtkit.jobs import distributed
from nmtkit.models.architectures import Architecture
from nmtkit.models.layers.static_kv_cache import CacheLengths
from nmtkit.translation.engines.engine import ENGINES, OUTSIDE, Engine, EngineConfig, LoadedModels
from nmtkit.translation.search.gpu_beam_search import CudaGraphs, Eager, GraphBeamSearch, StepRunner
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.rules import max_lengths
from nmtkit.translation.search.types import BatchHypotheses, Hypothesis, Segment, SegmentBatch

# B slots

# number of steps between two reads by the host; more steps leave slots idle, fewer steps keep the host busy
STEPS_PER_SYNC = 2
TOKENS_PER_SLOT = 64  # a search has at most `LoadedModels.max_tokens` / TOKENS_PER_SLOT slots
MIN_SLOTS = 16  # minimum number of slots; with fewer slots, a step on a GPU would take the same time
INSERTION_SHARE = 1 / 16  # an insertion waits until at least this share of the slots is free
FLAGS = OUTSIDE | {"--beam", "--nbest", "--lenpen", "--max-len-a", "--max-len-b", "--min-len"}  # supported flags
MEMORY_SHARE = 0.5  # share of the free GPU memory that slots may take; graphs and encoders need memory too


def refusal(models: Sequence[Architecture], options: SearchOptions) -> str | None:
    """Returns the reason why the slots do not support `options` or these models, or None."""
    others = sorted(changed_flags(options) - FLAGS)
    unsupported = [type(model).__name__ for model in models if not model.supports_static_decoding]
    return ", ".join(others + unsupported) or None


@dataclass
class SlotRequest:
    """A segment to be searched: segment `index` of batch `batch`."""

    batch: int
    index: int
    segment: Segment
    max_length: int  # maximum tokens of the translation, without eos
    steps: int = 0

    @property
    def lengths(self) -> CacheLengths:
        """The numbers of target and source positions that the sentence needs."""
        return CacheLengths(self.max_length + 1, len(self.segment.ids))


@dataclass
class EncodedRequests:
    """Encoded requests, and their packed memories, one per model. The first `inserted` requests are in slots."""

    requests: list[SlotRequest]
    memories: list[Packed]
    inserted: int = 0

    @property
    def remaining(self) -> int:
        return len(self.requests) - self.inserted

    def take(self, number: int) -> tuple[list[SlotRequest], list[Packed]]:
        """Returns the next requests, at most `number`, with their memories, and counts them as inserted."""
        start, end = self.inserted, min(self.inserted + number, len(self.requests))
        self.inserted = end
        lengths = [len(request.segment.ids) for request in self.requests[:end]]
        first, tokens = sum(lengths[:start]), sum(lengths[start:])
        return self.requests[start:end], [
            Packed(
                memory.values[first : first + tokens],
                Layout(memory.layout.lengths[start:end], max(lengths[start:]), tokens),
            )
            for memory in self.memories
        ]


class AsyncCopy:
    """Copies tensors from the device to the host. The constructor starts the copy. `read` waits for the copy."""

    def __init__(self, *tensors: Tensor) -> None:
        self.copies = [tensor.to("cpu", non_blocking=True, copy=True) for tensor in tensors]
        self.event = torch.cuda.Event() if tensors[0].is_cuda else None
        if self.event is not None:
            self.event.record(torch.cuda.current_stream(tensors[0].device))

    def read(self) -> list[Tensor]:
        if self.event is not None:
            self.event.synchronize()
        return self.copies


@ENGINES.register("slots", EngineConfig())
class SlotsEngine(Engine):
    """The search in slots, for Transformers: with recorded CUDA graphs on a GPU, step by step on a CPU.

    The slots of the newest options are kept for the next call. If these slots are in use, the next call gets new slots.
    """

    shares_memory = True

    def __init__(self, config: Any, loaded: LoadedModels) -> None:
        super().__init__(config, loaded)
        if loaded.device.startswith("mps"):
            raise ValueError("--engine slots computes in fp64, which --device mps does not support; leave out --engine")
        self.kept: list[ContinuousBatching] = []
        self.choosing = threading.Lock()

    def refusal(self, options: SearchOptions) -> str | None:
        return refusal(self.loaded.models, options)

    def refuses(self, segment: Segment) -> bool:
        return segment.constraints.forbid_tokens

    def decode(
        self, batches: Iterable[SegmentBatch], options: SearchOptions, polled: bool = False
    ) -> Iterator[tuple[int, BatchHypotheses]]:
        search = self.slots_for(options)
        try:
            yield from search.decode(batches, polled)
        finally:
            search.in_use = False

    def slots_for(self, options: SearchOptions) -> "ContinuousBatching":
        """Returns slots that no other call uses, and marks them as used."""
        search = replace(
            options, alignment=None, quality=False, mbr=None, source_lang=None, target_lang=None, keep_loops=False
        )
        with self.choosing:
            found = next((slots for slots in self.kept if not slots.in_use and slots.options == search), None)
            if found is None:
                # frees the memory of slots with other options before new slots are made
                self.kept = [slots for slots in self.kept if slots.in_use]
                number = max(1, self.loaded.max_tokens // TOKENS_PER_SLOT)
                found = ContinuousBatching(self.loaded.models, search, number, torch.device(self.loaded.device))
                self.kept.append(found)
            found.in_use = True
            return found


class ContinuousBatching:
    """A search over batches of sentences, with at most `slots` sentences at a time.

    `refusal` must return None for the models and options. Required phrases are ignored. A larger search
    replaces the search if a sentence does not fit or many sentences wait. The search and its recorded graphs are kept
    for the next run.
    """

    def __init__(
        self,
        models: Sequence[Architecture],
        options: SearchOptions,
        slots: int,
        device: torch.device,
        backend: Callable[[], Eager] | None = None,
    ) -> None:
        self.models, self.options, self.device = models, options, device
        self.backend = backend or ((lambda: CudaGraphs(device)) if device.type == "cuda" else Eager)
        self.slots = self.affordable = slots  # `affordable` may become smaller if memory is short
        self.in_use = False  # whether a call uses these slots
        self.search: GraphBeamSearch | None = None
        self.step: StepRunner | None = None
        self.reset()

    def reset(self) -> None:
        """Drops all requests."""
        self.waiting: deque[SlotRequest] = deque()
        self.encoded = EncodedRequests([], [])
        self.in_slots: dict[int, SlotRequest] = {}
        # the copy of `done` [B] after the latest steps, and the requests that were in the slots
        self.flags: tuple[AsyncCopy, dict[int, SlotRequest]] | None = None
        self.finished: deque[tuple[list[SlotRequest], AsyncCopy]] = deque()
        self.partial: dict[int, BatchHypotheses] = {}  # hypotheses of batches that are not complete
        self.missing: dict[int, int] = {}  # number of missing sentences of each incomplete batch
        if self.search is not None:
            self.search.reset()

    def decode(self, batches: Iterable[SegmentBatch], polled: bool = False) -> Iterator[tuple[int, BatchHypotheses]]:
        """Yields the number and the hypotheses of each batch as soon as they are ready.

        An empty batch means that no further input has arrived yet. Then all started sentences are finished before the
        next batch is requested. With `polled`, the next batch is requested between steps.
        """
        queue = enumerate(batches)
        idle = exhausted = False
        try:
            while not exhausted or self.missing:
                while not exhausted and not (idle and self.missing) and len(self.waiting) < self.slots:
                    number, batch = next(queue, (-1, None))
                    exhausted, idle = batch is None, not batch
                    if batch:
                        self.enqueue(number, batch)
                    elif batch is not None:
                        yield number, []
                if self.missing:
                    yield from self.advance()
                    idle = idle and not polled
        finally:
            self.reset()

    def enqueue(self, number: int, batch: SegmentBatch) -> None:
        self.partial[number], self.missing[number] = [[] for _ in batch], len(batch)
        sources, constraints = [len(segment.ids) for segment in batch], [segment.constraints for segment in batch]
        lengths = max_lengths(self.options, sources, constraints, self.models)
        for index, (segment, max_length) in enumerate(zip(batch, lengths, strict=True)):
            self.waiting.append(SlotRequest(number, index, segment, max_length))

    @torch.inference_mode()
    def advance(self) -> list[tuple[int, BatchHypotheses]]:
        """Runs a few steps. Returns the number and the hypotheses of complete batches."""
        distributed.heartbeat()
        if not self.in_slots and not self.encoded.remaining and self.must_grow():
            self.grow()
        self.insert_waiting()
        previous = self.flags
        self.flags = (self.run_steps(), self.in_slots.copy()) if self.in_slots else None
        self.encode()
        complete = self.collect_results()
        if previous is not None:
            copy, held = previous
            done = copy.read()[0].tolist()
            self.free([slot for slot, request in held.items() if done[slot] and self.in_slots.get(slot) is request])
        return complete

    # --- slots ------------------------------------------------------------------------------------------------------

    def must_grow(self) -> bool:
        """Returns whether the waiting requests need a larger search."""
        search = self.search
        if search is None or not self.waiting:
            return search is None
        needed, many = self.waiting[0].lengths, len(self.waiting) >= 2 * search.slots
        fits = needed.target <= search.capacity and needed.source <= search.source_capacity
        return not fits or (many and search.slots < self.affordable)

    def grow(self) -> None:
        """Creates a search for the waiting requests, with no fewer slots than before if memory allows."""
        capacity = source = slots = 0
        if self.search is not None:
            capacity, source, slots = self.search.capacity, self.search.source_capacity, self.search.slots
        capacity = max([capacity, *(rounded(request.lengths.target) for request in self.waiting)])
        source = max([source, *(rounded(request.lengths.source) for request in self.waiting)])
        limits = [model.max_target_positions for model in self.models if model.max_target_positions is not None]
        capacity = min([capacity, *limits])
        self.search = self.step = None  # frees the memory of the last search
        shape = capacity, source, self.device
        slot_bytes = GraphBeamSearch(self.models, self.options, 1, *shape).nbytes
        self.affordable = max(1, min(self.slots, free_memory(self.device) // slot_bytes))
        slots = min(self.affordable, max(MIN_SLOTS, slots, rounded(len(self.waiting))))
        self.search = GraphBeamSearch(self.models, self.options, slots, *shape)
        self.step = StepRunner(self.search.step, self.backend())

    def insert_waiting(self) -> None:
        """Inserts requests into free slots if enough slots are free."""
        assert self.search is not None
        free = [slot for slot in range(self.search.slots) if slot not in self.in_slots]
        if self.in_slots and len(free) < INSERTION_SHARE * self.search.slots:
            return
        while free:
            if not self.encoded.remaining:
                self.encode()
            if not self.encoded.remaining:
                return
            requests, memories = self.encoded.take(len(free))
            slots, free = free[: len(requests)], free[len(requests) :]
            numbers = self.to_device(torch.tensor([slots, [request.max_length for request in requests]]))
            self.search.insert(numbers[0], memories, numbers[1])
            self.in_slots.update(zip(slots, requests, strict=True))

    def encode(self) -> None:
        """Encodes waiting requests, at most one for each slot, unless encoded requests are still waiting."""
        if self.encoded.remaining or self.search is None:
            return
        requests: list[SlotRequest] = []
        while self.waiting and len(requests) < self.search.slots and not self.must_grow():
            requests.append(self.waiting.popleft())
        if requests:
            lengths = [len(request.segment.ids) for request in requests]
            ids = self.to_device(torch.tensor([id for request in requests for id in request.segment.ids]))
            source = Packed(ids, Layout(self.to_device(torch.tensor(lengths)), max(lengths), sum(lengths)))
            self.encoded = EncodedRequests(requests, [model.encode(source) for model in self.models])

    def to_device(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda":
            # pinned, because a copy from other memory waits for all launched work of the device
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    # --- steps ------------------------------------------------------------------------------------------------------

    def run_steps(self) -> AsyncCopy:
        """Launches a few steps. Returns the copy of the flags of finished slots."""
        assert self.search is not None and self.step is not None
        requests = self.in_slots.values()
        for request in requests:
            request.steps += STEPS_PER_SYNC
        target = rounded(max(min(request.steps, request.lengths.target) for request in requests))
        source = rounded(max(request.lengths.source for request in requests))
        lengths = CacheLengths(min(target, self.search.capacity), min(source, self.search.source_capacity))
        for _ in range(STEPS_PER_SYNC):
            self.step(lengths)
        return AsyncCopy(self.search.done)

    def free(self, slots: list[int]) -> None:
        """Starts copying the results of these slots and frees the slots."""
        if not slots:
            return
        assert self.search is not None
        requests = [self.in_slots.pop(slot) for slot in slots]
        longest = min(max(request.steps for request in requests), self.search.capacity)
        results = self.search.results(self.to_device(torch.tensor(slots)), longest)
        self.finished.append((requests, AsyncCopy(*results)))

    def collect_results(self) -> list[tuple[int, BatchHypotheses]]:
        """Reads all copied results. Returns the number and the hypotheses of each batch that is now complete."""
        complete = []
        while self.finished:
            requests, results = self.finished.popleft()
            for request, hypotheses in zip(requests, hypotheses_of(*results.read()), strict=True):
                self.partial[request.batch][request.index] = hypotheses
                self.missing[request.batch] -= 1
                if not self.missing[request.batch]:
                    del self.missing[request.batch]
                    complete.append((request.batch, self.partial.pop(request.batch)))
        return complete


def rounded(number: int) -> int:
    """Rounds `number` up to 2^n or 3/2 x 2^n, at least 16, so that few different shapes occur."""
    size = 16
    while size < number:
        size += size // 2 if size & (size - 1) == 0 else size // 3
    return size


def free_memory(device: torch.device) -> int:
    """Returns the number of bytes that slots may use."""
    if device.type != "cuda":
        return 1 << 62
    torch.cuda.empty_cache()
    return int(MEMORY_SHARE * torch.cuda.mem_get_info(device)[0])


def hypotheses_of(scores: Tensor, log_probabilities: Tensor, lengths: Tensor, tokens: Tensor) -> BatchHypotheses:
    """Returns the hypotheses of each sentence, best first, from the tensors of `GraphBeamSearch.results`."""
    columns = (scores.tolist(), log_probabilities.tolist(), lengths.tolist(), tokens.tolist())
    return [
        [
            Hypothesis(ids[:length], score, log_probability)
            for score, log_probability, length, ids in zip(*row, strict=True)
            if score > float("-inf")
        ]
        for row in zip(*columns, strict=True)
    ]
