"""Position-wise feed-forward networks (Vaswani et al. 2017, section 3.3)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.models.layers import is_unmodified, multiplies_in_bf16, stacked_linear, trains_in_bf16_on_cpu
from nmtkit.models.layers.dropout import Dropout

# T tokens, D model width, F inner width of the feed-forward network

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "gelu": F.gelu, "swish": F.silu}
GATED = {"reglu": "relu", "geglu": "gelu", "swiglu": "swish"}


class FeedForward(nn.Module):
    """Computes max(0, x W1 + b1) W2 + b2 (equation 2), or the same with a different activation.

    Gated activations compute (act(x Wg + bg) * (x W1 + b1)) W2 + b2; `fc1` computes both factors, the gate first.
    `d_ff` is the width between the two products. `dropout` applies to the output of the activation.
    """

    def __init__(self, d_model: int, d_ff: int, activation: str = "relu", dropout: float = 0.0) -> None:
        super().__init__()
        self.gated = activation in GATED
        self.activation = ACTIVATIONS[GATED.get(activation, activation)]
        self.fc1 = stacked_linear(d_model, [d_ff] * (2 if self.gated else 1), bias=True)
        self.dropout = Dropout(dropout)
        self.fc2 = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            gate, hidden = self.fc1(x).chunk(2, -1)
            hidden = self.activation(gate) * hidden
        elif self.activation is torch.relu:
            hidden = linear_relu(self.fc1, x)
        else:
            hidden = self.activation(self.fc1(x))
        return self.fc2(self.dropout(hidden))


def linear_relu(linear: nn.Module, x: Tensor) -> Tensor:
    """Returns relu(linear(x)): T D -> T F. Uses a fused kernel in training in bf16, on a CPU with bf16 instructions.

    oneDNN adds the bias and applies ReLU while a tile of the product is in registers. torch's own operations would
    write the bias to all rows before the product, and read and write the result once more after the product.
    """
    # a hook may keep the output of the layer, so ReLU must not change this output in place
    if not is_unmodified(linear, type(linear)):
        return torch.relu(linear(x))
    if type(linear) is nn.Linear and linear.bias is not None and trains_in_bf16_on_cpu(x) and multiplies_in_bf16():
        return _LinearReLU.apply(x, linear.weight, linear.bias)  # type: ignore[no-untyped-call]
    return torch.relu_(linear(x))


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
        x_needed, weight_needed, bias_needed = ctx.needs_input_grad
        x_type, weight_type, bias_type = ctx.types
        return (
            (gradient @ weight).to(x_type) if x_needed else None,
            (gradient.t() @ x).to(weight_type) if weight_needed else None,
            gradient.sum(0).to(bias_type) if bias_needed else None,
        )
