"""Linear layers for inference on a CPU, with weights in the layout of the kernels, in fp32, bf16 or int8."""

import copy
import ctypes
import functools
import logging
import warnings
from abc import ABC, abstractmethod
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.models.layers import int8, is_unmodified, multiplies_in_bf16
from nmtkit.models.layers.dropout import Dropout

Precision = Literal["fp32", "bf16", "int8"]

log = logging.getLogger("nmtkit")

ROWS = 128  # the packed layout is optimised for this number of rows; any number of rows works
# With 128 or 256 inputs, scaling the inputs takes all the time that the int8 product saves, unless there are many
# outputs.
MIN_INT8_INPUTS, MIN_INT8_OUTPUTS = 512, 4096
MAX_FP16_WEIGHTS = 1 << 16  # maximum number of weights of an fp16 layer, measured for 128 x 128 to 256 x 768
MIN_BF16_CACHE_WIDTH = 512
SMALL_PRODUCT = 4 * 128 * 384  # number of multiplications that take as long as the set-up of oneDNN
ZERO_POINT = torch.tensor(128.0)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # constants of malloc.h
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


# --- the modules of a model -------------------------------------------------------------------------------------------


def prepack(model: nn.Module, precision: Precision) -> None:
    """Replaces the `nn.Linear` layers of `model` in place, on the CPU, and removes dropout.

    Afterwards, the model cannot be trained.

    Embeddings, norms, and the inputs and outputs of layers stay in fp32. A result for one row does not depend on the
    other rows, except for rounding in the last place of fp32.

    Only layers that become faster in int8 use int8. Layers with fewer than 512 inputs and fewer than 4,096 outputs use
    bf16 instead, if the processor multiplies in bf16. bf16 layers of up to 65,536 weights keep their weights in fp16
    and multiply in fp32. On a processor without bf16 products, larger bf16 layers compute in fp32.

    Some modules stay unchanged with all their children, and compute in fp32: modules with hooks, with parametrizations
    or with a replaced `forward`, modules of an unknown subclass, and the composite modules of torch
    (`nn.TransformerEncoderLayer`, `nn.MultiheadAttention`), which read the weights of their children.

    Raises ValueError for int8 if torch was built without int8 kernels.
    """
    keep_freed_memory()
    if precision == "bf16" and not multiplies_in_bf16():
        log.warning(
            "this processor does not support bf16 products: layers with more than %s weights use fp32", MAX_FP16_WEIGHTS
        )
    if precision == "int8" and not (torch.backends.mkldnn.is_available() or has_fbgemm()):
        raise ValueError(
            "--precision int8 needs a torch with oneDNN or FBGEMM; the installed torch has neither, so use fp32"
        )
    left_alone: list[str] = []
    replacements: dict[nn.Module, nn.Module] = {}
    visited: set[nn.Module] = set()  # a module may occur twice, such as an embedding that both sides share

    def visit(parent: nn.Module, path: str) -> None:
        for name, child in list(parent._modules.items()):
            if child is None or child in visited:
                continue
            if not may_change(child):
                left_alone.append(f"{path}{name}")
                continue
            if type(child) is nn.Linear:
                if child not in replacements:
                    replacements[child] = prepacked_linear(child, precision)
                child = replacements[child]
                setattr(parent, name, child)
            elif type(child) is Dropout:
                child = nn.Identity().eval()
                setattr(parent, name, child)
            else:
                visit(child, f"{path}{name}.")
            visited.add(child)

    if may_change(model):
        visit(model, "")
    else:
        left_alone.append("the model")
    if left_alone:
        shown = ", ".join(left_alone[:3]) + (", …" if len(left_alone) > 3 else "")
        log.info("modules with hooks, parametrizations or custom code compute in fp32: %s", shown)


def may_change(module: nn.Module) -> bool:
    """Returns whether `prepack` may replace the module or modules inside it without changing results."""
    kind = type(module)
    called_as_usual = kind.__call__ is nn.Module.__call__ and module._compiled_call_impl is None
    if not is_unmodified(module, kind) or not called_as_usual or hasattr(module, "parametrizations"):
        return False
    if isinstance(module, nn.Linear):
        return kind is nn.Linear
    # composite modules of torch, and their subclasses, read the weights of their children
    torch_classes = [base for base in kind.__mro__ if base.__module__.startswith("torch.nn.")]
    return not module._modules or set(torch_classes) <= {nn.Module, *CONTAINERS}


