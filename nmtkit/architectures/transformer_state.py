"""What a Transformer carries from step to step of a search."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.architectures.interface import DecoderState
from nmtkit.layers.kv_cache import KVCache, rounded
from nmtkit.packed import Packed

# B sentences, M memory tokens of the longest, rounded up, H heads, K width of a key head, V width of a value head,
# N = B x beams rows of a search, E entries of the cache of a sentence

Projection = Callable[[Tensor], tuple[Tensor, Tensor]]  # memory S D -> keys S H K, values S H V


class TransformerState(DecoderState):
    """Keys and values of the tokens so far of every hypothesis, and of the memory once for each sentence.

    `projections` are the cross-attention's of each layer; `dtype` is what keys and values are kept in.
    """

    def __init__(
        self,
        memory: Packed,
        beams: int,
        projections: Sequence[Projection],
        heads: int,
        window: int | None,
        dtype: torch.dtype,
    ) -> None:
        self.beams, self.projections, self.heads, self.window = beams, projections, heads, window
        self.cache = KVCache(memory.layout.sentences, beams, memory.values.device, dtype)
        self.cross = self.project(memory, rounded(memory.layout.max_length))  # of each layer, B H M K and B H M V
        self.memory_mask = self.mask_of(memory, rounded(memory.layout.max_length))  # B*H 1 M
        self.own_mask = self.memory_mask  # B*H Q E, of the step under way
        self.longest = 0  # tokens of the oldest sentence

    @property
    def rows(self) -> int:
        """N."""
        return len(self.cache.mask) * self.beams

    def advance(self, tokens: Tensor) -> tuple[Tensor, Tensor, int]:
        """Begins the step of `tokens` N: the tokens to step with, as KVCache.advance says, their positions, and
        the tokens of the oldest sentence.
        """
        self.longest += 1
        tokens = self.cache.advance(tokens)
        position = self.cache.position.repeat_interleave(self.cache.new)
        self.own_mask = self.cache.visible(self.window)[:, None].expand(-1, self.heads, -1, -1).flatten(0, 1)
        return tokens, position, self.longest

    def project(self, memory: Packed, width: int) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values, B H width …, zero beyond a sentence's end."""
        projected = (project(memory.values) for project in self.projections)
        return [
            (self.padded_heads(memory.with_values(key), width), self.padded_heads(memory.with_values(value), width))
            for key, value in projected
        ]

    def padded_heads(self, heads: Packed, width: int) -> Tensor:
        """S H K as B H width K."""
        x = heads.to_padded().transpose(1, 2)
        whole = x.new_zeros(*x.shape[:2], width, x.shape[3], dtype=self.cache.mask.dtype)
        whole[:, :, : x.shape[2]] = x
        return whole

    def mask_of(self, memory: Packed, width: int) -> Tensor:
        """What to add to scores: 0 where a sentence has a token, -inf elsewhere: B*H 1 width."""
        valid = F.pad(memory.layout.mask, (0, width - memory.layout.max_length))
        mask = torch.zeros(valid.shape, device=valid.device, dtype=self.cache.mask.dtype)
        return mask.masked_fill_(~valid, -math.inf).repeat_interleave(self.heads, 0)[:, None]

    def reorder(self, beam_index: Tensor) -> None:
        self.cache.reorder(beam_index)

    def drop_finished(self, sentences: Tensor) -> None:
        self.cache.drop_finished(sentences)
        self.cross = [(key[sentences], value[sentences]) for key, value in self.cross]
        self.memory_mask = self.memory_mask.unflatten(0, (-1, self.heads))[sentences].flatten(0, 1)

    def insert(self, slots: Tensor, memory: Packed) -> None:
        width = max(rounded(memory.layout.max_length), self.memory_mask.shape[2])
        wider = width - self.memory_mask.shape[2]
        by_sentence = F.pad(self.memory_mask, (0, wider), value=-math.inf).unflatten(0, (-1, self.heads))
        by_sentence[slots] = self.mask_of(memory, width).unflatten(0, (-1, self.heads))
        self.memory_mask = by_sentence.flatten(0, 1)
        self.cross = [
            (F.pad(key, (0, 0, 0, wider)).index_copy(0, slots, new_key),
             F.pad(value, (0, 0, 0, wider)).index_copy(0, slots, new_value))
            for (key, value), (new_key, new_value) in zip(self.cross, self.project(memory, width), strict=True)
        ]  # fmt: skip
        self.cache.reset(slots)
