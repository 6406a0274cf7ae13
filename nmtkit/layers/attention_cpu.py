"""Attention on a CPU: of short sentences on a rectangle, with a backward pass by hand; of narrow windows in a band.

Heads are gathered straight from the packed projections into B H L K, one copy each way; keys are padded to a multiple
of 16, since a softmax over fewer leaves the vector units (11 times slower at 15 columns than at 16); the softmax is
taken in 32 bits, the products in the type of the projections.
"""

import math
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.layers.dropout import dropout as dropped
from nmtkit.layers.dropout import keep_mask, keep_scale
from nmtkit.layers.visibility import attention_mask
from nmtkit.packed import Layout

# B sentences, T query tokens, S key tokens, L and M tokens of the longest sentence of each (M rounded up to a multiple
# of 16), H heads, K width of a query or key head, V width of a value head

# N blocks of P tokens, of the token axis whatever the sentences, and W keys in a block and its neighbours

KEY_MULTIPLE = 16
LEAST_BLOCK = 16  # smaller products cost as much


def rectangle_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_layout: Layout,
    key_layout: Layout,
    causal: bool,
    window: int | None,
    dropout: float,
) -> Tensor:
    """What `attention.attention` computes: T H K, S H K, S H V -> T H V."""
    other = None if key_layout is query_layout else key_layout  # a layout that its own memory held would never go
    name = ("bias", other, causal, window)
    bias = _remembered(query_layout, name, lambda: _bias(query_layout, key_layout, causal, window))
    arguments = query, key, value, bias, query_layout, key_layout, dropout
    return _RectangleAttention.apply(*arguments)  # type: ignore[no-untyped-call]


class _RectangleAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, query_layout: Layout, key_layout: Layout, p: float
    ) -> Tensor:
        heads = query.shape[1]
        q = _to_rectangle(query, query_layout, query_layout.max_length)  # BH L K
        k, v = (_to_rectangle(x, key_layout, bias.shape[-1]) for x in (key, value))
        scale = 1 / math.sqrt(q.shape[-1])
        scores = torch.bmm(q, k.transpose(1, 2)).float().unflatten(0, (-1, heads))  # B H L M
        weights = torch.softmax(scores.mul_(scale).add_(bias), -1)
        if not query_layout.uniform:
            weights.mul_(query_layout.mask[:, None, :, None])  # so that queries beyond the end have no gradient
        kept = (keep_mask(weights, p) < 0).float().mul_(keep_scale(p)) if p else None
        used = weights if kept is None else weights * kept
        attended = torch.bmm(used.flatten(0, 1).to(v.dtype), v)  # BH L V
        ctx.save_for_backward(q, k, v, weights, kept)
        ctx.layouts, ctx.scale = (query_layout, key_layout), scale
        return _to_packed(attended, query_layout, heads)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        q, k, v, weights, kept = ctx.saved_tensors
        query_layout, key_layout = ctx.layouts
        heads, dtype = weights.shape[1], v.dtype
        attended = _to_rectangle(gradient, query_layout, q.shape[1])
        used = weights if kept is None else weights * kept
        value = torch.bmm(used.flatten(0, 1).to(dtype).transpose(1, 2), attended)
        of_weights = torch.bmm(attended, v.transpose(1, 2)).float().view_as(weights)
        if kept is not None:
            of_weights.mul_(kept)
        scores = torch._softmax_backward_data(of_weights, weights, -1, torch.float32)
        scores = scores.mul_(ctx.scale).to(dtype).flatten(0, 1)
        query, key = torch.bmm(scores, k), torch.bmm(scores.transpose(1, 2), q)
        packed = _to_packed(query, query_layout, heads), *(_to_packed(x, key_layout, heads) for x in (key, value))
        return *packed, None, None, None, None


