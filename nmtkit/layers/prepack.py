"""Linear layers for inference on a CPU: weights laid out once for the processor's kernels, in fp32, bf16 or int8."""

import ctypes
import functools
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

# R rows, K inputs, N outputs

ROWS = 128  # rows that the packed layout is chosen for; any number of rows works
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
INT8_PAYS = 512  # inputs; with 128 or 256, scaling them takes what the product saves over bf16


def prepack(model: nn.Module, precision: Literal["fp32", "bf16", "int8"]) -> None:
    """Replaces every `nn.Linear` of `model`, which must be on the CPU, in place. The model can be trained no more.

    Embeddings and norms stay in fp32, and so do inputs and outputs of the layers. A result for one row does not depend
    on the other rows, but for rounding in the last place of fp32.

    int8 is for layers where it pays: those of fewer than 512 inputs become bf16, if the processor multiplies in that.
    """
    keep_freed_memory()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, prepacked_linear(child, precision))


@functools.cache
def keep_freed_memory() -> None:
    """Tells glibc to keep large blocks that are freed for the next allocation, in the whole process.

    By default it returns those above 32 MiB to the system at once, so that the logits of every step (of 544 rows and
    37,000 entries, say) come in fresh pages: their int8 projection and softmax took 66 ms instead of 40.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            mallopt(parameter, 1 << 30)


def prepacked_linear(linear: nn.Linear, precision: Literal["fp32", "bf16", "int8"]) -> "FixedLinear":
    if precision != "int8":
        return PrepackedLinear(linear, precision)
    if linear.in_features < INT8_PAYS and multiplies_in_bf16():
        return PrepackedLinear(linear, "bf16")
    return Int8Linear(linear)


def multiplies_in_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported()


def kv_cache_dtype(linear: nn.Module) -> torch.dtype:
    """The type a search keeps keys and values in that `linear` makes: that of its numbers, but bf16 for 8 bits.

    Batched products in bf16 take a quarter of the time, for half the memory is moved. A processor without instructions
    for them is given fp32.
    """
    if isinstance(linear, PrepackedLinear | Int8Linear):
        short = getattr(linear, "dtype", None) is not torch.float32
        return torch.bfloat16 if short and multiplies_in_bf16() else torch.float32
    weight: Tensor = linear.weight  # type: ignore[assignment]
    return weight.dtype


class FixedLinear(nn.Module, ABC):
    """An `nn.Linear` whose weights are laid out for inference."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.outputs, self.inputs = linear.weight.shape

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """R K -> R N."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.reshape(-1, self.inputs)).view(*x.shape[:-1], self.outputs)


class PrepackedLinear(FixedLinear):
    """`nn.Linear` with weights in oneDNN's own order; in bf16 it takes the products in bf16 and sums in fp32."""

    def __init__(self, linear: nn.Linear, precision: Literal["fp32", "bf16"]) -> None:
        super().__init__(linear)
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(self.dtype), ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach().to(self.dtype)

    def product(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.packed, self.bias, "none", [], "")
        return y.to(x.dtype)


class Int8Linear(FixedLinear):
    """`nn.Linear` in 8 bits: weights scaled by output, inputs by row, so that a row's result is its own.

    Inputs become round(127 x / largest of the row) + 128, unsigned as the processor's instruction wants them (by way of
    signed numbers, whose conversion is the fast one). Sums are whole numbers, hence exact.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1).clamp_min(1e-30) / 127
        whole = (weight / scale[:, None]).round().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(whole, [ROWS, self.inputs])
        self.scale = scale / 127  # N; of weight and input
        self.zero = torch.zeros(self.outputs, dtype=torch.int64)
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def product(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(1, keepdim=True).clamp_min_(1e-30)  # R 1; a vector norm takes ten times as long
        whole = torch.empty(few_shapes(len(x)), self.inputs, dtype=torch.int8)
        whole[: len(x)].copy_((x * (127 / largest)).round_())  # what the rows after them hold does not matter
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            whole.bitwise_xor_(-128).view(torch.uint8), 1.0, 128, self.packed, self.scale, self.zero, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        y = y[: len(x)].mul_(largest)
        return y if self.bias is None else y.add_(self.bias)  # one addcmul would take three times as long


def few_shapes(rows: int) -> int:
    """`rows` or a few more: for each new number of rows oneDNN builds a kernel, which takes 2 ms in 8 bits."""
    multiple = 4 if rows <= 32 else 32
    return -(-rows // multiple) * multiple
