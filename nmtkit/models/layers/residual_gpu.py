"""The residual connection on a GPU, norm(x + dropout(change)), in one Triton kernel for each direction.

Separate operations (dropout, sum in fp32, norm and casts) move about 29 bytes per element forward and 33 backward. The
kernels compute sums and statistics in fp32 in registers, and write results in the dtype of `change`. They move 8 bytes
per element in each direction. The dropout mask is not stored; the backward kernel draws it again from the same seed.

Without Triton, or if a kernel cannot be built, `add_and_norm` of `dropout.py` uses separate operations. Tests run these
kernels in Triton's interpreter; **the kernels have not run on a GPU yet**.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from nmtkit.models.layers import works

# T tokens, D model width

ROWS = 16  # rows of one program of the backward kernel, which sums the gradients of weight and bias over its rows


@functools.cache
def kernels() -> tuple[Any, Any]:
    """Returns the forward and the backward kernel. Raises ModuleNotFoundError without Triton."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["seed"])  # type: ignore[untyped-decorator]
    def forward(  # type: ignore[no-untyped-def]
        x, change, weight, bias, total, result, mean, rstd, width, eps, p, seed,
        DROP: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < width
        element = row * width + column
        added = tl.load(change + element, inside, 0.0).to(tl.float32)
        if DROP:
            added = tl.where(tl.rand(seed, element.to(tl.int32)) >= p, added / (1 - p), 0.0)
        # statistics are computed from the rounded sum, because the backward pass reads the rounded sum
        s = (tl.load(x + element, inside, 0.0).to(tl.float32) + added).to(total.dtype.element_ty)
        tl.store(total + element, s, inside)
        s = s.to(tl.float32)
        m = tl.sum(s, 0) / width
        centred = tl.where(inside, s - m, 0.0)
        r = 1 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
        tl.store(mean + row, m)
        tl.store(rstd + row, r)
        normed = centred * r * tl.load(weight + column, inside, 0.0) + tl.load(bias + column, inside, 0.0)
        tl.store(result + element, normed.to(result.dtype.element_ty), inside)

    @triton.jit(do_not_specialize=["rows", "seed"])  # type: ignore[untyped-decorator]
    def backward(  # type: ignore[no-untyped-def]
        gradient, total, weight, mean, rstd, x_gradient, change_gradient, weight_gradient, bias_gradient, rows, width,
        p, seed,
        DROP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
    ):  # fmt: skip
        program = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < width
        w = tl.load(weight + column, inside, 0.0)
        weight_sum = tl.zeros([BLOCK], tl.float32)
        bias_sum = tl.zeros([BLOCK], tl.float32)
        for index in range(ROWS):
            row = program * ROWS + index
            element = row * width + column
            valid = inside & (element < rows * width)
            g = tl.load(gradient + element, valid, 0.0).to(tl.float32)
            s = tl.load(total + element, valid, 0.0).to(tl.float32)
            # masked rows, which are beyond the end of the tensor, read the statistics of the last row
            last = tl.minimum(row, rows - 1)
            m = tl.load(mean + last)
            r = tl.load(rstd + last)
            normed = tl.where(valid, (s - m) * r, 0.0)
            weight_sum += g * normed
            bias_sum += g
            scaled = g * w
            sum_gradient = r * (scaled - tl.sum(scaled, 0) / width - normed * (tl.sum(scaled * normed, 0) / width))
            tl.store(x_gradient + element, sum_gradient.to(x_gradient.dtype.element_ty), valid)
            if DROP:
                sum_gradient = tl.where(tl.rand(seed, element.to(tl.int32)) >= p, sum_gradient / (1 - p), 0.0)
            tl.store(change_gradient + element, sum_gradient.to(change_gradient.dtype.element_ty), valid)
        tl.store(weight_gradient + program * width + column, weight_sum, inside)
        tl.store(bias_gradient + program * width + column, bias_sum, inside)

    return forward, backward


class FusedAddAndNorm(torch.autograd.Function):
    """Computes norm(x + dropout(change)) in the dtype of `change`: T D. Weight and bias are in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, eps: float, p: float) -> Tensor:
        kernel, _ = kernels()
        x, change = x.contiguous(), change.contiguous()
        rows, width = change.shape
        total, result = torch.empty_like(change), torch.empty_like(change)
        mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
        # the generator of the CPU, which the trainer also seeds, draws the seed without waiting for the GPU
        seed = int(torch.randint(1 << 31, ())) if p else 0
        block = 1 << (width - 1).bit_length()
        kernel[(rows,)](
            x, change, weight, bias, total, result, mean, rstd, width, eps, p, seed, DROP=p > 0, BLOCK=block
        )
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.x_type, ctx.p, ctx.seed, ctx.block = x.dtype, p, seed, block
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _, kernel = kernels()
        total, weight, mean, rstd = ctx.saved_tensors
        rows, width = total.shape
        x_gradient = torch.empty_like(total, dtype=ctx.x_type)
        change_gradient = torch.empty_like(total)
        programs = -(-rows // ROWS)
        weight_gradient, bias_gradient = (torch.empty(programs, width, device=total.device) for _ in range(2))
        kernel[(programs,)](
            gradient.contiguous(), total, weight, mean, rstd, x_gradient, change_gradient, weight_gradient,
            bias_gradient, rows, width, ctx.p, ctx.seed, DROP=ctx.p > 0, BLOCK=ctx.block, ROWS=ROWS,
        )  # fmt: skip
        return x_gradient, change_gradient, weight_gradient.sum(0), bias_gradient.sum(0), None, None


@functools.cache
def is_usable(device: torch.device) -> bool:
    """Returns whether the kernels work on this CUDA device. The kernels are tried once, and a failure is logged."""

    def both_passes() -> None:
        with torch.enable_grad():
            x, change = (torch.ones(3, 512, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(2))
            weight, bias = (torch.ones(512, device=device, requires_grad=True) for _ in range(2))
            result = FusedAddAndNorm.apply(x, change, weight, bias, 1e-5, 0.1)  # type: ignore[no-untyped-call]
            result.sum().backward()

    ampere = torch.cuda.get_device_capability(device) >= (8, 0)
    return ampere and works(both_passes, "cannot use the fused kernels of the residual connection")
