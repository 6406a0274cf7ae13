"""Layers of architectures. Fast paths for one kind of device have files of their own, next to the plain ones."""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

log = logging.getLogger("nmtkit")


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of matrix products with x: the dtype of autocast if it is on, else the dtype of x."""
    device = x.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def multiplies_in_bf16() -> bool:
    """Returns whether this processor has instructions for bf16 products (AVX-512 BF16)."""
    return torch.cpu._is_avx512_bf16_supported()


def works(kernel: Callable[[], object], otherwise: str) -> bool:
    """Returns whether a GPU kernel runs. If it fails, logs `otherwise`, the text that says what is used instead."""
    try:
        with torch.random.fork_rng([]):
            kernel()
    except Exception as error:  # a compiler raises any kind
        log.warning("%s: %s", otherwise, next(iter(str(error).strip().splitlines()), type(error).__name__))
        return False
    return True


def stacked_linear(width: int, rows: Sequence[int], bias: bool) -> nn.Linear:
    """Returns one layer that computes several projections of these output widths.

    Its weight has the attribute `stacked_rows`, for optimizers that treat each projection as a matrix of its own.
    """
    linear = nn.Linear(width, sum(rows), bias=bias)
    linear.weight.stacked_rows = tuple(rows)  # type: ignore[attr-defined]
    return linear


def hooks_of(module: nn.Module) -> list[object]:
    """Returns the forward and backward hooks of a module itself, without those of its children."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return [hook for by_id in hooks for hook in by_id.values()]


def is_unmodified(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Returns whether calling the module does exactly what the class `kind` does with the module's parameters.

    Then another implementation may read these parameters and compute the same. It must not do so for a subclass (which
    a parametrization makes too), for a module with hooks (`torch.nn.utils.weight_norm` computes the weight in a hook),
    or for a module whose `forward` was replaced.
    """
    if type(module) is not kind or "forward" in module.__dict__ or nn.modules.module._has_any_global_hook():
        return False
    return not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
