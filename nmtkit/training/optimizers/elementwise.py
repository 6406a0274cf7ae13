"""Element-wise optimizers: Adam, AdamW and SGD of torch, Lion, and schedule-free AdamW.

The optimizers also work on shards of parameters.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nmtkit.config import Config, option
from nmtkit.training.optimizers.interface import (
    OPTIMIZERS,
    DeviceSkippingOptimizer,
    ParameterGroups,
    exchanged,
    unless_skipped,
)


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
    return dict(lr=0.0, betas=config.adam_betas, eps=config.adam_eps, weight_decay=config.weight_decay, fused=True)


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
    """Lion (Chen et al. 2023, algorithm 2): steps by the sign of an interpolated momentum.

    All values of an update have the size of the learning rate. Use a third to a tenth of the learning rate of Adam.
    """

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

    def swapped(self) -> contextlib.AbstractContextManager[None]:
        """The context in which the parameters have the averages as values. Afterwards, they have their old values.

        Before the first step there are no averages, and the parameters keep their values.
        """
        parameters = [p for group in self.param_groups for p in group["params"] if self.state.get(p)]
        return exchanged([(parameter, self.state[parameter]["average"]) for parameter in parameters])
