"""Scaled dot-product attention (Vaswani et al. 2017, sections 3.2 and 4).

`attention` chooses the fastest backend for its input. An `AttentionContext` provides the keys and values that the
attention of a layer attends to.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.data.packed import Layout, Packed
from nmtkit.models.layers.attention_cpu import bmm_attention, sliding_window_attention
from nmtkit.models.layers.attention_reference import (
    FULL_ATTENTION,
    AttentionSpec,
    SplitHeads,
    attention_mask,
    attention_weights,
    reference_attention,
)
from nmtkit.models.layers.convolution import packed_convolution
from nmtkit.models.layers.dropout import MAX_P
from nmtkit.models.layers.scan import gated_scan, running_average

# B sentences, T query tokens, S key tokens, L query tokens of the longest sentence, M key tokens of the longest
# sentence, H heads, K width of a query or key head, Kv width of a value head, D model width

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
    pairs = (query, query_layout), (key, key_layout), (value, key_layout)
    q, k, v = (Packed(x, layout).to_padded().transpose(1, 2) for x, layout in pairs)  # B H L K, B H M K, B H M Kv
    mask = attention_mask(query_layout, key_layout, spec).expand(-1, 1, query_layout.max_length, -1)
    attended = F.scaled_dot_product_attention(q, k, v, mask, spec.dropout, scale=1 / math.sqrt(q.shape[-1]))
    return Packed.from_padded(attended.transpose(1, 2), query_layout).values


Backend = Literal["reference", "bmm", "sliding_window", "varlen", "sdpa"]
BACKENDS: dict[Backend, Callable[[Tensor, Tensor, Tensor, Layout, Layout, AttentionSpec], Tensor]] = {
    "reference": reference_attention,
    "bmm": bmm_attention,
    "sliding_window": sliding_window_attention,
    "varlen": varlen_attention,
    "sdpa": sdpa_attention,
}
MAX_BMM_LENGTH = 256
MAX_LENGTH_WITHOUT_BLOCKS = 128
MIN_WINDOWS = 4  # blocks are faster for sentences of at least this many windows


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_layout: Layout,
    key_layout: Layout,
    spec: AttentionSpec = FULL_ATTENTION,
) -> Tensor:
    """Returns softmax(Q K^T / sqrt(K)) V within each sentence and head: T H K, S H K, S H Kv -> T H Kv."""
    if torch.is_autocast_enabled(query.device.type):  # kernels need queries, keys and values of one dtype
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    name = backend(
        query.device.type,
        query.dtype,
        query.shape[-1],
        value.shape[-1],
        max(query_layout.max_length, key_layout.max_length),
        spec.dropout,
        window=spec.window if query_layout is key_layout else None,
        position_terms=spec.position_terms is not None,
        capability=_capability(query.device.index) if query.device.type == "cuda" else (0, 0),
        compiling=torch.compiler.is_compiling(),
    )
    if name == "bmm":
        return bmm_attention(query, key, value, query_layout, key_layout, spec)
    rows = len(query)
    query, key, value = query[: query_layout.tokens], key[: key_layout.tokens], value[: key_layout.tokens]
    attended = BACKENDS[name](query, key, value, query_layout, key_layout, spec)
    return _with_rows(attended, rows)


def _with_rows(x: Tensor, rows: int) -> Tensor:
    """Returns x [T, …] with rows of zeros appended up to `rows` rows."""
    return x if len(x) == rows else F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows - len(x)))


def backend(
    device: str,
    dtype: torch.dtype,
    key_width: int,
    value_width: int,
    max_length: int,
    dropout: float,
    *,
    window: int | None = None,
    position_terms: bool = False,
    capability: tuple[int, int] = (0, 0),
    compiling: bool = False,
) -> Backend:
    """Returns the fastest backend for heads of these widths in sentences of up to `max_length` tokens.

    `window` is None for cross-attention. `capability` is the compute capability of the CUDA device. Only the
    reference backend adds position terms.

    On a CPU, batched products (forward and backward) are faster than the kernel of torch up to about 256 tokens. At 16
    tokens, they are 12 times as fast in bf16 and twice as fast in fp32. At 1,024 tokens, they take 1.5 times as long as
    the kernel, and more memory. With a window, `sliding_window` computes attention in blocks, in the same time per
    token at any length. With a window of 32, blocks are as fast as batched products at 128 tokens. At 1,024 tokens,
    blocks take 1/7 (fp32) or 1/12 (bf16) of the time of the kernel.

    Flash attention supports 16-bit inputs and head widths up to 256, but not dropout. It needs an Ampere GPU or later.
    """
    if position_terms:
        return "reference"
    if device == "cpu":
        if compiling or dropout > MAX_P:
            return "reference"
        if window is not None and max_length > max(MAX_LENGTH_WITHOUT_BLOCKS, MIN_WINDOWS * window - 1):
            return "sliding_window"
        return "bmm" if dropout or max_length <= MAX_BMM_LENGTH else "sdpa"
    if device != "cuda":
        return "reference"
    short = dtype in (torch.float16, torch.bfloat16)
    if short and not dropout and capability >= (8, 0) and varlen_width(key_width, value_width) <= MAX_WIDTH:
        return "varlen"
    return "sdpa"


def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


# the same as torch.compiler.assume_constant_result, which would import the compiler and double the start-up time
_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


class AttentionContext(Protocol):
    """The keys and values that the attention of one layer attends to: packed sentences, or a KV cache.

    Both methods return the attended values, T H*Kv. Several heads of queries may share a head of keys and values.
    `positions` has the position of each input token [T], or is one integer if all tokens have the same position.
    """

    @property
    def positions(self) -> Tensor | int: ...

    def self_attention(self, qkv: Tensor, split: SplitHeads, spec: AttentionSpec) -> Tensor:
        """Attends within a sentence or hypothesis. `qkv` [T, H*(2K+Kv)] is the projection of the new tokens."""

    def cross_attention(self, query: Tensor, project: SplitHeads, spec: AttentionSpec) -> Tensor:
        """Attends to the memory with `query` T H K. `project` computes keys and values from the memory S D."""


class RecurrentContext(Protocol):
    """The context of a layer without self-attention: a state of fixed size (not keys and values), and the memory."""

    def gated_recurrence(self, x: Tensor, forget: Tensor) -> Tensor:
        """Returns c_t = forget_t c_{t-1} + (1 - forget_t) x_t, with c = 0 before the first token: T D, T D -> T D."""

    def average(self, x: Tensor) -> Tensor:
        """Returns the average of the tokens of the sentence up to each token: T D -> T D."""

    def convolution(self, x: Tensor, weights: Tensor, newer: int) -> Tensor:
        """Returns the weighted sum of the W tokens around each token for each of H heads: T D, T H W -> T D.

        The last `newer` weights belong to the tokens after the current token.
        """

    def cross_attention(self, query: Tensor, project: SplitHeads, spec: AttentionSpec) -> Tensor:
        """Does the same as `AttentionContext.cross_attention`."""


@dataclass(frozen=True)
class PackedContext:
    """Context of whole sentences, for teacher forcing. Cross-attention reads `memory`.

    `weights` may have a list "self" and a list "cross". Each layer then appends its attention weights B H L M to the
    list. Rows beyond the end of a sentence are zero.
    """

    layout: Layout
    memory: Packed | None = None
    weights: dict[str, list[Tensor]] | None = None

    @property
    def positions(self) -> Tensor:
        return self.layout.position_ids

    def self_attention(self, qkv: Tensor, split: SplitHeads, spec: AttentionSpec) -> Tensor:
        query, key, value = split(qkv)
        return self._attend("self", query, key, value, self.layout, spec)

    def gated_recurrence(self, x: Tensor, forget: Tensor) -> Tensor:
        tokens = self.layout.tokens
        return _with_rows(gated_scan(x[:tokens], forget[:tokens], self.layout), len(x))

    def average(self, x: Tensor) -> Tensor:
        return _with_rows(running_average(x[: self.layout.tokens], self.layout), len(x))

    def convolution(self, x: Tensor, weights: Tensor, newer: int) -> Tensor:
        tokens = self.layout.tokens
        return _with_rows(packed_convolution(x[:tokens], weights[:tokens], newer, self.layout), len(x))

    def cross_attention(self, query: Tensor, project: SplitHeads, spec: AttentionSpec) -> Tensor:
        assert self.memory is not None
        key, value = project(self.memory.values)
        return self._attend("cross", query, key, value, self.memory.layout, spec)

    def _attend(
        self, kind: str, query: Tensor, key: Tensor, value: Tensor, key_layout: Layout, spec: AttentionSpec
    ) -> Tensor:
        if key.shape[1] < query.shape[1]:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        if self.weights is not None and kind in self.weights:
            tokens, key_tokens = self.layout.tokens, key_layout.tokens
            weights = attention_weights(query[:tokens], key[:key_tokens], self.layout, key_layout, spec)
            self.weights[kind].append(weights * self.layout.mask[:, None, :, None])
        return attention(query, key, value, self.layout, key_layout, spec).flatten(1)
