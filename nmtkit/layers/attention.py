"""Scaled dot-product attention over packed sentences (Vaswani et al. 2017, sections 3.2 and 4)."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.layers.attention_cpu import rectangle_attention
from nmtkit.packed import Layout, Packed

# B sentences, T query tokens, S key tokens, L and M tokens of the longest sentence of each, H heads, K width of a
# query or key head, V width of a value head


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_layout: Layout,
    key_layout: Layout,
    *,
    causal: bool = False,
    window: int | None = None,
    dropout: float = 0.0,
    training: bool = False,
) -> Tensor:
    """softmax(Q K^T / sqrt(K)) V within each sentence and head: T H K, S H K, S H V -> T H V.

    `causal` lets a query see the keys up to its own position; `window` r only those of the neighbourhood of size r
    around it, |i - j| <= r // 2. `dropout` falls on the weights, while training.
    """
    p = dropout if training else 0.0
    if query.device.type == "cpu" and not torch.compiler.is_compiling():
        return rectangle_attention(query, key, value, query_layout, key_layout, causal, window, p)
    options: Any = {"causal": causal, "window": window, "dropout": dropout, "training": training}
    return plain_attention(query, key, value, query_layout, key_layout, **options)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_layout: Layout,
    key_layout: Layout,
    *,
    causal: bool = False,
    window: int | None = None,
    dropout: float = 0.0,
    training: bool = False,
) -> Tensor:
    """The reference of `attention`: padded, with a mask, in torch's own operations."""
    weights = attention_weights(query, key, query_layout, key_layout, causal=causal, window=window)
    weights = F.dropout(weights, dropout, training).to(value.dtype)
    attended = weights @ Packed(value, key_layout).rectangle().transpose(1, 2)  # B H L V
    return Packed.from_rectangle(attended.transpose(1, 2), query_layout).values


def attention_weights(
    query: Tensor, key: Tensor, query_layout: Layout, key_layout: Layout, *, causal: bool, window: int | None
) -> Tensor:
    """The softmax of `attention` as a rectangle, B H L M; rows beyond a sentence's end have no meaning."""
    queries = Packed(query, query_layout).rectangle().transpose(1, 2)  # B H L K
    keys = Packed(key, key_layout).rectangle().transpose(1, 2)
    scores = queries @ keys.transpose(-2, -1) / math.sqrt(query.shape[-1])
    visible = visible_keys(query_layout, key_layout, causal, window)
    return scores.masked_fill(~visible, -math.inf).softmax(-1)


def visible_keys(query_layout: Layout, key_layout: Layout, causal: bool, window: int | None) -> Tensor:
    """Which keys each query may see: bool, broadcasts to B H L M."""
    visible = key_layout.valid[:, None, None, :]
    if causal or window is not None:
        device = visible.device
        rows = torch.arange(query_layout.max_length, device=device)[:, None]
        columns = torch.arange(key_layout.max_length, device=device)
        # a query beyond its sentence's end must see some key, lest its softmax be 0 / 0
        ends = (key_layout.lengths - 1)[:, None, None, None]
        rows = torch.minimum(rows, ends)
        if causal:
            visible = visible & (columns <= rows)
        if window is not None:
            visible = visible & ((columns - rows).abs() <= window // 2)
    return visible


def attend_one(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attention of a few queries per row over cached keys, as a search step wants it.

    query R Q H K, keys R M H K, values R M H V, visible (which keys) R M -> R Q H V.
    """
    scores = torch.einsum("rqhk,rmhk->rhqm", query, keys) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~visible[:, None, None], -math.inf).softmax(-1)
    return torch.einsum("rhqm,rmhv->rqhv", weights.to(values.dtype), values)
