"""Callbacks by name (`--callbacks a,b`): code that a run calls at updates, log lines, validations and checkpoints.

A registered factory is called as `factory(config)` on every rank. Slow initialisation belongs in `start`.
"""

import contextlib
import difflib
import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nmtkit.config.registry import Registry
from nmtkit.jobs import distributed
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.contract import ContractError

log = logging.getLogger("nmtkit")


@dataclass(kw_only=True, eq=False)
class RunState:
    """The facts and progress of a run, and the requests of its callbacks.

    Any rank that calls hooks may make a request. In the hook `validation`, requests to stop and to save take effect at
    once, and a request to validate has no effect. Requests in the hook `update` take effect after the same update.
    Requests in all other hooks take effect after the next update. If a run has several processes, requests outside
    `validation` take effect one update later, because all ranks must agree.
    """

    save_dir: Path
    settings: Mapping[str, Mapping[str, Any]]  # tables of config.toml
    model: Architecture
    can_validate: bool
    sharded: bool = False  # whether each process has only a share of every parameter and gradient (--parallel fsdp)
    update: int = 0  # number of updates made
    epoch: int = 1  # counted from 1
    stop_reason: str | None = None
    validation_asked: bool = False
    checkpoint_asked: bool = False

    def stop(self, reason: str) -> None:
        """Asks to end the run. The run then validates, saves a checkpoint and logs `reason`."""
        self.stop_reason = reason

    def validate(self) -> None:
        """Asks for a validation. Raises ValueError if the dataset has no validation set."""
        if not self.can_validate:
            raise ValueError("a callback asks for a validation, but the dataset has no --valid-subset")
        self.validation_asked = True

    def save(self) -> None:
        """Asks for a checkpoint."""
        self.checkpoint_asked = True


