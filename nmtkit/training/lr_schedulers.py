"""Learning-rate schedulers by name (`--lr-scheduler`). A scheduler computes the learning rate of each update.

The learning rate depends only on the number of the update. The only exception is the scheduler plateau, which also uses
validation scores.

A registered factory is called as `factory(config, run)`. `run` is a `RunInfo`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Any

from nmtkit.config import Config, option
from nmtkit.config.registry import Registry

MAX_UPDATES = 10**9


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Facts of a run that a schedule may depend on."""

    # width of the model, or with --base-width the base width; None: the config of the architecture has no width
    d_model: int | None
    # updates from the start of the schedule to the end of the run; with --max-epoch, an estimate; None: no limit
    max_update: int | None


class LRScheduler(ABC):
    """The learning rate of each update, counted from the start of the schedule."""

    @abstractmethod
    def lr(self, update: int) -> float:
        """Returns the learning rate of `update`, counted from 1."""

    def observe(self, score: float) -> None:  # noqa: B027  # most schedules do not need this method
        """Called after each validation with its score. Lower is better. All ranks get the same score."""

    def state(self) -> dict[str, Any]:
        """Returns the values that a resumed run needs besides the config, such as the number of reductions so far.

        The values are saved in checkpoints, so they must be plain numbers, strings, lists or dicts.
        """
        return {}

    def load_state(self, state: dict[str, Any]) -> None:  # noqa: B027  # stateless schedules have nothing to load
        """Restores the state that `state` returned."""


def learning_rate(scheduler: LRScheduler, update: int) -> float:
    """Returns the learning rate of `update`. Raises ValueError if the schedule does not return a valid number."""
    rate: object = scheduler.lr(update)
    if not isinstance(rate, Real) or isinstance(rate, bool) or not 0 <= float(rate) < math.inf:
        raise ValueError(
            f"the learning-rate scheduler {type(scheduler).__name__} returned {rate!r} for update {update}; it must "
            "return a finite number of at least 0"
        )
    return float(rate)


LR_SCHEDULERS: Registry[LRScheduler] = Registry("lr-scheduler", "--lr-scheduler")


def warmup_factor(update: int, warmup_updates: int) -> float:
    """Returns the factor of a linear warm-up: 1 / warmup_updates at update 1, and 1 from `warmup_updates` on."""
    return min(1.0, update / warmup_updates) if warmup_updates else 1.0


@dataclass(frozen=True, kw_only=True)
class FixedConfig(Config):
    lr: float = option(1e-4, "Learning rate.", above=0)
    warmup_updates: int = option(0, "Updates of linear warm-up.", min=0, max=MAX_UPDATES)


@LR_SCHEDULERS.register("fixed", FixedConfig())
class Fixed(LRScheduler):
    """A constant learning rate after a warm-up."""

    def __init__(self, config: FixedConfig, run: RunInfo) -> None:
        self.config = config

    def lr(self, update: int) -> float:
        return self.config.lr * warmup_factor(update, self.config.warmup_updates)


