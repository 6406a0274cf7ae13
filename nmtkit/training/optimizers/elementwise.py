"""Element-wise optimizers of torch: Adam, AdamW and SGD. They also work on shards of parameters."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from nmtkit.config import Config, option
from nmtkit.training.optimizers.interface import OPTIMIZERS, ParameterGroups


@dataclass(frozen=True, kw_only=True)
class AdamConfig(Config):
    adam_betas: tuple[float, ...] = option(
        (0.9, 0.98), "Decay rates of the two moments (Vaswani et al. 2017, section 5.3).", min=0, below=1
    )
    adam_eps: float = option(1e-9, "Constant that is added to the square root of the second moment.", above=0, max=1)
    weight_decay: float = option(0.0, "L2 penalty, which is added to the gradient.", min=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.adam_betas) != 2:
            raise ValueError(f"--adam-betas is {','.join(map(str, self.adam_betas))}; it must be two numbers")


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(AdamConfig):
    weight_decay: float = option(0.01, "Each update subtracts this share of a weight, times the learning rate.", min=0)


@OPTIMIZERS.register("adam", AdamConfig(), works_on_shards=True)
def adam(config: AdamConfig, groups: ParameterGroups) -> Optimizer:
    """Adam (Kingma & Ba 2015), with the constants of Vaswani et al. 2017, section 5.3."""
    return torch.optim.Adam(groups, **_adam_arguments(config))


@OPTIMIZERS.register("adamw", AdamWConfig(), works_on_shards=True)
def adamw(config: AdamWConfig, groups: ParameterGroups) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""
    return torch.optim.AdamW(groups, **_adam_arguments(config))


def _adam_arguments(config: AdamConfig) -> dict[str, Any]:
    return {
        "lr": 0.0,
        "betas": config.adam_betas,
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
        "fused": True,
    }


@dataclass(frozen=True, kw_only=True)
class SGDConfig(Config):
    momentum: float = option(0.99, "Nesterov momentum; 0: no momentum.", min=0, below=1)
    weight_decay: float = option(0.0, "L2 penalty, which is added to the gradient.", min=0)


@OPTIMIZERS.register("sgd", SGDConfig(), works_on_shards=True)
def sgd(config: SGDConfig, groups: ParameterGroups) -> Optimizer:
    """Stochastic gradient descent with Nesterov momentum (Sutskever et al. 2013).

    The momentum is initialised with zeros, because the fused kernel of torch leaves the momentum uninitialised if the
    first update is skipped (its gradient is not finite).
    """
    momentum, weight_decay = config.momentum, config.weight_decay
    nesterov = momentum > 0
    optimizer = torch.optim.SGD(
        groups, lr=0.0, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, fused=True
    )
    if momentum:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer
