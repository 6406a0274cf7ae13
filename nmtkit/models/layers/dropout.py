"""Dropout (Srivastava et al. 2014), alone and in the residual connection around a sub-layer, with fast masks on CPUs.

On a CPU, `F.dropout` draws one random number for each element, which takes 6 ns on one core. This module reads random
bits as floating-point numbers: 64 bits are four bf16 numbers. An element is dropped if its number is at most a
threshold. The share of bit patterns up to a threshold is known exactly. torch's kernel for the gradient of ReLU writes
zeros where a number is at most a threshold, so this kernel drops elements in a single pass over the data.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.models.layers import is_unmodified, residual_gpu
from nmtkit.models.layers.layer_norm import layer_norm_backward

# T tokens, D model width

# supported dtype -> number of bit patterns, and the bit pattern of infinity
PATTERNS = {torch.bfloat16: (1 << 16, 0x7F80), torch.float32: (1 << 32, 0x7F80_0000)}
MAX_P = 0.99  # elements whose random number is NaN are never dropped, so the probability cannot reach 1


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
    """Returns x with dropout of probability `p`, even in evaluation mode."""
    if not p:
        return x
    return _Dropout.apply(x, p) if takes_noise(x, p) else F.dropout(x, p)  # type: ignore[no-untyped-call]


@contextmanager
def token_cutoff(embeddings: Iterable[nn.Module], p: float) -> Iterator[None]:
    """Sets the results of `embeddings` [T, D] to zero for random tokens, with probability p (Shen et al. 2020)."""

    def cut(module: nn.Module, inputs: Any, x: Tensor) -> Tensor:
        return x.masked_fill(torch.rand(len(x), 1, device=x.device) < p, 0.0)

    with ExitStack() as hooks:
        for embedding in embeddings:
            hooks.enter_context(embedding.register_forward_hook(cut))
        yield


def add_and_norm(x: Tensor, change: Tensor, norm: nn.Module, p: float) -> Tensor:
    """Returns norm(x + dropout(change)): T D. Dropout has probability `p`, even in evaluation mode.

    In training, one fused operation computes the result on a CPU, and on a GPU if Triton works. The fused operation
    needs a `norm` that is an unmodified `nn.LayerNorm` with weight and bias. Under autocast, the result of the fused
    operation has the dtype of `change`: bf16 takes half the memory, and the next product needs no cast. The sum is
    rounded to this dtype, and the statistics are computed in fp32.
    """
    trains = p or torch.is_grad_enabled()
    if trains and is_unmodified(norm, nn.LayerNorm) and norm.weight is not None and norm.bias is not None:
        arguments = x, change, norm.weight, norm.bias, norm.eps, p
        if takes_noise(change, p):
            return _AddAndNorm.apply(*arguments)  # type: ignore[no-untyped-call]
        if uses_kernels(change):
            return residual_gpu.FusedAddAndNorm.apply(*arguments)  # type: ignore[no-untyped-call]
    return norm(x + dropout(change, p))


def takes_noise(x: Tensor, p: float) -> bool:
    """Returns whether the fast dropout masks of this module support the tensor x and the dropout probability p.

    The masks need a tensor on a CPU in bf16 or fp32, and p <= MAX_P. torch.compile cannot compile the masks.
    """
    return x.device.type == "cpu" and x.dtype in PATTERNS and p <= MAX_P and not torch.compiler.is_compiling()


def uses_kernels(x: Tensor) -> bool:
    """Returns whether the kernels of `residual_gpu` can be used for the tensor x.

    The kernels need a CUDA tensor in bf16 or fp32, enabled gradients, and code that is not compiled.
    """
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float32) or torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() and residual_gpu.is_usable(x.device)


def noise_for(x: Tensor) -> Tensor:
    """Returns random bits as a tensor of the shape and dtype of x. The numbers include infinities and NaNs.

    The seed comes from torch's global generator.
    """
    # NumPy's generator takes 0.6 times as long as torch's generator
    generator = np.random.SFC64(int(torch.randint(1 << 62, ())))
    words = generator.random_raw(-(-x.numel() * x.element_size() // 8))
    return torch.from_numpy(words.view(np.uint8)).view(x.dtype)[: x.numel()].view(x.shape)


def dropped(x: Tensor, noise: Tensor | None, p: float) -> Tensor:
    """Returns a copy of x with zeros where `noise` is at most the threshold of `p`, or x itself if `noise` is None.

    The other elements are multiplied by the exact 1 / P(an element is kept).
    """
    if noise is None:
        return x
    limit, scale = threshold(p, x.dtype)
    # mul_ multiplies by the exact scale; torch.add(…, alpha=scale) would round the scale to bf16
    return torch.ops.aten.threshold_backward(x, noise, limit).mul_(scale)


@lru_cache
def threshold(p: float, dtype: torch.dtype) -> tuple[float, float]:
    """Returns t with P(noise <= t) ≈ p for noise of this dtype, and the exact 1 / P(noise > t).

    The bit patterns of the dtype are counted in ascending order of their values: from minus infinity to -0, then 0
    (equal to -0), then the positive numbers. NaN never compares as <= t, so NaN counts as kept.
    """
    patterns, infinity = PATTERNS[dtype]
    count = max(round(p * patterns), 1)  # number of patterns up to t
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
        return dropped(x, noise, p)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        (noise,) = ctx.saved_tensors
        return dropped(gradient, noise, ctx.p), None


class _AddAndNorm(torch.autograd.Function):
    """Implements `add_and_norm` as one autograd node instead of five. Stores only sum, noise and statistics."""

    @staticmethod
    def forward(ctx, x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, eps: float, p: float) -> Tensor:  # type: ignore[no-untyped-def]
        noise = noise_for(change) if p else None
        ctx.p, ctx.input_type = p, x.dtype
        total = x.to(change.dtype) + dropped(change, noise, p)
        result, mean, inverse_deviation = torch.native_layer_norm(total, [total.shape[-1]], weight, bias, eps)
        ctx.save_for_backward(total, noise, mean, inverse_deviation, weight, bias)
        return result

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        total, noise, *statistics = ctx.saved_tensors
        gradient, weight_gradient, bias_gradient = layer_norm_backward(gradient, total, *statistics)
        change_gradient = dropped(gradient, noise, ctx.p)
        return gradient.to(ctx.input_type), change_gradient, weight_gradient, bias_gradient, None, None
