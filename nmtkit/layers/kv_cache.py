"""The KV cache of a beam search, which nothing copies into a new order when hypotheses change places.

The keys and values of every hypothesis a sentence has had stay where they were appended; a mask says which of them
each hypothesis descends from. All hypotheses of a sentence attend to all of its entries in one product of matrices,
which costs less than moving the cache at every step would.

One tensor holds the keys and values of all layers, so that what a step needs of it is set up once for all of them. For
one sentence, a layer's step then takes 17 operations that compute, about as many as there are in its equations: to such
small tensors what counts is their number.

Entries come in sixteens: a softmax over fewer leaves the vector units, and takes ten times as long over 15 as over 16.
Caches are exactly as large as what is attended to: torch would copy a part of a larger one at every bf16 product.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.layers.attention_reference import AttentionSpec
from nmtkit.layers.packed import Packed

# B sentences, R hypotheses (rows) of each, N = B x R, H heads, K width of a query or key head, Kv width of a value
# head, D model width, S memory tokens of all sentences, M of the longest (rounded up to a multiple of 16), E entries of
# a sentence, of which every step adds one for each row

Projection = Callable[[Tensor], tuple[Tensor, Tensor]]  # memory S D -> keys S H K, values S H Kv
KeysAndValues = tuple[Tensor, Tensor]  # BH K E and BH E Kv
MULTIPLE = 16
# For so few rows products in bf16 take several times as long as in fp32, since setting one up takes 12 µs; for
# transformer_base they are level from 16 sentences of 4 rows, or 64 of one.
MAX_FP32_ROWS = 32


def round_up(entries: int) -> int:
    return -(-entries // MULTIPLE) * MULTIPLE


class Entries:
    """Keys and values of all layers, each layer's as `products` want them.

    Where keys and values have one width they lie in one tensor, which takes new ones in one copy. Its dimensions are
    layers, 2 (or 1 of two tensors), B, H, E, K.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        keys, values = tensors[0][:, 0].flatten(1, 2), tensors[-1][:, -1].flatten(1, 2)
        self.products: list[KeysAndValues] = list(zip(keys.transpose(2, 3).unbind(), values.unbind(), strict=True))

    @staticmethod
    def zeros(
        layers: int, sentences: int, heads: int, entries: int, widths: tuple[int, int], like: Tensor
    ) -> "Entries":
        """Masked entries are multiplied too, and must be finite."""
        parts = [(2, widths[0])] if widths[0] == widths[1] else [(1, width) for width in widths]
        return Entries([like.new_zeros(layers, count, sentences, heads, entries, width) for count, width in parts])

    def map(self, change: Callable[[Tensor], Tensor]) -> "Entries":
        return Entries([change(tensor) for tensor in self.tensors])

    def resized(self, entries: int) -> "Entries":
        return self.map(lambda x: F.pad(x, (0, 0, 0, entries - x.shape[4])))


