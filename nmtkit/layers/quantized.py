"""Linear layers for inference on a CPU: weights laid out once for the processor's kernels, in fp32, bf16 or int8."""

from typing import Literal

import torch
from torch import Tensor, nn

# R rows, K inputs, N outputs

ROWS = 128  # rows that the packed layout is chosen for; any number of rows works


def pack(model: nn.Module, precision: Literal["fp32", "bf16", "int8"]) -> None:
    """Replaces every `nn.Linear` of `model`, which must be on the CPU, in place. The model can be trained no more.

    Embeddings, norms and attention stay in fp32, and so do inputs and outputs of the layers. A result for one row does
    not depend on the other rows, but for rounding in the last place of fp32.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear(child) if precision == "int8" else PackedLinear(child, precision))


class PackedLinear(nn.Module):
    """`nn.Linear` with weights in oneDNN's own order; in bf16 it takes the products in bf16 and sums in fp32."""

    def __init__(self, linear: nn.Linear, precision: Literal["fp32", "bf16"]) -> None:
        super().__init__()
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(self.dtype), ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach().to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.packed, self.bias, "none", [], "")
        return y.to(x.dtype)


class Int8Linear(nn.Module):
    """`nn.Linear` in 8 bits: weights scaled by output, inputs by row, so that a row's result is its own.

    Inputs become round(127 x / largest of the row) + 128, unsigned as the processor's instruction wants them (by way of
    signed numbers, whose conversion is the fast one). Sums are whole numbers, hence exact.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1).clamp_min(1e-30) / 127
        whole = (weight / scale[:, None]).round().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(whole, [ROWS, weight.shape[1]])
        self.scale = scale / 127  # N; of weight and input
        self.zero = torch.zeros(len(weight), dtype=torch.int64)
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        largest = rows.abs().amax(1, keepdim=True).clamp_min_(1e-30)  # R 1; a vector norm takes ten times as long
        whole = (rows * (127 / largest)).round_().to(torch.int8).bitwise_xor_(-128).view(torch.uint8)
        y = torch.ops.onednn.qlinear_pointwise(
            whole, 1.0, 128, self.packed, self.scale, self.zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        y = y.mul_(largest) if self.bias is None else torch.addcmul(self.bias, y, largest)
        return y.view(*x.shape[:-1], -1)
