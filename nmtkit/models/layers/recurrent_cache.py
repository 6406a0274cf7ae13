"""Search states of decoders that replace self-attention by layers with a state of fixed size.

`RecurrentCache` is the state of a search on a CPU, `StaticRecurrentCache` the state of a search with CUDA graphs. Both
keep the states of all layers in one tensor, so that one operation reorders all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nmtkit.data.packed import Packed
from nmtkit.models.layers.attention_reference import AttentionSpec
from nmtkit.models.layers.fixed_state import state_dtype
from nmtkit.models.layers.kv_cache import MemoryCache, MemoryContext
from nmtkit.models.layers.static_kv_cache import (
    CacheLengths,
    Projection,
    Split,
    StaticMemory,
    StaticMemoryContext,
    StaticSizes,
)

# B sentences or slots, R hypotheses (rows) of each, N = B x R, D width of a state


@dataclass(frozen=True)
class StepContext:
    """An `attention.RecurrentContext` for a step: the state N D of one layer, which is overwritten, and the memory.

    `share` is the share of the earlier tokens in the new average: n / (n + 1) after n tokens. It is one number, or a
    tensor N 1.
    """

    state: Tensor
    share: Tensor | float
    memory: MemoryContext | StaticMemoryContext

    def gated_recurrence(self, x: Tensor, forget: Tensor) -> Tensor:
        return torch.lerp(x, self.state, forget, out=self.state)

    def average(self, x: Tensor) -> Tensor:
        return torch.lerp(x, self.state, self.share, out=self.state)

    def cross_attention(self, query: Tensor, project: Split, spec: AttentionSpec) -> Tensor:
        return self.memory.cross_attention(query, project, spec)


class RecurrentCache(MemoryCache):
    """Keys and values of the memory, and a state of `width` numbers for each layer and hypothesis.

    `states` has the shape layers B D if all rows of a sentence are equal, otherwise layers N D.
    """

    def __init__(
        self,
        memory: Packed,
        beams: int,
        projections: Sequence[Split],
        *,
        heads: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(memory, beams, projections, heads=heads, dtype=dtype)
        like = memory.values
        self.states = like.new_zeros(len(projections), self.sentences, width, dtype=state_dtype(like.dtype))
        self.memories = [MemoryContext(self, index) for index in range(len(projections))]

    def advance(self, tokens: Tensor) -> tuple[Tensor, Tensor | int]:
        tokens, position = self._advance(tokens)
        if self.new == self.beams:
            self._expand()
        share = position / (position + 1)
        share = share.to(self.states.dtype)[:, None] if isinstance(share, Tensor) else share
        states = zip(self.states.unbind(), self.memories, strict=True)
        self.layers = [StepContext(state, share, memory) for state, memory in states]
        return tokens, position

    def reorder(self, beam_index: Tensor) -> None:
        if self.beams > 1:
            expanded = self.states.shape[1] == self.rows
            self.states = self.states.index_select(1, beam_index if expanded else beam_index // self.beams)

    def drop_finished(self, sentences: Tensor) -> None:
        self._expand()
        super().drop_finished(sentences)
        self.states = self.states.index_select(1, self._rows_of(sentences))

    def insert(self, slots: Tensor, memory: Packed) -> None:
        self._expand()
        super().insert(slots, memory)
        self.states.index_fill_(1, self._rows_of(slots), 0.0)

    def _expand(self) -> None:
        """Gives each row a separate state."""
        if self.states.shape[1] < self.rows:
            self.states = self.states.repeat_interleave(self.beams, 1)

    def _rows_of(self, sentences: Tensor) -> Tensor:
        return (sentences[:, None] * self.beams + torch.arange(self.beams, device=sentences.device)).flatten()


class StaticRecurrentCache(StaticMemory):
    """The memory of every slot, and a state of `width` numbers for each layer and row, in tensors of fixed shape."""

    def __init__(self, projection: Projection, sizes: StaticSizes, width: int) -> None:
        super().__init__(projection, sizes)
        rows = sizes.slots * sizes.beams
        self.states = self.memory.new_zeros(sizes.layers, rows, width, dtype=state_dtype(sizes.dtype))

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.states.nbytes

    def advance(self, position: Tensor, lengths: CacheLengths) -> list[StepContext]:
        """Returns the context of each layer for a step. The new tokens of slot b are at position[b] [B]."""
        share = (position / (position + 1)).to(self.states.dtype).repeat_interleave(self.beams)[:, None]
        return [
            StepContext(state, share, StaticMemoryContext(self, layer, lengths))
            for layer, state in enumerate(self.states)
        ]

    def reorder(self, beam_index: Tensor, lengths: CacheLengths) -> None:
        """Makes row r of slot b continue row beam_index[b, r] of the slot. `beam_index` is [B, R]."""
        first = torch.arange(self.slots, device=beam_index.device)[:, None] * self.beams
        self.states.copy_(self.states.index_select(1, (first + beam_index).flatten()))

    def insert(self, slots: Tensor, memory: Packed) -> None:
        super().insert(slots, memory)
        self.states.unflatten(1, (self.slots, self.beams)).index_fill_(1, slots, 0.0)
