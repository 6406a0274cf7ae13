"""The learning rate rises in a straight line, and falls to zero at the end of the run (Smith and Topin 2018)."""

from dataclasses import dataclass

from nmtkit.extend import LR_SCHEDULERS, Config, LRScheduler, RunInfo, option


@dataclass(frozen=True, kw_only=True)
class OneCycleConfig(Config):
    lr: float = option(1e-3, "Learning rate at the peak.", above=0)
    rise_share: float = option(0.3, "Share of the run before the peak.", above=0, below=1)


@LR_SCHEDULERS.register("one_cycle", OneCycleConfig())
class OneCycle(LRScheduler):
    def __init__(self, config: OneCycleConfig, run: RunInfo) -> None:
        if run.max_update is None:
            raise ValueError("one_cycle needs the length of the run; give --max-update or --max-epoch")
        self.config, self.end = config, run.max_update

    def lr(self, update: int) -> float:
        share, rise = min(1.0, update / self.end), self.config.rise_share
        return self.config.lr * min(share / rise, (1 - share) / (1 - rise))
