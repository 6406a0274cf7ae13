"""The KV cache of a beam search on a CPU. When hypotheses are reordered, no keys or values are copied.

Keys and values are appended, and stay in place until the cache is full. A mask marks the cache positions of the
tokens of each hypothesis. All hypotheses of a sentence attend to all cache positions of the sentence in one masked
matrix product, which takes less time than reordering the cache at every step.

One tensor holds the keys and values of all layers, so that a step prepares the views of all layers at once. For one
sentence, a step of a layer takes 17 operations. Each operation on such small tensors takes a fixed time, so the number
of operations matters.

Cache positions come in multiples of 16: a softmax over 15 columns does not use vector instructions, and takes ten times
as long as a softmax over 16 columns. Attention multiplies all positions of the cache and masks free positions. If
attention used a part of the tensor, torch would copy this part at every bf16 product.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.data.packed import Packed
from nmtkit.models.layers.attention_reference import AttentionSpec, HeadSplit, SplitHeads

# B sentences, R hypotheses (rows) of a sentence, N = B x R, H heads of keys and values, G heads of queries that share a
# head of keys and values (usually 1), K width of a query or key head, Kv width of a value head, D model width, S memory
# tokens of all sentences, M memory tokens of the longest sentence (rounded up to a multiple of 16), E cache
# positions of a sentence: every step adds one position for each row

MULTIPLE = 16
# Up to this number of rows, bf16 products take several times as long as fp32 products, because the setup of a bf16
# product takes 12 µs. For transformer_base, both types take the same time at 64 rows (16 sentences of 4 rows, or 64
# sentences of one row).
MAX_FP32_ROWS = 32


def round_up(positions: int) -> int:
    return -(-positions // MULTIPLE) * MULTIPLE


class KeysAndValues:
    """Keys and values of all layers. `by_layer` has the views that attention multiplies: BH K E and BH E Kv.

    Keys and values of equal width are in one tensor, so that one copy appends both. The dimensions of this tensor are
    layers, 2, B, H, E, K. Keys and values of different widths are in two tensors, whose second dimension is 1.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.shapes = [(tensor.shape[1], tensor.shape[-1]) for tensor in tensors]  # second dimension, width of a head
        keys, values = tensors[0][:, 0].flatten(1, 2), tensors[-1][:, -1].flatten(1, 2)
        self.by_layer = list(zip(keys.transpose(2, 3).unbind(), values.unbind(), strict=True))

    @staticmethod
    def zeros(
        layers: int, sentences: int, heads: int, positions: int, widths: tuple[int, int], like: Tensor
    ) -> "KeysAndValues":
        """Returns keys and values that are all zero. Masked positions are also multiplied, so they must be finite."""
        parts = [(2, widths[0])] if widths[0] == widths[1] else [(1, width) for width in widths]
        return KeysAndValues([like.new_zeros(layers, n, sentences, heads, positions, width) for n, width in parts])

    def map(self, change: Callable[[Tensor], Tensor]) -> "KeysAndValues":
        return KeysAndValues([change(tensor) for tensor in self.tensors])