class KVCache:
    """Keys and values of the tokens so far of `beams` hypotheses of each sentence, and of the sentences' memory, for
    all layers; the decoder state of a Transformer (see `architectures.interface.DecoderState`).

    `projections` are those of the layers' cross-attention. In `dtype` are keys, values, queries, weights and products.
    """

    def __init__(
        self,
        memory: Packed,
        beams: int,
        projections: Sequence[Projection],
        *,
        heads: int,
        window: int | None,
        dtype: torch.dtype,
    ) -> None:
        self.beams, self.projections, self.heads, self.window, self.dtype = beams, projections, heads, window, dtype
        self.sentences = sentences = memory.layout.sentences
        device, capacity = memory.values.device, round_up(4 * beams)
        self.used = 0  # entries, of E
        self.new = 0  # entries of the newest step
        self.steps = 0  # tokens of the oldest sentence
        self.started: Tensor | None = None  # B: the steps before a sentence's first; None: none has any
        self.memory_mask = self._mask_of(memory, round_up(memory.layout.max_length))  # B 1 M
        self.cross_mask: Tensor | None = None  # BH new M: for the products of every step
        self.memory_entries = self._project(memory, round_up(memory.layout.max_length))
        store = self._store(sentences, device)
        self.widths = self.memory_entries.tensors[0].shape[-1], self.memory_entries.tensors[-1].shape[-1]
        like = self.memory_mask.new_empty(0, dtype=store)
        self.entries = Entries.zeros(len(projections), sentences, heads, capacity, self.widths, like)
        # B R E, added to scores: 0 for the entries a row descends from, else -inf
        self.mask = like.new_full((sentences, beams, capacity), -math.inf)
        self.own = like.new_full((beams, beams), -math.inf).fill_diagonal_(0.0)  # of the newest entries
        self.entry_step: Tensor | None = None  # B E: the step that made an entry; for a window alone
        if window is not None:
            self.entry_step = torch.zeros(sentences, capacity, dtype=torch.int64, device=device)
        self.layers = [CachedContext(self, index) for index in range(len(projections))]

    @property
    def rows(self) -> int:
        return self.sentences * self.beams

    def advance(self, tokens: Tensor) -> tuple[Tensor, Tensor | int]:
        """Makes room for the entries of `tokens` [N], which each layer then appends.

        Returns the tokens to step with and their positions, one number where they are alike. At the very first step,
        when the rows of a sentence are all bos, these are B: one row stands for all, and all share its entry. Otherwise
        they are N.
        """
        by_sentence = tokens.view(-1, self.beams)
        alike = self.used == 0 and bool((by_sentence == by_sentence[:, :1]).all())
        self.new = 1 if alike else self.beams
        if self.used + self.new > self.mask.shape[2]:
            self._prune()
        newest = self.used, self.new
        self.used += self.new
        self.steps += 1
        own = self.mask.narrow(2, *newest)
        own.zero_() if alike else own.copy_(self.own)
        mask = self.mask[:, : self.new] if self.new < self.beams else self.mask
        if self.entry_step is not None and self.window is not None:
            self.entry_step.narrow(1, *newest).fill_(self.steps)
            far = self.entry_step < self.steps - self.window // 2
            mask = mask.masked_fill(far[:, None], -math.inf)
        self.self_mask = self._by_head(mask)  # BH new E
        if self.cross_mask is None or self.cross_mask.shape[1] != self.new:
            self.cross_mask = self._by_head(self.memory_mask.expand(-1, self.new, -1))
        room = [tensor.narrow(4, *newest).unbind() for tensor in self.entries.tensors]
        self.room = list(zip(*room, strict=True))  # of each layer, where its new keys and values go
        heads, (key, value) = self.heads, self.widths
        self.row = heads * (2 * key + value)  # stride of the rows of a projection to queries, keys and values
        strides = [heads * key, self.new * self.row, key if key == value else 0, self.row, 1]
        size = [self.sentences, heads, self.new]
        if key == value:
            self.sources = [([2, *size, key], strides, heads * key)]
        else:
            self.sources = [
                ([1, *size, width], [1, self.new * self.row, width, self.row, 1], start)
                for width, start in ((key, heads * key), (value, 2 * heads * key))
            ]
        if self.started is None:
            return (by_sentence[:, 0] if alike else tokens), self.steps - 1
        position = self.steps - 1 - self.started
        return (by_sentence[:, 0] if alike else tokens), position.repeat_interleave(self.new)

    def append(self, layer: int, qkv: Tensor) -> Tensor:
        """Adds the keys and values of the newest tokens, from queries, keys and values N H*(2K+Kv), to a layer's
        entries; returns the queries BH R K.
        """
        for room, (size, stride, start) in zip(self.room[layer], self.sources, strict=True):
            room.copy_(qkv.as_strided(size, stride, qkv.storage_offset() + start))
        return self.by_head(qkv, (self.row, self.widths[0], 1))

    def by_head(self, queries: Tensor, strides: tuple[int, int, int]) -> Tensor:
        """Returns queries, which have these strides from row to row, head to head and element to element, as BH R K."""
        row, head, element = strides
        if self.sentences == 1:
            return queries.as_strided((self.heads, self.new, self.widths[0]), (head, row, element))
        size = (self.sentences, self.heads, self.new, self.widths[0])
        return queries.as_strided(size, (self.new * row, head, row, element)).flatten(0, 1)

    def reorder(self, beam_index: Tensor) -> None:
        if self.beams > 1:
            self.mask = self.mask.flatten(0, 1).index_select(0, beam_index).view_as(self.mask)

    def drop_finished(self, sentences: Tensor) -> None:
        self.sentences = len(sentences)
        self.mask, self.memory_mask, self.cross_mask = self.mask[sentences], self.memory_mask[sentences], None
        if self.started is not None:
            self.started = self.started[sentences]
        if self.entry_step is not None:
            self.entry_step = self.entry_step[sentences]
        store = self._store(len(sentences), sentences.device)
        self.mask, self.memory_mask, self.own = self.mask.to(store), self.memory_mask.to(store), self.own.to(store)
        self.entries = self.entries.map(lambda x: x.index_select(2, sentences).to(store))
        self.memory_entries = self.memory_entries.map(lambda x: x.index_select(2, sentences).to(store))

    def insert(self, slots: Tensor, memory: Packed) -> None:
        self.mask[slots] = -math.inf
        started = torch.zeros(self.sentences, dtype=torch.int64, device=slots.device)
        self.started = (started if self.started is None else self.started).index_fill(0, slots, self.steps)
        length = max(round_up(memory.layout.max_length), self.memory_mask.shape[2])
        self.memory_mask = F.pad(self.memory_mask, (0, length - self.memory_mask.shape[2]), value=-math.inf)
        self.cross_mask = None
        self.memory_mask[slots] = self._mask_of(memory, length).to(self.memory_mask.dtype)
        self.memory_entries = self.memory_entries.resized(length)
        for old, new in zip(self.memory_entries.tensors, self._project(memory, length).tensors, strict=True):
            old.index_copy_(2, slots, new.to(old.dtype))

    def _store(self, sentences: int, device: torch.device) -> torch.dtype:
        """Returns the type that holds numbers of `dtype`, for so many sentences."""
        few = device.type == "cpu" and sentences * self.beams <= MAX_FP32_ROWS
        return torch.float32 if few and self.dtype == torch.bfloat16 else self.dtype

    def _by_head(self, mask: Tensor) -> Tensor:
        """B R E -> BH R E."""
        if len(mask) == 1:
            return mask.expand(self.heads, -1, -1)
        return mask[:, None].expand(-1, self.heads, -1, -1).flatten(0, 1)

    def _project(self, memory: Packed, length: int) -> Entries:
        """Returns the memory's keys and values for each layer, padded to `length`."""
        entries: Entries | None = None
        layout, store = memory.layout, self._store(memory.layout.sentences, memory.values.device)
        for layer, project in enumerate(self.projections):
            projected = [memory.with_values(x).to_padded().transpose(1, 2) for x in project(memory.values)]  # B H M K
            if entries is None:
                widths = projected[0].shape[-1], projected[1].shape[-1]
                like = projected[0].new_empty(0, dtype=store)
                entries = Entries.zeros(len(self.projections), layout.sentences, self.heads, length, widths, like)
            for tensor, part, new in zip((entries.tensors[0], entries.tensors[-1]), (0, -1), projected, strict=True):
                tensor[layer, part, :, :, : layout.max_length] = new.to(self.dtype)
        assert entries is not None
        return entries

    def _mask_of(self, memory: Packed, length: int) -> Tensor:
        """Returns what is added to scores, 0 where a sentence has a token and -inf elsewhere: B 1 length."""
        mask = F.pad(memory.layout.mask, (0, length - memory.layout.max_length))
        bias = torch.zeros(mask.shape, device=mask.device, dtype=self._store(len(mask), mask.device))
        return bias.masked_fill_(~mask, -math.inf)[:, None]

    def _prune(self) -> None:
        """Drops the entries that no row descends from (of old steps most rows share one ancestor) and makes room."""
        alive = (self.mask == 0).any(1)  # B E
        used = int(alive.sum(1).max())
        least = 2 * MULTIPLE if self.rows <= MAX_FP32_ROWS else MULTIPLE
        capacity = round_up(used + max(least, self.beams, used // 4))
        kept = (~alive).to(torch.uint8).argsort(dim=1, stable=True)[:, :used]  # the others among them stay masked
        mask = self.mask.gather(2, kept[:, None].expand(-1, self.beams, -1))
        self.mask = F.pad(mask, (0, capacity - used), value=-math.inf)
        if self.entry_step is not None:
            self.entry_step = F.pad(self.entry_step.gather(1, kept), (0, capacity - used))
        # what stands in the room is masked, but must be finite: any entry will do, and no zeros are written
        kept = F.pad(kept, (0, capacity - used))
        self.entries = self.entries.map(lambda x: _pruned(x, kept))
        self.used = used


def _pruned(tensor: Tensor, kept: Tensor) -> Tensor:
    """Returns these entries [B, E] of a tensor of `Entries`."""
    groups, (sentences, heads, entries, width) = tensor.shape[0] * tensor.shape[1], tensor.shape[2:]
    first = torch.arange(groups * sentences * heads, device=tensor.device).view(groups, sentences, heads, 1) * entries
    rows = (first + kept[:, None]).flatten()  # whole rows of the keys, end to end, are copied, unlike by gather
    return tensor.view(-1, width).index_select(0, rows).view(*tensor.shape[:4], -1, width)


@dataclass(frozen=True)
class CachedContext:
    """The keys and values that one layer attends to in a step: an `attention.AttentionContext`."""

    cache: KVCache
    layer: int

    def self_attention(
        self, qkv: Tensor, split: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], spec: AttentionSpec
    ) -> Tensor:
        cache = self.cache
        if qkv.dtype != cache.dtype:
            return self.self_attention(qkv.to(cache.dtype), split, spec).to(qkv.dtype)
        query = cache.append(self.layer, qkv)
        return cached_attention(query, *cache.entries.products[self.layer], cache.self_mask, cache.sentences)

    def cross_attention(self, query: Tensor, project: Projection, spec: AttentionSpec) -> Tensor:
        cache = self.cache
        if query.dtype != cache.dtype:
            return self.cross_attention(query.to(cache.dtype), project, spec).to(query.dtype)
        assert cache.cross_mask is not None
        row, head, element = query.stride()
        rows = cache.by_head(query, (row, head, element))
        return cached_attention(rows, *cache.memory_entries.products[self.layer], cache.cross_mask, cache.sentences)


def cached_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, sentences: int) -> Tensor:
    """Attention of the rows of each sentence to its entries: BH R K, BH K E, BH E Kv -> N H*Kv.

    `mask`, added to the scores, is BH R E, of the type of keys and values. The softmax is taken in fp32. Products are
    those of the type of the queries: if keys and values are in fp32 and it is bf16, they are summed in fp32 and rounded
    where a product in bf16 rounds its result, so that only the order of a sum may differ. Plain batched products: with
    so few queries the fused kernels are slower on a CPU.
    """
    dtype = query.dtype
    rows, width = query.shape[1:]
    if dtype == torch.float32:
        scores = torch.baddbmm(mask, query, keys, alpha=width**-0.5)
        attended = torch.bmm(torch.softmax(scores, -1, out=scores), values)
    else:
        scores = torch.baddbmm(mask, query.to(keys.dtype), keys, alpha=width**-0.5)
        weights = scores.to(dtype).softmax(-1, dtype=torch.float32)
        attended = torch.bmm(weights.to(dtype).to(values.dtype), values).to(dtype)  # BH R Kv
    if rows == 1:
        return attended.view(sentences, -1)
    if sentences == 1:
        return attended.transpose(0, 1).reshape(rows, -1)
    return attended.view(sentences, -1, *attended.shape[1:]).transpose(1, 2).reshape(sentences * rows, -1)
