"""One learning rate, after a warm-up."""

from dataclasses import dataclass

from nmtkit.lr_schedulers.interface import LR_SCHEDULERS, LRScheduler, RunFacts, check_rate, check_warmup, warm_up
from nmtkit.registry import option


@dataclass(frozen=True, kw_only=True)
class FixedConfig:
    lr: float = option(1e-4, "Learning rate.")
    warmup_updates: int = option(0, "Updates of linear warm-up.")

    def __post_init__(self) -> None:
        check_rate(self.lr)
        check_warmup(self.warmup_updates)


@LR_SCHEDULERS.register("fixed", FixedConfig())
class Fixed(LRScheduler):
    def __init__(self, config: FixedConfig, facts: RunFacts) -> None:
        self.config = config

    def lr(self, update: int) -> float:
        return self.config.lr * warm_up(update, self.config.warmup_updates)
