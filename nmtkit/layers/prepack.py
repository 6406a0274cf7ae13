"""Linear layers for inference on a CPU: weights laid out once for the processor's kernels, in fp32, bf16 or int8."""

import ctypes
import functools
import warnings
from abc import ABC, abstractmethod
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Precision = Literal["fp32", "bf16", "int8"]

_linear = torch.ops.mkldnn._linear_pointwise.default
_fp16_linear: Any = getattr(torch, "fbgemm_linear_fp16_weight_fp32_activation", None)
_onednn_linear = torch.ops.onednn.qlinear_pointwise.default
_fbgemm_linear = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default

ROWS = 128  # rows that the packed layout is chosen for; any number of rows works
# With 128 or 256 inputs, scaling them takes what the product saves over bf16, unless there are many outputs.
MIN_INT8_INPUTS, MIN_INT8_OUTPUTS = 512, 4096
MAX_FP16_WEIGHTS = 1 << 16  # measured for 128 x 128 to 256 x 768
MIN_BF16_CACHE_WIDTH = 512
SMALL_PRODUCT = 4 * 128 * 384  # multiplications of a product that oneDNN's setting up would double
ZERO_POINT = torch.tensor(128.0)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def prepack(model: nn.Module, precision: Precision) -> None:
    """Replaces every `nn.Linear` of `model`, which must be on the CPU, in place; it can no longer be trained.

    Embeddings and norms stay in fp32, and so do inputs and outputs of the layers. A result for one row does not depend
    on the other rows, but for rounding in the last place of fp32.

    int8 is for layers where it pays: those of fewer than 512 inputs and 4,096 outputs become bf16, if the processor
    multiplies in that. Of the layers in bf16, those of up to 65,536 weights keep these in fp16, and multiply in fp32.

    Hooks of the modules within `model` are not called any more.
    """
    keep_freed_memory()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, prepacked_linear(child, precision))
    for module in list(model.modules())[1:]:
        module.__class__ = without_hooks(type(module))  # type: ignore[arg-type]  # it means its instances
        # Python finds them so at once; by nn.Module's own search it takes 0.4 µs each time, hundreds of times a step
        module.__dict__.update(module._modules)
        module.__dict__.update(module._parameters)


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


