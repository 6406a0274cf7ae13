"""The data loader: splits updates into micro-batches. A thread reads the micro-batches of this rank."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from nmtkit.data.corpora.dropping import RowNumbers
from nmtkit.data.dataset.batching import BatchSampler, copy_numbers, micro_batches
from nmtkit.data.dataset.binarized import Split
from nmtkit.data.dataset.transform_pipeline import Draw, TransformPipeline
from nmtkit.data.packed import IGNORE_INDEX, Batch, Layout, Packed
from nmtkit.jobs.threads import Prefetched

PREFETCHED = 4  # updates that the thread prepares in advance
PROBED = 100  # number of first updates whose micro-batches are examined before the run


@dataclass(frozen=True)
class Position:
    """The position of a run in its data: the next update is number `index` of `epoch`, both counted from 0."""

    epoch: int
    index: int


@dataclass(frozen=True, eq=False)
class Update:
    """One global batch, and the share of this rank."""

    position: Position
    pairs: RowNumbers
    # target tokens of the whole update before transforms; if there are no transforms, the denominator of the loss
    target_tokens: int
    source_tokens: int
    micro_batches: list[tuple[int, Batch]]  # micro-batches of this rank, with their indices in the update
    ends_epoch: bool

    @property
    def next(self) -> Position:
        if self.ends_epoch:
            return Position(self.position.epoch + 1, 0)
        return Position(self.position.epoch, self.position.index + 1)


@dataclass(eq=False)
class BatchLoader:
    """A loader that yields updates without end, starting at any position. Call `close` after the last update.

    Ranks take the micro-batches of an update in turn. All ranks get the same number of micro-batches: if there are too
    few, some ranks get a dummy micro-batch, whose tokens do not count.

    `transforms` change pairs when the pairs are read. The lengths on disk decide which pairs form an update and a
    micro-batch, so a micro-batch of transformed pairs may exceed `max_tokens`.
    """

    split: Split
    sampler: BatchSampler
    max_tokens: int
    rank: int
    ranks: int
    device: torch.device
    max_sentences: int | None = None
    transforms: TransformPipeline | None = None
    prefetched: Prefetched[Update] | None = field(default=None, init=False)

    def updates(self, position: Position) -> Iterator[Update]:
        """Returns an iterator over the updates from `position` on. `next` raises errors of the loader thread."""
        self.prefetched = Prefetched(self._updates(position), PREFETCHED, "loader")
        return self.prefetched

    def close(self) -> None:
        """Stops the loader thread. The interpreter would abort if it exited while the thread still runs torch."""
        if self.prefetched is not None:
            self.prefetched.close()
            self.prefetched.thread.join()

    def _updates(self, position: Position) -> Iterator[Update]:
        epoch, index = position.epoch, position.index
        while True:
            epoch_updates = self.sampler.epoch(epoch, index)
            pairs = next(epoch_updates, None)
            while pairs is not None:
                following = next(epoch_updates, None)
                yield self.update(Position(epoch, index), pairs, ends_epoch=following is None)
                index, pairs = index + 1, following
            epoch, index = epoch + 1, 0

    def update(self, position: Position, pairs: RowNumbers, ends_epoch: bool) -> Update:
        parts = self._micro_batches(pairs)
        rounds = -(-len(parts) // self.ranks)
        # an epoch and an update may have a pair several times, each time with other random numbers
        draw = (position.epoch, position.index) if self.sampler.repeats_pairs else position.epoch
        copies = np.split(copy_numbers(np.concatenate(parts)), np.cumsum([len(part) for part in parts]))
        numbers = range(self.rank, rounds * self.ranks, self.ranks)
        of_rank = [(n, self.batch(parts[n], draw, copies[n])) for n in numbers if n < len(parts)]
        of_rank += [(n, self.dummy(parts[0][:1])) for n in numbers if n >= len(parts)]
        counted = self.split.counted_tokens(pairs)
        return Update(position, pairs, counted, int(self.split.source.lengths[pairs].sum()), of_rank, ends_epoch)

    def _micro_batches(self, pairs: RowNumbers) -> list[RowNumbers]:
        source, target = self.split.source.lengths, self.split.target.lengths
        return micro_batches(pairs, source, target, self.max_tokens, self.max_sentences)

    def batch(self, pairs: RowNumbers, draw: Draw, copies: npt.ArrayLike = 0) -> Batch:
        """Returns a micro-batch of these pairs on the device. For `draw` and `copies`, see `TransformPipeline`."""
        batch = self.split.batch(pairs, partial(self.transforms, draw, copies=copies) if self.transforms else None)
        if self.device.type == "cuda":
            return pinned(batch).to(self.device, non_blocking=True)
        return batch.to(self.device)

    def dummy(self, pairs: RowNumbers) -> Batch:
        """Returns a micro-batch of `pairs` whose tokens do not count: all target tokens are ignored."""
        batch = self.batch(pairs, 0)
        ignored = torch.full_like(batch.target_output, IGNORE_INDEX)
        return replace(batch, target_output=ignored, target_tokens=0)

    def largest_micro_batch(self) -> RowNumbers:
        """Returns the pairs of the micro-batch with the most tokens (source plus target) in the first updates."""
        return self.extreme_micro_batches()[0]

    def extreme_micro_batches(self) -> tuple[RowNumbers, RowNumbers]:
        """Returns the pairs of the micro-batch with the most tokens and of the micro-batch with the most sentences.

        Both are from the first updates. The micro-batch with the most sentences may need more memory, because flash
        attention stores a multiple of 128 rows for every sentence.
        """
        source, target = self.split.source.lengths, self.split.target.lengths
        parts = [part for parts in self._first_micro_batches() for part in parts]
        by_tokens = max(parts, key=lambda pairs: int(source[pairs].sum()) + int(target[pairs].sum()))
        return by_tokens, max(parts, key=len)

    def _first_micro_batches(self) -> list[list[RowNumbers]]:
        """Returns the micro-batches of each of the first updates."""
        return [self._micro_batches(pairs) for pairs in islice(self.sampler.epoch(0), PROBED)]

    def idle_share(self) -> float:
        """Returns the share of dummy micro-batches among the micro-batches of all ranks in the first updates."""
        if self.ranks == 1:
            return 0.0
        counts = [len(parts) for parts in self._first_micro_batches()]
        passes = sum(-(-count // self.ranks) * self.ranks for count in counts)
        return 1 - sum(counts) / passes

    def tokens_of(self, pairs: RowNumbers) -> int:
        """Returns the number of tokens of `pairs` on the side with more tokens."""
        return max(int(side.lengths[pairs].sum()) for side in (self.split.source, self.split.target))


def pinned(batch: Batch) -> Batch:
    """Returns the batch in page-locked memory. Copies from page-locked memory to the GPU do not block."""

    def pin(packed: Packed) -> Packed:
        layout = packed.layout
        return Packed(packed.values.pin_memory(), Layout(layout.lengths.pin_memory(), layout.max_length, layout.tokens))

    return replace(
        batch,
        source=pin(batch.source),
        target_input=pin(batch.target_input),
        target_output=batch.target_output.pin_memory(),
        alignments=None if batch.alignments is None else batch.alignments.pin_memory(),
    )
