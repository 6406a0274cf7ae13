"""What the steps of a beam search keep of attention on a GPU: tensors that never grow, move or change shape.

So a step can be captured once in a CUDA graph and replayed. An entry is written where its slot has come to, and stays
there: when hypotheses change places, only the table of who descends from whom is put in order, and all hypotheses of a
slot attend to all of its entries under a mask. Per layer and step, in bytes, with S slots, R rows of each, P positions
and w bytes for the key and the value of one token, that is

    S R P w             to read the slot's entries once for its R rows, and next to nothing for table and mask
    3 S R P w           to copy the caches into the new order (read and write) and then read each row's own

since a row's entries are as many as a slot's divided by R. At 256 slots of 4 rows, 64 positions and transformer_base
in bf16 (w = 2 KiB, 6 layers) that is 0.8 GB a step against 2.4 GB: 0.19 ms against 0.56 ms at an H200's 4.3 TB/s. The
R times as many products that the mask then throws away are free, for they fill rows of a tile that would lie idle.

Only the first `CacheLengths.target` positions are read, those that the oldest sentence in the search can have come
to, so capacity costs memory and no time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.packed import Packed

# S slots, R hypotheses (rows) of each, N = S x R, C positions, P of them in lengths, E = C x R entries of a slot
# (that of
# row r at position p is p x R + r), M source positions, L layers, H heads, K width of a query or key head, V of a value
# head, D model width


@dataclass(frozen=True)
class CacheLengths:
    """How many positions a step looks at: of the target, its own included, and of the source."""

    target: int
    source: int


class StaticKVCache:
    """Keys and values for every slot: of its hypotheses' tokens, and of its source once.

    `project` turns a memory T D into all layers' keys and values, T L H*(K+V): for each layer the keys of all heads,
    then the values. Everything has the type and the device of `like`.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        widths: tuple[int, int],
        *,
        slots: int,
        beams: int,
        capacity: int,
        source_capacity: int,
        window: int | None,
        project: Callable[[Tensor], Tensor],
        like: Tensor,
    ) -> None:
        self.slots, self.beams, self.heads, self.widths = slots, beams, heads, widths
        self.capacity, self.window, self.project = capacity, window, project
        entries = capacity * beams
        self.keys, self.values = (like.new_zeros(layers, slots, heads, entries, width) for width in widths)
        self.memory = like.new_zeros(slots, source_capacity, layers, heads * sum(widths))
        # S 1 R M, added to scores; an empty slot looks at something, lest its softmax be of nothing
        self.memory_mask = like.new_full((slots, 1, beams, source_capacity), -math.inf)
        self.memory_mask[..., 0] = 0.0
        # S R C: the row that wrote the entry which this hypothesis has at this position
        self.ancestors = torch.zeros(slots, beams, capacity, dtype=torch.int16, device=like.device)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.keys, self.values, self.memory, self.memory_mask, self.ancestors))

    def begin(self, position: Tensor, lengths: CacheLengths) -> "CacheStep":
        """A step in which every row of slot s has a token at position[s]: S, int64."""
        slots, beams, device = self.slots, self.beams, position.device
        row = torch.arange(beams, device=device)
        own = row.to(torch.int16)
        self.ancestors.scatter_(2, position[:, None, None].expand(-1, beams, 1), own[:, None].expand(slots, -1, 1))
        place = torch.arange(lengths.target, device=device)
        seen = place <= position[:, None]  # S P
        if self.window is not None:
            seen = seen & (place >= position[:, None] - self.window // 2)
        visible = (self.ancestors[:, :, : lengths.target, None] == own) & seen[:, None, :, None]  # S R P R
        mask = self.memory_mask.new_zeros(visible.shape).masked_fill_(~visible, -math.inf).flatten(2)[:, None]
        head = torch.arange(slots * self.heads, device=device).view(slots, 1, self.heads)
        entry = position[:, None] * beams + row  # S R
        places = (head * (self.capacity * beams) + entry[:, :, None]).flatten()  # S R H, as the step's keys come
        return CacheStep(self, lengths, places, mask)

    def reorder(self, beam_index: Tensor, lengths: CacheLengths) -> None:
        """Row r of slot s goes on from what its row beam_index[s, r] was: S R."""
        past = self.ancestors[:, :, : lengths.target]
        past.copy_(past.gather(1, beam_index[:, :, None].expand_as(past)))

    def insert(self, slots: Tensor, memory: Packed) -> None:
        """The sentences of `memory` start afresh in `slots` (indices, one for each).

        What the last sentences left is wiped out: the masks hide it, but 0 x NaN is NaN.
        """
        layout, places = memory.layout, self.memory.shape[1]
        for store in (self.keys, self.values):
            store.index_fill_(1, slots, 0.0)
        self.memory.index_fill_(0, slots, 0.0)
        token = slots[layout.segment_ids] * places + layout.position_ids  # T
        self.memory.view(-1, self.memory[0, 0].numel()).index_copy_(0, token, self.project(memory.values))
        beyond = torch.arange(places, device=slots.device) >= layout.lengths[:, None]
        mask = self.memory_mask.new_zeros(beyond.shape).masked_fill_(beyond, -math.inf)[:, None, None]
        self.memory_mask.index_copy_(0, slots, mask.expand(-1, 1, self.beams, -1))


@dataclass(frozen=True)
class CacheStep:
    """The cache as the layers see it in one step."""

    cache: StaticKVCache
    lengths: CacheLengths
    places: Tensor  # N*H: where the newest keys go, among S*H*E
    mask: Tensor  # S 1 R P*R: what is added to scores

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Keeps the newest keys N H K and values N H V; the rows' attention to what they descend from: N H*V."""
        end = self.lengths.target * self.cache.beams
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        for store, new in ((keys, key), (values, value)):
            store.view(-1, store.shape[-1]).index_copy_(0, self.places, new.flatten(0, 1))
        return self._attended(query, keys[:, :, :end], values[:, :, :end], self.mask)

    def attend_memory(self, layer: int, query: Tensor) -> Tensor:
        """The rows' attention to their source: N H K -> N H*V."""
        cache, end = self.cache, self.lengths.source
        sizes = [cache.heads * width for width in cache.widths]
        parts = cache.memory[:, :end, layer].split(sizes, -1)
        key, value = (part.unflatten(-1, (cache.heads, -1)).transpose(1, 2) for part in parts)  # S H M K
        return self._attended(query, key, value, cache.memory_mask[..., :end])

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        rows = query.unflatten(0, (self.cache.slots, -1)).transpose(1, 2)  # S H R K
        attended = F.scaled_dot_product_attention(rows, key, value, mask)
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)
