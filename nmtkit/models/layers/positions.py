"""Sinusoidal position encodings, in the layouts of published Transformers."""

from typing import Any

import torch
from torch import Tensor

# D model width


def sinusoids(positions: int, d_model: int, layout: str = "sinusoidal", offset: int = 0) -> Tensor:
    """Returns sinusoidal position encodings in fp32: positions x D. The first row is position `offset`.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), and PE(pos, 2i + 1) is the cosine of the same angle. The layout
    "sinusoidal_halves" has all sines before the cosines (transformers' MarianMTModel). "sinusoidal_fairseq" has the
    same order, but the angles are pos / 10000^(i / (d_model / 2 - 1)) (Marian itself, M2M-100, NLLB).
    """
    # The table is always computed on the CPU. Models without memory are built on the meta device, where some operations
    # import torch._dynamo, which takes a second.
    double: Any = {"dtype": torch.float64, "device": "cpu"}
    position = torch.arange(offset, offset + positions, **double)[:, None]
    if layout == "sinusoidal_fairseq":  # for an odd d_model, the last column is zeros
        angle = position / 10000 ** (torch.arange(d_model // 2, **double) / max(1, d_model // 2 - 1))
        zeros = position.new_zeros(positions, d_model % 2)
        return torch.cat([angle.sin(), angle.cos(), zeros], -1).float()
    angle = position / 10000 ** (2 * torch.arange((d_model + 1) // 2, **double) / d_model)
    if layout == "sinusoidal":
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :d_model].float()
    return torch.cat([angle.sin(), angle.cos()], -1)[:, :d_model].float()
