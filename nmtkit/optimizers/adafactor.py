"""Adafactor: second moments by row and column, for models whose Adam state is too large (Shazeer & Stern 2018)."""

from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from nmtkit.optimizers.interface import OPTIMIZERS, ParameterGroups
from nmtkit.registry import option


@dataclass(frozen=True, kw_only=True)
class AdafactorConfig:
    beta2_decay: float = option(-0.8, "Exponent of the second moment's decay, 1 - update^X.")
    update_clip: float = option(1.0, "Largest root mean square of an update, before the learning rate.")
    weight_decay: float = option(0.0, "Share of a weight taken off in an update, per unit of learning rate.")

    def __post_init__(self) -> None:
        if self.beta2_decay > 0:
            raise ValueError(f"--beta2-decay {self.beta2_decay} is positive; the paper's is -0.8")
        if self.update_clip < 1:
            raise ValueError(f"--update-clip {self.update_clip} is below 1")
        if self.weight_decay < 0:
            raise ValueError(f"--weight-decay {self.weight_decay} is negative")


@OPTIMIZERS.register("adafactor", AdafactorConfig())
def adafactor(config: AdafactorConfig, groups: ParameterGroups) -> Optimizer:
    """The learning rate is relative: each update is scaled by the root mean square of its weights."""
    return torch.optim.Adafactor(
        groups, lr=0.0, beta2_decay=config.beta2_decay, d=config.update_clip, weight_decay=config.weight_decay
    )
