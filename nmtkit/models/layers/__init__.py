"""Layers of architectures. Fast paths for one device type are in separate files."""

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)
# names of attributes of a module; each attribute is a dictionary from ids to hooks
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"

log = logging.getLogger("nmtkit")


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of matrix products with x: the dtype of autocast if it is on, else the dtype of x."""
    device = x.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def trains_in_bf16_on_cpu(x: Tensor) -> bool:
    """Returns whether products with x run in bf16 on a CPU, with gradients enabled, in code that is not compiled."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return compute_dtype(x) == torch.bfloat16


def multiplies_in_bf16() -> bool:
    """Returns whether this processor has instructions for bf16 products (AVX-512 BF16)."""
    return torch.cpu._is_avx512_bf16_supported()


def device_of_sums(device: torch.device) -> torch.device:
    """Returns the device for sums in fp64 of numbers on `device`: the CPU for an Apple GPU, which has no fp64."""
    return torch.device("cpu") if device.type == "mps" else device


def works(kernel: Callable[[], object], otherwise: str) -> bool:
    """Returns whether a GPU kernel of Triton runs. If the kernel fails, logs the message `otherwise` and the error.

    Without Triton, returns False and logs nothing. Triton comes with torch for CUDA on Linux.
    """
    try:
        with torch.random.fork_rng([]):
            kernel()
    except Exception as error:  # a compiler can raise exceptions of any type
        if not (isinstance(error, ModuleNotFoundError) and error.name == "triton"):
            log.warning("%s: %s", otherwise, next(iter(str(error).strip().splitlines()), type(error).__name__))
        return False
    return True


def stacked_linear(width: int, rows: Sequence[int], bias: bool) -> nn.Linear:
    """Returns one layer that computes several projections. `rows` are the output widths of the projections.

    The weight has the attribute `stacked_rows`, for optimizers that treat each projection as a separate matrix.
    """
    linear = nn.Linear(width, sum(rows), bias=bias)
    linear.weight.stacked_rows = tuple(rows)  # type: ignore[attr-defined]
    return linear


def hooks_of(module: nn.Module) -> list[object]:
    """Returns the forward and backward hooks of a module itself, without the hooks of its children."""
    return [hook for name in HOOKS for hook in getattr(module, name).values()]


def is_unmodified(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Returns whether a module gives exactly the same results as class `kind`, so faster code can replace the module.

    This is false for a subclass (a parametrization also makes a subclass), for a module with hooks
    (`torch.nn.utils.weight_norm` computes the weight in a hook), and for a module whose `forward` was replaced.
    """
    if type(module) is not kind or "forward" in module.__dict__ or nn.modules.module._has_any_global_hook():
        return False
    return not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def rows_of(sentences: Tensor, beams: int) -> Tensor:
    """Returns the indices [n * beams] of all rows (hypotheses) of n sentences.

    `sentences` [n] are indices of sentences. Each sentence has `beams` rows.
    """
    return (sentences[:, None] * beams + torch.arange(beams, device=sentences.device)).flatten()


def module_list(modules: Iterable[M]) -> Sequence[M]:
    """Returns an `nn.ModuleList`, with the type of a sequence of modules of one class."""
    return cast(Sequence[M], nn.ModuleList(modules))


def sharing_copy(model: M) -> M:
    """Returns a copy of the modules of a model, with the same tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


class ModuleWatch:
    """Tells whether modules have hooks, or have got new code, new modules or new weights since the watch began.

    An engine calls `are_changed` before each search, and the search of one line can take only half a millisecond. So
    the methods compare lists of objects, and do not walk through the models.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        self.attributes = [module.__dict__ for module in self.modules]
        # torch changes these dictionaries in place and never replaces them
        self.hooks = [getattr(module, name) for module in self.modules for name in HOOKS]
        self.parts = [part for module in self.modules for part in (module._modules, module._parameters)]
        self.kept = [each for part in self.parts for each in part.values()]  # so that no id() is reused
        parameters = dict.fromkeys(each for each in self.kept if isinstance(each, nn.Parameter))
        self.weights = [each for each in parameters if not each.is_inference()]
        self.state = self.fingerprint()

    def fingerprint(self) -> tuple[list[int], list[int]]:
        """Returns the identities of modules and parameters, and the versions of parameters.

        A version counts the changes of a parameter in place, apart from changes of its attribute `data`.
        """
        identities = [id(each) for part in self.parts for each in part.values()]
        return identities, [parameter._version for parameter in self.weights]

    def have_hooks(self) -> bool:
        """Returns whether a module has a hook or a replaced `forward`. See `is_unmodified`."""
        replaced = any("forward" in attributes for attributes in self.attributes)
        return replaced or any(self.hooks) or nn.modules.module._has_any_global_hook()

    def are_changed(self) -> bool:
        return self.have_hooks() or self.fingerprint() != self.state
