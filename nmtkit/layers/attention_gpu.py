"""Attention over packed sentences on a GPU, in three ways; `attention.backend` chooses among them by shape.

`varlen_attention`, flash attention over the token axis, needs 16-bit numbers and heads of one width, at most 256.
`flex_attention` takes any power of two, queries and values of unlike width and 32 bits. `padded_attention` takes
everything, dropout on the weights too, for the price of padding and a mask.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

from nmtkit.layers.visibility import attention_mask
from nmtkit.packed import Layout, Packed

# B sentences, T query tokens, S key tokens, L and M tokens of the longest sentence of each, H heads, K width of a query
# or key head, V width of a value head

BLOCK = 128  # tokens in a tile of FlexAttention's mask


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_layout: Layout,
    key_layout: Layout,
    causal: bool,
    window: int | None,
) -> Tensor:
    """T H K, S H K, S H K -> T H K; never looks beyond a sentence, so padding is not even thought of."""
    from torch.nn.attention.varlen import varlen_attn  # its import registers CUDA operators

    offsets = query_layout.cu_seqlens, key_layout.cu_seqlens
    longest = query_layout.max_length, key_layout.max_length
    reach = -1 if window is None else window // 2  # -1: as far as the sentence goes
    attended: Any = varlen_attn(query, key, value, *offsets, *longest, window_size=(reach, 0 if causal else reach))
    return attended


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_layout: Layout,
    key_layout: Layout,
    causal: bool,
    window: int | None,
) -> Tensor:
    """T H K, S H K, S H V -> T H V, as one sentence of T tokens whose mask keeps real sentences apart."""
    mask = document_mask(query_layout, key_layout, causal, window)
    run = flex.flex_attention if torch.compiler.is_compiling() or query.device.type == "cpu" else _compiled_flex()
    one_sentence = (x.transpose(0, 1)[None] for x in (query, key, value))  # 1 H T K
    attended: Any = run(*one_sentence, block_mask=mask)
    return attended[0].transpose(0, 1)


@functools.cache
def _compiled_flex() -> Any:
    """Uncompiled, FlexAttention holds the T x S scores that it is meant to avoid."""
    return torch.compile(flex.flex_attention, dynamic=True)


def document_mask(
    query_layout: Layout, key_layout: Layout, causal: bool, window: int | None, block: int = BLOCK
) -> flex.BlockMask:
    """The mask under which a token sees its own sentence alone.

    The tiles that hold anything are read off the layouts: sentences lie in order, so the keys of a tile of queries run
    from the first key of its first sentence to the last key of its last. (torch's own constructor looks at all T x S.)
    """
    device = query_layout.lengths.device
    sentence, key_sentence = query_layout.segment_ids, key_layout.segment_ids
    position, key_position = query_layout.position_ids, key_layout.position_ids

    def visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        seen = sentence[row] == key_sentence[column]
        if causal:
            seen = seen & (key_position[column] <= position[row])
        if window is not None:
            seen = seen & ((key_position[column] - position[row]).abs() <= window // 2)
        return seen

    tiles, key_tiles = (-(-layout.tokens // block) for layout in (query_layout, key_layout))
    first_row = torch.arange(tiles, device=device) * block
    last_row = (first_row + block - 1).clamp(max=query_layout.tokens - 1)
    first = key_layout.cu_seqlens.long()[sentence[first_row]] // block
    last = (key_layout.cu_seqlens.long()[sentence[last_row] + 1] - 1) // block
    count = last - first + 1
    # the tiles to visit come first; what stands behind them is not read
    order = (first[:, None] + torch.arange(key_tiles, device=device)).clamp(max=key_tiles - 1)
    return flex.BlockMask.from_kv_blocks(
        count.to(torch.int32)[None, None],
        order.to(torch.int32)[None, None],
        BLOCK_SIZE=block,
        mask_mod=visible,
        seq_lengths=(query_layout.tokens, key_layout.tokens),
    )


def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_layout: Layout,
    key_layout: Layout,
    causal: bool,
    window: int | None,
    dropout: float,
) -> Tensor:
    """T H K, S H K, S H V -> T H V, through rectangles and torch's scaled_dot_product_attention."""
    layouts = query_layout, key_layout, key_layout
    pairs = zip((query, key, value), layouts, strict=True)
    q, k, v = (Packed(x, layout).to_padded().transpose(1, 2) for x, layout in pairs)
    visible = attention_mask(query_layout, key_layout, causal, window)
    visible = visible.expand(-1, 1, query_layout.max_length, -1)
    attended = F.scaled_dot_product_attention(q, k, v, visible, dropout, scale=1 / math.sqrt(q.shape[-1]))
    return Packed.from_padded(attended.transpose(1, 2), query_layout).values
