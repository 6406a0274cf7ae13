"""Adafactor (Shazeer & Stern 2018) as torch.optim.Adafactor has it, in operations that never wait for a GPU.

torch's own reads three numbers of every parameter on the host at each step, some 400 waits an update for
transformer_base, and knows no `found_inf`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

MIN_WEIGHT_RMS = 1e-3  # by which an update is scaled at least: weights of zero must be able to move


class Adafactor(Optimizer):
    """Second moments are kept by row and column of the last two dimensions; vectors have whole ones.

    An update is scaled by the root mean square (RMS) of its weights, times min(lr, 1 / sqrt(step)), and its own RMS is
    clipped to `update_clip`. `found_inf`, a number on the device, may be set before a step: unless it is 0, parameters
    and state stay as they are.
    """

    _step_supports_amp_scaling = True  # as torch marks optimizers that read `found_inf`
    found_inf: Tensor | None = None

    def __init__(self, params: Any, *, lr: float, beta2_decay: float, update_clip: float, weight_decay: float) -> None:
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "update_clip": update_clip, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, parameter.grad, group)

    def _step_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            # not called "step", which torch would leave on the CPU when a checkpoint is loaded
            state["steps"] = torch.zeros((), device=parameter.device)
            if parameter.dim() > 1:
                state["row_var"] = torch.zeros_like(parameter[..., :1])
                state["col_var"] = torch.zeros_like(parameter[..., :1, :])
            else:
                state["variance"] = torch.zeros_like(parameter)
        taken = torch.ones_like(state["steps"])  # 0 if this update is skipped
        if self.found_inf is not None:
            skipped = self.found_inf > 0
            taken = taken.masked_fill_(skipped, 0.0)
            gradient = gradient.masked_fill(skipped, 0.0)  # times 0 it would still be NaN
        step = state["steps"].add_(taken).clamp(min=1)
        size = rms(parameter).clamp_(min=MIN_WEIGHT_RMS)
        rate = step.rsqrt().clamp_(max=group["lr"]).mul_(size).mul_(taken)
        if group["weight_decay"]:
            parameter.mul_(1 - taken * (group["lr"] * group["weight_decay"]))
        eps = torch.finfo(parameter.dtype).eps
        variance = updated_variance(state, gradient, step.pow(group["beta2_decay"]).mul_(taken), eps)
        update = variance.clamp_(min=eps * eps).rsqrt_().mul_(gradient)
        clip = rms(update).div_(group["update_clip"]).clamp_(min=1)
        parameter.addcmul_(update, rate / clip, value=-1)


def updated_variance(state: dict[str, Tensor], gradient: Tensor, share: Tensor, eps: float) -> Tensor:
    """Takes the squared gradient into the moments of `state` with the weight `share`; returns the variance, newly made.

    By row and column it is their product over the mean of the rows.
    """
    if "variance" in state:
        return state["variance"].lerp_(gradient.square(), share).clone()
    row, column = state["row_var"], state["col_var"]
    row.lerp_(torch.linalg.vector_norm(gradient, dim=-1, keepdim=True).square_().div_(gradient.shape[-1]), share)
    column.lerp_(torch.linalg.vector_norm(gradient, dim=-2, keepdim=True).square_().div_(gradient.shape[-2]), share)
    return (row @ column).div_(row.mean(-2, keepdim=True).clamp_(min=eps))


def rms(x: Tensor) -> Tensor:
    """Returns the root mean square, a number."""
    return torch.linalg.vector_norm(x) / math.sqrt(x.numel())
