"""Position-wise feed-forward networks (Vaswani et al. 2017, section 3.3)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.layers import compute_dtype, stacked_linear
from nmtkit.layers.dropout import Dropout
from nmtkit.layers.prepack import multiplies_in_bf16

# T tokens, D model width, F inner width of the feed-forward network

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu_, "gelu": F.gelu, "swish": F.silu}
GATED = {"reglu": "relu", "geglu": "gelu", "swiglu": "swish"}


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2 (equation 2), or with another activation; gated (act(x Wg + bg) * (x W1 + b1)) W2 + b2,
    where `fc1` makes both factors, the gate first.

    `d_ff` is the width between the two products; `dropout` is on what the activation returns.
    """

    def __init__(self, d_model: int, d_ff: int, activation: str = "relu", dropout: float = 0.0) -> None:
        super().__init__()
        self.gated = activation in GATED
        self.activation = ACTIVATIONS[GATED.get(activation, activation)]
        self.fc1 = stacked_linear(d_model, [d_ff] * (2 if self.gated else 1), bias=True)
        self.dropout = Dropout(dropout)
        self.fc2 = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated and self.activation is torch.relu_:
            return self.fc2(self.dropout(linear_relu(self.fc1, x)))
        hidden = self.fc1(x)
        if self.gated:
            gate, hidden = hidden.chunk(2, -1)
            hidden = self.activation(gate) * hidden
        else:
            hidden = self.activation(hidden)
        return self.fc2(self.dropout(hidden) if self.training else hidden)


def linear_relu(linear: nn.Module, x: Tensor) -> Tensor:
    """Returns relu(linear(x)), in training on a CPU in bf16 as one product: T D -> T F.

    oneDNN adds the bias and takes the maximum while a tile of the product is at hand. torch would write the bias to all
    rows before it multiplies, and read and write the result once more after it.
    """
    if type(linear) is not nn.Linear or not _fuses(linear, x):
        return torch.relu_(linear(x))
    return _LinearReLU.apply(x, linear.weight, linear.bias)  # type: ignore[no-untyped-call]


def _fuses(linear: nn.Linear, x: Tensor) -> bool:
    """Returns whether the fused product applies: in training, on a CPU that multiplies in bf16, uncompiled."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not torch.is_grad_enabled() or linear.bias is None:
        return False
    return compute_dtype(x) == torch.bfloat16 and multiplies_in_bf16()


class _LinearReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.types = x.dtype, weight.dtype, bias.dtype
        x, weight = x.bfloat16(), weight.bfloat16()
        result = torch.ops.mkldnn._linear_pointwise(x, weight, bias.bfloat16(), "relu", [None], "")
        ctx.save_for_backward(x, weight, result)
        return result

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        x, weight, result = ctx.saved_tensors
        gradient = torch.ops.aten.threshold_backward(gradient, result, 0)
        of_x, of_weight, of_bias = ctx.needs_input_grad
        x_type, weight_type, bias_type = ctx.types
        return (
            (gradient @ weight).to(x_type) if of_x else None,
            (gradient.t() @ x).to(weight_type) if of_weight else None,
            gradient.sum(0).to(bias_type) if of_bias else None,
        )
