"""Convolutions over packed sentences, and weight normalisation."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.data.packed import Layout, Packed
from nmtkit.models.layers.recurrent import LayerStates

# B sentences, T tokens, L tokens of the longest sentence, N rows of a search, D model width, H heads, W width of the
# kernel


def windows(x: Tensor, layout: Layout, kernel: int, dilation: int, causal: bool) -> Tensor:
    """Returns the inputs of the kernel at each token: [T, width] -> [T, kernel x width].

    The earliest input comes first. Inputs are shifted copies of the token axis, with zeros outside the sentence. The
    last input of a causal kernel is the token itself; other kernels have the token in the middle.
    """
    first = -(kernel - 1) * dilation // (1 if causal else 2)
    taps = []
    for shift in range(first, first + kernel * dilation, dilation):
        if shift == 0:
            taps.append(x)
            continue
        position = layout.position_ids + shift
        inside = position >= 0 if shift < 0 else position < layout.lengths[layout.segment_ids]
        distance = min(abs(shift), len(x))
        shifted = F.pad(x[:-distance], (0, 0, distance, 0)) if shift < 0 else F.pad(x[distance:], (0, 0, 0, distance))
        taps.append(torch.where(inside[:, None], shifted, 0))
    return torch.cat(taps, -1)


def packed_convolution(x: Tensor, weights: Tensor, newer: int, layout: Layout) -> Tensor:
    """Computes `RecurrentContext.convolution` of `attention.py` for whole sentences: T D, T H W -> T D.

    The weighted sums of a head are a product with a band matrix, which takes as long as the product of attention
    weights and values. The last `newer` weights belong to the tokens after the current token.
    """
    heads, width = weights.shape[1:]
    padded = Packed(x, layout).to_padded().unflatten(-1, (heads, -1)).transpose(1, 2)  # B H L D/H
    kernel = Packed(weights, layout).to_padded().transpose(1, 2)  # B H L W
    token = torch.arange(layout.max_length, device=x.device)
    index = token - token[:, None] + width - 1 - newer  # L L: index of the weight of token j (column) for token i (row)
    inside = (index >= 0) & (index < width)
    band = kernel.gather(-1, index.clamp(0, width - 1).expand(*kernel.shape[:2], -1, -1)) * inside
    return Packed.from_padded((band @ padded).transpose(1, 2).flatten(2), layout).values


class PackedConvolution(nn.Module):
    """A one-dimensional convolution that stays within each sentence: [T, width] -> [T, output].

    `linear` maps the concatenated inputs of the kernel to the output: [kernel x width] -> [output]. In a step of
    decoding, `states` holds the previous inputs of a causal convolution, and x holds the new token of each of the
    N rows.
    """

    def __init__(self, linear: nn.Module, kernel: int, *, width: int, dilation: int = 1, causal: bool) -> None:
        super().__init__()
        assert causal or kernel % 2, "a kernel of even width has no middle token"
        self.linear = linear
        self.kernel, self.dilation, self.causal = kernel, dilation, causal
        self.state_shapes = (((kernel - 1) * dilation, width),)  # inputs of a causal kernel before the current token

    def forward(self, x: Tensor, layout: Layout, states: LayerStates | None = None) -> Tensor:
        if not states or self not in states:
            return self.linear(windows(x, layout, self.kernel, self.dilation, self.causal))
        assert self.causal and layout.max_length == 1
        inputs = torch.cat([states[self][0].to(x.dtype), x[:, None]], 1)
        states[self] = (inputs[:, 1:],)
        return self.linear(inputs[:, :: self.dilation].flatten(1))


class WeightNormLinear(nn.Module):
    """A linear layer with weight normalisation (Salimans & Kingma 2016, equation 2).

    A row of the weight is `gain` times the unit vector of a direction. Directions are drawn from a normal distribution
    with standard deviation `std`. The gain starts as the length of the direction, so the initial layer computes the
    same as a layer without normalisation. Biases start at zero.
    """

    def __init__(self, width: int, output: int, std: float) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.empty(output, width).normal_(0, std))
        self.gain = nn.Parameter(self.direction.detach().norm(dim=1, keepdim=True))
        self.bias = nn.Parameter(torch.zeros(output))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.direction * (self.gain / self.direction.norm(dim=1, keepdim=True)), self.bias)
