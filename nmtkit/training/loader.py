"""Updates as they are wanted: planned, cut into slices, and this rank's slices made into batches on another thread."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nmtkit.data.batching import BatchSampler, micro_batches
from nmtkit.data.binarized import Split
from nmtkit.packed import IGNORE_INDEX, Batch, Layout, Packed

AHEAD = 4  # updates prepared beyond the one being computed


@dataclass(frozen=True)
class Position:
    """Where in the data a run is: the next update is number `index` of `epoch`; both are counted from 0."""

    epoch: int
    index: int


@dataclass(frozen=True, eq=False)
class Update:
    """One global batch and this rank's share of it."""

    position: Position
    pairs: npt.NDArray[np.int64]
    target_tokens: int  # of the whole update: the denominator of its loss
    source_tokens: int
    slices: int  # of all ranks together
    batches: list[tuple[int, Batch]]  # this rank's slices, with their numbers
    ends_epoch: bool

    @property
    def next(self) -> Position:
        if self.ends_epoch:
            return Position(self.position.epoch + 1, 0)
        return Position(self.position.epoch, self.position.index + 1)


class BatchLoader:
    """Endless updates from a position on. `close` it when done.

    With `subword_alpha` every epoch sees the text segmented anew. The pairs of an update and of its slices are those
    of the plan, whose lengths are of the fixed segmentation; a slice may then exceed `max_tokens` by some per cent.
    With `equal_passes` all ranks have equally many slices of an update, some of them idle: no token of these counts.
    """

    def __init__(
        self,
        split: Split,
        plan: BatchSampler,
        max_tokens: int,
        rank: int,
        ranks: int,
        device: torch.device,
        subword_alpha: float = 0.0,
        fixed_shapes: bool = False,
        equal_passes: bool = False,
    ) -> None:
        self.split = split
        self.plan = plan
        self.max_tokens = max_tokens
        self.rank = rank
        self.ranks = ranks
        self.device = device
        self.subword_alpha = subword_alpha
        self.fixed_shapes = fixed_shapes
        self.equal_passes = equal_passes
        self.closed = threading.Event()
        self.thread: threading.Thread | None = None

    def updates(self, position: Position) -> Iterator[Update]:
        """The updates from `position` on; an error of the preparing thread is raised here."""
        ready: queue.Queue[Any] = queue.Queue(AHEAD)
        self.thread = threading.Thread(target=self._prepare, args=(position, ready), name="feed", daemon=True)
        self.thread.start()
        while True:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Waits for the preparing thread: the interpreter aborts when it ends while a thread is inside torch."""
        self.closed.set()
        if self.thread is not None:
            self.thread.join()

    def _prepare(self, position: Position, ready: "queue.Queue[Any]") -> None:
        try:
            epoch, start = position.epoch, position.index
            while True:
                index = start
                planned = self.plan.epoch(epoch, start)
                pairs = next(planned, None)
                while pairs is not None:
                    following = next(planned, None)
                    self._put(ready, self.update(Position(epoch, index), pairs, ends_epoch=following is None))
                    if self.closed.is_set():
                        return
                    index, pairs = index + 1, following
                epoch, start = epoch + 1, 0
        except BaseException as error:
            self._put(ready, error)

    def _put(self, ready: "queue.Queue[Any]", item: Any) -> None:
        while not self.closed.is_set():
            try:
                return ready.put(item, timeout=0.2)
            except queue.Full:
                continue

    def update(self, position: Position, pairs: npt.NDArray[np.int64], ends_epoch: bool) -> Update:
        source, target = self.split.source.lengths, self.split.target.lengths
        cut = micro_batches(pairs, source, target, self.max_tokens)
        end = -(-len(cut) // self.ranks) * self.ranks if self.equal_passes else len(cut)
        mine = [
            (number, self.batch(cut[number], position.epoch) if number < len(cut) else self.idle(cut[0][:1]))
            for number in range(self.rank, end, self.ranks)
        ]
        return Update(position, pairs, int(target[pairs].sum()), int(source[pairs].sum()), len(cut), mine, ends_epoch)

    def batch(self, pairs: npt.NDArray[np.int64], epoch: int) -> Batch:
        """One slice, on the device."""
        resample = (self.subword_alpha, self.plan.seed * 1_000_003 + epoch) if self.subword_alpha else None
        fixed = self.fixed_shapes and not resample
        batch = self._fixed(pairs) if fixed else self.split.batch(pairs, resample=resample)
        if self.device.type == "cuda":
            return pinned(batch).to(self.device, non_blocking=True)
        return batch

    def idle(self, pairs: npt.NDArray[np.int64]) -> Batch:
        """A slice of which no token counts."""
        batch = self.batch(pairs, 0)
        ignored = torch.full_like(batch.target_output, IGNORE_INDEX)
        return Batch(batch.source, batch.target_input, ignored, 0, batch.pairs)

    def _fixed(self, pairs: npt.NDArray[np.int64]) -> Batch:
        """A batch with a dead tail up to one of a few shapes, so that a compiled model is compiled a few times only."""
        sentences = 1 << len(pairs).bit_length()  # more than there are
        dead = sentences - len(pairs)
        step = max(1, self.max_tokens // 4)
        real = (int(side.lengths[pairs].sum()) for side in (self.split.source, self.split.target))
        source, target = (-(-(tokens + dead) // step) * step for tokens in real)
        batch = self.split.batch(pairs, source_tokens=source, target_tokens=target, sentences=sentences)
        return Batch(
            _bounded(batch.source),
            _bounded(batch.target_input),
            batch.target_output,
            batch.target_tokens,
            batch.pairs,
        )


def _bounded(packed: Packed) -> Packed:
    """With a power of two, at least 32, as the bound of the longest sentence."""
    layout = packed.layout
    bound = max(32, 1 << (layout.max_length - 1).bit_length())
    return Packed(packed.values, Layout(layout.lengths, bound, layout.tokens))


def pinned(batch: Batch) -> Batch:
    """In page-locked memory, from where copies to the GPU do not wait."""

    def pin(packed: Packed) -> Packed:
        layout = packed.layout
        return Packed(packed.values.pin_memory(), Layout(layout.lengths.pin_memory(), layout.max_length, layout.tokens))

    return Batch(
        pin(batch.source), pin(batch.target_input), batch.target_output.pin_memory(), batch.target_tokens, batch.pairs
    )
