"""Linear layers for inference on a CPU, with weights in the layout of the kernels, in fp32, bf16 or int8."""

import copy
import ctypes
import functools
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.models.layers import int8, is_unmodified, multiplies_in_bf16
from nmtkit.models.layers.dropout import Dropout

Precision = Literal["fp32", "bf16", "int8"]

log = logging.getLogger("nmtkit")

ROWS = 128  # the packed layout is optimised for this number of rows; any number of rows works
MIN_REDUCED_INPUTS, MIN_REDUCED_OUTPUTS = 512, 4096  # a layer below both limits computes in fp32
SMALL_PRODUCT = 4 * 128 * 384  # number of multiplications that take as long as the set-up of oneDNN
MIN_BF16_CACHE_WIDTH = 512
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # constants of malloc.h


# --- the modules of a model -------------------------------------------------------------------------------------------


def prepack(model: nn.Module, precision: Precision) -> None:
    """Replaces the `nn.Linear` layers of `model` in place, on the CPU, and removes dropout.

    Afterwards, the model cannot be trained.

    Embeddings, norms, and the inputs and outputs of layers stay in fp32. A result for one row does not depend on the
    other rows, except for rounding in the last place of fp32.

    Layers with fewer than 512 inputs and fewer than 4,096 outputs always compute in fp32, because the conversion of
    their inputs takes all the time that the product saves. bf16 layers compute in fp32 on a processor without bf16
    products.

    Some modules stay unchanged with all their children, and compute in fp32: modules with hooks, with parametrizations
    or with a replaced `forward`, subclasses of `nn.Linear`, and the composite modules of torch
    (`nn.TransformerEncoderLayer`, `nn.MultiheadAttention`), which read the weights of their children.
    """
    keep_freed_memory()
    if precision == "bf16" and not multiplies_in_bf16():
        log.warning("this processor does not support bf16 products: PyTorch computes in fp32")
    if precision == "int8" and not has_fbgemm():
        log.warning("this torch has no products in int8: PyTorch computes in bf16 or fp32")
    left_alone: list[str] = []
    visited: set[nn.Module] = set()  # a module may occur twice, such as an embedding that both sides share
    packed = functools.cache(lambda linear: prepacked_linear(linear, precision))  # a layer may occur several times

    def visit(parent: nn.Module, path: str) -> None:
        for name, child in list(parent._modules.items()):
            if child is None or child in visited:
                continue
            if not may_change(child):
                left_alone.append(f"{path}{name}")
            elif type(child) is nn.Linear:
                setattr(parent, name, packed(child))
            elif type(child) is Dropout:
                setattr(parent, name, nn.Identity().eval())
            else:
                visited.add(child)
                visit(child, f"{path}{name}.")

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
    return not module._modules or set(torch_classes) <= {nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict}


@functools.cache
def keep_freed_memory() -> None:
    """Tells glibc to keep large freed blocks for later allocations of the process.

    By default glibc returns blocks above 32 MiB to the system at once. The logits of every step, such as 544 rows of
    37,000 columns, would then be written to new pages. int8 projection and softmax took 66 ms with new pages, and 40 ms
    with kept pages.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has this function
    if mallopt is not None:
        for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            mallopt(parameter, 1 << 30)


def kv_cache_dtype(linear: nn.Module) -> torch.dtype:
    """Returns the dtype in which a search keeps the keys and values that `linear` computes.

    This is the dtype of the weights, or bf16 if `prepack` packed the weights in bf16 or int8. Batched products in
    bf16 take half the time of fp32, because they read half as many bytes. For packed weights, the dtype is fp32 on a
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
    if linear.in_features < MIN_REDUCED_INPUTS and linear.out_features < MIN_REDUCED_OUTPUTS:
        precision = "fp32"
    if precision == "int8" and has_fbgemm():
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

    oneDNN takes 12 µs to set up a product, so BLAS computes the small products of fp32 layers.
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

    @functools.cached_property
    def kept_weight(self) -> Tensor:
        """The weights that the layer multiplies by, in its dtype: [outputs, inputs]. They are unpacked only once."""
        return self.weight.to(self.dtype)

    def product(self, x: Tensor) -> Tensor:
        if self.plain_weight is not None and x.shape[0] <= self.small_rows:
            return F.linear(x, self.plain_weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x.to(self.dtype), self.packed, self.bias, "none", [], "")
        return y.to(x.dtype)


