"""The KV cache of a beam search on a GPU. Its tensors never grow, move or change shape.

So a CUDA graph can record and replay a step. A slot holds the hypotheses of one sentence. Keys and values are written
at a cache position of their slot and never move. When hypotheses are reordered, only a table of ancestors is reordered:
it has, for each hypothesis and target position, the row that wrote the key and the value. All hypotheses of a slot
attend to all cache positions of the slot under a mask. With B slots of R hypotheses and P target positions, and w bytes
for the key and the value of one token, a layer reads and writes this number of bytes in each step:

    B R P w             with a table of ancestors: reads all positions once (table and mask are very small)
    3 B R P w           without a table: copies the caches into the new order (read and write), then reads them

For 256 slots of 4 rows, 64 positions and transformer_base in bf16 (w = 2 KiB, 6 layers), a step moves 0.8 GB instead of
2.4 GB: 0.19 ms instead of 0.56 ms at the 4.3 TB/s of an H200. A query is multiplied with the keys of all R hypotheses
of its slot, and the mask discards R - 1 of these R products. The discarded products take no time, because they fill
rows of a tile that would otherwise be empty.

A step reads only the first `CacheLengths.target` positions. This number is the maximum length of the hypotheses in the
slots. So a larger capacity takes memory but no time.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.data.packed import Packed
from nmtkit.models.layers.attention_reference import AttentionSpec, SplitHeads

# B slots, R hypotheses (rows) of a slot, N = B x R, P target positions, E = P x R cache positions of a slot (row r at
# target position p has cache position p x R + r), M positions of the memory, T memory tokens, H heads of keys and
# values, G heads of queries per head of keys, K width of a query or key head, Kv width of a value head, D model width


@dataclass(frozen=True)
class CacheLengths:
    """The numbers of target positions (including the current position) and of source positions that a step reads."""

    target: int
    source: int


@dataclass(frozen=True, kw_only=True)
class StaticSizes:
    """The sizes of a static state, with the dtype and the device of its keys and values.

    `heads` is the number of heads of keys and values, and `widths` are K and Kv of a head. `capacity` and
    `memory_capacity` are the maximum numbers of target and memory positions.
    """

    heads: int
    widths: tuple[int, int]
    slots: int
    beams: int
    capacity: int
    memory_capacity: int
    dtype: torch.dtype
    device: torch.device


class StaticMemory:
    """The state of a search over a fixed number of slots. Methods change tensors in place and never change shapes.

    This base class has the keys and values of the memory in every slot. `projections` has a function for each layer,
    which computes the keys and values of a memory.
    """

    def __init__(self, projections: Sequence[SplitHeads], sizes: StaticSizes) -> None:
        self.projections, self.heads, self.widths = projections, sizes.heads, sizes.widths
        self.slots, self.beams, self.capacity = sizes.slots, sizes.beams, sizes.capacity
        shape = sizes.slots, sizes.memory_capacity, len(projections), sizes.heads * sum(sizes.widths)
        self.memory = torch.zeros(shape, dtype=sizes.dtype, device=sizes.device)
        # B 1 R M, added to scores; an empty slot attends to one position, because a softmax over no position is NaN
        self.memory_mask = self.memory.new_full((sizes.slots, 1, sizes.beams, sizes.memory_capacity), -math.inf)
        self.memory_mask[..., 0] = 0.0

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes + self.memory_mask.nbytes

    @abstractmethod
    def advance(self, position: Tensor, lengths: CacheLengths) -> Sequence[Any]:
        """Returns the context of each layer for a step. `position` [B] has the target position of the new tokens."""

    @abstractmethod
    def reorder(self, beam_index: Tensor, lengths: CacheLengths) -> None:
        """Makes row r of slot b continue row beam_index[b, r] of the slot. `beam_index` is [B, R]."""

    def insert(self, slots: Tensor, memory: Packed) -> None:
        """Starts sentence i of `memory` in slot `slots[i]`, and removes the previous sentence of this slot.

        Old keys and values are overwritten with zeros. A mask alone is not enough, because 0 x NaN is NaN.
        """
        layout, capacity = memory.layout, self.memory.shape[1]
        self.memory.index_fill_(0, slots, 0.0)
        cell = slots[layout.segment_ids] * capacity + layout.position_ids  # T
        parts = [part.flatten(1) for project in self.projections for part in project(memory.values)]
        projected = torch.cat(parts, 1).to(self.memory.dtype)  # T layers*H*(K+Kv)
        self.memory.view(-1, projected.shape[1]).index_copy_(0, cell, projected)
        beyond = torch.arange(capacity, device=slots.device) >= layout.lengths[:, None]
        mask = self.memory_mask.new_zeros(beyond.shape).masked_fill_(beyond, -math.inf)[:, None, None]
        self.memory_mask.index_copy_(0, slots, mask.expand(-1, 1, self.beams, -1))


class StaticKVCache(StaticMemory):
    """Keys and values of the hypotheses and of the memory in every slot, for all layers."""

    def __init__(self, projections: Sequence[SplitHeads], sizes: StaticSizes, window: int | None) -> None:
        super().__init__(projections, sizes)
        self.window = window
        positions, like = sizes.capacity * sizes.beams, self.memory
        self.keys, self.values = (
            like.new_zeros(len(projections), sizes.slots, sizes.heads, positions, width) for width in sizes.widths
        )
        # B R capacity: the row that wrote the keys and values of this hypothesis at this target position
        self.ancestors = like.new_zeros(sizes.slots, sizes.beams, sizes.capacity, dtype=torch.int16)

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(x.nbytes for x in (self.keys, self.values, self.ancestors))

    def advance(self, position: Tensor, lengths: CacheLengths) -> list["StaticContext"]:
        slots, beams, device = self.slots, self.beams, position.device
        row = torch.arange(beams, device=device)
        writer = row.to(torch.int16)
        self.ancestors.scatter_(2, position[:, None, None].expand(-1, beams, 1), writer[:, None].expand(slots, -1, 1))
        positions = torch.arange(lengths.target, device=device)
        seen = positions <= position[:, None]  # B P
        if self.window is not None:
            seen = seen & (positions >= position[:, None] - self.window // 2)
        visible = (self.ancestors[:, :, : lengths.target, None] == writer) & seen[:, None, :, None]  # B R P R
        mask = self.memory_mask.new_zeros(visible.shape).masked_fill_(~visible, -math.inf).flatten(2)[:, None]
        head = torch.arange(slots * self.heads, device=device).view(slots, 1, self.heads)
        cache_position = position[:, None] * beams + row  # B R
        newest = (head * (self.capacity * beams) + cache_position[:, :, None]).flatten()  # B R H, the order of new keys
        return [StaticContext(self, layer, lengths, position, newest, mask) for layer in range(len(self.keys))]

    def reorder(self, beam_index: Tensor, lengths: CacheLengths) -> None:
        past = self.ancestors[:, :, : lengths.target]
        past.copy_(past.gather(1, beam_index[:, :, None].expand_as(past)))

    def insert(self, slots: Tensor, memory: Packed) -> None:
        super().insert(slots, memory)
        for cache in (self.keys, self.values):
            cache.index_fill_(1, slots, 0.0)


@dataclass(frozen=True)
class StaticMemoryContext:
    """The memory that the cross-attention of one layer reads in a step."""

    cache: StaticMemory
    layer: int
    lengths: CacheLengths

    def cross_attention(self, query: Tensor, project: SplitHeads, spec: AttentionSpec) -> Tensor:
        cache, end = self.cache, self.lengths.source
        sizes = [cache.heads * width for width in cache.widths]
        parts = cache.memory[:, :end, self.layer].split(sizes, -1)
        keys, values = (part.unflatten(-1, (cache.heads, -1)).transpose(1, 2) for part in parts)  # B H M K, B H M Kv
        return self._attend(query, keys, values, cache.memory_mask[..., :end])

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Computes attention from the rows of each slot to cached keys and values, for all heads of queries.

        The shapes are query N HG K, keys B H E K, values B H E Kv, and the result N H*G*Kv. `mask` is added to the
        scores. It has the shape B 1 R E, or B HG R E if it differs between heads.
        """
        groups = query.shape[1] // keys.shape[1]
        rows = query.to(keys.dtype).unflatten(0, (self.cache.slots, -1)).transpose(1, 2)  # B HG R K
        if groups > 1:  # the rows of heads that share keys become rows of one head
            mask = mask if mask.shape[1] > 1 else mask.expand(-1, rows.shape[1], -1, -1)
            rows, mask = (x.unflatten(1, (-1, groups)).flatten(2, 3) for x in (rows, mask))  # B H GR …
        attended = F.scaled_dot_product_attention(rows, keys, values, mask)
        attended = attended.unflatten(2, (groups, -1)).flatten(1, 2)  # B HG R Kv
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)