class MemoryCache:
    """Keys and values of the memory for all layers: base class of the decoder states of a Transformer.

    Subclasses are decoder states (see `architectures.interface.DecoderState`). `projections` has a function for each
    layer, which computes keys and values of the memory. `heads` is the number of heads of queries. `dtype` is the type
    of projections and products.
    """

    layers: Sequence[Any]  # the context of each layer in a step

    def __init__(
        self, memory: Packed, beams: int, projections: Sequence[SplitHeads], *, heads: int, dtype: torch.dtype
    ) -> None:
        self.beams, self.projections, self.query_heads, self.dtype = beams, projections, heads, dtype
        self.sentences = memory.layout.sentences
        self.new = 0  # number of rows of a sentence in the newest step
        self.steps = 0  # number of tokens of the oldest sentence
        self.started: Tensor | None = None  # B: number of steps before the first step of a sentence; None if all are 0
        length = round_up(memory.layout.max_length)
        self.memory_mask = self._memory_mask(memory, length)  # B 1 M
        self.cross_attention_mask: Tensor | None = None  # BH new M, the same mask at every step
        self.memory = self._project(memory, length)
        self.heads = self.memory.tensors[0].shape[3]
        self.groups = heads // self.heads
        self.widths = self.memory.tensors[0].shape[-1], self.memory.tensors[-1].shape[-1]
        self.positions: Tensor | int = 0  # positions of the tokens of a step

    @property
    def rows(self) -> int:
        return self.sentences * self.beams

    @abstractmethod
    def reorder(self, beam_index: Tensor) -> None: ...

    @abstractmethod
    def prepare(self) -> None:
        """Prepares `layers` for the step in which each sentence has `new` rows."""

    def advance(self, tokens: Tensor) -> tuple[Tensor, Tensor | int]:
        """Begins a step with `tokens` [N], and prepares `layers`.

        Returns the tokens to compute, and their positions (one integer if all are equal). At the first step, all rows
        of a sentence have the same token (bos). So the tokens to compute are [B], one for each sentence, and all rows
        share the result. Later, the tokens to compute are [N].
        """
        by_sentence = tokens.view(-1, self.beams)
        alike = self.steps == 0 and bool((by_sentence == by_sentence[:, :1]).all())
        self.new = 1 if alike else self.beams
        self.steps += 1
        if self.cross_attention_mask is None or self.cross_attention_mask.shape[1] != self.new * self.groups:
            self.cross_attention_mask = self._for_heads(self.memory_mask.expand(-1, self.new, -1))
        self.positions = self.steps - 1
        if self.started is not None:
            self.positions = (self.positions - self.started).repeat_interleave(self.new)
        self.prepare()
        return by_sentence[:, 0] if alike else tokens, self.positions

    def by_head(self, queries: Tensor, strides: Sequence[int]) -> Tensor:
        """Returns queries as BH RG K. `strides` are the distances between rows, between heads and between elements."""
        row, head, element = strides
        if self.groups > 1:
            sizes = self.sentences, self.heads, self.new, self.groups, self.widths[0]
            steps = self.new * row, self.groups * head, row, head, element
            return queries.as_strided(sizes, steps).flatten(0, 1).flatten(1, 2)
        if self.sentences == 1:
            return queries.as_strided((self.heads, self.new, self.widths[0]), (head, row, element))
        size = (self.sentences, self.heads, self.new, self.widths[0])
        return queries.as_strided(size, (self.new * row, head, row, element)).flatten(0, 1)

    def drop_finished(self, sentences: Tensor) -> None:
        self.sentences = len(sentences)
        dtype = self._cache_dtype(len(sentences), sentences.device)
        self.memory_mask, self.cross_attention_mask = self.memory_mask[sentences].to(dtype), None
        if self.started is not None:
            self.started = self.started[sentences]
        self.memory = self.memory.map(lambda x: x.index_select(2, sentences).to(dtype))

    def insert(self, slots: Tensor, memory: Packed) -> None:
        started = torch.zeros(self.sentences, dtype=torch.int64, device=slots.device)
        self.started = (started if self.started is None else self.started).index_fill(0, slots, self.steps)
        length = max(round_up(memory.layout.max_length), self.memory_mask.shape[2])
        self.memory_mask = F.pad(self.memory_mask, (0, length - self.memory_mask.shape[2]), value=-math.inf)
        self.cross_attention_mask = None
        self.memory_mask[slots] = self._memory_mask(memory, length).to(self.memory_mask.dtype)
        self.memory = self.memory.map(lambda x: F.pad(x, (0, 0, 0, length - x.shape[4])))
        for old, new in zip(self.memory.tensors, self._project(memory, length).tensors, strict=True):
            old.index_copy_(2, slots, new.to(old.dtype))

    def _cache_dtype(self, sentences: int, device: torch.device) -> torch.dtype:
        """Returns the dtype of the cache for this number of sentences: fp32 for few sentences on a CPU."""
        few = device.type == "cpu" and sentences * self.beams <= MAX_FP32_ROWS
        return torch.float32 if few and self.dtype == torch.bfloat16 else self.dtype

    def _for_heads(self, mask: Tensor) -> Tensor:
        """Repeats a mask for each head: B R E -> BH RG E."""
        mask = mask if self.groups == 1 else mask.repeat_interleave(self.groups, 1)
        if len(mask) == 1:
            return mask.expand(self.heads, -1, -1)
        return mask[:, None].expand(-1, self.heads, -1, -1).flatten(0, 1)

    def _project(self, memory: Packed, length: int) -> KeysAndValues:
        """Returns the keys and values of the memory for each layer, padded to `length` positions."""
        result: KeysAndValues | None = None
        layout, dtype = memory.layout, self._cache_dtype(memory.layout.sentences, memory.values.device)
        for layer, project in enumerate(self.projections):
            projected = [memory.with_values(x).to_padded().transpose(1, 2) for x in project(memory.values)]  # B H M K
            if result is None:
                heads, widths = projected[0].shape[1], (projected[0].shape[-1], projected[1].shape[-1])
                like = projected[0].new_empty(0, dtype=dtype)
                result = KeysAndValues.zeros(len(self.projections), layout.sentences, heads, length, widths, like)
            for tensor, part, new in zip((result.tensors[0], result.tensors[-1]), (0, -1), projected, strict=True):
                tensor[layer, part, :, :, : layout.max_length] = new.to(self.dtype)
        assert result is not None
        return result

    def _memory_mask(self, memory: Packed, length: int) -> Tensor:
        """Returns the mask to add to scores, 0 where a sentence has a token and -inf elsewhere: B 1 length."""
        mask = F.pad(memory.layout.mask, (0, length - memory.layout.max_length))
        bias = torch.zeros(mask.shape, device=mask.device, dtype=self._cache_dtype(len(mask), mask.device))
        return bias.masked_fill_(~mask, -math.inf)[:, None]