@functools.cache
def keep_freed_memory() -> None:
    """Tells glibc to keep large freed blocks for later allocations of the process.

    By default glibc returns blocks above 32 MiB to the system at once. The logits of every step, such as 544 rows of
    37,000 columns, would then be written to new pages. int8 projection and softmax took 66 ms with new pages, and 40 ms
    without.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has this function
    if mallopt is not None:
        for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            mallopt(parameter, 1 << 30)


def kv_cache_dtype(linear: nn.Module) -> torch.dtype:
    """Returns the dtype in which a search keeps the keys and values that `linear` computes.

    This is the dtype of the weights, or bf16 if `prepack` packed the weights in bf16, fp16 or int8. Batched products in
    bf16 take half the time of fp32, because they move half the memory. For packed weights, the dtype is fp32 on a
    processor without bf16 products, and for models of fewer than 512 dimensions. The keys and values of such models fit
    into the cache of the processor, where bf16 products are not faster (at 256 sentences, they are half as fast).
    """
    if isinstance(linear, InferenceLinear):
        half = linear.dtype != torch.float32 and multiplies_in_bf16() and linear.in_features >= MIN_BF16_CACHE_WIDTH
        return torch.bfloat16 if half else torch.float32
    return next((weight.dtype for weight in linear.parameters() if weight.is_floating_point()), torch.float32)


# --- linear layers ----------------------------------------------------------------------------------------------------


def prepacked_linear(linear: nn.Linear, precision: Precision) -> nn.Module:
    """Returns an equivalent of `linear` for inference, or `linear` itself if torch has no faster kernel."""
    pays = linear.in_features >= MIN_INT8_INPUTS or linear.out_features >= MIN_INT8_OUTPUTS
    if precision == "int8" and pays:
        return Int8Linear(linear)
    if precision != "fp32" and linear.weight.numel() <= MAX_FP16_WEIGHTS:
        packed = fp16_weight(linear.weight.detach())
        if packed is not None:
            return Fp16Linear(linear, packed)
    if precision == "int8" and not multiplies_in_bf16():
        return Int8Linear(linear)
    if not torch.backends.mkldnn.is_available():
        return linear
    return PrepackedLinear(linear, "bf16" if precision != "fp32" and multiplies_in_bf16() else "fp32")


class InferenceLinear(nn.Module, ABC):
    """An `nn.Linear` with a weight layout for inference. `dtype` is the type of the weights."""

    dtype: torch.dtype
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """The weights that the layer multiplies by, as a new fp32 tensor [outputs, inputs]."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Returns the layer's output for rows of inputs: [rows, inputs] -> [rows, outputs]."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return _NoGradient.apply(x, self)  # type: ignore[no-untyped-call]
        if x.dim() == 2:
            return self.product(x)
        return self.product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


class _NoGradient(torch.autograd.Function):
    """Runs a layer that has no gradients. A backward pass raises an error instead of returning zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: InferenceLinear) -> Tensor:
        return layer(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise RuntimeError(
            "the layers of this model are optimised for inference and have no gradients; load it with "
            "nmtkit.load(path, trainable=True)"
        )


class PrepackedLinear(InferenceLinear):
    """`nn.Linear` with weights in the layout of oneDNN. A bf16 layer multiplies in bf16 and sums in fp32.

    oneDNN takes 12 µs to set up a product, so BLAS computes small products in fp32.
    """

    def __init__(self, linear: nn.Linear, precision: Literal["fp32", "bf16"]) -> None:
        super().__init__(linear)
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        weight = linear.weight.detach().to(self.dtype)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach().to(self.dtype)
        self.small_rows = SMALL_PRODUCT // weight.numel() if precision == "fp32" else 0
        self.plain_weight = weight if self.small_rows else None

    @property
    def weight(self) -> Tensor:
        return self.packed.to_dense().float()

    def product(self, x: Tensor) -> Tensor:
        if x.shape[0] <= self.small_rows:
            return F.linear(x, cast(Tensor, self.plain_weight), self.bias)
        y: Tensor = operators().linear(x.to(self.dtype), self.packed, self.bias, "none", [], "")
        return y.to(x.dtype)


class Fp16Linear(InferenceLinear):
    """`nn.Linear` with weights in fp16, which FBGEMM multiplies in fp32.

    For few rows, this takes a quarter of the time of oneDNN's bf16 product, which takes 12 µs to set up: a product of 4
    rows with 128 x 384 weights takes 4 µs instead of 16 µs. From 128 rows on, oneDNN is faster (1.4 times as fast at
    256 rows).
    """

    dtype = torch.float16

    def __init__(self, linear: nn.Linear, packed: Tensor) -> None:
        super().__init__(linear)
        self.packed = packed
        self.rounded_weight = linear.weight.detach().half()  # takes at most 128 KiB
        bias = torch.zeros(self.out_features) if linear.bias is None else linear.bias
        self.bias = bias.detach().float()

    @property
    def weight(self) -> Tensor:
        return self.rounded_weight.float()

    def product(self, x: Tensor) -> Tensor:
        y: Tensor = operators().fp16_linear(x, self.packed, self.bias)
        return y


def fp16_weight(weight: Tensor) -> Tensor | None:
    """Returns weights [outputs, inputs] in fp16 for FBGEMM, or None without FBGEMM or if they exceed fp16's range."""
    fp16_linear = operators().fp16_linear
    if fp16_linear is None or weight.abs().max() > torch.finfo(torch.float16).max:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hides a deprecation; `PrepackedLinear` can replace these operators
            packed: Tensor = torch.fbgemm_pack_gemm_matrix_fp16(weight.float())
            fp16_linear(weight.new_zeros(1, weight.shape[1]).float(), packed, weight.new_zeros(len(weight)).float())
            return packed
    except (AttributeError, RuntimeError):
        return None


