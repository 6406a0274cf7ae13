"""The residual connection around a sub-layer: a sum with what dropout leaves, and its layer normalisation."""

import torch
from torch import Tensor, nn

from nmtkit.layers.dropout import dropout, keep_mask, keep_scale, masked, uses_bit_masks

# T tokens, D model width


def add_and_norm(x: Tensor, change: Tensor, norm: nn.LayerNorm, p: float, training: bool) -> Tensor:
    """norm(x + dropout(change)): T D.

    On a CPU under autocast the result has the type of `change`, bfloat16: half the memory to move, and no cast before
    the next product. Sums and statistics are still taken in 32 bits.
    """
    p = p if training else 0.0
    if not p and x.dtype == change.dtype and not torch.is_grad_enabled():
        return norm(x + change)
    if uses_bit_masks(change):
        return _AddAndNorm.apply(x, change, norm.weight, norm.bias, norm.eps, p)  # type: ignore[no-untyped-call]
    return norm(x + dropout(change, p))


class _AddAndNorm(torch.autograd.Function):
    """One node where autograd would keep five; it saves the sum, and a mask of bits."""

    @staticmethod
    def forward(ctx, x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, eps: float, p: float) -> Tensor:  # type: ignore[no-untyped-def]
        mask = keep_mask(change, p) if p else None
        ctx.scale = keep_scale(p) if p else 1.0
        ctx.input_type = x.dtype
        kept = change if mask is None else masked(change, mask)
        total = torch.add(x.to(change.dtype), kept, alpha=ctx.scale)
        result, mean, inverse_deviation = torch.native_layer_norm(total, [total.shape[-1]], weight, bias, eps)
        ctx.save_for_backward(total, mask, mean, inverse_deviation, weight, bias)
        return result

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        total, mask, mean, inverse_deviation, weight, bias = ctx.saved_tensors
        gradient, weight_gradient, bias_gradient = torch.ops.aten.native_layer_norm_backward(
            gradient, total, [total.shape[-1]], mean, inverse_deviation, weight, bias, [True] * 3
        )
        change_gradient = gradient if mask is None else masked(gradient, mask).mul_(ctx.scale)
        return gradient.to(ctx.input_type), change_gradient, weight_gradient, bias_gradient, None, None
