"""Scaled dot-product attention over packed sentences (Vaswani et al. 2017, sections 3.2 and 4)."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.layers.attention_cpu import banded_attention, rectangle_attention
from nmtkit.layers.attention_gpu import flex_attention, padded_attention, varlen_attention
from nmtkit.layers.visibility import attention_mask
from nmtkit.packed import Layout, Packed

# B sentences, T query tokens, S key tokens, L and M tokens of the longest sentence of each, H heads, K width of a
# query or key head, V width of a value head

Backend = Literal["plain", "rectangle", "banded", "varlen", "flex", "padded"]
LONGEST_RECTANGLE = 256
LONGEST_OUTSIDE_BAND = 128
WINDOWS_IN_BAND = 4  # a sentence must be so many windows long to be worth a band


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
    if torch.is_autocast_enabled(query.device.type):  # kernels want one type, whatever sums these come from
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    arguments = query, key, value, query_layout, key_layout, causal, window
    banded = window if query_layout is key_layout else None
    match _backend_of(query, value, max(query_layout.max_length, key_layout.max_length), banded, p):
        case "rectangle":
            return rectangle_attention(*arguments, p)
        case "banded":
            assert window is not None
            return banded_attention(query, key, value, query_layout, causal, window, p)
        case "varlen":
            return varlen_attention(*arguments)
        case "flex":
            return flex_attention(*arguments)
        case "padded":
            return padded_attention(*arguments, p)
    return plain_attention(*arguments, p)


def backend(
    device: str,
    dtype: torch.dtype,
    key_width: int,
    value_width: int,
    longest: int,
    dropout: float,
    *,
    window: int | None = None,
    capability: tuple[int, int] = (0, 0),
    compiling: bool = False,
) -> Backend:
    """The fastest way that takes such heads, in sentences of up to `longest` tokens; `capability` is the CUDA device's.

    `window` is given for self-attention only. On a CPU, products on a rectangle beat torch's kernel on sentences of up
    to about 256 tokens: 12 times at 16 tokens in bf16 and twice in fp32, forward and backward together; at 1,024 they
    take 1.5 times as long, and more memory. A band costs the same at any length; with a window of 32 it draws level
    with them at 128 tokens, and takes a seventh (fp32) or a twelfth (bf16) of the kernel's time at 1,024.
    Flash and flex kernels have no dropout, and need tensor cores of the Ampere generation or later. Flash takes
    16-bit heads of one width up to 256; flex any powers of two, of which more than 128 overflow its shared memory.
    """
    if device == "cpu":
        if compiling:
            return "plain"
        if window is not None and longest > max(LONGEST_OUTSIDE_BAND, WINDOWS_IN_BAND * window - 1):
            return "banded"
        return "rectangle" if dropout or longest <= LONGEST_RECTANGLE else "padded"
    if device != "cuda":
        return "plain"
    if dropout or capability < (8, 0):
        return "padded"
    if dtype in (torch.float16, torch.bfloat16) and key_width == value_width <= 256 and key_width % 8 == 0:
        return "varlen"
    if all(width in (16, 32, 64, 128) for width in (key_width, value_width)):
        return "flex"
    return "padded"


def _backend_of(query: Tensor, value: Tensor, longest: int, window: int | None, dropout: float) -> Backend:
    compiling = torch.compiler.is_compiling()
    capability = _capability(query.device.index) if query.device.type == "cuda" else (0, 0)
    sizes = query.shape[-1], value.shape[-1], longest
    return backend(
        query.device.type, query.dtype, *sizes, dropout, window=window, capability=capability, compiling=compiling
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_layout: Layout,
    key_layout: Layout,
    causal: bool,
    window: int | None,
    dropout: float,
) -> Tensor:
    """The reference of `attention`: padded, with a mask, in torch's own operations."""
    weights = attention_weights(query, key, query_layout, key_layout, causal=causal, window=window)
    weights = F.dropout(weights, dropout).to(value.dtype)
    attended = weights @ Packed(value, key_layout).to_padded().transpose(1, 2)  # B H L V
    return Packed.from_padded(attended.transpose(1, 2), query_layout).values


def attention_weights(
    query: Tensor, key: Tensor, query_layout: Layout, key_layout: Layout, *, causal: bool, window: int | None
) -> Tensor:
    """The softmax of `attention` as a rectangle, B H L M; rows beyond a sentence's end have no meaning."""
    queries = Packed(query, query_layout).to_padded().transpose(1, 2)  # B H L K
    keys = Packed(key, key_layout).to_padded().transpose(1, 2)
    scores = queries @ keys.transpose(-2, -1) / math.sqrt(query.shape[-1])
    visible = attention_mask(query_layout, key_layout, causal, window)
    return scores.masked_fill(~visible, -math.inf).softmax(-1)


def attend_one(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attention of a few queries per row over cached keys, as a search step wants it.

    query R Q H K, keys R M H K, values R M H V, visible (which keys) R M -> R Q H V.
    """
    scores = torch.einsum("rqhk,rmhk->rhqm", query, keys) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~visible[:, None, None], -math.inf).softmax(-1)
    return torch.einsum("rhqm,rmhv->rqhv", weights.to(values.dtype), values)
