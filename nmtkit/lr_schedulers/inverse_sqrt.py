"""Linear warm-up, then the inverse square root of the update (Vaswani et al. 2017, equation 3)."""

from dataclasses import dataclass

from nmtkit.lr_schedulers.interface import LR_SCHEDULERS, LRScheduler, RunFacts, check_rate
from nmtkit.registry import option


@dataclass(frozen=True, kw_only=True)
class InverseSqrtConfig:
    lr: float | None = option(None, "Learning rate at the end of warm-up; none is the paper's, from d_model.")
    lr_factor: float = option(1.0, "Multiplies the paper's rate, when --lr is not given.")
    warmup_updates: int = option(4000, "Updates of linear warm-up.")

    def __post_init__(self) -> None:
        if self.lr is not None:
            check_rate(self.lr)
            if self.lr_factor != 1.0:
                raise ValueError("--lr and --lr-factor both set the learning rate; give one")
        if self.lr_factor <= 0:
            raise ValueError(f"--lr-factor {self.lr_factor} is not above 0")
        if self.warmup_updates < 1:
            raise ValueError(f"--warmup-updates {self.warmup_updates} is below 1")


def inverse_sqrt(update: int, d_model: int, warmup_updates: int) -> float:
    """Learning rate of `update` (counted from 1); it peaks at `warmup_updates`.

    Raises ValueError below 1, where the formula is undefined.
    Source: Vaswani et al. 2017, equation 3.
    """
    if update < 1:
        raise ValueError(f"update {update}: updates are counted from 1")
    return d_model**-0.5 * min(update**-0.5, update * warmup_updates**-1.5)


@LR_SCHEDULERS.register("inverse_sqrt", InverseSqrtConfig())
class InverseSqrt(LRScheduler):
    def __init__(self, config: InverseSqrtConfig, facts: RunFacts) -> None:
        self.warmup = config.warmup_updates
        if config.lr is not None:
            self.factor, self.width = config.lr * self.warmup**0.5, 1
        elif facts.d_model is not None:
            self.factor, self.width = config.lr_factor, facts.d_model
        else:
            raise ValueError("the paper's learning rate depends on d_model, which this architecture lacks; give --lr")

    def lr(self, update: int) -> float:
        return self.factor * inverse_sqrt(update, self.width, self.warmup)