@functools.cache
def without_hooks(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns a subclass whose instances are called without a look for hooks: it takes 0.7 µs, fifty times a step."""
    if kind is nn.LayerNorm:
        return InferenceLayerNorm
    return type(kind.__name__, (kind,), {"__call__": kind.forward, "__module__": kind.__module__})


def prepacked_linear(linear: nn.Linear, precision: Precision) -> "InferenceLinear":
    pays = linear.in_features >= MIN_INT8_INPUTS or linear.out_features >= MIN_INT8_OUTPUTS
    if precision == "int8" and pays:
        return Int8Linear(linear)
    if precision != "fp32" and linear.weight.numel() <= MAX_FP16_WEIGHTS:
        packed = fp16_weight(linear.weight.detach())
        if packed is not None:
            return Fp16Linear(linear, packed)
    if precision == "int8" and not multiplies_in_bf16():
        return Int8Linear(linear)
    return PrepackedLinear(linear, "fp32" if precision == "fp32" else "bf16")


def multiplies_in_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported()


def kv_cache_dtype(linear: nn.Module) -> torch.dtype:
    """Returns the type in which a search keeps the keys and values that `linear` computes.

    It is that of the weights, but bf16 for int8: batched products in bf16 take half the time, for half the memory is
    moved. A processor without instructions for bf16 keeps fp32, and so do models of fewer than 512 dimensions: their
    caches stay in the processor's, and the products are as fast (half as fast with 256 sentences of many entries).
    """
    if isinstance(linear, InferenceLinear):
        short = linear.dtype != torch.float32 and multiplies_in_bf16() and linear.inputs >= MIN_BF16_CACHE_WIDTH
        return torch.bfloat16 if short else torch.float32
    weight: Tensor = linear.weight  # type: ignore[assignment]
    return weight.dtype


class InferenceLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` without the Python around the operation, which takes as long again for few rows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    __call__ = forward


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
        if x.dim() == 2:
            return self.product(x)
        return self.product(x.reshape(-1, self.inputs)).view(*x.shape[:-1], self.outputs)


class PrepackedLinear(InferenceLinear):
    """`nn.Linear` with weights in oneDNN's own order; in bf16 it multiplies in bf16 and sums in fp32.

    oneDNN takes 12 µs to set a product up; small ones in fp32 are left to BLAS.
    """

    def __init__(self, linear: nn.Linear, precision: Literal["fp32", "bf16"]) -> None:
        super().__init__(linear)
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        weight = linear.weight.detach().to(self.dtype)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach().to(self.dtype)
        self.small_rows = SMALL_PRODUCT // weight.numel() if precision == "fp32" else 0
        self.plain = weight if self.small_rows else None

    def product(self, x: Tensor) -> Tensor:
        if x.shape[0] <= self.small_rows:
            return F.linear(x, cast(Tensor, self.plain), self.bias)
        y: Tensor = _linear(x.to(self.dtype), self.packed, self.bias, "none", [], "")
        return y.to(x.dtype)


class Fp16Linear(InferenceLinear):
    """`nn.Linear` with weights in fp16, which FBGEMM multiplies in fp32: a row's result is the same to the last bit,
    whatever the other rows.

    For few rows it takes a quarter of the time of oneDNN's bf16, whose product takes 12 µs to set up: 4 of 128 x 384 in
    4 µs for 16. From 128 rows on oneDNN is faster, 1.4 times with 256.
    """

    dtype = torch.float16

    def __init__(self, linear: nn.Linear, packed: Tensor) -> None:
        super().__init__(linear)
        self.packed = packed
        bias = torch.zeros(self.outputs) if linear.bias is None else linear.bias
        self.bias = bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _fp16_linear(x, self.packed, self.bias)
        return y

    product = forward


def fp16_weight(weight: Tensor) -> Tensor | None:
    """Returns weights [outputs, inputs] in fp16 as FBGEMM wants them; None without it, or beyond the range of fp16."""
    if _fp16_linear is None or weight.abs().max() > torch.finfo(torch.float16).max:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch means to drop these one day; then it is oneDNN's bf16
            packed: Tensor = torch.fbgemm_pack_gemm_matrix_fp16(weight.float())
            _fp16_linear(weight.new_zeros(1, weight.shape[1]).float(), packed, weight.new_zeros(len(weight)).float())
            return packed
    except (AttributeError, RuntimeError):
        return None


class Int8Linear(InferenceLinear):
    """`nn.Linear` in 8 bits: weights scaled by output, inputs by row, so that a row's result is its own.

    Inputs become round(127 x / largest of the row + 128), unsigned as the processor's instruction wants them, in one
    rounding. Sums are of integers, hence exact, and the same whoever takes them: FBGEMM, which makes the integers
    itself and takes half of oneDNN's time for few rows, or oneDNN, which takes down to a half of its time for many.
    """

    dtype = torch.int8

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1).clamp_min(1e-30) / 127
        quantized = (weight / scale[:, None]).round().to(torch.int8)
        self.few = fbgemm_weight(quantized, scale)
        self.few_rows = fbgemm_rows(self.inputs, self.outputs)
        self.packed = torch.ops.onednn.qlinear_prepack(quantized, [ROWS, self.inputs])
        self.scale = scale * torch.tensor(1 / 127)  # [outputs]: of weight and input, rounded as FBGEMM does
        self.zero_point = torch.zeros(self.outputs, dtype=torch.int64)
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def product(self, x: Tensor) -> Tensor:
        # [rows, 1]; a vector norm takes ten times as long
        largest = x.abs().amax(1, keepdim=True).clamp_min_(1e-30)
        scaled = x / largest
        if self.few is not None and x.shape[0] <= self.few_rows:
            y: Tensor = _fbgemm_linear(scaled, 1 / 127, 128, self.few)
        else:
            y = self.onednn_product(scaled)
        y = y.mul_(largest)
        return y if self.bias is None else y.add_(self.bias)  # one addcmul would take three times as long

    def onednn_product(self, scaled: Tensor) -> Tensor:
        """Returns the product of inputs between -1 and 1."""
        whole = torch.add(ZERO_POINT, scaled, alpha=127).round_()  # one rounding, by fused multiply-add
        quantized = torch.empty(round_up_rows(len(scaled)), self.inputs, dtype=torch.uint8)
        # by way of 16 bits, whose conversion is the fast one; the rows behind them are cut off again
        quantized[: len(scaled)].copy_(whole.to(torch.int16))
        y: Tensor = _onednn_linear(
            quantized, 1.0, 128, self.packed, self.scale, self.zero_point, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y[: len(scaled)]


def fbgemm_weight(quantized: Tensor, scale: Tensor) -> Any:
    """Returns weights [outputs, inputs] and their scales [outputs] as FBGEMM wants them; None where it is not there."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return None
    engine = torch.backends.quantized.engine
    try:
        torch.backends.quantized.engine = "fbgemm"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch means to drop quantized tensors one day; then oneDNN takes all rows
            weight = torch._make_per_channel_quantized_tensor(
                quantized, scale.double(), torch.zeros(len(scale), dtype=torch.int64), 0
            )
        return torch.ops.quantized.linear_prepack(weight, None)
    except (AttributeError, RuntimeError):
        return None
    finally:
        torch.backends.quantized.engine = engine


def fbgemm_rows(inputs: int, outputs: int) -> int:
    """Returns for how many rows FBGEMM is faster than oneDNN, measured for 512 x 512 to 512 x 10,000.

    What speaks for it is that it quantises the inputs itself, and that counts the less the more outputs there are.
    """
    return 1 << 30 if outputs <= inputs else 128 if outputs <= 4 * inputs else 32


def round_up_rows(rows: int) -> int:
    """Returns `rows` or a few more: for each new number of rows oneDNN builds a kernel, 2 ms in int8."""
    multiple = 4 if rows <= 32 else 32
    return -(-rows // multiple) * multiple
