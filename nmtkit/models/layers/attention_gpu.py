"""Attention over packed sentences with two fused kernels of torch. `attention.backend` chooses the kernel."""

import math
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from nmtkit.data.packed import Layout, Packed
from nmtkit.models.layers.attention_reference import AttentionSpec, attention_mask

# T query tokens, S key tokens, L query tokens of the longest sentence, M key tokens of the longest sentence, H heads,
# K width of a query or key head, Kv width of a value head

WIDTH_MULTIPLE, MAX_WIDTH = 8, 256  # widths of a head in flash attention


def varlen_width(key_width: int, value_width: int) -> int:
    """Returns the width to which `varlen_attention` pads the heads of queries, keys and values."""
    return -(-max(key_width, value_width) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, query_layout: Layout, key_layout: Layout, spec: AttentionSpec
) -> Tensor:
    """Computes flash attention on the token axis, in 16 bits and without dropout: T H K, S H K, S H Kv -> T H Kv.

    The kernel stays within each sentence, so sentences need no padding. All heads must have the same width: narrower
    heads are padded with zeros, which do not change the scores or the result.
    """
    from torch.nn.attention.varlen import varlen_attn  # imported here, because the import registers CUDA operators

    width, value_width, scale = varlen_width(key.shape[-1], value.shape[-1]), value.shape[-1], key.shape[-1] ** -0.5
    query, key, value = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    bounds = query_layout.cu_seqlens, key_layout.cu_seqlens, query_layout.max_length, key_layout.max_length
    radius = -1 if spec.window is None else spec.window // 2  # -1: the whole sentence
    window = radius, 0 if spec.causal else radius
    attended: Any = varlen_attn(query, key, value, *bounds, scale=scale, window_size=window)
    return attended[..., :value_width]


def sdpa_attention(
    query: Tensor, key: Tensor, value: Tensor, query_layout: Layout, key_layout: Layout, spec: AttentionSpec
) -> Tensor:
    """Computes scaled_dot_product_attention of torch on padded sentences: T H K, S H K, S H Kv -> T H Kv.

    The kernel supports every dtype, width and dropout, but needs padding and a mask.
    """
    layouts = query_layout, key_layout, key_layout
    pairs = zip((query, key, value), layouts, strict=True)
    q, k, v = (Packed(x, layout).to_padded().transpose(1, 2) for x, layout in pairs)  # B H L K, B H M K, B H M Kv
    mask = attention_mask(query_layout, key_layout, spec).expand(-1, 1, query_layout.max_length, -1)
    attended = F.scaled_dot_product_attention(q, k, v, mask, spec.dropout, scale=1 / math.sqrt(q.shape[-1]))
    return Packed.from_padded(attended.transpose(1, 2), query_layout).values
