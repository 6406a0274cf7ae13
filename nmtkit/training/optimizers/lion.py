"""Lion: steps by the sign of an interpolated momentum (Chen et al. 2023, algorithm 2)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nmtkit.config import Config, option
from nmtkit.training.optimizers.interface import OPTIMIZERS, DeviceSkippingOptimizer, ParameterGroups, unless_skipped


@dataclass(frozen=True, kw_only=True)
class LionConfig(Config):
    lion_betas: tuple[float, ...] = option(
        (0.9, 0.99), "Share of the momentum in a step, and decay rate of the momentum.", min=0, below=1
    )
    weight_decay: float = option(0.0, "Each update subtracts this share of a weight, times the learning rate.", min=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.lion_betas) != 2:
            raise ValueError(f"--lion-betas is {','.join(map(str, self.lion_betas))}; it must be two numbers")


@OPTIMIZERS.register("lion", LionConfig(), works_on_shards=True)
class Lion(DeviceSkippingOptimizer):
    """Lion. All values of an update have the size of the learning rate. Use a third to a tenth of the rate of Adam."""

    def __init__(self, config: LionConfig, groups: ParameterGroups) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": config.lion_betas, "weight_decay": config.weight_decay})

    def step_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        (share, decay), lr, state = group["betas"], group["lr"], self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        gradient, applied = unless_skipped(gradient, self.found_inf)
        direction = torch.lerp(gradient, state["momentum"], share).sign_()
        parameter.mul_(1 - applied * (lr * group["weight_decay"])).sub_(direction.mul_(applied * lr))
        state["momentum"].lerp_(gradient, applied * (1 - decay))