class KVCache(MemoryCache):
    """Keys and values of the earlier tokens of each hypothesis, and of the memory, for all layers."""

    def __init__(
        self,
        memory: Packed,
        beams: int,
        projections: Sequence[SplitHeads],
        *,
        heads: int,
        window: int | None,
        needs_distances: bool = False,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(memory, beams, projections, heads=heads, dtype=dtype)
        self.window = window
        sentences, device, capacity = self.sentences, memory.values.device, round_up(4 * beams)
        self.used = 0  # number of used cache positions of a sentence, at most E
        like = self.memory_mask.new_empty(0, dtype=self._cache_dtype(sentences, device))
        self.hypotheses = KeysAndValues.zeros(len(projections), sentences, self.heads, capacity, self.widths, like)
        # B R E, added to scores: 0 at the positions of the tokens of a row, else -inf
        self.mask = like.new_full((sentences, beams, capacity), -math.inf)
        # R R: at the positions of the newest step, a row sees only its own position
        self.self_mask = like.new_full((beams, beams), -math.inf).fill_diagonal_(0.0)
        self.position_step: Tensor | None = None  # B E: the step that filled a position
        if window is not None or needs_distances:
            self.position_step = torch.zeros(sentences, capacity, dtype=torch.int64, device=device)
        self.layers = [CachedContext(self, index) for index in range(len(projections))]

    def prepare(self) -> None:
        """Reserves cache positions for the new tokens. Each layer then appends the keys and values of these tokens.

        If all rows of a sentence have the same token (bos) in the first step, the rows share one cache position.
        """
        if self.used + self.new > self.mask.shape[2]:
            self._prune()
        newest = self.used, self.new
        self.used += self.new
        new_mask, shared = self.mask.narrow(2, *newest), self.new < self.beams
        new_mask.zero_() if shared else new_mask.copy_(self.self_mask)
        mask = self.mask[:, : self.new] if shared else self.mask
        if self.position_step is not None:
            self.position_step.narrow(1, *newest).fill_(self.steps)
            self.distance = (self.position_step - self.steps)[:, None, None]  # B 1 1 E
            if self.window is not None:
                mask = mask.masked_fill(self.distance[:, 0] < -(self.window // 2), -math.inf)
        self.attention_mask = self._for_heads(mask)  # BH new E
        slots = [tensor.narrow(4, *newest).unbind() for tensor in self.hypotheses.tensors]
        self.slots = list(zip(*slots, strict=True))  # for each layer, the destination of its new keys and values
        heads, (key, value), queries = self.heads, self.widths, self.query_heads * self.widths[0]
        self.row_stride = row = queries + heads * (key + value)  # row size of the projection
        # for each tensor in `self.slots`: size, strides and first element of the part of the projection (a view) that
        # `append` copies to this tensor
        self.slot_views = [
            ([parts, self.sentences, heads, self.new, width], [heads * width, self.new * row, width, row, 1], first)
            for (parts, width), first in zip(self.hypotheses.shapes, (queries, queries + heads * key), strict=False)
        ]

    def append(self, layer: int, qkv: Tensor) -> Tensor:
        """Appends new keys and values to the cache of a layer. Returns the queries BH RG K.

        `qkv` [N, H*(GK+K+Kv)] is the projection of the newest tokens to queries, keys and values.
        """
        qkv = qkv.contiguous()  # a hook, or the code of a plug-in, may return a part of a wider tensor
        for slots, (size, stride, first) in zip(self.slots[layer], self.slot_views, strict=True):
            slots.copy_(qkv.as_strided(size, stride, qkv.storage_offset() + first))
        return self.by_head(qkv, (self.row_stride, self.widths[0], 1))

    def reorder(self, beam_index: Tensor) -> None:
        if self.beams > 1:
            self.mask = self.mask.flatten(0, 1).index_select(0, beam_index).view_as(self.mask)

    def drop_finished(self, sentences: Tensor) -> None:
        super().drop_finished(sentences)
        dtype = self.memory_mask.dtype
        self.mask, self.self_mask = self.mask[sentences].to(dtype), self.self_mask.to(dtype)
        if self.position_step is not None:
            self.position_step = self.position_step[sentences]
        self.hypotheses = self.hypotheses.map(lambda x: x.index_select(2, sentences).to(dtype))

    def insert(self, slots: Tensor, memory: Packed) -> None:
        super().insert(slots, memory)
        self.mask[slots] = -math.inf

    def _prune(self) -> None:
        """Drops the cache positions that no row attends to, and adds free positions.

        Few old positions remain, because the rows of a sentence share most of their earlier tokens.
        """
        alive = (self.mask == 0).any(1)  # B E
        used = int(alive.sum(1).max())
        least = 2 * MULTIPLE if self.rows <= MAX_FP32_ROWS else MULTIPLE
        capacity = round_up(used + max(least, self.beams, used // 4))
        # `kept` may contain dropped positions, which stay masked
        kept = (~alive).to(torch.uint8).argsort(dim=1, stable=True)[:, :used]
        mask = self.mask.gather(2, kept[:, None].expand(-1, self.beams, -1))
        self.mask = F.pad(mask, (0, capacity - used), value=-math.inf)
        if self.position_step is not None:
            self.position_step = F.pad(self.position_step.gather(1, kept), (0, capacity - used))
        # free positions are masked, but must be finite, so they become copies of position 0
        kept = F.pad(kept, (0, capacity - used))
        self.hypotheses = self.hypotheses.map(lambda x: _select_positions(x, kept))
        self.used = used


def _select_positions(tensor: Tensor, positions: Tensor) -> Tensor:
    """Selects the cache positions `positions` [B, E] of a tensor of `KeysAndValues`."""
    groups, (sentences, heads, size, width) = tensor.shape[0] * tensor.shape[1], tensor.shape[2:]
    first = torch.arange(groups * sentences * heads, device=tensor.device).view(groups, sentences, heads, 1) * size
    rows = (first + positions[:, None]).flatten()  # index_select copies whole rows, unlike gather
    return tensor.view(-1, width).index_select(0, rows).view(*tensor.shape[:4], -1, width)


@dataclass(frozen=True)
class MemoryContext:
    """Context of one decoder layer in a search step: cross-attention reads the keys and values of the memory."""

    cache: MemoryCache
    layer: int

    @property
    def positions(self) -> Tensor | int:
        return self.cache.positions

    def cross_attention(self, query: Tensor, project: SplitHeads, spec: AttentionSpec) -> Tensor:
        cache = self.cache
        if query.dtype != cache.dtype:
            return self.cross_attention(query.to(cache.dtype), project, spec).to(query.dtype)
        assert cache.cross_attention_mask is not None
        rows = cache.by_head(query, query.stride())
        keys_and_values = cache.memory.by_layer[self.layer]
        return cached_attention(rows, *keys_and_values, cache.cross_attention_mask, cache.sentences, cache.groups)


@dataclass(frozen=True)
class CachedContext(MemoryContext):
    """The keys and values that one layer attends to in a step: an `attention.AttentionContext`."""

    cache: KVCache

    def self_attention(self, qkv: Tensor, split: SplitHeads, spec: AttentionSpec) -> Tensor:
        cache = self.cache
        if qkv.dtype != cache.dtype:
            return self.self_attention(qkv.to(cache.dtype), split, spec).to(qkv.dtype)
        if type(split) is not HeadSplit:  # a plug-in changes queries, keys or values
            qkv = torch.cat([part.flatten(1) for part in split(qkv)], 1)
        query = cache.append(self.layer, qkv)
        keys, values = cache.hypotheses.by_layer[self.layer]
        mask, terms, change = cache.attention_mask, spec.position_terms, None
        if terms is not None:
            by_query_head = _ungrouped(query, cache.sentences, cache.groups)  # B HG R K
            mask = mask + _grouped(terms.scores(by_query_head, cache.distance), cache.groups).to(mask.dtype)

            def change(weights: Tensor) -> Tensor | None:
                by_query_head = _ungrouped(weights, cache.sentences, cache.groups)
                change = terms.values(by_query_head, cache.distance)
                return None if change is None else _grouped(change, cache.groups)

        return cached_attention(query, keys, values, mask, cache.sentences, cache.groups, change)


def _ungrouped(x: Tensor, sentences: int, groups: int) -> Tensor:
    """Separates the heads of queries or of attention weights: BH RG X -> B HG R X, where X is K or E."""
    return x.view(sentences, -1, x.shape[1] // groups, groups, x.shape[2]).transpose(2, 3).flatten(1, 2)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Inverse of `_ungrouped`: B HG R X -> BH RG X."""
    return x.unflatten(1, (-1, groups)).transpose(2, 3).flatten(0, 1).flatten(1, 2)


def cached_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    sentences: int,
    groups: int = 1,
    change: Callable[[Tensor], Tensor | None] | None = None,
) -> Tensor:
    """Computes attention from the rows of each sentence to its cache positions: BH RG K, BH K E, BH E Kv -> N H*G*Kv.

    `mask` BH RG E is added to the scores and has the dtype of keys and values. `change` maps the attention weights
    BH RG E to terms that are added to the result BH RG Kv.

    The softmax is computed in fp32, and products in the dtype of the queries. If queries are bf16 but keys and values
    are fp32, products are summed in fp32 and then rounded like results of bf16 products, so only the order of summation
    differs. For few queries, batched products are faster on a CPU than fused kernels.
    """
    dtype = query.dtype
    rows, width = query.shape[1:]
    if dtype == torch.float32:
        scores = torch.baddbmm(mask, query, keys, alpha=width**-0.5)
        weights = torch.softmax(scores, -1, out=scores)
        attended = torch.bmm(weights, values)
    else:
        scores = torch.baddbmm(mask, query.to(keys.dtype), keys, alpha=width**-0.5)
        weights = scores.to(dtype).softmax(-1, dtype=torch.float32)
        attended = torch.bmm(weights.to(dtype).to(values.dtype), values).to(dtype)  # BH RG Kv
    if change is not None and (terms := change(weights)) is not None:
        attended = attended + terms.to(dtype)
    if rows == 1:
        return attended.view(sentences, -1)
    if groups == 1 and sentences == 1:
        return attended.transpose(0, 1).reshape(rows, -1)
    by_row = attended.view(sentences, -1, rows // groups, groups, attended.shape[2]).transpose(1, 2)
    return by_row.reshape(sentences * (rows // groups), -1)
