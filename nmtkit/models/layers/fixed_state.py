"""Replacements for the self-attention of a decoder with a state of fixed size: SSRU, average attention, convolutions.

A step of self-attention reads the keys and values of all earlier tokens. A step of these layers reads and overwrites
one vector for each hypothesis. The vector of a convolution holds the newest tokens. States are in fp32, or in fp64 for
a model in fp64.

`RecurrentCache` is the state of a search without CUDA graphs, and `StaticRecurrentCache` is the state of a search with
CUDA graphs. Both classes keep the states of all layers in one tensor, so that one operation reorders all states.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.data.packed import Packed
from nmtkit.models.layers import rows_of, stacked_linear
from nmtkit.models.layers.attention import RecurrentContext
from nmtkit.models.layers.attention_reference import AttentionSpec, SplitHeads
from nmtkit.models.layers.dropout import dropout
from nmtkit.models.layers.feed_forward import FeedForward
from nmtkit.models.layers.kv_cache import MemoryCache, MemoryContext
from nmtkit.models.layers.static_kv_cache import CacheLengths, StaticMemory, StaticMemoryContext, StaticSizes

# T target tokens, D width of the model, H heads and W width of a convolution, B sentences or slots, R hypotheses (rows)
# of a sentence or slot, N = B x R


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the state for inputs of this dtype."""
    return dtype if dtype == torch.float64 else torch.float32


class SSRU(nn.Module):
    """Simpler simple recurrent unit (Kim et al. 2019, section 3.1).

    f_t = sigmoid(W_f x_t + b_f), c_t = f_t c_{t-1} + (1 - f_t) W x_t; the output is relu(c_t). With `norm_eps`, both
    projections are normalised before b_f is added, like --layer-normalization of Marian. Each projection has its own
    gain.
    """

    def __init__(self, d_model: int, norm_eps: float | None = None) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, d_model, bias=False)
        self.forget_proj = nn.Linear(d_model, d_model, bias=norm_eps is None)
        self.norm = None if norm_eps is None else nn.LayerNorm(d_model, norm_eps, bias=False)
        self.forget_norm = None if norm_eps is None else nn.LayerNorm(d_model, norm_eps)

    def forward(self, x: Tensor, context: RecurrentContext) -> Tensor:
        value, forget = self.proj(x), self.forget_proj(x)
        dtype, wide = value.dtype, state_dtype(value.dtype)
        if self.norm is not None and self.forget_norm is not None:
            value, forget = self.norm(value), self.forget_norm(forget)
        if dtype == wide:
            return torch.relu(context.gated_recurrence(value, torch.sigmoid(forget)))
        state = context.gated_recurrence(value.to(wide), torch.sigmoid(forget.to(wide)))
        return torch.relu(state).to(dtype)


class AverageAttention(nn.Module):
    """Average attention (Zhang et al. 2018, section 3).

    The layer computes g_j = FFN(average of y_1 to y_j) (equation 1) and returns i_j y_j + f_j g_j. The gates are [i_j;
    f_j] = sigmoid(W [y_j; g_j]) (equations 2 and 3). `inner` has the inner width, the activation and the dropout of the
    feed-forward network. If `inner` is None, there is no feed-forward network. Without `gate`, the layer returns g_j.
    With `separate`, the gates of Marian are used: i_j = sigmoid(W_i y_j), f_j = sigmoid(W_f g_j).
    """

    def __init__(
        self, d_model: int, inner: tuple[int, str, float] | None, gate: bool, bias: bool, separate: bool = False
    ) -> None:
        super().__init__()
        self.feed_forward = nn.Identity() if inner is None else FeedForward(d_model, *inner)
        self.gate = stacked_linear(2 * d_model, (d_model, d_model), bias) if gate and not separate else None
        self.input_gate = nn.Linear(d_model, d_model, bias) if gate and separate else None
        self.average_gate = nn.Linear(d_model, d_model, bias) if gate and separate else None

    def forward(self, x: Tensor, context: RecurrentContext) -> Tensor:
        wide = state_dtype(x.dtype)
        average = context.average(x) if x.dtype == wide else context.average(x.to(wide)).to(x.dtype)
        average = self.feed_forward(average)
        if self.input_gate is not None and self.average_gate is not None:
            return torch.sigmoid(self.input_gate(x)) * x + torch.sigmoid(self.average_gate(average)) * average
        if self.gate is None:
            return average
        current, past = torch.sigmoid(self.gate(torch.cat([x, average.to(x.dtype)], -1))).chunk(2, -1)
        return current * x + past * average


