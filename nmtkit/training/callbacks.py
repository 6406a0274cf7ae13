"""Callbacks by name (`--callbacks a,b`): what else happens at updates, log lines, validations, checkpoints and the end.

A registered factory is called as `factory(config)` on every rank. What takes long belongs into `start`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.processes import distributed
from nmtkit.registry import Registry

log = logging.getLogger("nmtkit")


@dataclass(kw_only=True, eq=False)
class RunState:
    """The run of a callback: what it is, where it stands, and what the callback asks of it.

    What is asked for in `validation` happens before the next update; at other times it happens after the next update,
    and with several processes one update later, when all know of it. Any rank that runs hooks may ask.
    """

    save_dir: Path
    settings: Mapping[str, Mapping[str, Any]]  # tables of config.toml
    model: Architecture
    can_validate: bool
    update: int = 0  # updates made
    epoch: int = 1  # counted from 1
    stop_reason: str | None = None
    validation_asked: bool = False
    checkpoint_asked: bool = False

    def stop(self, reason: str) -> None:
        """Ends the run as `--max-update` does, with a validation and a checkpoint. `reason` is logged."""
        self.stop_reason = reason

    def validate(self) -> None:
        """Asks for a validation. Raises ValueError when the dataset has no set to validate on."""
        if not self.can_validate:
            raise ValueError("a callback asks for a validation, and the dataset has no --valid-subset")
        self.validation_asked = True

    def save(self) -> None:
        """Asks for a checkpoint."""
        self.checkpoint_asked = True


class Callback:
    """Hooks of a run; override those that are needed. An exception in one ends the run.

    They run on rank 0, or with `every_rank` on all ranks, but for `checkpoint`. `metrics` and `scores` are what the log
    gets, by name: numbers, already means over all ranks.
    """

    every_rank: bool = False

    def start(self, run: RunState) -> None:
        """Called before the first update, and again when the run is resumed."""

    def update(self, run: RunState) -> None:
        """Called after every update. Reading a tensor here makes the host wait for the GPU."""

    def log(self, run: RunState, metrics: Mapping[str, float]) -> None:
        """Called with every log line, each `--log-interval` updates: loss, ppl, lr, norm, tokens_per_second, …"""

    def validation(self, run: RunState, scores: Mapping[str, float]) -> None:
        """Called after every validation: loss, ppl and the metrics."""

    def checkpoint(self, run: RunState, path: Path) -> None:
        """Called on rank 0 after a checkpoint was written."""

    def end(self, run: RunState, reason: str | None) -> None:
        """Called once after `start`: with why the run ended, or None where an exception ends it."""

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run needs, in plain types and tensors; saved with every checkpoint."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned on rank 0; called before `start`."""


CALLBACKS: Registry[Callback] = Registry("callback", "--callbacks", several=True)


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns those values of a log record that are numbers, and no place in the run."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("update", "updates")
    }


class CallbackList:
    """The callbacks of a run, by name, and the hooks of those that run on this rank."""

    def __init__(self, callbacks: Mapping[str, Callback], run: RunState) -> None:
        self.callbacks = dict(callbacks)
        self.run = run
        self.started = False
        self.own = {name: it for name, it in callbacks.items() if it.every_rank or distributed.is_rank_zero()}

    def __bool__(self) -> bool:
        """Whether the run has any, on whatever rank."""
        return bool(self.callbacks)

    def start(self) -> None:
        self.started = True
        for callback in self.own.values():
            callback.start(self.run)

    def update(self, number: int, epoch: int) -> None:
        self.run.update, self.run.epoch = number, epoch
        for callback in self.own.values():
            callback.update(self.run)

    def log(self, record: Mapping[str, Any]) -> None:
        for callback in self.own.values():
            callback.log(self.run, numbers(record))

    def validation(self, scores: Mapping[str, float]) -> None:
        for callback in self.own.values():
            callback.validation(self.run, scores)

    def checkpoint(self, path: Path) -> None:
        for callback in self.own.values():
            callback.checkpoint(self.run, path)

    def end(self, reason: str | None) -> None:
        """Calls `end` where `start` was called. An exception in one is a warning: the run has ended."""
        if not self.started:
            return
        self.started = False
        for name, callback in self.own.items():
            try:
                callback.end(self.run, reason)
            except Exception as error:  # of a user's code, any kind
                log.warning("the callback %s failed at the end of the run: %s: %s", name, type(error).__name__, error)

    # --- what they ask for ------------------------------------------------------------------------------------------

    def asked(self) -> tuple[bool, bool, bool]:
        """Returns whether this rank asks to stop, to validate and to save; the last two are then forgotten."""
        run = self.run
        asked = run.stop_reason is not None, run.validation_asked, run.checkpoint_asked
        run.validation_asked = run.checkpoint_asked = False
        return asked

    def agreed_stop_reason(self) -> str | None:
        """Returns the reason to stop of the first rank that has one; every rank must call it."""
        reasons = distributed.all_gather_object(self.run.stop_reason)
        return next((reason for reason in reasons if reason is not None), None)

    # --- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Any]]:
        """Returns the states of the callbacks that have one. Raises ValueError for what a checkpoint cannot hold."""
        states = {name: callback.state() for name, callback in self.own.items()}
        for name, state in states.items():
            if not _is_plain(state):
                raise ValueError(
                    f"the state of callback {name} is {state!r:.200}; it must be a dict of numbers, texts, lists, "
                    "dicts and tensors"
                )
        return {name: state for name, state in states.items() if state}

    def load_state(self, states: Mapping[str, dict[str, Any]]) -> None:
        for name, state in states.items():
            if name in self.own:
                self.own[name].load_state(state)


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) in (str, int) and _is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool) or isinstance(value, Tensor)


def named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Returns callbacks that come as objects and not by name, under the names of their classes."""
    return {f"{type(callback).__name__} {number}": callback for number, callback in enumerate(callbacks, 1)}
