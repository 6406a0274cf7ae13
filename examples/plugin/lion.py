"""Lion steps by the sign of an interpolated momentum (Chen et al. 2023, alg. 2). Use a tenth of Adam's rate."""

from dataclasses import dataclass

import torch

from nmtkit.extend import OPTIMIZERS, Config, ParameterGroups, option


@dataclass(frozen=True, kw_only=True)
class LionConfig(Config):
    lion_beta1: float = option(0.9, "Share of the momentum in a step.", min=0, below=1)
    lion_beta2: float = option(0.99, "Decay rate of the momentum.", min=0, below=1)
    weight_decay: float = option(0.0, "Share of a weight to subtract per update, times the learning rate.", min=0)


@OPTIMIZERS.register("lion", LionConfig(), works_on_shards=True)  # a step on a part of a tensor needs no other part
class Lion(torch.optim.Optimizer):
    def __init__(self, config: LionConfig, groups: ParameterGroups) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": config.weight_decay})  # a group may set its own decay
        self.beta1, self.beta2 = config.lion_beta1, config.lion_beta2

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                direction = torch.lerp(parameter.grad, state["momentum"], self.beta1).sign()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                state["momentum"].lerp_(parameter.grad, 1 - self.beta2)