@dataclass(frozen=True)
class StaticContext(StaticMemoryContext):
    """The keys and values that one layer attends to in a step: an `attention.AttentionContext`."""

    cache: StaticKVCache
    position: Tensor  # B: position of the newest token of each slot
    newest: Tensor  # N*H: indices of the new keys (and values) among all B*H*E keys of the cache
    mask: Tensor  # B 1 R E, added to scores

    @property
    def positions(self) -> Tensor:
        return self.position.repeat_interleave(self.cache.beams)

    def self_attention(self, qkv: Tensor, split: SplitHeads, spec: AttentionSpec) -> Tensor:
        query, key, value = split(qkv)
        end = self.lengths.target * self.cache.beams
        keys, values = self.cache.keys[self.layer], self.cache.values[self.layer]
        for cache, new in ((keys, key), (values, value)):
            cache.view(-1, cache.shape[-1]).index_copy_(0, self.newest, new.flatten(0, 1).to(cache.dtype))
        keys, values = keys[:, :, :end], values[:, :, :end]
        terms = spec.position_terms
        if terms is None:
            return self._attend(query, keys, values, self.mask)
        groups = query.shape[1] // keys.shape[1]
        rows = query.to(keys.dtype).unflatten(0, (self.cache.slots, -1)).transpose(1, 2)  # B HG R K
        distance = torch.arange(self.lengths.target, device=rows.device) - self.position[:, None]
        distance = distance.repeat_interleave(self.cache.beams, 1)[:, None, None]  # B 1 1 E
        bias = self.mask + terms.scores(rows, distance)
        attended = self._attend(query, keys, values, bias)
        weights = (rows @ keys.repeat_interleave(groups, 1).transpose(2, 3) * rows.shape[3] ** -0.5 + bias).softmax(-1)
        change = terms.values(weights, distance)
        return attended if change is None else attended + change.transpose(1, 2).flatten(2).flatten(0, 1)
