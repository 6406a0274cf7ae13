"""Which keys a query may see."""

import torch
from torch import Tensor

from nmtkit.packed import Layout

# B sentences, L and M tokens of the longest sentence on the side of the queries and of the keys


def attention_mask(query_layout: Layout, key_layout: Layout, causal: bool, window: int | None) -> Tensor:
    """Which keys each query may see: bool, B 1 1 M or B 1 L M.

    `causal` hides the keys after a query's own position; `window` r those outside the neighbourhood of size r around
    it, |i - j| > r // 2 (section 4).
    """
    visible = key_layout.mask[:, None, None, :]
    if causal or window is not None:
        device = visible.device
        rows = torch.arange(query_layout.max_length, device=device)[:, None]
        columns = torch.arange(key_layout.max_length, device=device)
        # a query beyond its sentence's end must see some key, lest its softmax be 0 / 0
        rows = torch.minimum(rows, (key_layout.lengths - 1)[:, None, None, None])
        if causal:
            visible = visible & (columns <= rows)
        if window is not None:
            visible = visible & ((columns - rows).abs() <= window // 2)
    return visible
