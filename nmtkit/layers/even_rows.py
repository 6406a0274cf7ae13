"""Numbers of rows that come again, for products that a library prepares by shape."""

import os

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.layers import compute_dtype

# T tokens, D model width

STEPS = 64  # to an octave of numbers of rows: at most 1.6 % of them are spare
KEPT_SHAPES = 96


def keep_few_shapes() -> None:
    """Has oneDNN and torch's wrapper of it keep the code of 96 shapes each, unless the environment says how many.

    By default they keep that of 1,024, half a megabyte each; an update has some 60. Both read their limit at the first
    product of the process.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KEPT_SHAPES))


def even_rows(x: Tensor) -> Tensor:
    """Appends rows of zeros to x [T, D] in training on a CPU in bf16; elsewhere returns x itself.

    Every micro-batch has another number of tokens. oneDNN generates code for each product of a new shape, 0.5 to 1 ms,
    some 50 times an update of transformer_tiny, and keeps that of 1,024 shapes, half a gigabyte. Layers that treat rows
    one by one need not know of spare rows; attention leaves them out, and the caller drops them.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return x
    spare = even_number(len(x), STEPS) - len(x)
    return F.pad(x, (0, 0, 0, spare)) if spare and compute_dtype(x) == torch.bfloat16 else x


def even_number(number: int, steps: int) -> int:
    """Returns the next of `steps` numbers to an octave, a power of 2: at least `number`, and at most 1 / steps more."""
    return number + -number % (1 << max(number.bit_length() - steps.bit_length(), 0))