def banded_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, causal: bool, window: int, dropout: float
) -> Tensor:
    """Self-attention of a neighbourhood (Vaswani et al. 2017, section 4): T H K, T H K, T H V -> T H V.

    The token axis is cut into blocks no shorter than a neighbourhood's half, and each is multiplied with the keys of
    itself and its neighbours alone: sentences lie end to end, so a distance in a sentence is one on the axis too.
    """
    block = max(window // 2, LEAST_BLOCK)
    bias = _remembered(layout, ("band", causal, window), lambda: _band(layout, causal, window, block))
    k, v = (_with_neighbours(_blocks(x, block), causal) for x in (key, value))  # N H W K
    scores = (_blocks(query, block) @ k.transpose(2, 3)).float() / math.sqrt(key.shape[-1])
    weights = dropped((scores + bias).softmax(-1), dropout)
    return (weights.to(v.dtype) @ v).transpose(1, 2).flatten(0, 1)[: layout.tokens]


def _blocks(x: Tensor, block: int) -> Tensor:
    """T H K -> N H P K; zero behind the last token."""
    return F.pad(x, (0, 0, 0, 0, 0, -len(x) % block)).unflatten(0, (-1, block)).transpose(1, 2)


def _with_neighbours(blocks: Tensor, causal: bool, beyond: int = 0) -> Tensor:
    """Each block behind the one before it and, unless causal, before the next: N H P K -> N H W K."""
    padded = F.pad(blocks, (0, 0, 0, 0, 0, 0, 1, 0 if causal else 1), value=beyond)
    return torch.cat([padded[first : first + len(blocks)] for first in range(2 if causal else 3)], 2)


def _band(layout: Layout, causal: bool, window: int, block: int) -> Tensor:
    """What is added to scores: 0 where a query may look, -inf elsewhere: N 1 P W."""
    sentence = F.pad(
        layout.segment_ids, (0, -layout.tokens % block), value=-1
    )  # rows behind the last token: a sentence
    own = _blocks(sentence[:, None, None], block)
    seen = _with_neighbours(own, causal, beyond=-2).transpose(2, 3)  # N 1 1 W
    distance = torch.arange(seen.shape[3]) - block - torch.arange(block)[:, None]
    near = distance.abs() <= window // 2
    if causal:
        near &= distance <= 0
    visible = (own == seen) & near
    return torch.zeros(visible.shape).masked_fill_(~visible, -math.inf)


def _bias(query_layout: Layout, key_layout: Layout, causal: bool, window: int | None) -> Tensor:
    """What is added to scores: 0 where a query may look, -inf elsewhere: B 1 L M."""
    visible = attention_mask(query_layout, key_layout, causal, window).expand(-1, 1, query_layout.max_length, -1)
    visible = F.pad(visible, (0, -key_layout.max_length % KEY_MULTIPLE))
    return torch.zeros(visible.shape).masked_fill_(~visible, -math.inf)


def _to_rectangle(x: Tensor, layout: Layout, width: int) -> Tensor:
    """Packed heads T H K as BH width K; beyond a sentence's end its last token again."""
    heads, size = x.shape[1:]
    if x.stride(2) != 1 or x.stride(1) != size or x.stride(0) % size:
        x = x.contiguous()
    step = x.stride(0) // size  # heads lie at multiples of their width, here this many to a token
    rows = x.as_strided(((len(x) - 1) * step + heads, size), (size, 1))
    index = _remembered(layout, ("to", heads, step, width), lambda: _rectangle_index(layout, heads, step, width))
    return rows.index_select(0, index).unflatten(0, (-1, width))


def _rectangle_index(layout: Layout, heads: int, step: int, width: int) -> Tensor:
    column = torch.minimum(torch.arange(width), layout.lengths[:, None] - 1)
    token = layout.cu_seqlens[:-1, None] + column  # B width
    return (token[:, None] * step + torch.arange(heads)[:, None]).flatten()  # B H width


def _to_packed(x: Tensor, layout: Layout, heads: int) -> Tensor:
    """The inverse: BH width K as T H K."""
    width, size = x.shape[1:]
    index = _remembered(layout, ("from", heads, width), lambda: _packed_index(layout, heads, width))
    return x.reshape(-1, size).index_select(0, index).unflatten(0, (-1, heads))


def _packed_index(layout: Layout, heads: int, width: int) -> Tensor:
    row = layout.segment_ids[:, None] * heads + torch.arange(heads)  # T H
    return (row * width + layout.position_ids[:, None]).flatten()


_memory: weakref.WeakKeyDictionary[Layout, dict[object, Tensor]] = weakref.WeakKeyDictionary()


def _remembered(layout: Layout, key: object, make: Callable[[], Tensor]) -> Tensor:
    """Index tensors are the same for every layer, so they are kept for as long as their layout lives."""
    kept = _memory.setdefault(layout, {})
    if key not in kept:
        kept[key] = make()
    return kept[key]