class LightConvolution(nn.Module):
    """A gated linear unit, a convolution along the sentence, and a projection (Wu et al. 2019, section 3, figure 2).

    The weights are normalised by a softmax, and the channels of a head share their weights. A lightweight convolution
    has fixed weights (equation 1). The weights of a dynamic convolution are a linear function of the token (section 4).
    Tokens outside the sentence count as zeros. A causal convolution reads the `width` newest tokens. Any other
    convolution, which only an encoder can have, also reads tokens after the current token.
    """

    def __init__(
        self, d_model: int, heads: int, width: int, *, causal: bool, dynamic: bool, dropout: float, bias: bool
    ) -> None:
        super().__init__()
        self.heads, self.width, self.rate = heads, width, dropout
        self.newer = 0 if causal else width // 2  # number of tokens after the current token that the kernel reads
        self.in_proj = stacked_linear(d_model, (d_model, d_model), bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)
        self.weight_proj = nn.Linear(d_model, heads * width, bias=False) if dynamic else None
        self.weight = None if dynamic else nn.Parameter(torch.empty(heads, width))
        if self.weight is not None:
            nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor, context: RecurrentContext) -> Tensor:
        x = F.glu(self.in_proj(x))
        if self.weight_proj is not None:
            weights = self.weight_proj(x).unflatten(-1, (self.heads, self.width))  # T H W
        else:
            assert self.weight is not None
            weights = self.weight.expand(len(x), -1, -1)
        weights = weights.softmax(-1)
        if self.training:
            weights = dropout(weights, self.rate)
        return self.out_proj(context.convolution(x, weights.to(x.dtype), self.newer))


@dataclass(frozen=True)
class StepContext:
    """An `attention.RecurrentContext` for a step: the state of one layer, which is overwritten, and the memory.

    The state is N D, or N (W-1)*D for convolutions of maximum width W. `share` is the share of the earlier tokens in
    the new average: n / (n + 1) after n tokens. `share` is one number, or a tensor of shape N 1.
    """

    state: Tensor
    share: Tensor | float
    memory: MemoryContext | StaticMemoryContext

    def gated_recurrence(self, x: Tensor, forget: Tensor) -> Tensor:
        return torch.lerp(x, self.state, forget, out=self.state)

    def average(self, x: Tensor) -> Tensor:
        return torch.lerp(x, self.state, self.share, out=self.state)

    def convolution(self, x: Tensor, weights: Tensor, newer: int) -> Tensor:
        past = self.state.unflatten(1, (-1, x.shape[1]))  # N tokens D
        newest = torch.cat([past, x[:, None].to(past.dtype)], 1)
        self.state.copy_(newest[:, 1:].flatten(1))
        heads, width = weights.shape[1:]
        by_head = newest[:, -width:].unflatten(2, (heads, -1)).transpose(1, 2)  # N H W D/H
        return (weights[:, :, None].to(by_head.dtype) @ by_head).flatten(1).to(x.dtype)

    def cross_attention(self, query: Tensor, project: SplitHeads, spec: AttentionSpec) -> Tensor:
        return self.memory.cross_attention(query, project, spec)


class RecurrentCache(MemoryCache):
    """Keys and values of the memory, and a state of `width` numbers for each layer and hypothesis.

    `states` is [layers, B, width] if all rows of a sentence are equal, otherwise [layers, N, width].
    """

    def __init__(
        self,
        memory: Packed,
        beams: int,
        projections: Sequence[SplitHeads],
        *,
        heads: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(memory, beams, projections, heads=heads, dtype=dtype)
        like = memory.values
        self.states = like.new_zeros(len(projections), self.sentences, width, dtype=state_dtype(like.dtype))
        self.memories = [MemoryContext(self, index) for index in range(len(projections))]

    def prepare(self) -> None:
        if self.new == self.beams:
            self._expand()
        share = self.positions / (self.positions + 1)
        share = share.to(self.states.dtype)[:, None] if isinstance(share, Tensor) else share
        states = zip(self.states.unbind(), self.memories, strict=True)
        self.layers = [StepContext(state, share, memory) for state, memory in states]

    def reorder(self, beam_index: Tensor) -> None:
        if self.beams > 1:
            expanded = self.states.shape[1] == self.rows
            self.states = self.states.index_select(1, beam_index if expanded else beam_index // self.beams)

    def drop_finished(self, sentences: Tensor) -> None:
        self._expand()
        super().drop_finished(sentences)
        self.states = self.states.index_select(1, rows_of(sentences, self.beams))

    def insert(self, slots: Tensor, memory: Packed) -> None:
        self._expand()
        super().insert(slots, memory)
        self.states.index_fill_(1, rows_of(slots, self.beams), 0.0)

    def _expand(self) -> None:
        """Gives each row a separate state."""
        if self.states.shape[1] < self.rows:
            self.states = self.states.repeat_interleave(self.beams, 1)


class StaticRecurrentCache(StaticMemory):
    """The memory of every slot, and a state of `width` numbers for each layer and row, in tensors of fixed shape."""

    def __init__(self, projections: Sequence[SplitHeads], sizes: StaticSizes, width: int) -> None:
        super().__init__(projections, sizes)
        rows = sizes.slots * sizes.beams
        self.states = self.memory.new_zeros(len(projections), rows, width, dtype=state_dtype(sizes.dtype))

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.states.nbytes

    def advance(self, position: Tensor, lengths: CacheLengths) -> list[StepContext]:
        share = (position / (position + 1)).to(self.states.dtype).repeat_interleave(self.beams)[:, None]
        return [
            StepContext(state, share, StaticMemoryContext(self, layer, lengths))
            for layer, state in enumerate(self.states)
        ]

    def reorder(self, beam_index: Tensor, lengths: CacheLengths) -> None:
        first = torch.arange(self.slots, device=beam_index.device)[:, None] * self.beams
        self.states.copy_(self.states.index_select(1, (first + beam_index).flatten()))

    def insert(self, slots: Tensor, memory: Packed) -> None:
        super().insert(slots, memory)
        self.states.index_fill_(1, rows_of(slots, self.beams), 0.0)
