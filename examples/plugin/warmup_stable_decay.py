"""Warm-up, a constant rate for most of the run, and linear decay to zero at the end (Hägele et al. 2024, section 2)."""

from dataclasses import dataclass

from nmtkit.extend import LR_SCHEDULERS, Config, LRScheduler, RunInfo, option


@dataclass(frozen=True, kw_only=True)
class WSDConfig(Config):
    lr: float = option(5e-4, "Learning rate between warm-up and decay.", above=0)
    warmup_updates: int = option(1000, "Updates of linear warm-up.", min=0)
    decay_share: float = option(0.2, "Share of the run with a falling rate.", above=0, max=1)


@LR_SCHEDULERS.register("warmup_stable_decay", WSDConfig())
class WarmupStableDecay(LRScheduler):
    def __init__(self, config: WSDConfig, run: RunInfo) -> None:
        if run.max_update is None:
            raise ValueError("warmup_stable_decay needs the length of the run; give --max-update or --max-epoch")
        self.config, self.end = config, run.max_update

    def lr(self, update: int) -> float:
        warmup = min(1.0, update / max(1, self.config.warmup_updates))
        left = max(0, self.end - update) / (self.config.decay_share * self.end)
        return self.config.lr * min(warmup, left, 1.0)
