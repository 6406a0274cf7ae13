"""The KV cache of a beam search, which nothing copies into a new order when hypotheses change places.

The keys and values of every hypothesis a sentence has had stay where they were appended; a mask says which of them
each hypothesis descends from. All hypotheses of a sentence attend to all of its entries in one product of matrices,
which costs less than moving the cache at every step would.

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
from nmtkit.packed import Packed

# B sentences, R hypotheses (rows) of each, N = B x R, H heads, K width of a query or key head, Kv width of a value
# head, D model width, S memory tokens of all sentences, M of the longest (rounded up to a multiple of 16), E entries of
# a sentence, of which every step adds one for each row

Projection = Callable[[Tensor], tuple[Tensor, Tensor]]  # memory S D -> keys S H K, values S H Kv
KeysAndValues = tuple[Tensor, Tensor]  # B H E K and B H E Kv
MULTIPLE = 16


def round_up(entries: int) -> int:
    return -(-entries // MULTIPLE) * MULTIPLE


class KVCache:
    """Keys and values of the tokens so far of `beams` hypotheses of each sentence, and of the sentences' memory, for
    all layers; the decoder state of a Transformer (see `architectures.interface.DecoderState`).

    `projections` are those of the layers' cross-attention. Keys and values are kept in `dtype`.
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
        sentences, device, capacity = memory.layout.sentences, memory.values.device, round_up(4 * beams)
        self.used = 0  # entries, of E
        self.new = 0  # entries of the newest step
        self.steps = 0  # tokens of the oldest sentence
        self.position = torch.full((sentences,), -1, device=device)  # B: that of the newest token
        self.positions = torch.zeros(sentences, capacity, dtype=torch.int64, device=device)  # B E
        # B R E, added to scores: 0 for the entries a row descends from, else -inf
        self.mask = torch.full((sentences, beams, capacity), -math.inf, device=device, dtype=dtype)
        self.memory_mask = self._mask_of(memory, round_up(memory.layout.max_length))  # BH 1 M
        self.memory_kv = self._project(memory, round_up(memory.layout.max_length))  # of each layer
        self.kv = [(self._zeros(key, capacity), self._zeros(value, capacity)) for key, value in self.memory_kv]
        self.layers = [CachedContext(self, index) for index in range(len(projections))]
        self.self_mask = self.mask  # BH new E, of the newest step

    @property
    def rows(self) -> int:
        return len(self.mask) * self.beams

    def advance(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Makes room for the entries of `tokens` [N], which each layer then appends.

        Returns the tokens to step with and their positions. At the very first step, when the rows of a sentence are all
        bos, these are B: one row stands for all, and all share its entry. Otherwise they are N.
        """
        by_sentence = tokens.view(-1, self.beams)
        alike = self.used == 0 and bool((by_sentence == by_sentence[:, :1]).all())
        self.new = 1 if alike else self.beams
        if self.used + self.new > self.mask.shape[2]:
            self._prune()
        newest = slice(self.used, self.used + self.new)
        self.used += self.new
        self.steps += 1
        self.position = self.position + 1
        self.positions[:, newest] = self.position[:, None]
        own = torch.full((self.beams, self.beams), -math.inf, device=self.mask.device, dtype=self.dtype)
        self.mask[:, :, newest] = 0.0 if alike else own.fill_diagonal_(0.0)
        mask = self.mask[:, : self.new]
        if self.window is not None:
            far = self.positions < (self.position - self.window // 2)[:, None]
            mask = mask.masked_fill(far[:, None], -math.inf)
        self.self_mask = mask[:, None].expand(-1, self.heads, -1, -1).flatten(0, 1)
        return by_sentence[:, 0] if alike else tokens, self.position.repeat_interleave(self.new)

    def append(self, layer: int, key: Tensor, value: Tensor) -> KeysAndValues:
        """Adds the keys N H K and values N H Kv of the newest tokens; returns all of the layer's."""
        keys, values = self.kv[layer]
        newest = slice(self.used - self.new, self.used)
        keys[:, :, newest] = key.unflatten(0, (-1, self.new)).transpose(1, 2)
        values[:, :, newest] = value.unflatten(0, (-1, self.new)).transpose(1, 2)
        return keys, values

    def reorder(self, beam_index: Tensor) -> None:
        self.mask = self.mask.flatten(0, 1)[beam_index].unflatten(0, (-1, self.beams))

    def drop_finished(self, sentences: Tensor) -> None:
        self.mask, self.position = self.mask[sentences], self.position[sentences]
        self.positions = self.positions[sentences]
        self.memory_mask = self.memory_mask.unflatten(0, (-1, self.heads))[sentences].flatten(0, 1)
        for caches in (self.kv, self.memory_kv):
            caches[:] = [
                (keys.index_select(0, sentences), values.index_select(0, sentences)) for keys, values in caches
            ]

    def insert(self, slots: Tensor, memory: Packed) -> None:
        self.mask[slots] = -math.inf
        self.position = self.position.index_fill(0, slots, -1)
        length = max(round_up(memory.layout.max_length), self.memory_mask.shape[2])
        wider = length - self.memory_mask.shape[2]
        by_sentence = F.pad(self.memory_mask, (0, wider), value=-math.inf).unflatten(0, (-1, self.heads))
        by_sentence[slots] = self._mask_of(memory, length).unflatten(0, (-1, self.heads))
        self.memory_mask = by_sentence.flatten(0, 1)
        for layer, new in enumerate(self._project(memory, length)):
            keys, values = (
                F.pad(old, (0, 0, 0, wider)).index_copy(0, slots, fresh)
                for old, fresh in zip(self.memory_kv[layer], new, strict=True)
            )
            self.memory_kv[layer] = keys, values

    def _project(self, memory: Packed, length: int) -> list[KeysAndValues]:
        """Returns the memory's keys and values for each layer, padded to `length`."""
        layers = []
        for project in self.projections:
            padded = (memory.with_values(x).to_padded().transpose(1, 2) for x in project(memory.values))  # B H M K
            keys, values = (self._padded(x, length) for x in padded)
            layers.append((keys, values))
        return layers

    def _mask_of(self, memory: Packed, length: int) -> Tensor:
        """Returns what is added to scores, 0 where a sentence has a token and -inf elsewhere: BH 1 length."""
        mask = F.pad(memory.layout.mask, (0, length - memory.layout.max_length))
        bias = torch.zeros(mask.shape, device=mask.device, dtype=self.dtype)
        return bias.masked_fill_(~mask, -math.inf).repeat_interleave(self.heads, 0)[:, None]

    def _zeros(self, like: Tensor, entries: int) -> Tensor:
        """Returns a cache of zeros: masked entries are multiplied too, and must be finite."""
        return like.new_zeros(*like.shape[:2], entries, like.shape[3], dtype=self.dtype)

    def _padded(self, x: Tensor, entries: int) -> Tensor:
        padded = self._zeros(x, entries)
        padded[:, :, : x.shape[2]] = x
        return padded

    def _prune(self) -> None:
        """Drops the entries that no row descends from (of old steps most rows share one ancestor) and makes room."""
        alive = (self.mask == 0).any(1)  # B E
        used = int(alive.sum(1).max())
        capacity = round_up(used + max(MULTIPLE, self.beams, used // 4))
        kept = (~alive).to(torch.uint8).argsort(dim=1, stable=True)[:, :used]  # the others among them stay masked
        mask = self.mask.gather(2, kept[:, None].expand(-1, self.beams, -1))
        self.mask = F.pad(mask, (0, capacity - used), value=-math.inf)
        self.positions = F.pad(self.positions.gather(1, kept), (0, capacity - used))
        self.kv = [(self._pruned(k, kept, capacity), self._pruned(v, kept, capacity)) for k, v in self.kv]
        self.used = used

    def _pruned(self, cache: Tensor, kept: Tensor, capacity: int) -> Tensor:
        """Returns these entries [B, E] of a cache, padded to `capacity`."""
        sentences, heads, entries, width = cache.shape
        first = torch.arange(sentences * heads, device=cache.device).view(sentences, heads, 1) * entries
        rows = (first + kept[:, None]).flatten()  # whole rows of the keys, end to end, are copied, unlike by gather
        return self._padded(cache.view(-1, width).index_select(0, rows).view(sentences, heads, -1, width), capacity)


@dataclass(frozen=True)
class CachedContext:
    """The keys and values that one layer attends to in a step: an `attention.AttentionContext`."""

    cache: KVCache
    layer: int

    def self_attention(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        return cached_attention(query, *self.cache.append(self.layer, key, value), self.cache.self_mask)

    def cross_attention(self, query: Tensor, project: Projection, spec: AttentionSpec) -> Tensor:
        return cached_attention(query, *self.cache.memory_kv[self.layer], self.cache.memory_mask)


def cached_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of the rows of each sentence to its entries: N H K, B H E K, B H E Kv -> N H*Kv.

    `mask`, added to the scores, is BH R E, or BH 1 E, of the type of keys and values, in which the products are taken;
    the softmax is taken in fp32. Plain batched products: with so few queries the fused kernels are slower on a CPU.
    """
    sentences, heads, _, width = keys.shape
    rows = query.unflatten(0, (sentences, -1)).transpose(1, 2)  # B H R K
    rows = rows.to(keys.dtype, memory_format=torch.contiguous_format).flatten(0, 1)
    mask = mask.expand(-1, rows.shape[1], -1)
    scores = torch.baddbmm(mask, rows, keys.flatten(0, 1).transpose(1, 2), alpha=width**-0.5)
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    attended = torch.bmm(weights, values.flatten(0, 1)).unflatten(0, (sentences, heads))  # B H R Kv
    attended = attended.transpose(1, 2).to(query.dtype, memory_format=torch.contiguous_format)
    return attended.reshape(-1, heads * values.shape[-1])