class Int8Linear(InferenceLinear):
    """`nn.Linear` in 8 bits. Weights have one scale per output. Inputs have one scale per row, so rows are independent.

    FBGEMM turns an input x into round(127 x / m) + 128, where m is the largest absolute value of its row. This integer
    is unsigned, because the instruction of the processor needs unsigned inputs. Weights become integers up to `limit`
    (int8.py). FBGEMM also multiplies. Sums of integers are exact.
    """

    dtype = torch.int8

    def __init__(self, linear: nn.Linear, limit: int | None = None) -> None:
        super().__init__(linear)
        quantized, scale = int8.quantize(linear.weight, largest_int8_weight() if limit is None else limit)
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self.packed = fbgemm_weight(quantized, scale)

    @functools.cached_property
    def unpacked(self) -> tuple[Tensor, Tensor]:
        """The weights in int8 [outputs, inputs], and their scales [outputs]."""
        weight = torch.ops.quantized.linear_unpack(self.packed)[0]
        return weight.int_repr(), weight.q_per_channel_scales().float()

    def select(self, columns: Tensor) -> Callable[[Tensor], Tensor]:
        """Returns a function that computes only the outputs `columns`, with the same results as `product`."""
        layer = copy.copy(self)
        layer.bias = None if self.bias is None else self.bias[columns]
        layer.packed = fbgemm_weight(*(part[columns] for part in self.unpacked))
        return layer.product

    @property
    def weight(self) -> Tensor:
        unpacked: Tensor = torch.ops.quantized.linear_unpack(self.packed)[0].dequantize()
        return unpacked

    def product(self, x: Tensor) -> Tensor:
        # [rows, 1]; torch's vector norm would take ten times as long
        largest = x.abs().amax(1, keepdim=True).clamp_min_(1e-30)
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        y: Tensor = multiply(x / largest, 1 / 127, 128, self.packed).mul_(largest)
        return y if self.bias is None else y.add_(self.bias)  # a single addcmul would take three times as long


@functools.cache
def largest_int8_weight() -> int:
    """Returns the largest absolute value of an int8 weight: 127, or 63 if products of full-range weights saturate.

    Processors without VNNI instructions add two products of an unsigned and a signed byte in 16 bits, with saturation:
    2 x 255 x 127 does not fit into 16 bits, but 2 x 255 x 63 fits. A trial product shows whether sums saturate. Weights
    of 7 bits are as fast, with an error of about 1 % of the largest output.
    """
    with torch.no_grad():
        linear = nn.Linear(512, 64, bias=False, dtype=torch.float32)
        linear.weight.fill_(1.0)
        y = Int8Linear(linear, limit=127)(torch.ones(4, 512))
    return 127 if torch.allclose(y, torch.full_like(y, 512.0), rtol=1e-3) else 63


def has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def fbgemm_weight(quantized: Tensor, scale: Tensor) -> Any:
    """Returns int8 weights [outputs, inputs] with scales [outputs], packed for FBGEMM."""
    engine = torch.backends.quantized.engine
    try:
        torch.backends.quantized.engine = "fbgemm"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hides a deprecation warning
            weight = torch._make_per_channel_quantized_tensor(
                quantized, scale.double(), torch.zeros(len(scale), dtype=torch.int64), 0
            )
        return torch.ops.quantized.linear_prepack(weight, None)
    finally:
        torch.backends.quantized.engine = engine
