"""Layers of architectures: fast paths per device, each beside its plain reference."""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

log = logging.getLogger("nmtkit")


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the type of products with x, which autocast may lower."""
    device = x.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def works(kernel: Callable[[], object], otherwise: str) -> bool:
    """Returns whether a GPU kernel can be built and launched; if not, logs `otherwise`, what happens then, and why."""
    try:
        with torch.random.fork_rng([]):
            kernel()
    except Exception as error:  # a compiler raises any kind
        log.warning("%s: %s", otherwise, next(iter(str(error).strip().splitlines()), type(error).__name__))
        return False
    return True


def stacked_linear(width: int, rows: Sequence[int], bias: bool) -> nn.Linear:
    """Returns several projections as one; their weight has an attribute `stacked_rows`, for optimizers of matrices."""
    linear = nn.Linear(width, sum(rows), bias=bias)
    linear.weight.stacked_rows = tuple(rows)  # type: ignore[attr-defined]
    return linear
