"""Layers of architectures: fast paths per device, each beside its plain reference."""

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the type of products with x, which autocast may lower."""
    device = x.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else x.dtype
