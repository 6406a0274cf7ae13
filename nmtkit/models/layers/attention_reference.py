"""Attention in basic operations of torch, on padded sentences with a mask: the reference for faster backends."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.data.packed import Layout, Packed
from nmtkit.models.layers.relative_positions import PositionTerms

# B sentences, T query tokens, S key tokens, L and M tokens of the longest query and key sentence, H heads, K width of a
# query or key head, Kv width of a value head


@dataclass(frozen=True)
class AttentionSpec:
    """The variant of attention that a backend computes.

    With `causal`, a query sees the keys up to its own position. With `window`, it sees the keys at a distance of at
    most window // 2 (Vaswani et al. 2017, section 4). `dropout` is the dropout probability of the attention weights; it
    also applies in evaluation mode. `position_terms` are added to scores and to attended values.
    """

    causal: bool = False
    window: int | None = None
    dropout: float = 0.0
    position_terms: PositionTerms | None = None


FULL_ATTENTION = AttentionSpec()


# a function like `HeadSplit`, from a stacked projection to heads: (queries, keys, values) or (keys, values)
SplitHeads = Callable[[Tensor], tuple[Tensor, ...]]


class HeadSplit:
    """Splits the output of a stacked projection into its parts, and each part into heads: T H*(K+…) -> T H K, …

    The parts are queries, keys and values, or keys and values. `heads` has the number of heads of each part, and
    `widths` has the width of a head of each part.
    """

    def __init__(self, heads: Sequence[int], widths: Sequence[int]) -> None:
        self.widths, self.sizes = widths, [number * width for number, width in zip(heads, widths, strict=True)]

    def __call__(self, projected: Tensor) -> tuple[Tensor, ...]:
        parts = zip(projected.split(self.sizes, -1), self.widths, strict=True)
        return tuple(part.unflatten(-1, (-1, width)) for part, width in parts)


def attention_mask(query_layout: Layout, key_layout: Layout, spec: AttentionSpec) -> Tensor:
    """Returns a mask that is True where a query sees a key: B 1 1 M or B 1 L M, bool."""
    visible = key_layout.mask[:, None, None, :]
    if spec.causal or spec.window is not None:
        device = visible.device
        rows = torch.arange(query_layout.max_length, device=device)[:, None]
        columns = torch.arange(key_layout.max_length, device=device)
        # a query beyond the end of its sentence must see a key, because a softmax over no key is NaN
        rows = torch.minimum(rows, (key_layout.lengths - 1)[:, None, None, None])
        if spec.causal:
            visible = visible & (columns <= rows)
        if spec.window is not None:
            visible = visible & ((columns - rows).abs() <= spec.window // 2)
    return visible


def distances(query_layout: Layout, key_layout: Layout) -> Tensor:
    """Returns the position of each key minus the position of each query: L M."""
    device = query_layout.lengths.device
    keys, queries = (torch.arange(x.max_length, device=device) for x in (key_layout, query_layout))
    return keys - queries[:, None]


def attention_weights(
    query: Tensor, key: Tensor, query_layout: Layout, key_layout: Layout, spec: AttentionSpec = FULL_ATTENTION
) -> Tensor:
    """Returns the attention weights before dropout: T H K, S H K -> B H L M.

    The weights are the softmax of the products of queries and keys, divided by sqrt(width), over the visible keys. The
    terms of `spec.position_terms` are added before the softmax. Rows beyond the end of a sentence are undefined.
    """
    queries = Packed(query, query_layout).to_padded().transpose(1, 2)  # B H L K
    keys = Packed(key, key_layout).to_padded().transpose(1, 2)
    scores = queries @ keys.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if spec.position_terms is not None:
        scores = scores + spec.position_terms.scores(queries, distances(query_layout, key_layout))
    return scores.masked_fill(~attention_mask(query_layout, key_layout, spec), -math.inf).softmax(-1)


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, query_layout: Layout, key_layout: Layout, spec: AttentionSpec
) -> Tensor:
    """Computes the same as `attention.attention` for any input: T H K, S H K, S H Kv -> T H Kv."""
    weights = attention_weights(query, key, query_layout, key_layout, spec)
    weights = F.dropout(weights, spec.dropout).to(value.dtype)
    attended = weights @ Packed(value, key_layout).to_padded().transpose(1, 2)  # B H L Kv
    if spec.position_terms is not None:
        terms = spec.position_terms.values(weights, distances(query_layout, key_layout))
        attended = attended if terms is None else attended + terms
    return Packed.from_padded(attended.transpose(1, 2), query_layout).values
