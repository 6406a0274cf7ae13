"""A learning rate that shrinks by a factor: every so many updates, or when validation stops getting better."""

import math
from dataclasses import dataclass
from typing import Any

from nmtkit.lr_schedulers.interface import LR_SCHEDULERS, LRScheduler, RunFacts, check_rate, check_warmup, warm_up
from nmtkit.registry import option


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    lr: float = option(5e-4, "Learning rate at the end of warm-up.")
    lr_shrink: float = option(0.5, "Factor of each step.")
    lr_step_updates: int = option(10000, "Updates from one step to the next.")
    warmup_updates: int = option(0, "Updates of linear warm-up.")

    def __post_init__(self) -> None:
        _check(self.lr, self.lr_shrink, self.warmup_updates)
        if self.lr_step_updates < 1:
            raise ValueError(f"--lr-step-updates {self.lr_step_updates} is below 1")


@dataclass(frozen=True, kw_only=True)
class PlateauConfig:
    lr: float = option(5e-4, "Learning rate at the end of warm-up.")
    lr_shrink: float = option(0.5, "Factor of each step.")
    lr_patience: int = option(3, "Validations without a better score before the rate shrinks.")
    min_lr: float = option(0.0, "Smallest learning rate.")
    warmup_updates: int = option(0, "Updates of linear warm-up.")

    def __post_init__(self) -> None:
        _check(self.lr, self.lr_shrink, self.warmup_updates)
        if self.lr_patience < 1:
            raise ValueError(f"--lr-patience {self.lr_patience} is below 1")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"--min-lr {self.min_lr} is not between 0 and --lr {self.lr}")


def _check(lr: float, lr_shrink: float, warmup_updates: int) -> None:
    check_rate(lr)
    check_warmup(warmup_updates)
    if not 0 < lr_shrink < 1:
        raise ValueError(f"--lr-shrink {lr_shrink} is not between 0 and 1")


@LR_SCHEDULERS.register("step", StepConfig())
class Step(LRScheduler):
    def __init__(self, config: StepConfig, facts: RunFacts) -> None:
        self.config = config

    def lr(self, update: int) -> float:
        config = self.config
        steps = max(0, update - config.warmup_updates - 1) // config.lr_step_updates
        return config.lr * warm_up(update, config.warmup_updates) * config.lr_shrink**steps


@LR_SCHEDULERS.register("plateau", PlateauConfig())
class Plateau(LRScheduler):
    def __init__(self, config: PlateauConfig, facts: RunFacts) -> None:
        self.config = config
        self.best = math.inf
        self.waited = 0  # validations since the best, or since the last step
        self.steps = 0

    def lr(self, update: int) -> float:
        config = self.config
        peak = max(config.min_lr, config.lr * config.lr_shrink**self.steps)
        return peak * warm_up(update, config.warmup_updates)

    def observe(self, score: float) -> None:
        if score < self.best:
            self.best, self.waited = score, 0
            return
        self.waited += 1
        if self.waited >= self.config.lr_patience:
            self.steps, self.waited = self.steps + 1, 0

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "steps": self.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.best, self.waited, self.steps = state["best"], state["waited"], state["steps"]
