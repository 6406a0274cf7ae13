"""A projection and the ReLU behind it (Vaswani et al. 2017, section 3.3) as one product on a CPU in bf16."""

import torch
from torch import Tensor, nn

from nmtkit.layers import compute_dtype
from nmtkit.layers.prepack import multiplies_in_bf16

# T tokens, D model width, F inner width of the feed-forward network


def linear_relu(linear: nn.Module, x: Tensor) -> Tensor:
    """Returns relu(linear(x)): T D -> T F.

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
