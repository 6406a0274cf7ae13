"""Linear layers for inference on a CPU: weights laid out once for the processor's kernels, in fp32, bf16 or int8."""

import ctypes
import functools
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

Precision = Literal["fp32", "bf16", "int8"]

ROWS = 128  # rows that the packed layout is chosen for; any number of rows works
MIN_INT8_INPUTS = 512  # with 128 or 256, scaling the inputs takes what the product saves over bf16
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def prepack(model: nn.Module, precision: Precision) -> None:
    """Replaces every `nn.Linear` of `model`, which must be on the CPU, in place; it can no longer be trained.

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


def prepacked_linear(linear: nn.Linear, precision: Precision) -> "InferenceLinear":
    if precision == "int8" and (linear.in_features >= MIN_INT8_INPUTS or not multiplies_in_bf16()):
        return Int8Linear(linear)
    return PrepackedLinear(linear, "fp32" if precision == "fp32" else "bf16")


def multiplies_in_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported()


def kv_cache_dtype(linear: nn.Module) -> torch.dtype:
    """Returns the type in which a search keeps the keys and values that `linear` computes.

    It is that of the weights, but bf16 for int8: batched products in bf16 take a quarter of the time, for half the
    memory is moved. A processor without instructions for bf16 keeps fp32.
    """
    if isinstance(linear, InferenceLinear):
        return torch.bfloat16 if linear.dtype != torch.float32 and multiplies_in_bf16() else torch.float32
    weight: Tensor = linear.weight  # type: ignore[assignment]
    return weight.dtype


class InferenceLinear(nn.Module, ABC):
    """An `nn.Linear` whose weights, of type `dtype`, are laid out for inference."""

    dtype: torch.dtype

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.outputs, self.inputs = linear.weight.shape

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, outputs]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.reshape(-1, self.inputs)).view(*x.shape[:-1], self.outputs)


class PrepackedLinear(InferenceLinear):
    """`nn.Linear` with weights in oneDNN's own order; in bf16 it multiplies in bf16 and sums in fp32."""

    def __init__(self, linear: nn.Linear, precision: Literal["fp32", "bf16"]) -> None:
        super().__init__(linear)
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(self.dtype), ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach().to(self.dtype)

    def product(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.packed, self.bias, "none", [], "")
        return y.to(x.dtype)


class Int8Linear(InferenceLinear):
    """`nn.Linear` in 8 bits: weights scaled by output, inputs by row, so that a row's result is its own.

    Inputs become round(127 x / largest of the row) + 128, unsigned as the processor's instruction wants them (by way of
    signed numbers, whose conversion is the fast one). Sums are of integers, hence exact.
    """

    dtype = torch.int8

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1).clamp_min(1e-30) / 127
        quantized = (weight / scale[:, None]).round().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(quantized, [ROWS, self.inputs])
        self.scale = scale / 127  # [outputs]: of weight and input
        self.zero_point = torch.zeros(self.outputs, dtype=torch.int64)
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def product(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(1, keepdim=True).clamp_min_(1e-30)  # [rows, 1]; a vector norm takes ten times as long
        quantized = torch.empty(round_up_rows(len(x)), self.inputs, dtype=torch.int8)
        quantized[: len(x)].copy_((x * (127 / largest)).round_())  # the rows behind them are cut off again
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            quantized.bitwise_xor_(-128).view(torch.uint8), 1.0, 128, self.packed, self.scale, self.zero_point, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        y = y[: len(x)].mul_(largest)
        return y if self.bias is None else y.add_(self.bias)  # one addcmul would take three times as long


def round_up_rows(rows: int) -> int:
    """Returns `rows` or a few more: for each new number of rows oneDNN builds a kernel, 2 ms in int8."""
    multiple = 4 if rows <= 32 else 32
    return -(-rows // multiple) * multiple
