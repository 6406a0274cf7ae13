"""Stochastic gradient descent with Nesterov momentum (Sutskever et al. 2013)."""

from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from nmtkit.optimizers.interface import OPTIMIZERS, ParameterGroups
from nmtkit.registry import option


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    momentum: float = option(0.99, "Nesterov momentum; 0 is plain gradient descent.")
    weight_decay: float = option(0.0, "L2 penalty, added to the gradient.")

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"--momentum {self.momentum} is not in [0, 1)")
        if self.weight_decay < 0:
            raise ValueError(f"--weight-decay {self.weight_decay} is negative")


@OPTIMIZERS.register("sgd", SGDConfig())
def sgd(config: SGDConfig, groups: ParameterGroups) -> Optimizer:
    return torch.optim.SGD(
        groups,
        lr=0.0,
        momentum=config.momentum,
        nesterov=config.momentum > 0,
        weight_decay=config.weight_decay,
        fused=True,
    )
