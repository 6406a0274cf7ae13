"""Schedules that fall from a peak to an end rate over the run: cosine (Loshchilov & Hutter 2017) and polynomial."""

import math
from dataclasses import dataclass

from nmtkit.lr_schedulers.interface import LR_SCHEDULERS, LRScheduler, RunFacts, check_rate, check_warmup, warm_up
from nmtkit.registry import option


@dataclass(frozen=True, kw_only=True)
class CosineConfig:
    lr: float = option(5e-4, "Learning rate at the end of warm-up.")
    end_lr: float = option(0.0, "Learning rate at the end of the decay, and after.")
    warmup_updates: int = option(4000, "Updates of linear warm-up.")
    decay_updates: int | None = option(None, "Update at which the decay ends; none is --max-update.")

    def __post_init__(self) -> None:
        _check(self.lr, self.end_lr, self.warmup_updates)


@dataclass(frozen=True, kw_only=True)
class PolynomialConfig:
    lr: float = option(5e-4, "Learning rate at the end of warm-up.")
    end_lr: float = option(0.0, "Learning rate at the end of the decay, and after.")
    power: float = option(1.0, "Exponent of the decay; 1 is a straight line.")
    warmup_updates: int = option(4000, "Updates of linear warm-up.")
    decay_updates: int | None = option(None, "Update at which the decay ends; none is --max-update.")

    def __post_init__(self) -> None:
        _check(self.lr, self.end_lr, self.warmup_updates)
        if self.power <= 0:
            raise ValueError(f"--power {self.power} is not above 0")


def _check(lr: float, end_lr: float, warmup_updates: int) -> None:
    check_rate(lr)
    check_warmup(warmup_updates)
    if not 0 <= end_lr <= lr:
        raise ValueError(f"--end-lr {end_lr} is not between 0 and --lr {lr}")


@LR_SCHEDULERS.register("polynomial", PolynomialConfig())
@LR_SCHEDULERS.register("cosine", CosineConfig())
class Decay(LRScheduler):
    def __init__(self, config: CosineConfig | PolynomialConfig, facts: RunFacts) -> None:
        self.config = config
        end = config.decay_updates if config.decay_updates is not None else facts.max_update
        if end is None:
            raise ValueError("this schedule needs to know where it ends; give --decay-updates or --max-update")
        if end <= config.warmup_updates:
            raise ValueError(f"the decay would end at update {end}, within the warm-up of {config.warmup_updates}")
        self.end = end

    def lr(self, update: int) -> float:
        config = self.config
        if update <= config.warmup_updates:
            return config.lr * warm_up(update, config.warmup_updates)
        done = min(1.0, (update - config.warmup_updates) / (self.end - config.warmup_updates))
        if isinstance(config, PolynomialConfig):
            left = (1 - done) ** config.power
        else:
            left = (1 + math.cos(math.pi * done)) / 2
        return config.end_lr + (config.lr - config.end_lr) * left