@dataclass(frozen=True, kw_only=True)
class InverseSqrtConfig(Config):
    lr: float | None = option(
        None, "Learning rate at the end of warm-up; none: computed from d_model (Vaswani et al. 2017).", above=0
    )
    lr_factor: float = option(
        1.0, "Multiply the learning rate that is computed from d_model by this factor; only without --lr.", above=0
    )
    warmup_updates: int = option(4000, "Updates of linear warm-up.", min=1, max=MAX_UPDATES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr is not None and self.lr_factor != 1.0:
            raise ValueError("--lr and --lr-factor both set the learning rate; give only one")


@LR_SCHEDULERS.register("inverse_sqrt", InverseSqrtConfig())
class InverseSqrt(LRScheduler):
    """Linear warm-up, then the inverse square root of the update (Vaswani et al. 2017, equation 3)."""

    def __init__(self, config: InverseSqrtConfig, run: RunInfo) -> None:
        self.warmup_updates = config.warmup_updates
        if config.lr is not None:
            self.peak = config.lr
        elif run.d_model is not None:
            self.peak = config.lr_factor * (run.d_model * config.warmup_updates) ** -0.5
        else:
            raise ValueError("this architecture has no d_model to compute the default learning rate; give --lr")

    def lr(self, update: int) -> float:
        return self.peak * min(update / self.warmup_updates, (self.warmup_updates / update) ** 0.5)


@dataclass(frozen=True, kw_only=True)
class CosineConfig(Config):
    lr: float = option(5e-4, "Learning rate at the end of warm-up.", above=0)
    end_lr: float = option(0.0, "Learning rate at the end of the decay and afterwards.", min=0)
    warmup_updates: int = option(4000, "Updates of linear warm-up.", min=0, max=MAX_UPDATES)
    decay_updates: int | None = option(
        None,
        "Update at which the decay ends, counted from the start of the schedule; none: the last update of the run.",
        min=1,
        max=MAX_UPDATES,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end_lr > self.lr:
            raise ValueError(f"--end-lr is {self.end_lr}; it must be at most --lr, {self.lr}")


@dataclass(frozen=True, kw_only=True)
class PolynomialConfig(CosineConfig):
    power: float = option(1.0, "Exponent of the decay; 1: a straight line.", above=0)


@LR_SCHEDULERS.register("polynomial", PolynomialConfig())
@LR_SCHEDULERS.register("cosine", CosineConfig())
class Decay(LRScheduler):
    """Decay from a peak to an end rate: half a cosine (Loshchilov & Hutter 2017), or a polynomial."""

    def __init__(self, config: CosineConfig, run: RunInfo) -> None:
        self.config = config
        end = config.decay_updates if config.decay_updates is not None else run.max_update
        if end is None:
            raise ValueError("this schedule needs an end; give --decay-updates, --max-update or --max-epoch")
        if end <= config.warmup_updates:
            raise ValueError(f"the decay ends at update {end}, during the warm-up of {config.warmup_updates} updates")
        self.end = end

    def lr(self, update: int) -> float:
        config = self.config
        if update <= config.warmup_updates:
            return config.lr * warmup_factor(update, config.warmup_updates)
        progress = min(1.0, (update - config.warmup_updates) / (self.end - config.warmup_updates))
        if isinstance(config, PolynomialConfig):
            factor = (1 - progress) ** config.power
        else:
            factor = (1 + math.cos(math.pi * progress)) / 2
        return config.end_lr + (config.lr - config.end_lr) * factor


@dataclass(frozen=True, kw_only=True)
class StepConfig(Config):
    lr: float = option(5e-4, "Learning rate at the end of warm-up.", above=0)
    lr_shrink: float = option(0.5, "Factor by which each step multiplies the learning rate.", above=0, below=1)
    lr_step_updates: int = option(10000, "Updates between two steps.", min=1, max=MAX_UPDATES)
    warmup_updates: int = option(0, "Updates of linear warm-up.", min=0, max=MAX_UPDATES)


@LR_SCHEDULERS.register("step", StepConfig())
class StepDecay(LRScheduler):
    """Multiplies the learning rate by `lr_shrink` after every `lr_step_updates` updates that follow the warm-up."""

    def __init__(self, config: StepConfig, run: RunInfo) -> None:
        self.config = config

    def lr(self, update: int) -> float:
        config = self.config
        steps = max(0, update - config.warmup_updates - 1) // config.lr_step_updates
        return config.lr * warmup_factor(update, config.warmup_updates) * config.lr_shrink**steps


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecayConfig(Config):
    lr: float = option(5e-4, "Learning rate between warm-up and decay.", above=0)
    warmup_updates: int = option(1000, "Updates of linear warm-up.", min=0, max=MAX_UPDATES)
    decay_share: float = option(
        0.2, "Share of the updates, at the end of the run, during which the rate falls.", above=0, max=1
    )


@LR_SCHEDULERS.register("warmup_stable_decay", WarmupStableDecayConfig())
class WarmupStableDecay(LRScheduler):
    """A constant rate for most of the run, then linear decay to zero (Hägele et al. 2024, section 2)."""

    def __init__(self, config: WarmupStableDecayConfig, run: RunInfo) -> None:
        if run.max_update is None:
            raise ValueError("this schedule decays at the end of the run; give --max-update or --max-epoch")
        self.config, self.end = config, run.max_update
        if (1 - config.decay_share) * self.end < config.warmup_updates:
            raise ValueError(
                f"the decay would begin at update {(1 - config.decay_share) * self.end:.0f}, during the warm-up of "
                f"{config.warmup_updates} updates"
            )

    def lr(self, update: int) -> float:
        left = max(0, self.end - update) / (self.config.decay_share * self.end)
        return self.config.lr * min(warmup_factor(update, self.config.warmup_updates), left)


@dataclass(frozen=True, kw_only=True)
class PlateauConfig(Config):
    lr: float = option(5e-4, "Learning rate at the end of warm-up.", above=0)
    lr_shrink: float = option(0.5, "Factor by which each reduction multiplies the learning rate.", above=0, below=1)
    lr_patience: int = option(
        3, "Validations without a better score before the rate is reduced.", min=1, max=MAX_UPDATES
    )
    min_lr: float = option(0.0, "Smallest learning rate.", min=0)
    warmup_updates: int = option(0, "Updates of linear warm-up.", min=0, max=MAX_UPDATES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_lr > self.lr:
            raise ValueError(f"--min-lr is {self.min_lr}; it must be at most --lr, {self.lr}")


@LR_SCHEDULERS.register("plateau", PlateauConfig())
class Plateau(LRScheduler):
    """Multiplies the learning rate by a factor when validations stop improving."""

    def __init__(self, config: PlateauConfig, run: RunInfo) -> None:
        self.config = config
        self.best = math.inf
        self.waited = 0  # validations since the best validation or the last reduction
        self.steps = 0  # number of reductions

    def lr(self, update: int) -> float:
        config = self.config
        peak = max(config.min_lr, config.lr * config.lr_shrink**self.steps)
        return peak * warmup_factor(update, config.warmup_updates)

    def observe(self, score: float) -> None:
        if math.isfinite(score) and score < self.best:
            self.best, self.waited = score, 0
            return
        self.waited += 1
        if self.waited >= self.config.lr_patience:
            self.steps, self.waited = self.steps + 1, 0

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "steps": self.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.best, self.waited, self.steps = state["best"], state["waited"], state["steps"]
