"""Training with the rounding of int8 inference (quantisation-aware training, Jacob et al. 2018, section 3).

The forward pass of a layer rounds weights and inputs as `prepack.Int8Linear` does. Gradients pass through the rounding
unchanged (the straight-through estimator, Bengio et al. 2013).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.layers import is_unmodified
from nmtkit.layers.prepack import MAX_FP16_WEIGHTS, MIN_INT8_INPUTS, MIN_INT8_OUTPUTS, largest_int8_weight

# T rows


class RoundedLinear(nn.Linear):
    """An `nn.Linear` that rounds its inputs to 8 bits with a scale per row, and its weights with a scale per output."""

    limit = 127  # largest absolute value of a weight in int8

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(rounded(x, 127), rounded(self.weight, self.limit), self.bias)


def rounded(x: Tensor, limit: int) -> Tensor:
    """Rounds each row of x to multiples of (largest absolute value in the row) / `limit`. The gradient is 1."""
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-30)
        change = ((x.float() / scale * limit).round() * (scale / limit)).to(x.dtype) - x
    return x + change


def is_int8(linear: nn.Linear) -> bool:
    """Returns whether int8 inference rounds a layer on some processors.

    Layers with many inputs or outputs are rounded on all processors. Other layers with more than MAX_FP16_WEIGHTS
    weights are rounded only on processors without bf16 products.
    """
    wide = linear.in_features >= MIN_INT8_INPUTS or linear.out_features >= MIN_INT8_OUTPUTS
    return wide or linear.weight.numel() > MAX_FP16_WEIGHTS


def quantize_aware(model: nn.Module) -> int:
    """Makes the layers of a model round as in int8 inference, in place. Returns the number of these layers.

    Names and values of parameters stay the same. Raises ValueError if int8 inference rounds no layer.
    """
    layers = [module for module in model.modules() if is_unmodified(module, nn.Linear)]
    chosen = [layer for layer in layers if isinstance(layer, nn.Linear) and is_int8(layer)]
    if not chosen:
        raise ValueError(
            f"--quantize-aware has no effect: int8 inference rounds layers with {MIN_INT8_INPUTS} inputs, "
            f"{MIN_INT8_OUTPUTS:,} outputs or more than {MAX_FP16_WEIGHTS:,} weights, and this model has none"
        )
    for layer in chosen:
        layer.__class__ = RoundedLinear
        layer.limit = largest_int8_weight()  # type: ignore[assignment]
    return len(chosen)
