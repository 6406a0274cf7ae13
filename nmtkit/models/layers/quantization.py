"""Training with the rounding of 8-bit weights (quantisation-aware training, Jacob et al. 2018, section 3).

The forward pass rounds the weights of linear layers and embeddings with the functions that also round the weights of
8-bit checkpoints (`int8.py`). Linear layers also round their inputs, like int8 inference in the compiled engine.
Gradients pass through the rounding unchanged (the straight-through estimator, Bengio et al. 2013).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.models.layers import int8, is_unmodified


class RoundedLinear(nn.Linear):
    """An `nn.Linear` that rounds its weights to 8 bits with a scale per output, and its inputs with a scale per row."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(rounded_inputs(x), rounded_weight(self.weight), self.bias)


class RoundedEmbedding(nn.Embedding):
    """An `nn.Embedding` that rounds each vector to 8 bits."""

    def forward(self, ids: Tensor) -> Tensor:
        return rounded_weight(super().forward(ids))


def rounded_inputs(x: Tensor) -> Tensor:
    """Rounds each row of x to multiples of (largest absolute value in the row) / 127. The gradient is 1."""
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True).float().clamp_min(int8.SMALLEST)
        change = ((x.float() / scale * 127).round() * (scale / 127)).to(x.dtype) - x
    return x + change


def rounded_weight(weight: Tensor) -> Tensor:
    """Rounds each row of a weight like `int8.quantize`. The gradient is 1."""
    with torch.no_grad():
        change = int8.dequantize(*int8.quantize(weight)).to(weight.dtype) - weight
    return weight + change


def quantize_aware(model: nn.Module) -> tuple[int, int]:
    """Changes a model in place, so that its linear layers and embeddings round their weights.

    Names and values of parameters stay the same. Returns two counts: the layers and embeddings that round their
    weights, and the linear layers that also round their inputs. Raises ValueError if nothing is rounded.
    """
    weights = inputs = 0
    for module in model.modules():
        if is_unmodified(module, nn.Linear) and isinstance(module, nn.Linear) and int8.is_quantizable(module.weight):
            module.__class__ = RoundedLinear
            weights, inputs = weights + 1, inputs + 1
        elif is_unmodified(module, nn.Embedding) and int8.is_quantizable(module.weight):  # type: ignore[arg-type]
            module.__class__ = RoundedEmbedding
            weights += 1
    if not weights:
        raise ValueError(
            f"--quantize-aware has no effect: this model has no linear layer and no embedding with at least "
            f"{int8.MIN_WIDTH} weights in a row"
        )
    return weights, inputs
