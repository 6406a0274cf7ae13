"""Schedule-free AdamW: an average of the weights instead of a falling learning rate (Defazio et al. 2024)."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nmtkit.config import option
from nmtkit.training.optimizers.elementwise import AdamWConfig
from nmtkit.training.optimizers.interface import OPTIMIZERS, DeviceSkippingOptimizer, ParameterGroups, unless_skipped


@dataclass(frozen=True, kw_only=True)
class ScheduleFreeConfig(AdamWConfig):
    adam_betas: tuple[float, ...] = option(
        (0.9, 0.98), "Share of the average in the trained weights, and decay rate of the second moment.", min=0, below=1
    )


@OPTIMIZERS.register("schedule_free_adamw", ScheduleFreeConfig(), works_on_shards=True)
class ScheduleFreeAdamW(DeviceSkippingOptimizer):
    """Schedule-free AdamW (Defazio et al. 2024, algorithm 1). Use a constant rate after warm-up (--lr-scheduler fixed).

    z are the weights of AdamW without momentum. x is the average of z, weighted by squared learning rates. Gradients
    are computed at y = (1 - beta_1) z + beta_1 x, so the parameters of the model are y. The weights for validation and
    checkpoints are x.
    """

    def __init__(self, config: ScheduleFreeConfig, groups: ParameterGroups) -> None:
        defaults = {"lr": 0.0, "betas": config.adam_betas, "eps": config.adam_eps, "weight_decay": config.weight_decay}
        super().__init__(groups, defaults)

    def step_parameter(self, y: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (share, decay) = self.state[y], group["betas"]
        if not state:
            state |= {"z": y.clone(), "average": y.clone(), "variance": torch.zeros_like(y)}
            state |= {name: torch.zeros((), device=y.device) for name in ("steps", "weight_sum")}
        z, x, variance = state["z"], state["average"], state["variance"]
        gradient, applied = unless_skipped(gradient, self.found_inf)
        variance.lerp_(gradient.square(), applied * (1 - decay))
        rate = applied * group["lr"] * (1 - decay ** state["steps"].add_(applied)).sqrt()
        z.sub_(rate * (gradient / (variance.sqrt().add_(group["eps"])) + group["weight_decay"] * y))
        share_of_z = rate.square() / state["weight_sum"].add_(rate.square()).clamp(min=torch.finfo(torch.float32).tiny)
        x.lerp_(z, share_of_z)
        y.copy_(torch.lerp(z, x, share))

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """The context in which the parameters have the averages as values. Afterwards, they have their old values.

        Before the first step there are no averages, and the parameters keep their values.
        """
        parameters = [p for group in self.param_groups for p in group["params"] if self.state.get(p)]
        held = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(self.state[parameter]["average"])
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(parameters, held, strict=True):
                    parameter.copy_(value)
