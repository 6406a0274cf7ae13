"""Lightweight and dynamic convolutions in place of self-attention (Wu et al. 2019, "Pay Less Attention").

Each token becomes a weighted sum of the tokens around it. The weights are normalised by a softmax. The channels of a
head share their weights.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.models.layers import stacked_linear
from nmtkit.models.layers.attention import RecurrentContext
from nmtkit.models.layers.dropout import dropout

# T tokens, H heads, W width of the kernel


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

    def forward(self, x: Tensor, context: RecurrentContext) -> Tensor:
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