class Int8Linear(InferenceLinear):
    """`nn.Linear` in 8 bits. Weights have one scale per output. Inputs have one scale per row, so rows are independent.

    Inputs are rounded once, to round(127 x / largest absolute value of the row + 128). They are unsigned, because the
    instruction of the processor needs unsigned inputs. Weights become integers up to `limit` (int8.py). Sums of
    integers are exact, so FBGEMM and oneDNN return the same results. FBGEMM quantises the inputs itself, and takes half
    the time of oneDNN for few rows. For many rows, oneDNN takes as little as half the time of FBGEMM.
    """

    dtype = torch.int8

    def __init__(self, linear: nn.Linear, limit: int | None = None) -> None:
        super().__init__(linear)
        quantized, scale = int8.quantize(linear.weight, largest_int8_weight() if limit is None else limit)
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self.few_rows = fbgemm_rows(self.in_features, self.out_features)
        self.unpacked: tuple[Tensor, Tensor] | None = None  # kept for `select`: weights in int8, and their scales
        self.pack(quantized, scale, torch.backends.mkldnn.is_available())

    def pack(self, quantized: Tensor, scale: Tensor, with_onednn: bool) -> None:
        """Packs int8 weights [outputs, inputs] with scales [outputs] for FBGEMM and, if `with_onednn`, for oneDNN."""
        self.few = fbgemm_weight(quantized, scale)
        self.packed: Tensor | None = None
        if with_onednn:
            self.packed = torch.ops.onednn.qlinear_prepack(quantized, [ROWS, self.in_features])
        self.weight_scale = scale
        self.scale = scale * torch.tensor(1 / 127)  # [outputs]: scale of weight x input, rounded as in FBGEMM
        self.zero_point = torch.zeros(len(scale), dtype=torch.int64)

    def select(self, columns: Tensor) -> "Int8Linear":
        """Returns the layer that computes only the outputs `columns`, with the same results."""
        if self.unpacked is None:
            whole = (
                self.packed.to_dense().t() if self.packed is not None else (self.weight / self.weight_scale[:, None])
            )
            self.unpacked = whole.round().to(torch.int8).contiguous(), self.weight_scale
        quantized, scale = self.unpacked
        layer = copy.copy(self)
        layer.out_features, layer.unpacked = len(columns), None
        layer.bias = None if self.bias is None else self.bias[columns]
        layer.pack(quantized[columns], scale[columns], with_onednn=self.few is None)
        return layer

    @property
    def weight(self) -> Tensor:
        if self.few is not None:
            unpacked: Tensor = torch.ops.quantized.linear_unpack(self.few)[0].dequantize()
            return unpacked
        assert self.packed is not None
        return self.packed.to_dense().t().float() * (self.scale * 127)[:, None]

    def product(self, x: Tensor) -> Tensor:
        # [rows, 1]; torch's vector norm would take ten times as long
        largest = x.abs().amax(1, keepdim=True).clamp_min_(1e-30)
        scaled = x / largest
        if self.few is not None and (x.shape[0] <= self.few_rows or self.packed is None):
            y: Tensor = operators().fbgemm_linear(scaled, 1 / 127, 128, self.few)
        else:
            y = self.onednn_product(scaled)
        y = y.mul_(largest)
        return y if self.bias is None else y.add_(self.bias)  # a single addcmul would take three times as long

    def onednn_product(self, scaled: Tensor) -> Tensor:
        """Returns the product of the weights and `scaled`, which are inputs scaled to -1 to 1."""
        # rounds once, because the addition is a fused multiply-add
        whole = torch.add(ZERO_POINT, scaled, alpha=127).round_()
        quantized = torch.empty(round_up_rows(len(scaled)), self.in_features, dtype=torch.uint8)
        # a conversion through int16 is faster; the results of padding rows are not returned
        quantized[: len(scaled)].copy_(whole.to(torch.int16))
        y: Tensor = operators().onednn_linear(
            quantized, 1.0, 128, self.packed, self.scale, self.zero_point, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y[: len(scaled)]


@functools.cache
def largest_int8_weight() -> int:
    """Returns the largest absolute value of an int8 weight: 127, or 63 if products of full-range weights saturate.

    Processors without VNNI instructions add two products of an unsigned and a signed byte in 16 bits, with saturation:
    2 x 255 x 127 does not fit into 16 bits, but 2 x 255 x 63 fits. A trial product shows whether sums saturate, because
    a library may ignore VNNI (ONEDNN_MAX_CPU_ISA). Weights of 7 bits are as fast, with an error of about 1 % of the
    largest output.
    """
    with torch.no_grad():
        linear = nn.Linear(512, 64, bias=False, dtype=torch.float32)
        linear.weight.fill_(1.0)
        layer, x = Int8Linear(linear, limit=127), torch.ones(4, 512)
        results = [] if layer.packed is None else [layer.onednn_product(x)]
        if layer.few is not None:
            results.append(operators().fbgemm_linear(x, 1 / 127, 128, layer.few))
        saturates = any(not torch.allclose(y, torch.full_like(y, 512.0), rtol=1e-3) for y in results)
    return 63 if saturates else 127


class Operators:
    """The operators of oneDNN and FBGEMM in torch. An operator is None if torch was built without its library."""

    def __init__(self) -> None:
        self.linear = _operator(torch.ops.mkldnn, "_linear_pointwise")
        self.onednn_linear = _operator(torch.ops.onednn, "qlinear_pointwise")
        self.fbgemm_linear = _operator(torch.ops.quantized, "linear_with_input_q_dq_qweight_dq_output_fp32")
        self.fp16_linear: Any = getattr(torch, "fbgemm_linear_fp16_weight_fp32_activation", None)


def _operator(namespace: Any, name: str) -> Any:
    packet = getattr(namespace, name, None)
    return None if packet is None else packet.default


operators = functools.cache(Operators)  # the operators are looked up at the first use, not when this file is imported


def has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def fbgemm_weight(quantized: Tensor, scale: Tensor) -> Any:
    """Returns int8 weights [outputs, inputs] with scales [outputs], packed for FBGEMM, or None without FBGEMM."""
    if not has_fbgemm():
        return None
    engine = torch.backends.quantized.engine
    try:
        torch.backends.quantized.engine = "fbgemm"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hides a deprecation; oneDNN can replace these operators
            weight = torch._make_per_channel_quantized_tensor(
                quantized, scale.double(), torch.zeros(len(scale), dtype=torch.int64), 0
            )
        return torch.ops.quantized.linear_prepack(weight, None)
    except (AttributeError, RuntimeError):
        return None
    finally:
        torch.backends.quantized.engine = engine


def fbgemm_rows(inputs: int, outputs: int) -> int:
    """Returns the number of rows up to which FBGEMM is faster than oneDNN, measured for 512 x 512 to 512 x 10,000.

    FBGEMM needs no separate quantisation of the inputs, which matters less if there are many outputs.
    """
    return 1 << 30 if outputs <= inputs else 128 if outputs <= 4 * inputs else 32


def round_up_rows(rows: int) -> int:
    """Rounds up a number of rows, because oneDNN builds a kernel for each new number, which takes 2 ms in int8."""
    multiple = 4 if rows <= 32 else 32
    return -(-rows // multiple) * multiple
