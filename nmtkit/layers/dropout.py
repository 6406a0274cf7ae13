"""Dropout (Srivastava et al. 2014), alone and within the residual connection around a sub-layer, with cheap CPU masks.

`F.dropout` on a CPU draws one random number for each element, at 6 ns each on one core. Here random bits are taken as
floating-point numbers as they come, four bf16 of 64 bits, and an element is dropped where its number is at most a
threshold: how many of all patterns of bits are, is known exactly, and dropping is ReLU's backward pass, one reading.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.layers import residual_gpu

# T tokens, D model width

# of the types that take noise: patterns of bits, and infinity as one of them
PATTERNS = {torch.bfloat16: (1 << 16, 0x7F80), torch.float32: (1 << 32, 0x7F80_0000)}
MAX_P = 0.99  # beyond which there is no threshold, as NaN is above none


class Dropout(nn.Module):
    """Zeroes each element with probability `p` while training and scales the others by 1 / (1 - p)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x

    def extra_repr(self) -> str:
        return f"p={self.p}"


def dropout(x: Tensor, p: float) -> Tensor:
    """Drops with probability `p`, whatever the mode."""
    if not p:
        return x
    return _Dropout.apply(x, p) if takes_noise(x, p) else F.dropout(x, p)  # type: ignore[no-untyped-call]


def add_and_norm(x: Tensor, change: Tensor, norm: nn.LayerNorm, p: float) -> Tensor:
    """Returns norm(x + dropout(change)): T D. It drops with probability `p`, whatever the mode.

    On a CPU under autocast the result has the type of `change`, bf16: half the memory to move, and no cast before the
    next product. Sums and statistics are still taken in fp32. So it is on a GPU in training, where Triton works.
    """
    if not p and x.dtype == change.dtype and not torch.is_grad_enabled():
        return torch.layer_norm(x + change, norm.normalized_shape, norm.weight, norm.bias, norm.eps)  # less of Python
    arguments = x, change, norm.weight, norm.bias, norm.eps, p
    if takes_noise(change, p):
        return _AddAndNorm.apply(*arguments)  # type: ignore[no-untyped-call]
    if uses_kernels(change):
        return residual_gpu.FusedAddAndNorm.apply(*arguments)  # type: ignore[no-untyped-call]
    return norm(x + dropout(change, p))


def takes_noise(x: Tensor, p: float) -> bool:
    """Returns whether the noise of this module applies: eager mode, on a CPU, in bf16 or fp32."""
    return x.device.type == "cpu" and x.dtype in PATTERNS and p <= MAX_P and not torch.compiler.is_compiling()


def uses_kernels(x: Tensor) -> bool:
    """Returns whether the kernels of `residual_gpu` apply: in training, on CUDA, in bf16 or fp32, uncompiled."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float32) or torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() and residual_gpu.is_usable(x.device)


def noise_for(x: Tensor) -> Tensor:
    """Returns a number of random bits, infinite or NaN too, for each element: x's shape and type.

    Drawn from torch's generator.
    """
    # NumPy's generator takes 0.6 of the time of torch's, and gets its seed from that one
    generator = np.random.SFC64(int(torch.randint(1 << 62, ())))
    words = generator.random_raw(-(-x.numel() * x.element_size() // 8))
    return torch.from_numpy(words.view(np.uint8)).view(x.dtype)[: x.numel()].view(x.shape)


def dropped(x: Tensor, noise: Tensor, p: float) -> Tensor:
    """Returns x, with 0 where the noise says so, not yet scaled: a new tensor."""
    return torch.ops.aten.threshold_backward(x, noise, threshold(p, x.dtype)[0])


def keep_scale(p: float, dtype: torch.dtype) -> float:
    """Returns the factor of kept elements: exactly the inverse of the probability that `dropped` keeps one."""
    return threshold(p, dtype)[1]


@lru_cache
def threshold(p: float, dtype: torch.dtype) -> tuple[float, float]:
    """Returns the number that noise of this type is at most with probability `p`, rounded to what there is, and the
    inverse of the probability that it is not.

    Patterns in order: from minus infinity, whose bits below the sign are `infinity`, down to -0, then from 0, which is
    equal to it, up. NaN is at most nothing.
    """
    patterns, infinity = PATTERNS[dtype]
    count = max(round(p * patterns), 1)
    if count <= infinity:
        bits, sign = infinity + 1 - count, -1.0
    else:
        bits, sign = max(count - infinity - 2, 0), 1.0
        count = infinity + 2 + bits
    integers = torch.int16 if dtype == torch.bfloat16 else torch.int32
    return sign * float(torch.tensor(bits, dtype=integers).view(dtype)), patterns / (patterns - count)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, p: float) -> Tensor:  # type: ignore[no-untyped-def]
        noise = noise_for(x)
        ctx.save_for_backward(noise)
        ctx.p = p
        return dropped(x, noise, p).mul_(keep_scale(p, x.dtype))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        (noise,) = ctx.saved_tensors
        return dropped(gradient, noise, ctx.p).mul_(keep_scale(ctx.p, gradient.dtype)), None


class _AddAndNorm(torch.autograd.Function):
    """One node where autograd would keep five; it saves the sum, and the noise."""

    @staticmethod
    def forward(ctx, x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, eps: float, p: float) -> Tensor:  # type: ignore[no-untyped-def]
        noise = noise_for(change) if p else None
        ctx.p, ctx.scale = p, keep_scale(p, change.dtype) if p else 1.0
        ctx.input_type = x.dtype
        kept = change if noise is None else dropped(change, noise, p)
        total = torch.add(x.to(change.dtype), kept, alpha=ctx.scale)
        result, mean, inverse_deviation = torch.native_layer_norm(total, [total.shape[-1]], weight, bias, eps)
        ctx.save_for_backward(total, noise, mean, inverse_deviation, weight, bias)
        return result

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        total, noise, mean, inverse_deviation, weight, bias = ctx.saved_tensors
        gradient, weight_gradient, bias_gradient = torch.ops.aten.native_layer_norm_backward(
            gradient, total, [total.shape[-1]], mean, inverse_deviation, weight, bias, [True] * 3
        )
        change_gradient = gradient if noise is None else dropped(gradient, noise, ctx.p).mul_(ctx.scale)
        return gradient.to(ctx.input_type), change_gradient, weight_gradient, bias_gradient, None, None
