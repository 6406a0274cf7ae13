"""Packed sentences: sentences concatenated along one token axis, without padding.

A layout holds the number of tokens of each sentence. The values of all T tokens are ids [T] or features [T, D]. Only
layers that need sentence boundaries (attention, recurrence) read the layout; all others compute on a flat token axis.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

# In shapes, B is the number of sentences, T the number of all tokens, L the number of tokens of the longest sentence.

Derived = TypeVar("Derived")
IGNORE_INDEX = -100  # target id that losses ignore: padding, dummy micro-batches, uncounted language tokens


@dataclass(frozen=True, eq=False)
class Layout:
    """The lengths of the sentences on a token axis.

    `max_length` and `tokens` are Python integers, so reading them never waits for a device. If a batch is padded to a
    fixed shape, `max_length` is an upper bound.
    """

    lengths: Tensor  # [B], int64; every sentence has at least one token (eos)
    max_length: int
    tokens: int
    _derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def of(lengths: Tensor) -> "Layout":
        """Returns the layout of sentences of these lengths [B]. Waits for the device of `lengths`."""
        return Layout(lengths, int(lengths.max()), int(lengths.sum()))

    def derived(self, key: Hashable, compute: Callable[[], Derived]) -> Derived:
        """Returns `compute()`. The result is cached under `key` for the lifetime of the layout.

        The cache holds indices and masks that every layer needs. A key must not contain a layout, because the cache
        would keep this layout alive.
        """
        # torch.compile merges equal computations itself, and cannot compile the write to the cache
        if torch.compiler.is_compiling():
            return compute()
        if key not in self._derived:
            self._derived[key] = compute()
        value: Derived = self._derived[key]
        return value

    @property
    def sentences(self) -> int:
        return self.lengths.shape[0]

    @property
    def uniform(self) -> bool:
        """Whether all sentences have the same length, so [T, …] can be viewed as [B, L, …]."""
        return self.tokens == self.sentences * self.max_length

    @property
    def cu_seqlens(self) -> Tensor:
        """Index of the first token of each sentence, then T, for variable-length attention: [B + 1], int32."""
        return self.derived("cu_seqlens", lambda: F.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32))

    @property
    def segment_ids(self) -> Tensor:
        """Index of the sentence of each token: [T], int64."""

        def compute() -> Tensor:
            index = torch.arange(self.sentences, device=self.lengths.device)
            return torch.repeat_interleave(index, self.lengths, output_size=self.tokens)

        return self.derived("segment_ids", compute)

    @property
    def position_ids(self) -> Tensor:
        """Position of each token in its sentence, counted from 0: [T], int64."""

        def compute() -> Tensor:
            index = torch.arange(self.tokens, device=self.lengths.device)
            return index - self.cu_seqlens.long()[self.segment_ids]

        return self.derived("position_ids", compute)

    @property
    def mask(self) -> Tensor:
        """True where a padded tensor [B, L] holds a token: [B, L], bool."""
        return self.derived(
            "mask", lambda: torch.arange(self.max_length, device=self.lengths.device) < self.lengths[:, None]
        )

    @property
    def pad_indices(self) -> Tensor:
        """Index, among the T tokens, of the token in each cell of a padded tensor: [B, L], int64.

        A cell of padding has the index of the last token of its sentence.
        """

        def compute() -> Tensor:
            column = torch.arange(self.max_length, device=self.lengths.device)
            return self.cu_seqlens.long()[:-1, None] + torch.minimum(column, self.lengths[:, None] - 1)

        return self.derived("pad_indices", compute)

    @property
    def unpad_indices(self) -> Tensor:
        """Index of each token in a padded tensor [B, L] that is flattened to [B * L]: [T], int64."""
        return self.derived("unpad_indices", lambda: self.segment_ids * self.max_length + self.position_ids)

    @property
    def host_lengths(self) -> list[int]:
        """The lengths as Python integers. Waits for the device unless the layout was made on the CPU."""
        return self.derived("host_lengths", self.lengths.tolist)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Layout":
        layout = Layout(self.lengths.to(device, non_blocking=non_blocking), self.max_length, self.tokens)
        if self.lengths.device.type == "cpu":
            layout.derived("host_lengths", lambda: self.host_lengths)
        return layout


@dataclass(frozen=True, eq=False)
class Packed:
    """Values [T, …] and the layout of their sentences."""

    values: Tensor
    layout: Layout

    @staticmethod
    def from_lists(sentences: list[list[int]], device: torch.device | str = "cpu") -> "Packed":
        """Returns packed token ids. No sentence may be empty."""
        lengths = torch.tensor([len(ids) for ids in sentences], device=device)
        values = torch.tensor([token for ids in sentences for token in ids], device=device)
        return Packed(values, Layout.of(lengths))

    def with_values(self, values: Tensor) -> "Packed":
        """Returns `values` [T, …] with the layout of this object."""
        return Packed(values, self.layout)

    def to_padded(self, fill: float = 0.0) -> Tensor:
        """Returns the values as [B, L, …], padded with `fill`."""
        if self.layout.uniform:
            return self.values.unflatten(0, (-1, self.layout.max_length))
        shape = self.layout.mask.shape + (1,) * (self.values.dim() - 1)
        return self.values[self.layout.pad_indices].masked_fill(~self.layout.mask.view(shape), fill)

    @staticmethod
    def from_padded(padded: Tensor, layout: Layout) -> "Packed":
        """Returns the values of a padded tensor [B, L, …] without padding: the inverse of `to_padded`."""
        flat = padded.flatten(0, 1)
        return Packed(flat if layout.uniform else flat[layout.unpad_indices], layout)

    def select(self, sentences: Tensor) -> "Packed":
        """Returns the sentences with these indices, in this order. An index may occur several times."""
        lengths = self.layout.lengths[sentences]
        layout = Layout.of(lengths)
        tokens = self.layout.cu_seqlens.long()[sentences][layout.segment_ids] + layout.position_ids
        return Packed(self.values[tokens], layout)

    def split(self) -> tuple[Tensor, ...]:
        """Returns the values of each sentence: B tensors [tokens, …]."""
        return self.values.split(self.layout.host_lengths)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Packed":
        return Packed(self.values.to(device, non_blocking=non_blocking), self.layout.to(device, non_blocking))


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch of sentence pairs. Sentence i of every field belongs to pair `pairs[i]` of the dataset.

    `target_input` is bos and the target without eos. `target_output` [T] is the target with eos, where padding and
    language tokens that the loss does not count are `IGNORE_INDEX`. `target_tokens` is the number of all other tokens
    of `target_output`. The loss of an update is divided by the sum of `target_tokens` of its micro-batches.
    """

    source: Packed
    target_input: Packed
    target_output: Tensor
    target_tokens: int
    pairs: Tensor  # [B], int64, on the CPU
    # word alignments [links, 3], int64: index of the sentence, source position and target position, from 0
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
