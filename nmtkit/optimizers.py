"""Optimizers by name (`--optimizer`): factories of `torch.optim.Optimizer`. The trainer sets the learning rate.

A registered factory is called as `factory(config, parameter_groups)`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from nmtkit.adafactor import Adafactor
from nmtkit.registry import Config, Registry, option

ParameterGroups = list[dict[str, Any]]  # each with "params", and what differs from the optimizer's defaults

OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", "--optimizer")


@dataclass(frozen=True, kw_only=True)
class AdamConfig(Config):
    adam_betas: tuple[float, ...] = option(
        (0.9, 0.98), "Decay rates of the two moments (the paper's section 5.3).", min=0, below=1
    )
    adam_eps: float = option(1e-9, "Added to the root of the second moment.", above=0, max=1)
    weight_decay: float = option(0.0, "L2 penalty, added to the gradient.", min=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.adam_betas) != 2:
            raise ValueError(f"--adam-betas is {','.join(map(str, self.adam_betas))}; it must be two numbers")


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(AdamConfig):
    weight_decay: float = option(0.01, "Share of a weight taken off per update and unit of learning rate.", min=0)


@OPTIMIZERS.register("adam", AdamConfig())
def adam(config: AdamConfig, groups: ParameterGroups) -> Optimizer:
    """Adam (Kingma & Ba 2015), with the constants of Vaswani et al. 2017, section 5.3."""
    return torch.optim.Adam(groups, **_adam_arguments(config))


@OPTIMIZERS.register("adamw", AdamWConfig())
def adamw(config: AdamWConfig, groups: ParameterGroups) -> Optimizer:
    """Adam with weight decay apart from the gradient (Loshchilov & Hutter 2019)."""
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
    momentum: float = option(0.99, "Nesterov momentum; 0: none.", min=0, below=1)
    weight_decay: float = option(0.0, "L2 penalty, added to the gradient.", min=0)


@OPTIMIZERS.register("sgd", SGDConfig())
def sgd(config: SGDConfig, groups: ParameterGroups) -> Optimizer:
    """Stochastic gradient descent with Nesterov momentum (Sutskever et al. 2013).

    Momentum starts at zero here: torch's fused kernel would allocate it uninitialised, and leave it so if the first
    update is skipped because a gradient is not finite.
    """
    momentum, weight_decay = config.momentum, config.weight_decay
    nesterov = momentum > 0
    optimizer = torch.optim.SGD(
        groups, lr=0.0, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, fused=True
    )
    for parameter in [p for group in optimizer.param_groups for p in group["params"]] if momentum else []:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


@dataclass(frozen=True, kw_only=True)
class AdafactorConfig(Config):
    beta2_decay: float = option(-0.8, "Exponent of the second moment's decay, 1 - update^X.", min=-10, max=0)
    update_clip: float = option(1.0, "Largest root mean square of an update, before the learning rate.", min=1)
    weight_decay: float = option(0.0, "Share of a weight taken off per update and unit of learning rate.", min=0)


@OPTIMIZERS.register("adafactor", AdafactorConfig())
def adafactor(config: AdafactorConfig, groups: ParameterGroups) -> Optimizer:
    """Adafactor, second moments by row and column, for models whose Adam state is too large (Shazeer & Stern 2018).

    The learning rate is relative: each update is scaled by the root mean square of its weights.
    """
    return Adafactor(
        groups,
        lr=0.0,
        beta2_decay=config.beta2_decay,
        update_clip=config.update_clip,
        weight_decay=config.weight_decay,
    )
