"""Signum: each step has the sign of the momentum (Bernstein et al. 2018, algorithm 2). Use a tenth of Adam's rate."""

from dataclasses import dataclass

import torch

from nmtkit.extend import OPTIMIZERS, Config, ParameterGroups, option


@dataclass(frozen=True, kw_only=True)
class SignumConfig(Config):
    signum_momentum: float = option(0.9, "Decay rate of the momentum.", min=0, below=1)
    weight_decay: float = option(0.0, "Each update subtracts this share of a weight, times the learning rate.", min=0)


@OPTIMIZERS.register("signum", SignumConfig(), works_on_shards=True)  # a step on a part of a tensor needs no other part
class Signum(torch.optim.Optimizer):
    def __init__(self, config: SignumConfig, groups: ParameterGroups) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": config.weight_decay})  # a group may set its own decay
        self.decay = config.signum_momentum

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - self.decay)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(
                    state["momentum"].sign(), alpha=group["lr"]
                )
