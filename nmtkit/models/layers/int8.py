"""Weights in 8 bits: integers, with a scale for each row.

A row is a vector along the last axis of a weight, such as the weights of an output of a linear layer, or an embedding.
The scale of a row is the largest absolute value of the row / 127. Checkpoints with 8-bit weights, int8 layers
(`prepack.Int8Linear`) and training with rounding (`quantization.py`) share these functions, so all three round alike.

A scale has 17 significant bits. The product of a scale and an integer of 7 bits is then exact in fp32, so that rounding
a weight a second time gives the same integers and the same scales.
"""

import torch
from torch import Tensor

LIMIT = 127  # largest absolute value of an integer
MIN_WIDTH = 8  # minimum weights of a row; for shorter rows, the scales would take too much space
LOW_BITS = 7  # the lowest 7 of the 24 significant bits of a scale are zero
SMALLEST = 1e-30  # avoids a division by zero for a row of zeros


def is_quantizable(weight: Tensor) -> bool:
    """Returns whether a checkpoint with 8-bit weights stores `weight` in 8 bits. Biases and gains are excluded."""
    return weight.is_floating_point() and weight.dim() > 1 and weight.shape[-1] >= MIN_WIDTH


def quantize(weight: Tensor, limit: int = LIMIT) -> tuple[Tensor, Tensor]:
    """Returns integers from -limit to limit, and the scales in fp32: [..., D] -> int8 [..., D], [...]."""
    weight = weight.detach().float()
    scale = weight.abs().amax(-1).clamp_min(SMALLEST) / limit
    half = 1 << (LOW_BITS - 1)
    scale = ((scale.view(torch.int32) + half) & -(1 << LOW_BITS)).view(torch.float32)
    return (weight / scale[..., None]).round().to(torch.int8), scale


def dequantize(integers: Tensor, scale: Tensor) -> Tensor:
    """Returns the weights in fp32: int8 [..., D], [...] -> [..., D]. The products are exact."""
    return integers.float() * scale[..., None]
