"""Progress of a run, reasons for its end, and the signals that end it."""

import contextlib
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from nmtkit.training.loader import Position
from nmtkit.training.run_config import RunConfig

log = logging.getLogger("nmtkit")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequestedError(Exception):
    """A stop signal came while this rank computed its share of a validation."""


@dataclass(frozen=True)
class StopReason:
    """The reason for the end of a run, and the number of updates that the run has made."""

    reason: str
    updates: int
    received: signal.Signals | None = None


@dataclass(kw_only=True)
class RunProgress:
    """The position of a run in its data, its best validation, and its time. Every checkpoint contains this progress."""

    position: Position = field(default_factory=lambda: Position(0, 0))
    best: float | None = None  # best value of the objective; lower is better
    waited: int = 0  # validations since the best validation
    seconds_before: float = 0.0  # training time before the run was resumed
    validation_due: bool = False  # whether the last validation was interrupted or failed
    started: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Returns the training time, including the time before the run was resumed."""
        return self.seconds_before + time.monotonic() - self.started

    def add_score(self, value: float) -> bool:
        """Counts a validation whose objective has this value. Returns whether the value is the best so far."""
        better = math.isfinite(value) and (self.best is None or value < self.best)
        self.best, self.waited = (value, 0) if better else (self.best, self.waited + 1)
        return better

    def stop_reason(
        self, config: RunConfig, updates: int, received: signal.Signals | None, others: str | None, out_of_time: bool
    ) -> StopReason | None:
        """Returns the reason to stop after `updates`, or None. `others` is the reason given by a callback."""
        if received is not None:
            return StopReason(received.name, updates, received)
        reasons = {
            f"--max-update {config.max_update} is reached": config.max_update and updates >= config.max_update,
            f"--max-epoch {config.max_epoch} is reached": config.max_epoch and self.position.epoch >= config.max_epoch,
            str(others): others is not None,
            f"--stop-time-hours {config.stop_time_hours or 0:g} is reached": out_of_time,
            f"no better {config.best_checkpoint_metric} in {config.patience} validations": (
                config.patience and self.waited >= config.patience
            ),
        }
        return next((StopReason(reason, updates) for reason, holds in reasons.items() if holds), None)

    def state(self) -> dict[str, Any]:
        return {
            "position": [self.position.epoch, self.position.index],
            "best": self.best,
            "waited": self.waited,
            "seconds": self.seconds(),
            "validation_due": self.validation_due,
        }

    def load_state(self, state: dict[str, Any], same_objective: bool) -> None:
        """Restores the state. Drops the best score if the objective of the run has changed."""
        self.position = Position(*state["position"])
        if same_objective:
            self.best, self.waited = state["best"], state["waited"]
        self.seconds_before, self.validation_due = state["seconds"], state["validation_due"]


class StopSignal:
    """A context that records the first Ctrl-C, SIGTERM or SIGUSR1 in `received`.

    A Ctrl-C after the first signal raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._raises = False
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():  # other threads cannot set signal handlers
            self._handlers = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """The context in which a signal raises StopRequestedError. An earlier signal raises the error at once."""
        self._raises = True
        try:
            if self.received is not None:
                raise StopRequestedError
            yield
        finally:
            self._raises = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number)
            log.info("%s: saving and stopping; Ctrl-C stops at once", self.received.name)
            if self._raises:
                raise StopRequestedError
