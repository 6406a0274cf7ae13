"""Adam (Kingma & Ba 2015), and AdamW with its weight decay apart from the gradient (Loshchilov & Hutter 2019)."""

from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from nmtkit.optimizers.interface import OPTIMIZERS, ParameterGroups
from nmtkit.registry import option


@dataclass(frozen=True, kw_only=True)
class AdamConfig:
    adam_betas: tuple[float, ...] = option((0.9, 0.98), "Decay rates of the two moments (the paper's section 5.3).")
    adam_eps: float = option(1e-9, "Added to the root of the second moment.")
    weight_decay: float = option(0.0, "L2 penalty, added to the gradient.")

    def __post_init__(self) -> None:
        _check(self.adam_betas, self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    adam_betas: tuple[float, ...] = option((0.9, 0.98), "Decay rates of the two moments (the paper's section 5.3).")
    adam_eps: float = option(1e-9, "Added to the root of the second moment.")
    weight_decay: float = option(0.01, "Share of a weight taken off in an update, per unit of learning rate.")

    def __post_init__(self) -> None:
        _check(self.adam_betas, self.weight_decay)


def _check(betas: tuple[float, ...], weight_decay: float) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"--adam-betas {','.join(map(str, betas))} are not two numbers in [0, 1)")
    if weight_decay < 0:
        raise ValueError(f"--weight-decay {weight_decay} is negative")


@OPTIMIZERS.register("adam", AdamConfig())
def adam(config: AdamConfig, groups: ParameterGroups) -> Optimizer:
    betas = (config.adam_betas[0], config.adam_betas[1])
    return torch.optim.Adam(
        groups, lr=0.0, betas=betas, eps=config.adam_eps, weight_decay=config.weight_decay, fused=True
    )


@OPTIMIZERS.register("adamw", AdamWConfig())
def adamw(config: AdamWConfig, groups: ParameterGroups) -> Optimizer:
    betas = (config.adam_betas[0], config.adam_betas[1])
    return torch.optim.AdamW(
        groups, lr=0.0, betas=betas, eps=config.adam_eps, weight_decay=config.weight_decay, fused=True
    )
