"""Lion: steps by the sign of an interpolated momentum (Chen et al. 2023, algorithm 2)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from nmtkit.config import Config, option
from nmtkit.training.optimizers.interface import OPTIMIZERS, ParameterGroups, unless_skipped


@dataclass(frozen=True, kw_only=True)
class LionConfig(Config):
    lion_betas: tuple[float, ...] = option(
        (0.9, 0.99), "Share of the momentum in a step, and decay rate of the momentum.", min=0, below=1
    )
    weight_decay: float = option(0.0, "Share of a weight that each update subtracts, times the learning rate.", min=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.lion_betas) != 2:
            raise ValueError(f"--lion-betas is {','.join(map(str, self.lion_betas))}; it must be two numbers")


@OPTIMIZERS.register("lion", LionConfig(), works_on_shards=True)
class Lion(Optimizer):
    """All values of an update have the size of the learning rate, so use a third to a tenth of the rate of Adam.

    If `found_inf`, a number on the device, is above 0, a step changes neither parameters nor state.
    """

    _step_supports_amp_scaling = True  # marks optimizers that read `found_inf`
    found_inf: Tensor | None = None

    def __init__(self, config: LionConfig, groups: ParameterGroups) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": config.lion_betas, "weight_decay": config.weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            (share, decay), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                gradient, applied = unless_skipped(parameter.grad, self.found_inf)
                direction = torch.lerp(gradient, state["momentum"], share).sign_()
                parameter.mul_(1 - applied * (lr * group["weight_decay"])).sub_(direction.mul_(applied * lr))
                state["momentum"].lerp_(gradient, applied * (1 - decay))
