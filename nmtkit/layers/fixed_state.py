"""Replacements of the decoder's self-attention whose state in a search has a fixed size: SSRU and average attention.

A step of self-attention reads the keys and values of all earlier tokens. A step of these layers reads and overwrites
one vector for each hypothesis. States are in fp32, or in fp64 for a model in fp64.
"""

import torch
from torch import Tensor, nn

from nmtkit.layers import stacked_linear
from nmtkit.layers.attention import RecurrentContext
from nmtkit.layers.feed_forward import FeedForward

# T target tokens, D model width


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the state for inputs of this dtype."""
    return torch.promote_types(dtype, torch.float32)


class SSRU(nn.Module):
    """Simpler simple recurrent unit (Kim et al. 2019, section 3.1).

    f_t = sigmoid(W_f x_t + b_f), c_t = f_t c_{t-1} + (1 - f_t) W x_t; the output is relu(c_t). With `norm_eps`, both
    projections are normalised before b_f is added, like --layer-normalization of Marian. Each projection has its own
    gain. One product computes both projections, W first.
    """

    def __init__(self, d_model: int, norm_eps: float | None = None) -> None:
        super().__init__()
        self.proj = stacked_linear(d_model, (d_model, d_model), bias=False)
        self.forget_bias = nn.Parameter(torch.zeros(d_model))
        norms = [nn.Identity() if norm_eps is None else nn.LayerNorm(d_model, norm_eps, bias=False) for _ in range(2)]
        self.norm, self.forget_norm = norms

    def forward(self, x: Tensor, context: RecurrentContext) -> Tensor:
        value, forget = self.proj(x).chunk(2, -1)
        dtype = state_dtype(value.dtype)
        forget = torch.sigmoid(self.forget_norm(forget).to(dtype) + self.forget_bias)
        return torch.relu(context.gated_recurrence(self.norm(value).to(dtype), forget)).to(value.dtype)


class AverageAttention(nn.Module):
    """Average attention (Zhang et al. 2018, section 3).

    g_j = FFN(average of y_1 to y_j) (equation 1), and i_j y_j + f_j g_j with the gates [i_j; f_j] = sigmoid(W [y_j;
    g_j]) (equations 2 and 3). `inner` are the inner width, the activation and the dropout of the feed-forward network,
    or None for no network. Without `gate`, the output is g_j.
    """

    def __init__(self, d_model: int, inner: tuple[int, str, float] | None, gate: bool, bias: bool) -> None:
        super().__init__()
        self.feed_forward = nn.Identity() if inner is None else FeedForward(d_model, *inner)
        self.gate = stacked_linear(2 * d_model, (d_model, d_model), bias) if gate else None

    def forward(self, x: Tensor, context: RecurrentContext) -> Tensor:
        average = context.average(x.to(state_dtype(x.dtype))).to(x.dtype)
        average = self.feed_forward(average)
        if self.gate is None:
            return average
        own, past = torch.sigmoid(self.gate(torch.cat([x, average.to(x.dtype)], -1))).chunk(2, -1)
        return own * x + past * average
