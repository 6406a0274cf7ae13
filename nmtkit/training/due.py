"""Decides which work is due after an update: a log line, a validation, a checkpoint, the end of the run.

The decision is a function of the settings, the progress of the run, and the requests that come from outside: stop
signals, the clock and callbacks. All ranks have the same settings and progress, and they agree on the requests, so they
make the same decision.
"""

import contextlib
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from nmtkit.jobs.processes import STOP_SIGNALS, restore_handlers
from nmtkit.training.loader import Position
from nmtkit.training.run_config import RunConfig

log = logging.getLogger("nmtkit")


@dataclass(frozen=True)
class StopReason:
    """The reason for the end of a run, and the number of updates that the run has made.

    `received` is the signal that stopped the run, or None.
    """

    reason: str
    updates: int
    received: signal.Signals | None = None


class Requests(NamedTuple):
    """The requests of a rank after an update. All ranks act on the maximum of each field over the ranks."""

    stop_signal: int = 0  # number of a signal, or 0
    out_of_time: int = 0  # whether the time of --stop-time-hours is over
    clock_saves: int = 0  # update at which the time of --save-interval-minutes was over, or 0
    callback_stops: int = 0
    callback_validates: int = 0
    callback_saves: int = 0


@dataclass(frozen=True, kw_only=True)
class Due:
    """The work that is due after an update. The run does this work in the order of the fields.

    A new best score or a callback can add work.
    """

    log: bool = False
    validate: bool = False
    save: bool = False
    scheduled: bool = False  # whether the checkpoint is saved at one of the intervals of the run
    stop: StopReason | None = None


@dataclass(kw_only=True)
class RunProgress:
    """The position of a run in its data, its best validation, and its time. Every checkpoint contains this progress."""

    updates: int = 0  # number of updates, including skipped updates
    saved: int = 0  # update of the last checkpoint
    position: Position = field(default_factory=lambda: Position(0, 0))
    best: float | None = None  # best value of the objective; lower is better
    waited: int = 0  # validations since the best validation
    seconds_before: float = 0.0  # training time before the run was resumed
    validation_due: bool = False  # whether the last validation was interrupted or failed
    started: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Returns the training time, including the time before the run was resumed."""
        return self.seconds_before + time.monotonic() - self.started

    def is_out_of_time(self, config: RunConfig) -> bool:
        return config.stop_time_hours is not None and self.seconds() >= 3600 * config.stop_time_hours

    def add_score(self, value: float) -> bool:
        """Counts a validation whose objective has this value. Returns whether the value is the best so far."""
        better = math.isfinite(value) and (self.best is None or value < self.best)
        self.best, self.waited = (value, 0) if better else (self.best, self.waited + 1)
        return better

    def ends_interval(self, epochs: int | None, updates: int | None) -> bool:
        """Returns whether the last update ends an interval of this number of epochs or updates (None: no interval)."""
        ends_epochs = self.position.index == 0 and epochs is not None and self.position.epoch % epochs == 0
        return ends_epochs or (updates is not None and self.updates % updates == 0)

    def state(self) -> dict[str, Any]:
        return {
            "position": [self.position.epoch, self.position.index],
            "best": self.best,
            "waited": self.waited,
            "seconds": self.seconds(),
            "validation_due": self.validation_due,
        }

    def load_state(self, state: dict[str, Any], updates: int) -> None:
        """Restores the state after `updates` updates."""
        self.updates, self.saved, self.position = updates, updates, Position(*state["position"])
        self.best, self.waited = state["best"], state["waited"]
        self.seconds_before, self.validation_due = state["seconds"], state["validation_due"]


def due_after_update(config: RunConfig, progress: RunProgress, asked: Requests, callback: str | None = None) -> Due:
    """Returns the work that is due after an update. `callback` is the stop reason that a callback gives.

    A run that ends also validates, unless a signal ends it. If the run has no save interval in epochs or updates, the
    checkpoints that the clock or a callback requests are the scheduled checkpoints. With several processes, the request
    of the clock is one update old, and a checkpoint that was saved in the meantime fulfils the request.
    """
    stop = stop_reason(config, progress, asked, callback)
    last_validation = stop is not None and stop.received is None and config.validates
    save = asked.clock_saves > progress.saved or bool(asked.callback_saves)
    only_by_clock = config.save_interval is None and config.save_interval_updates is None
    scheduled = progress.ends_interval(config.save_interval, config.save_interval_updates) or (save and only_by_clock)
    return Due(
        log=stop is not None or progress.updates % config.log_interval == 0,
        validate=last_validation
        or bool(asked.callback_validates)
        or progress.ends_interval(config.validate_interval, config.validate_interval_updates),
        save=save or scheduled or stop is not None,
        scheduled=scheduled,
        stop=stop,
    )


def stop_reason(
    config: RunConfig, progress: RunProgress, asked: Requests, callback: str | None = None
) -> StopReason | None:
    """Returns the first reason to stop now, or None. `callback` is the stop reason that a callback gives."""
    if asked.stop_signal:
        received = signal.Signals(asked.stop_signal)
        return StopReason(received.name, progress.updates, received)
    reasons = {
        f"--max-update {config.max_update} is reached": config.max_update and progress.updates >= config.max_update,
        f"--max-epoch {config.max_epoch} is reached": config.max_epoch and progress.position.epoch >= config.max_epoch,
        str(callback): callback is not None,
        f"--stop-time-hours {config.stop_time_hours or 0:g} is reached": asked.out_of_time,
        f"no better {config.best_checkpoint_metric} in {config.patience} validations": (
            config.patience and progress.waited >= config.patience
        ),
    }
    return next((StopReason(reason, progress.updates) for reason, holds in reasons.items() if holds), None)


# --- stop signals -----------------------------------------------------------------------------------------------------


class StopRequestedError(Exception):
    """A stop signal came while this rank computed its share of a validation."""


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
        restore_handlers(self._handlers)

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
