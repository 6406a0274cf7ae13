"""Attention on a CPU: batched products with a hand-written backward pass, or blocks of the token axis for windows.

Before the products, one copy pads the sentences and separates the heads: T H K -> BH L K. After the products, one copy
restores the layout T H K. Keys are padded to a multiple of 16, because vector instructions compute 16 columns of a
softmax at once (a softmax over 15 columns takes 11 times as long as over 16 columns). The softmax is computed in fp32.
The products are computed in the dtype of the projections.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.data.packed import Layout
from nmtkit.models.layers.attention_reference import AttentionSpec, attention_mask
from nmtkit.models.layers.dropout import dropout, dropped, noise_for
from nmtkit.models.layers.shape_padding import padded_size

# B sentences, T query tokens, S key tokens, L and M tokens of the longest query and key sentence (M rounded up to a
# multiple of 16), H heads, K width of a query or key head, Kv width of a value head

KEY_MULTIPLE = 16
QUERY_MULTIPLE = 4
SENTENCE_STEPS = 16  # number of allowed batch sizes between two powers of 2
MIN_BLOCK = 16  # minimum tokens of a block; smaller blocks are not faster


def bmm_attention(
    query: Tensor, key: Tensor, value: Tensor, query_layout: Layout, key_layout: Layout, spec: AttentionSpec
) -> Tensor:
    """Computes attention as batched products on padded sentences: T H K, S H K, S H Kv -> T H Kv.

    Input rows after the last token are ignored. The result has zeros in these rows.
    """
    sentences, length = query_layout.sentences, query_layout.max_length
    if query.dtype == torch.bfloat16 and torch.is_grad_enabled():  # limits the number of shapes, as in `shape_padding`
        sentences = padded_size(sentences, SENTENCE_STEPS)
        length += -length % QUERY_MULTIPLE
    name = "bias", spec.causal, spec.window, query_layout.max_length, sentences, length
    bias = key_layout.derived(name, lambda: _bias(query_layout, key_layout, spec, sentences, length))
    mask = query_layout.derived(("query mask", sentences, length), lambda: _query_mask(query_layout, sentences, length))
    arguments = query, key, value, bias, mask, query_layout, key_layout, spec.dropout
    return _BmmAttention.apply(*arguments)  # type: ignore[no-untyped-call]


class _BmmAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        mask: Tensor | None,
        query_layout: Layout,
        key_layout: Layout,
        p: float,
    ) -> Tensor:
        heads = query.shape[1]
        sentences, _, length, key_length = bias.shape
        q = _to_padded(query, query_layout, sentences, length)  # BH L K
        k, v = (_to_padded(x, key_layout, sentences, key_length) for x in (key, value))
        scale = 1 / math.sqrt(q.shape[-1])
        scores = torch.bmm(q, k.transpose(1, 2)).float().unflatten(0, (-1, heads))  # B H L M
        weights = torch.softmax(scores.mul_(scale).add_(bias), -1)
        if mask is not None:
            weights.mul_(mask)  # zero for queries beyond the end of a sentence, which then get no gradient
        noise = noise_for(weights) if p else None
        attended = torch.bmm((dropped(weights, noise, p) if p else weights).flatten(0, 1).to(v.dtype), v)  # BH L Kv
        ctx.save_for_backward(q, k, v, weights, noise)
        ctx.layouts, ctx.rows = (query_layout, key_layout), (len(query), len(key))
        ctx.scale, ctx.p = scale, p
        return _to_packed(attended, query_layout, heads, len(query))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        q, k, v, weights, noise = ctx.saved_tensors
        query_layout, key_layout = ctx.layouts
        heads, dtype = weights.shape[1], v.dtype
        attended_gradient = _to_padded(gradient, query_layout, len(weights), q.shape[1])
        used = dropped(weights, noise, ctx.p)
        value_gradient = torch.bmm(used.flatten(0, 1).to(dtype).transpose(1, 2), attended_gradient)
        weights_gradient = torch.bmm(attended_gradient, v.transpose(1, 2)).float().view_as(weights)
        weights_gradient = dropped(weights_gradient, noise, ctx.p)
        scores_gradient = torch._softmax_backward_data(weights_gradient, weights, -1, torch.float32)
        scores_gradient = scores_gradient.mul_(ctx.scale).to(dtype).flatten(0, 1)
        query_gradient, key_gradient = torch.bmm(scores_gradient, k), torch.bmm(scores_gradient.transpose(1, 2), q)
        query_rows, key_rows = ctx.rows
        gradients = (_to_packed(x, key_layout, heads, key_rows) for x in (key_gradient, value_gradient))
        return _to_packed(query_gradient, query_layout, heads, query_rows), *gradients, None, None, None, None, None


def sliding_window_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, key_layout: Layout, spec: AttentionSpec
) -> Tensor:
    """Computes self-attention in a window (Vaswani et al. 2017, section 4): T H K, T H K, T H Kv -> T H Kv.

    The token axis is cut into blocks of at least half a window. Each block is multiplied with its own keys and with the
    keys of the blocks before and after. The tokens of a sentence are contiguous, so their distance in the sentence
    equals their distance on the token axis.
    """
    assert layout is key_layout and spec.window is not None
    block = max(spec.window // 2, MIN_BLOCK)
    bias = layout.derived(("window bias", spec.causal, spec.window), lambda: _window_bias(layout, spec, block))
    k, v = (_with_neighbours(_blocks(x, block), spec.causal) for x in (key, value))  # blocks H keys K
    scores = (_blocks(query, block) @ k.transpose(2, 3)).float() / math.sqrt(key.shape[-1])
    weights = dropout((scores + bias).softmax(-1), spec.dropout)
    return (weights.to(v.dtype) @ v).transpose(1, 2).flatten(0, 1)[: layout.tokens]


def _blocks(x: Tensor, block: int) -> Tensor:
    """Cuts T H K into blocks H block K, with zeros after the last token."""
    return F.pad(x, (0, 0, 0, 0, 0, -len(x) % block)).unflatten(0, (-1, block)).transpose(1, 2)


def _with_neighbours(blocks: Tensor, causal: bool, beyond: int = 0) -> Tensor:
    """Joins each block with the previous and, unless causal, the next block: blocks H block K -> blocks H keys K.

    Blocks before the first block and after the last block are filled with `beyond`.
    """
    padded = F.pad(blocks, (0, 0, 0, 0, 0, 0, 1, 0 if causal else 1), value=beyond)
    return torch.cat([padded[first : first + len(blocks)] for first in range(2 if causal else 3)], 2)


def _window_bias(layout: Layout, spec: AttentionSpec, block: int) -> Tensor:
    """Returns the mask to add to scores, 0 where a query sees a key, else -inf: blocks 1 block keys."""
    assert spec.window is not None
    # rows after the last token count as a separate sentence, so that their softmax is finite
    segment_ids = _blocks(F.pad(layout.segment_ids, (0, -layout.tokens % block), value=-1)[:, None, None], block)
    key_segment_ids = _with_neighbours(segment_ids, spec.causal, beyond=-2).transpose(2, 3)  # blocks 1 1 keys
    distance = torch.arange(key_segment_ids.shape[3]) - block - torch.arange(block)[:, None]
    near = distance.abs() <= spec.window // 2
    if spec.causal:
        near &= distance <= 0
    return _additive((segment_ids == key_segment_ids) & near)


def _bias(query_layout: Layout, key_layout: Layout, spec: AttentionSpec, sentences: int, length: int) -> Tensor:
    """Returns the mask to add to scores, 0 where a query sees a key and -inf elsewhere: B 1 L M.

    The mask has a separate row for each query even if all rows are equal, because broadcasting a row of 16 keys is
    slow. `sentences` and `length` are B and L with padding. Padding queries see all keys, because a softmax over no key
    would be NaN.
    """
    visible = attention_mask(query_layout, key_layout, spec).expand(-1, 1, query_layout.max_length, -1)
    bias = _additive(F.pad(visible, (0, -key_layout.max_length % KEY_MULTIPLE)))
    return F.pad(bias, (0, 0, 0, length - bias.shape[2], 0, 0, 0, sentences - len(bias)))


def _query_mask(layout: Layout, sentences: int, length: int) -> Tensor | None:
    """Returns a mask that is 1 for queries and 0 for padding, B 1 L 1, or None without padding."""
    mask = F.pad(layout.mask, (0, length - layout.max_length, 0, sentences - layout.sentences))
    return None if bool(mask.all()) else mask[:, None, :, None].float()


def _additive(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, -math.inf)


def _to_padded(x: Tensor, layout: Layout, sentences: int, length: int) -> Tensor:
    """Pads T H K to BH length K. Padding repeats the last token of a sentence. Padding sentences repeat x[0]."""
    heads, width = x.shape[1:]
    if x.stride(2) != 1 or x.stride(1) != width or x.stride(0) % width:
        x = x.contiguous()
    stride = x.stride(0) // width  # distance between successive tokens, counted in heads
    rows = x.as_strided(((len(x) - 1) * stride + heads, width), (width, 1))

    def compute() -> Tensor:
        column = torch.minimum(torch.arange(length), layout.lengths[:, None] - 1)
        token = F.pad(layout.cu_seqlens[:-1, None] + column, (0, 0, 0, sentences - layout.sentences))  # B length
        return (token[:, None] * stride + torch.arange(heads)[:, None]).flatten()  # B H length

    index = layout.derived(("pad heads", heads, stride, sentences, length), compute)
    return rows.index_select(0, index).unflatten(0, (-1, length))


def _to_packed(x: Tensor, layout: Layout, heads: int, rows: int) -> Tensor:
    """Packs BH length K as T H K, and appends rows of zeros up to `rows` rows."""
    length, width = x.shape[1:]

    def compute() -> Tensor:
        row = layout.segment_ids[:, None] * heads + torch.arange(heads)  # T H
        index = (row * length + layout.position_ids[:, None]).flatten()
        return F.pad(index, (0, (rows - layout.tokens) * heads))

    index = layout.derived(("unpad heads", heads, length, rows), compute)
    packed = x.reshape(-1, width).index_select(0, index).unflatten(0, (-1, heads))
    packed[layout.tokens :] = 0
    return packed
