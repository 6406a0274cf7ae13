"""Convolutions over packed sentences, and weight normalisation."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.packed import Layout

# T tokens, N rows of a search, I and O width of input and output, K taps of the kernel


def windows(x: Tensor, layout: Layout, kernel: int, dilation: int, causal: bool) -> Tensor:
    """What each token's kernel sees, zero beyond its sentence: T I -> T (K I), the earliest tap first.

    Taps are shifted copies of the token axis, blanked where a shift has crossed a sentence's border. Causal kernels end
    at the token itself, others have it in their middle.
    """
    first = -(kernel - 1) * dilation // (1 if causal else 2)
    taps = []
    for shift in range(first, first + kernel * dilation, dilation):
        if shift == 0:
            taps.append(x)
            continue
        place = layout.position_ids + shift
        inside = place >= 0 if shift < 0 else place < layout.lengths[layout.segment_ids]
        reach = min(abs(shift), len(x))
        shifted = F.pad(x[:-reach], (0, 0, reach, 0)) if shift < 0 else F.pad(x[reach:], (0, 0, 0, reach))
        taps.append(torch.where(inside[:, None], shifted, 0))
    return torch.cat(taps, -1)


class PackedConvolution(nn.Module):
    """A one-dimensional convolution that never looks across a sentence's border: T I -> T O.

    `linear` maps the K taps, side by side, to the output: K I -> O.
    """

    def __init__(self, linear: nn.Module, kernel: int, *, dilation: int = 1, causal: bool) -> None:
        super().__init__()
        assert causal or kernel % 2, "a kernel of even width has no middle"
        self.linear = linear
        self.kernel, self.dilation, self.causal = kernel, dilation, causal

    @property
    def reach(self) -> int:
        """How many earlier tokens a causal kernel looks back over, and a search must keep."""
        return (self.kernel - 1) * self.dilation

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        return self.linear(windows(x, layout, self.kernel, self.dilation, self.causal))

    def step(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of N sentences: x N I, and the `reach` inputs before it, N reach I -> N O, and the past."""
        assert self.causal
        seen = torch.cat([past.to(x.dtype), x[:, None]], 1)
        return self.linear(seen[:, :: self.dilation].flatten(1)), seen[:, 1:]


class WeightNormLinear(nn.Module):
    """A linear layer whose weight rows are `gain` times a direction (Salimans & Kingma 2016, equation 2).

    The direction is drawn from a normal distribution of the given standard deviation, the gain starts at its length,
    so that the layer starts as a plain one; biases start at zero.
    """

    def __init__(self, width: int, output: int, deviation: float) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.empty(output, width).normal_(0, deviation))
        self.gain = nn.Parameter(self.direction.detach().norm(dim=1, keepdim=True))
        self.bias = nn.Parameter(torch.zeros(output))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.direction * (self.gain / self.direction.norm(dim=1, keepdim=True)), self.bias)
