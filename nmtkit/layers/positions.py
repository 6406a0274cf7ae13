"""Sinusoidal position encodings, in the layouts that Transformers were trained with."""

import torch
from torch import Tensor

# D model width


def sinusoids(positions: int, d_model: int, layout: str = "sinusoidal", offset: int = 0) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) the cosine: positions x D, in fp32.

    The first row is that of position `offset`. "sinusoidal_halves" has all sines before the cosines, as transformers'
    MarianMTModel; "sinusoidal_fairseq" also has the angles pos / 10000^(i / (d_model / 2 - 1)), as Marian itself,
    M2M-100 and NLLB.
    """
    position = torch.arange(offset, offset + positions, dtype=torch.float64)[:, None]
    pairs = torch.arange((d_model + 1) // 2, dtype=torch.float64)
    exponent = pairs / max(1, d_model // 2 - 1) if layout == "sinusoidal_fairseq" else 2 * pairs / d_model
    angle = position / 10000**exponent
    if layout == "sinusoidal":
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :d_model].float()
    return torch.cat([angle.sin(), angle.cos()], -1)[:, :d_model].float()
