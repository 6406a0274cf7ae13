"""Adafactor (Shazeer & Stern 2018), with the same results as torch.optim.Adafactor, but without waiting for a GPU.

In each step, torch.optim.Adafactor copies three numbers of every parameter to the host. For transformer_base, the host
waits about 400 times per update. torch.optim.Adafactor also does not support `found_inf`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nmtkit.config import Config, option, to_dict
from nmtkit.training.optimizers.interface import OPTIMIZERS, DeviceSkippingOptimizer, ParameterGroups, unless_skipped

MIN_WEIGHT_RMS = 1e-3  # minimum of the RMS that scales an update; otherwise weights of zero would never change


@dataclass(frozen=True, kw_only=True)
class AdafactorConfig(Config):
    beta2_decay: float = option(-0.8, "X in the decay rate of the second moment: 1 - update^X.", min=-10, max=0)
    update_clip: float = option(
        1.0, "Maximum root mean square of an update before the learning rate is applied.", min=1
    )
    weight_decay: float = option(0.0, "Each update subtracts this share of a weight, times the learning rate.", min=0)


@OPTIMIZERS.register("adafactor", AdafactorConfig())
class Adafactor(DeviceSkippingOptimizer):
    """Adafactor (Shazeer & Stern 2018): second moments by row and column, for models whose Adam state is too large.

    The rows and columns are the last two dimensions of a parameter. Vectors have a moment for each value. The RMS (root
    mean square) of an update is clipped to `update_clip`. The learning rate is relative: the update is scaled by the
    RMS of the parameter and by min(lr, 1 / sqrt(step)).
    """

    def __init__(self, config: AdafactorConfig, groups: ParameterGroups) -> None:
        super().__init__(groups, {"lr": 0.0, **to_dict(config)})

    def step_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            # The name is not "step", because torch leaves a state of this name on the CPU when it loads a checkpoint.
            state["steps"] = torch.zeros((), device=parameter.device)
            if parameter.dim() > 1:
                state["row_var"] = torch.zeros_like(parameter[..., :1])
                state["col_var"] = torch.zeros_like(parameter[..., :1, :])
            else:
                state["variance"] = torch.zeros_like(parameter)
        gradient, applied = unless_skipped(gradient, self.found_inf)
        step = state["steps"].add_(applied).clamp(min=1)
        size = rms(parameter).clamp_(min=MIN_WEIGHT_RMS)
        rate = step.rsqrt().clamp_(max=group["lr"]).mul_(size).mul_(applied)
        if group["weight_decay"]:
            parameter.mul_(1 - applied * (group["lr"] * group["weight_decay"]))
        eps = torch.finfo(parameter.dtype).eps
        variance = updated_variance(state, gradient, step.pow(group["beta2_decay"]).mul_(applied), eps)
        update = variance.clamp_(min=eps * eps).rsqrt_().mul_(gradient)
        clip = rms(update).div_(group["update_clip"]).clamp_(min=1)
        parameter.addcmul_(update, rate / clip, value=-1)


def updated_variance(state: dict[str, Tensor], gradient: Tensor, share: Tensor, eps: float) -> Tensor:
    """Updates the second moments in `state`, and returns the variance of each value of the gradient.

    The new moment is (1 - `share`) x old moment + `share` x squared gradient. With moments by row and column, the
    variance is row moment x column moment / mean of the row moments.
    """
    if "variance" in state:
        return state["variance"].lerp_(gradient.square(), share).clone()
    row, column = state["row_var"], state["col_var"]
    row.lerp_(torch.linalg.vector_norm(gradient, dim=-1, keepdim=True).square_().div_(gradient.shape[-1]), share)
    column.lerp_(torch.linalg.vector_norm(gradient, dim=-2, keepdim=True).square_().div_(gradient.shape[-2]), share)
    return (row @ column).div_(row.mean(-2, keepdim=True).clamp_(min=eps))


def rms(x: Tensor) -> Tensor:
    """Returns the root mean square of all values, a tensor without dimensions."""
    return torch.linalg.vector_norm(x) / math.sqrt(x.numel())
