"""Dropout (Srivastava et al. 2014)."""

from torch import Tensor, nn
from torch.nn import functional as F


class Dropout(nn.Module):
    """Zeroes each element with probability `p` while training and scales the others by 1 / (1 - p)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p) if self.training and self.p else x

    def extra_repr(self) -> str:
        return f"p={self.p}"
