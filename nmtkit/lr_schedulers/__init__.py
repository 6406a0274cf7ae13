"""Learning-rate schedulers by name: `--lr-scheduler`."""

from nmtkit.lr_schedulers import decay, fixed, inverse_sqrt, step
from nmtkit.lr_schedulers.interface import LR_SCHEDULERS, LRScheduler, RunFacts

__all__ = ["LR_SCHEDULERS", "LRScheduler", "RunFacts", "decay", "fixed", "inverse_sqrt", "step"]
