"""Pads tensors in training to few different numbers of rows, because oneDNN compiles a product for every new shape."""

import os

from torch import Tensor
from torch.nn import functional as F

from nmtkit.models.layers import trains_in_bf16_on_cpu

# T tokens, D model width

STEPS = 64  # number of allowed row counts between two powers of 2; at most 1.6 % of the rows are padding
CACHED_PRODUCTS = 96


def limit_product_caches() -> None:
    """Limits the caches of compiled products in oneDNN and in its wrapper in torch to 96 products each.

    By default, each cache keeps 1,024 products of half a megabyte; an update uses about 60. Limits that are set in the
    environment are kept. Both libraries read their limit at the first product of the process.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(CACHED_PRODUCTS))


def pad_rows(x: Tensor) -> Tensor:
    """Appends rows of zeros to x [T, D] in training on a CPU in bf16. Otherwise returns x itself.

    Micro-batches differ in their number of tokens. For each new number of tokens, an update of transformer_tiny makes
    oneDNN compile about 50 products, in 0.5 to 1 ms each. Layers that treat rows independently also compute the padding
    rows. Attention ignores padding rows, and the caller drops them.
    """
    padding = padded_size(len(x), STEPS) - len(x) if trains_in_bf16_on_cpu(x) else 0
    return F.pad(x, (0, 0, 0, padding)) if padding else x


def padded_size(size: int, steps: int) -> int:
    """Returns the smallest allowed size that is at least `size`. `steps` sizes are allowed between two powers of 2."""
    return size + -size % (1 << max(size.bit_length() - steps.bit_length(), 0))
