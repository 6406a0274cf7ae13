"""SSRU and average attention: replacements for the self-attention of a decoder, with a state of fixed size.

A step of self-attention reads the keys and values of all earlier tokens. A step of these layers reads and overwrites
one vector for each hypothesis. States are in fp32, or in fp64 for a model in fp64.
"""

import torch
from torch import Tensor, nn

from nmtkit.models.layers import stacked_linear
from nmtkit.models.layers.attention import RecurrentContext
from nmtkit.models.layers.feed_forward import FeedForward

# T target tokens, D model width


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the state for inputs of this dtype."""
    return dtype if dtype == torch.float64 else torch.float32


class SSRU(nn.Module):
    """Simpler simple recurrent unit (Kim et al. 2019, section 3.1).

    f_t = sigmoid(W_f x_t + b_f), c_t = f_t c_{t-1} + (1 - f_t) W x_t; the output is relu(c_t). With `norm_eps`, both
    projections are normalised before b_f is added, like --layer-normalization of Marian. Each projection has its own
    gain.

    The two projections are separate layers, because `prepack` uses fast fp16 layers only up to 256 x 256 weights.
    """

    def __init__(self, d_model: int, norm_eps: float | None = None) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, d_model, bias=False)
        self.forget_proj = nn.Linear(d_model, d_model, bias=norm_eps is None)
        self.norm = self.forget_norm = None
        if norm_eps is not None:
            self.norm, self.forget_norm = nn.LayerNorm(d_model, norm_eps, bias=False), nn.LayerNorm(d_model, norm_eps)

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
