"""A GPU without a GPU: CUDA tensors that have a shape, a type and a device, and no contents.

Within `fake_gpu()`, tensors and modules can be put on "cuda". A step is run within `StepRules()`, where these raise:

- tensors of two devices in one operation (torch's own RuntimeError), and types that a kernel refuses (MixedTypesError);
- whatever reads a value, such as `.item()`, `bool()`, `nonzero`, a boolean index and `bincount` (torch's own
  DataDependentOutputException and DynamicOutputShapeException);
- a copy from or to the host, as of a tensor made on the CPU (HostTransferError).

Limits of single kernels and time are not seen. The process must have loaded the guard of `library.load`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten

# Kernels that take floating-point tensors of one type only, though the shape functions do not say so.
SAME_TYPE = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm, aten.convolution, aten.convolution_backward,
    aten.index_copy, aten.index_copy_, aten.index_add, aten.index_add_, aten.index_put, aten.index_put_,
    aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_, aten.scatter_reduce, aten.scatter_reduce_,
    aten.lerp, aten.lerp_, aten.masked_scatter, aten.masked_scatter_,
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward, aten._scaled_dot_product_cudnn_attention_backward,
}  # fmt: skip


class HostTransferError(AssertionError):
    """A step copies between host and device, which waits for the device."""


class MixedTypesError(AssertionError):
    """A kernel is given floating-point tensors of two types."""


class StepRules(TorchDispatchMode):
    """Raises at an operation that makes the host wait for the device, or that a CUDA kernel refuses."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        if func is aten._local_scalar_dense.default and given[0].device.type == "cpu":
            return (
                1.0 if given[0].is_floating_point() else 1
            )  # a number on the host, which is read without asking the device
        if func is aten._fused_sgd_.default:  # the operation has no shape function and does not need one
            return None
        types_given = {str(x.dtype) for x in given if x.is_floating_point() and x.is_cuda}
        if func.overloadpacket in SAME_TYPE and len(types_given) > 1:
            raise MixedTypesError(f"{func} of {' and '.join(sorted(types_given))}")
        result = func(*args, **kwargs)
        from_gpu = any(x.is_cuda for x in given)
        for made in tensors_of(result):
            if not made.is_cuda and (from_gpu or made.dim()):
                raise HostTransferError(f"{func} puts {tuple(made.shape)} on the CPU")
            if made.is_cuda and given and not from_gpu:
                raise HostTransferError(f"{func} copies {tuple(made.shape)} from the CPU")
        return result


def tensors_of(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """The context of a fake GPU of the Hopper generation. All tensors are fake, also on the CPU."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
            (torch.cuda, "get_device_capability", lambda *_, **__: (9, 0)),
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (nn.Module, "to", module_to),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(
            torch.autograd.set_multithreading_enabled(False)
        )  # modes of torch apply to the current thread
        yield


def module_to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`Module.to` for fake tensors, whose memory torch's own cannot exchange. Shared parameters stay shared."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    moved: dict[int, nn.Parameter] = {}

    def like(old: Tensor) -> Tensor:
        return torch.empty_like(old, device=device, dtype=dtype if old.is_floating_point() else None)

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    moved[id(parameter)] = nn.Parameter(like(parameter.detach()), parameter.requires_grad)
                part._parameters[name] = moved[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = like(buffer)
    return module


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that works with the host's real tensors though a step calls it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call
