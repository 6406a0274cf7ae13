"""What a learning-rate scheduler is: a function of the update, and for plateau of the validation history."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from nmtkit.registry import Registry


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a schedule may depend on beside its own config."""

    d_model: int | None  # the architecture's width, where its config has one
    max_update: int | None  # updates the run is to make


class LRScheduler(ABC):
    """Registered factories are called as `factory(config, facts)`."""

    @abstractmethod
    def lr(self, update: int) -> float:
        """Learning rate of `update`, counted from 1."""

    def observe(self, score: float) -> None:  # noqa: B027  # most schedules need not know
        """A validation's score, lower is better; called alike on all ranks."""

    def state(self) -> dict[str, Any]:
        """What `lr` depends on beside the config, in plain types."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:  # noqa: B027  # nor remember
        """Goes on from what `state` returned."""


def warm_up(update: int, warmup_updates: int) -> float:
    """Linear from 1 / warmup_updates at update 1 to 1 at `warmup_updates` and after."""
    return min(1.0, update / warmup_updates) if warmup_updates else 1.0


def check_warmup(warmup_updates: int) -> None:
    if warmup_updates < 0:
        raise ValueError(f"--warmup-updates {warmup_updates} is negative; 0 starts at the full rate")


def check_rate(lr: float) -> None:
    if lr <= 0:
        raise ValueError(f"--lr {lr} is not above 0")


LR_SCHEDULERS: Registry[LRScheduler] = Registry("lr-scheduler", "--lr-scheduler")
