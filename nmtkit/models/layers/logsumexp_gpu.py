"""Log-sum-exp and block maxima of logits in one pass, as a Triton kernel for GPUs.

A search needs the best few logits of each row and the log-sum-exp of the row. A log-softmax would write all N x V
logits again, and top-k would read the result. For 1,024 rows of 37,000 columns, this moves about 450 MB per step; a
single pass moves 150 MB. The same pass computes the largest value of each block of columns, which top-k also needs.

Tests run the kernel in Triton's interpreter; **it has not run on a GPU yet**.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from nmtkit.models.layers import works

# N rows of a search, V target vocabulary

COLUMNS = 1024  # number of columns that a Triton program reads at a time


@functools.cache
def kernel() -> Any:
    """Returns the kernel. Raises ModuleNotFoundError without Triton."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["columns", "blocks"])  # type: ignore[untyped-decorator]
    def statistics(  # type: ignore[no-untyped-def]
        logits, maxima, result, columns, blocks,
        BLOCK: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        largest = -float("inf")
        total = 0.0
        for start in range(0, columns, GROUP * BLOCK):
            block = start // BLOCK + tl.arange(0, GROUP)
            column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            x = tl.load(logits + row * columns + column, column < columns, -float("inf"))
            block_maximum = tl.max(x, 1)
            tl.store(maxima + row * blocks + block, block_maximum, block < blocks)
            new = tl.maximum(largest, tl.max(block_maximum, 0))
            shift = tl.where(new == -float("inf"), 0.0, new)
            total = total * tl.exp(largest - shift) + tl.sum(tl.sum(tl.exp(x - shift), 1), 0)
            largest = new
        tl.store(result + row, largest + tl.log(total))

    return statistics


def fused_logsumexp(logits: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Returns the log-sum-exp [N] of fp32 logits [N, V], and the maxima [N, blocks] of complete blocks of columns.

    `block` is the number of columns of a block, a power of two. The log-sum-exp of a row with a NaN is NaN; maxima
    ignore NaN.
    """
    assert logits.dtype == torch.float32
    logits = logits.contiguous()
    rows, columns = logits.shape
    blocks = columns // block
    result, maxima = logits.new_empty(rows), logits.new_empty(rows, blocks)
    kernel()[(rows,)](logits, maxima, result, columns, blocks, BLOCK=block, GROUP=COLUMNS // block)
    return result, maxima


def logsumexp(logits: Tensor, block: int) -> tuple[Tensor, Tensor | None]:
    """Returns the log-sum-exp [N] and the block maxima [N, blocks] of `logits` [N, V], like `fused_logsumexp`.

    The maxima are None if the kernel cannot run.
    """
    if logits.is_cuda and is_usable(logits.device):
        return fused_logsumexp(logits, block)
    return logits.logsumexp(1), None


@functools.cache
def is_usable(device: torch.device) -> bool:
    """Returns whether the kernel works on this CUDA device. Tries the kernel once, and logs a failure."""
    return works(
        lambda: fused_logsumexp(torch.zeros(2, 300, device=device), 128), "cannot use the fused log-sum-exp kernel"
    )
