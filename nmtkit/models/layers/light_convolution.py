"""Lightweight and dynamic convolutions in place of self-attention (Wu et al. 2019, "Pay Less Attention").

Each token becomes a weighted sum of the tokens around it. The weights are normalised by a softmax. The channels of a
head share their weights.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.data.packed import Layout, Packed
from nmtkit.models.layers import stacked_linear
from nmtkit.models.layers.dropout import dropout

# B sentences, T tokens, L tokens of the longest sentence, D model width, H heads, W width of the kernel


class ConvolutionContext(Protocol):
    """The tokens around the input of a layer: whole sentences, or the newest tokens of a search."""

    def convolution(self, x: Tensor, weights: Tensor, newer: int) -> Tensor:
        """Returns weighted sums of the tokens around each token: T D, T H W -> T D.

        The last `newer` weights belong to the tokens that follow the token.
        """


class LightConvolution(nn.Module):
    """A gated linear unit, a convolution along the sentence, and a projection (section 3, figure 2).

    A lightweight convolution has fixed weights (equation 1). The weights of a dynamic convolution are a linear function
    of the token (section 4). Tokens outside the sentence count as zeros. A causal convolution reads the `width` newest
    tokens. Any other convolution also reads tokens after the current token.
    """

    def __init__(
        self, d_model: int, heads: int, width: int, *, causal: bool, dynamic: bool, dropout: float, bias: bool
    ) -> None:
        super().__init__()
        self.heads, self.width, self.rate = heads, width, dropout
        self.newer = 0 if causal else width // 2  # number of newer tokens that the kernel reads
        self.in_proj = stacked_linear(d_model, (d_model, d_model), bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)
        self.weight_proj = nn.Linear(d_model, heads * width, bias=False) if dynamic else None
        self.weight = None if dynamic else nn.Parameter(torch.empty(heads, width))
        if self.weight is not None:
            nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor, context: ConvolutionContext) -> Tensor:
        x = F.glu(self.in_proj(x))
        if self.weight_proj is not None:
            weights = self.weight_proj(x).unflatten(-1, (self.heads, self.width))  # T H W
        else:
            assert self.weight is not None
            weights = self.weight.expand(len(x), -1, -1)
        weights = weights.softmax(-1)
        if self.training:
            weights = dropout(weights, self.rate)
        return self.out_proj(context.convolution(x, weights.to(x.dtype), self.newer))


def packed_convolution(x: Tensor, weights: Tensor, newer: int, layout: Layout) -> Tensor:
    """Computes `ConvolutionContext.convolution` for whole sentences: T D, T H W -> T D.

    The sum is a product with a band matrix for each head, which is as fast as the second product of attention.
    """
    heads, width = weights.shape[1:]
    padded = Packed(x, layout).to_padded().unflatten(-1, (heads, -1)).transpose(1, 2)  # B H L D/H
    kernel = Packed(weights, layout).to_padded().transpose(1, 2)  # B H L W
    token = torch.arange(layout.max_length, device=x.device)
    index = token - token[:, None] + width - 1 - newer  # L L: index of the weight that a token gives to another token
    inside = (index >= 0) & (index < width)
    band = kernel.gather(-1, index.clamp(0, width - 1).expand(*kernel.shape[:2], -1, -1)) * inside
    return Packed.from_padded((band @ padded).transpose(1, 2).flatten(2), layout).values
