"""Runs a command of nmtkit on a fake Apple GPU, which computes on the CPU and refuses fp64 and operations that mix
devices. `python fake_mps.py LIBRARY COMMAND…`; LIBRARY is compiled from fake_mps.cpp.

An operation with a tensor of more than 0 dimensions on each of the two devices raises RuntimeError, as on the real
device. Limits of single kernels, speed and memory are not seen.
"""

import ctypes
import importlib.util
import sys
import threading
from pathlib import Path
from typing import Any

folder = Path(str(importlib.util.find_spec("torch").origin)).parent  # type: ignore[union-attr]
ctypes.CDLL(str(folder / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
ctypes.CDLL(sys.argv[1])  # torch looks for the guard of a device during its import only

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

aten = torch.ops.aten
COPIES = {aten.copy_, aten._to_copy, aten._foreach_copy_, aten.set_}


class AppleTensor(Tensor):
    """A tensor on the fake device. `inner` has its values on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "AppleTensor":
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="mps:0",
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.inner.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on the CPU. Its results are on the fake device if its arguments are, or if it names mps."""
    given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    on_device = [x for x in given if isinstance(x, AppleTensor)]
    named = kwargs.get("device")
    if on_device and func.overloadpacket not in COPIES and named is None:
        others = [x for x in given if not isinstance(x, AppleTensor) and x.dim()]
        if others:
            raise RuntimeError(f"{func} gets tensors of mps and of the CPU, of shape {tuple(others[0].shape)}")
    is_apple = bool(on_device) if named is None else torch.device(named).type == "mps"
    if func.overloadpacket is aten.copy_ or func.overloadpacket is aten.set_:
        is_apple = isinstance(args[0], AppleTensor)
    if named is not None:
        kwargs = {**kwargs, "device": "cpu"}
    inner_args, inner_kwargs = pytree.tree_map_only(AppleTensor, lambda x: x.inner, (args, kwargs))
    result = func(*inner_args, **inner_kwargs)
    if not is_apple:
        if named is not None and on_device:  # the copy on the CPU must not share memory with the device
            result = pytree.tree_map_only(Tensor, Tensor.clone, result)
        return result
    wrappers = {id(x.inner): x for x in on_device}

    def wrapped(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.float64:
            raise TypeError(f"{func}: the device mps has no float64")
        if id(tensor) in wrappers:
            return wrappers[id(tensor)]
        return AppleTensor(tensor)

    return pytree.tree_map_only(Tensor, wrapped, result)


def on_device(make: Any) -> Any:
    """Wraps a function that makes a tensor of Python numbers, which torch copies to the device beside all modes."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        tensor: Tensor = make(*args, **kwargs)
        return tensor if device is None else tensor.to(device)

    return made


class AppleMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def module_to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`Module.to`, which cannot exchange the memory of these tensors. Shared parameters stay shared."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    moved: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    new = parameter.detach().to(device, dtype if parameter.is_floating_point() else None)
                    moved[id(parameter)] = nn.Parameter(new, parameter.requires_grad)
                    moved[id(parameter)].__dict__.update(parameter.__dict__ if type(parameter) is nn.Parameter else {})
                part._parameters[name] = moved[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device, dtype if buffer.is_floating_point() else None)
    return module


def run_thread(thread: threading.Thread) -> None:
    with AppleMode():  # modes of torch apply to the current thread
        run_as_usual(thread)


run_as_usual = threading.Thread.run


def to_list(tensor: Tensor) -> Any:
    return list_as_usual(tensor.inner if isinstance(tensor, AppleTensor) else tensor)


list_as_usual = Tensor.tolist

if __name__ == "__main__":
    threading.Thread.run = run_thread  # type: ignore[method-assign]
    torch.tensor, torch.as_tensor = on_device(torch.tensor), on_device(torch.as_tensor)
    torch.inference_mode = torch.no_grad  # type: ignore[assignment,misc]  # a view of such a tensor has no version
    Tensor.tolist = to_list  # type: ignore[method-assign]
    nn.Module.to = module_to  # type: ignore[assignment,method-assign]
    torch.backends.mps.is_available = lambda: True  # type: ignore[assignment]
    from nmtkit.cli import main

    with AppleMode(), torch.autograd.set_multithreading_enabled(False):
        if sys.argv[2:] == ["probe"]:
            for operation in (Tensor.double, lambda x: x + torch.ones(2), lambda x: torch.zeros_like(x, dtype=float)):
                try:
                    operation(torch.zeros(2, device="mps"))
                except (TypeError, RuntimeError) as error:
                    print(type(error).__name__)
        else:
            main(sys.argv[2:])
