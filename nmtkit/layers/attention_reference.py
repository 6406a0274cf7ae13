"""Attention in torch's own operations, padded and with a mask: the reference of every faster backend."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.layers.packed import Layout, Packed

# B sentences, T query tokens, S key tokens, L and M tokens of the longest sentence of each, H heads, K width of a
# query or key head, Kv width of a value head


@dataclass(frozen=True)
class AttentionSpec:
    """How queries attend to keys; every backend takes one.

    `causal` lets a query see the keys up to its own position, `window` only those of the neighbourhood of that size
    around it, |i - j| <= window // 2 (Vaswani et al. 2017, section 4). `dropout` falls on the weights, whatever the
    mode.
    """

    causal: bool = False
    window: int | None = None
    dropout: float = 0.0


FULL_ATTENTION = AttentionSpec()


def attention_mask(query_layout: Layout, key_layout: Layout, spec: AttentionSpec) -> Tensor:
    """Returns which keys each query sees, True where it does: B 1 1 M or B 1 L M, bool."""
    visible = key_layout.mask[:, None, None, :]
    if spec.causal or spec.window is not None:
        device = visible.device
        rows = torch.arange(query_layout.max_length, device=device)[:, None]
        columns = torch.arange(key_layout.max_length, device=device)
        # a query beyond its sentence's end sees some key too, since a softmax over no key is NaN
        rows = torch.minimum(rows, (key_layout.lengths - 1)[:, None, None, None])
        if spec.causal:
            visible = visible & (columns <= rows)
        if spec.window is not None:
            visible = visible & ((columns - rows).abs() <= spec.window // 2)
    return visible


def attention_weights(
    query: Tensor, key: Tensor, query_layout: Layout, key_layout: Layout, spec: AttentionSpec = FULL_ATTENTION
) -> Tensor:
    """Returns softmax(Q K^T / sqrt(K)), before dropout: T H K, S H K -> B H L M.

    Rows beyond a sentence's end have no meaning.
    """
    queries = Packed(query, query_layout).to_padded().transpose(1, 2)  # B H L K
    keys = Packed(key, key_layout).to_padded().transpose(1, 2)
    scores = queries @ keys.transpose(-2, -1) / math.sqrt(query.shape[-1])
    return scores.masked_fill(~attention_mask(query_layout, key_layout, spec), -math.inf).softmax(-1)


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, query_layout: Layout, key_layout: Layout, spec: AttentionSpec
) -> Tensor:
    """As `attention.attention`: T H K, S H K, S H Kv -> T H Kv."""
    weights = attention_weights(query, key, query_layout, key_layout, spec)
    weights = F.dropout(weights, spec.dropout).to(value.dtype)
    attended = weights @ Packed(value, key_layout).to_padded().transpose(1, 2)  # B H L Kv
    return Packed.from_padded(attended.transpose(1, 2), query_layout).values
