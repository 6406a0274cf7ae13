"""Output projections of a search. They compute logits of a part of the vocabulary, or logits in fp32."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.models.layers import is_unmodified
from nmtkit.models.layers.prepack import Int8Linear, PrepackedLinear

# N rows, D width of the model, V vocabulary, C selected outputs; `columns` [C] are indices of outputs

# The number of columns of a bf16 product is padded to a multiple of this number, because oneDNN builds a kernel for
# each new number of columns.
COLUMN_GROUP = 64


def select_columns(projection: nn.Module, columns: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a function that computes the outputs `columns` [C] of `projection` for N rows: N D -> N C.

    A linear layer computes only these outputs. In int8, they are exactly equal to the outputs of the whole product. In
    other types, the last digits may differ, because sums can have a different order. If `projection` is a different
    module or has hooks, the function computes all outputs and then selects the columns.
    """
    if is_unmodified(projection, nn.Linear):
        return linear(cast(Tensor, projection.weight), cast(Tensor | None, projection.bias), columns)
    if isinstance(projection, PrepackedLinear | Int8Linear) and is_unmodified(projection, type(projection)):
        if isinstance(projection, Int8Linear):
            return projection.select(columns)
        return linear(projection.kept_weight, projection.bias, columns)
    return lambda x: projection(x)[:, columns]


def linear(weight: Tensor, bias: Tensor | None, columns: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a function N D -> N C that multiplies by rows `columns` of `weight` [V, D], in the dtype of `weight`."""
    rows = columns
    if weight.dtype != torch.float32:
        rows = torch.cat([columns, columns.new_zeros(-len(columns) % COLUMN_GROUP)])
    selected, added = weight[rows], None if bias is None else bias.to(weight.dtype)[rows]

    def product(x: Tensor) -> Tensor:
        return F.linear(x.to(selected.dtype), selected, added)[:, : len(columns)].to(x.dtype)

    return product


def fp32_logits(projection: nn.Module, features: Tensor) -> Tensor:
    """Returns the logits [N, V] of features [N, D] in fp32.

    A GPU sums products of bf16 numbers in fp32. The sums are not rounded to bf16, because rounding would change a logit
    between 8 and 16 by up to 0.03, which can exceed the difference between two candidates.
    """
    if features.is_cuda and features.dtype == torch.bfloat16 and is_unmodified(projection, nn.Linear):
        weight, bias = cast(Tensor, projection.weight), projection.bias
        if weight.dtype == torch.bfloat16:
            logits = torch.mm(features, weight.t(), out_dtype=torch.float32)
            return logits if bias is None else logits.add_(cast(Tensor, bias))
    logits = projection(features)
    return logits.float()
