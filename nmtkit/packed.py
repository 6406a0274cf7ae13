"""Sentences laid end to end, without padding.

A layout says how many tokens each sentence has; values of any width ride on it: token ids [T], features [T, D]. Only
what must know sentences (attention, recurrence) looks at the layout; every other layer sees a flat token axis.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

# B sentences, T tokens in all of them, L tokens of the longest

V = TypeVar("V")
IGNORE_INDEX = -100  # target of a token that counts in no loss: the dead tail of a batch of fixed shape


class cached_property(Generic[V]):  # noqa: N801  # used as a decorator
    """A property computed when first asked for: functools.cached_property without its lock, at which compilers stop."""

    def __init__(self, compute: Callable[[Any], V]) -> None:
        self.compute, self.name, self.__doc__ = compute, compute.__name__, compute.__doc__

    def __get__(self, instance: Any, owner: type) -> V:
        value = self.compute(instance)
        object.__setattr__(instance, self.name, value)  # from now on found before this descriptor
        return value


@dataclass(frozen=True, eq=False)
class Layout:
    """Where sentences begin and end on the token axis. Derived indices are computed once, when first asked for.

    `max_length` and `tokens` are Python integers, so that using them never waits for a device. On a layout of fixed
    shape, `max_length` is an upper bound.
    """

    lengths: Tensor  # B, int64; every sentence has at least one token (eos)
    max_length: int
    tokens: int

    @staticmethod
    def of(lengths: Tensor) -> "Layout":
        """The layout of sentences of these lengths [B]; synchronises with the device that holds them."""
        return Layout(lengths, int(lengths.max()), int(lengths.sum()))

    @property
    def sentences(self) -> int:
        return self.lengths.shape[0]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """First token of each sentence, then T: B+1, int32 (the `cu_seqlens` of variable-length attention)."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)

    @cached_property
    def segment_ids(self) -> Tensor:
        """The sentence each token is of: T, int64."""
        index = torch.arange(self.sentences, device=self.lengths.device)
        return torch.repeat_interleave(index, self.lengths, output_size=self.tokens)

    @cached_property
    def position_ids(self) -> Tensor:
        """Each token's place in its sentence, from 0: T, int64."""
        index = torch.arange(self.tokens, device=self.lengths.device)
        return index - self.cu_seqlens.long()[self.segment_ids]

    @cached_property
    def uniform(self) -> bool:
        """All sentences are equally long, so that [T, …] is [B, L, …] by a view."""
        return self.tokens == self.sentences * self.max_length

    @cached_property
    def pad_indices(self) -> Tensor:
        """For each cell of a B x L rectangle the token that fills it, clamped to the sentence: B, L, int64."""
        column = torch.arange(self.max_length, device=self.lengths.device)
        return self.cu_seqlens.long()[:-1, None] + torch.minimum(column, self.lengths[:, None] - 1)

    @cached_property
    def mask(self) -> Tensor:
        """Which cells of the B x L rectangle hold a token: B, L, bool."""
        return torch.arange(self.max_length, device=self.lengths.device) < self.lengths[:, None]

    @cached_property
    def unpad_indices(self) -> Tensor:
        """The cell of the flattened B x L rectangle each token is in: T, int64."""
        return self.segment_ids * self.max_length + self.position_ids

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Layout":
        return Layout(self.lengths.to(device, non_blocking=non_blocking), self.max_length, self.tokens)


@dataclass(frozen=True, eq=False)
class Packed:
    """Values on a layout: `values` is [T, …]."""

    values: Tensor
    layout: Layout

    @staticmethod
    def from_lists(sentences: list[list[int]], device: torch.device | str = "cpu") -> "Packed":
        """Token ids of several sentences, none of them empty."""
        lengths = torch.tensor([len(ids) for ids in sentences], device=device)
        values = torch.tensor([token for ids in sentences for token in ids], device=device)
        return Packed(values, Layout.of(lengths))

    def with_values(self, values: Tensor) -> "Packed":
        """Other values [T, …] on the same layout."""
        return Packed(values, self.layout)

    def to_padded(self, fill: float = 0.0) -> Tensor:
        """The values as [B, L, …], `fill` where a sentence has ended."""
        if self.layout.uniform:
            return self.values.unflatten(0, (-1, self.layout.max_length))
        shape = self.layout.mask.shape + (1,) * (self.values.dim() - 1)
        return self.values[self.layout.pad_indices].masked_fill(~self.layout.mask.view(shape), fill)

    @staticmethod
    def from_padded(rectangle: Tensor, layout: Layout) -> "Packed":
        """The inverse of `rectangle`: picks the tokens of [B, L, …]."""
        flat = rectangle.flatten(0, 1)
        return Packed(flat if layout.uniform else flat[layout.unpad_indices], layout)

    def select(self, sentences: Tensor) -> "Packed":
        """These sentences [N], in this order; one may be taken several times."""
        lengths = self.layout.lengths[sentences]
        layout = Layout.of(lengths)
        source = self.layout.cu_seqlens.long()[sentences][layout.segment_ids] + layout.position_ids
        return Packed(self.values[source], layout)

    def split(self) -> tuple[Tensor, ...]:
        """The values of each sentence: B tensors [L_i, …]."""
        return self.values.split(self.layout.lengths.tolist())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Packed":
        return Packed(self.values.to(device, non_blocking=non_blocking), self.layout.to(device, non_blocking))


@dataclass(frozen=True, eq=False)
class Batch:
    """Sentence pairs of one slice of an update. Sentence i of every field belongs to pair `pairs[i]` of the dataset.

    `target_input` is bos and the target without its eos; `target_output` [T] is the target, eos included,
    `IGNORE_INDEX` in
    a dead tail. `target_tokens` counts what is not ignored: the slice's share of the update's denominator.
    """

    source: Packed
    target_input: Packed
    target_output: Tensor
    target_tokens: int
    pairs: Tensor  # B, int64, on the CPU
    # word alignments [links, 3], int64: sentence of the batch, source position and target position, from 0
    alignments: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        return Batch(
            self.source.to(device, non_blocking),
            self.target_input.to(device, non_blocking),
            self.target_output.to(device, non_blocking=non_blocking),
            self.target_tokens,
            self.pairs,
            None if self.alignments is None else self.alignments.to(device, non_blocking=non_blocking),
        )