class Callback:
    """Hooks of a run: override the hooks that you need. An exception in a hook ends the run.

    Rank 0 calls all hooks. With `every_rank`, the other ranks call all hooks except `checkpoint` and `state`. The
    arguments `metrics` and `scores` contain the logged numbers by name. Losses are means over the tokens of all ranks.
    """

    every_rank: bool = False

    def start(self, run: RunState) -> None:
        """Called before the first update, and again when the run is resumed."""

    def update(self, run: RunState) -> None:
        """Called after every update. Reading a tensor here makes the host wait for the GPU."""

    def log(self, run: RunState, metrics: Mapping[str, float]) -> None:
        """Called every `--log-interval` updates with the numbers of the log line: loss, ppl, lr, norm, …"""

    def validation(self, run: RunState, scores: Mapping[str, float]) -> None:
        """Called after every validation. `scores` contains loss, ppl and the metrics."""

    def checkpoint(self, run: RunState, path: Path) -> None:
        """Called on rank 0 after a checkpoint was written to `path`."""

    def end(self, run: RunState, reason: str | None) -> None:
        """Called once at the end of the run, with the stop reason, or None after an exception."""

    def state(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs, in plain types and tensors. Every checkpoint saves the state."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the state that `state` returned on rank 0. Called before `start`."""


CALLBACKS: Registry[Callback] = Registry("callback", "--callbacks", several=True)

HOOKS = ("start", "update", "log", "validation", "checkpoint", "end", "state", "load_state")


def hook_mistakes(callback: Callback) -> list[str]:
    """Returns messages about likely mistakes in the class of a callback, or an empty list.

    There is a message for each method whose name looks like a misspelt hook. Methods whose names begin with _ and
    methods that the class itself calls are left out. If there is no such message, a class that overrides no hook gets a
    message. Raises ContractError for a hook that does not accept the arguments that a run passes.
    """
    cls = type(callback)
    for hook in HOOKS:
        arguments = [name for name in inspect.signature(getattr(Callback, hook)).parameters if name != "self"]
        try:
            inspect.signature(getattr(callback, hook)).bind(*arguments)
        except TypeError:
            raise ContractError(
                f"{cls.__name__}.{hook} does not take the arguments of the hook; write {hook}(self"
                f"{''.join(f', {name}' for name in arguments)})"
            ) from None
    functions = inspect.getmembers(cls, inspect.isfunction)
    methods = {name: function for name, function in functions if function is not getattr(Callback, name, None)}
    used = {name for function in methods.values() for name in function.__code__.co_names}
    mistakes = []
    for name in methods:
        helper = name.startswith("_") or name in used or hasattr(Callback, name)
        contained = [word for word in name.split("_") if word in HOOKS]  # such as validation in on_validation_end
        similar = contained or difflib.get_close_matches(name, HOOKS, 1, 0.7)
        if similar and not helper:
            mistakes.append(f"{cls.__name__}.{name} is not a hook, so no run calls it; did you mean {similar[0]}?")
    if not mistakes and not any(hook in methods or hook in vars(callback) for hook in HOOKS):
        mistakes.append(f"{cls.__name__} overrides no hook, so it has no effect; the hooks are {', '.join(HOOKS)}")
    return mistakes


class CallbackList:
    """The callbacks of a run by name. `call` calls the hooks of the callbacks that are active on this rank."""

    def __init__(self, callbacks: Mapping[str, Callback], run: RunState) -> None:
        self.callbacks = dict(callbacks)
        self.run = run
        self.started = False
        self.others: dict[str, dict[str, Any]] = {}  # saved states of callbacks that this run does not have
        self.active = {
            name: callback for name, callback in callbacks.items() if callback.every_rank or distributed.is_rank_zero()
        }
        for name, callback in self.active.items():
            for mistake in hook_mistakes(callback):
                if distributed.is_rank_zero():
                    log.warning("callback %s: %s", name, mistake)

    @contextlib.contextmanager
    def _guarded(self, name: str, callback: Callback) -> Iterator[None]:
        """The context of a hook call. In this context, the watchdog, which ends hanging runs, expects no heartbeats.

        If only rank 0 calls the hook, an operation on a sharded parameter raises RuntimeError.
        """
        alone = self.run.sharded and not callback.every_rank
        guard = distributed.RefuseSharded(f"the callback {name}") if alone else contextlib.nullcontext()
        with distributed.long_operation(), guard:
            yield

    def call(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of the active callbacks with the run and the `arguments`."""
        self.started = self.started or hook == "start"
        for name, callback in self.active.items():
            with self._guarded(name, callback):
                getattr(callback, hook)(self.run, *arguments)

    def end(self, reason: str | None) -> None:
        """Calls `end` if `start` was called. An exception becomes a warning, because the run has already ended."""
        if not self.started:
            return
        self.started = False
        for name, callback in self.active.items():
            try:
                with self._guarded(name, callback):
                    callback.end(self.run, reason)
            except Exception as error:  # code of users can raise any exception
                log.warning("the callback %s failed at the end of the run: %s: %s", name, type(error).__name__, error)

    # --- requests ------------------------------------------------------------------------------------------------

    def asked(self) -> dict[str, bool]:
        """Returns the fields of `Requests` that say if callbacks of this rank ask to stop, to validate and to save.

        Clears the requests to validate and to save.
        """
        run = self.run
        stops, validates, saves = run.stop_reason is not None, run.validation_asked, run.checkpoint_asked
        run.validation_asked = run.checkpoint_asked = False
        return {"callback_stops": stops, "callback_validates": validates, "callback_saves": saves}

    def agreed_stop_reason(self) -> str | None:
        """Returns the stop reason of the lowest rank that has a reason. Every rank must call this method."""
        reasons = distributed.all_gather_object(self.run.stop_reason)
        return next((reason for reason in reasons if reason is not None), None)

    # --- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Any]]:
        """Returns the states of the callbacks. Raises ValueError for a state that a checkpoint cannot hold."""
        states = {name: callback.state() for name, callback in self.active.items()}
        for name, state in states.items():
            if not _is_plain(state):
                raise ValueError(
                    f"the state of callback {name} is {state!r:.200}; it must be a dict of numbers, texts, lists, "
                    "dicts and tensors"
                )
        return self.others | {name: state for name, state in states.items() if state}

    def load_state(self, states: Mapping[str, dict[str, Any]]) -> None:
        self.others = {name: state for name, state in states.items() if name not in self.callbacks}
        for name, state in states.items():
            if name in self.active:
                self.active[name].load_state(state)


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) in (str, int) and _is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool) or isinstance(value, Tensor)
