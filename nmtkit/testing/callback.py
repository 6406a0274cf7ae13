"""Checks of a callback, in short runs."""

import tempfile
from pathlib import Path
from typing import Any

from nmtkit.architectures.contract import described
from nmtkit.config import derive
from nmtkit.testing.checks import Check, require, require_all
from nmtkit.testing.runs import TINY_TRANSFORMER, check_resume
from nmtkit.training.callbacks import CALLBACKS, Callback


class CallbackSubject:
    """A callback under test: its registered name, and settings over its preset."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        self.settings = settings
        entry = CALLBACKS[name]
        self.config = derive(entry.preset, settings, f"callback {name}")
        self.factory = entry.factory

    def __str__(self) -> str:
        return f"callback {self.name}"

    def build(self) -> Callback:
        callback: object = self.factory(self.config)
        require(
            isinstance(callback, Callback),
            f"the factory of {self.name!r} returned {described(callback)}; it must return a Callback",
        )
        assert isinstance(callback, Callback)
        return callback


def check_callback(name: str, **settings: Any) -> None:
    """Raises ContractError unless the callback passes all checks."""
    require_all(CALLBACK_CHECKS, CallbackSubject(name, settings))


def a_state_is_a_dict_that_is_loaded_again(subject: CallbackSubject) -> None:
    state: object = subject.build().state()
    require(
        isinstance(state, dict), f"state returned {described(state)}; it must return a dict, {{}} where there is none"
    )
    assert isinstance(state, dict)
    other = subject.build()
    other.load_state(state)
    again = other.state()
    require(again.keys() == state.keys(), f"after load_state, state has {sorted(again)}, and had {sorted(state)}")


def a_run_with_it_resumes_exactly(subject: CallbackSubject) -> None:
    names = {"architecture": "transformer_tiny", "callbacks": subject.name}
    with tempfile.TemporaryDirectory() as folder:
        check_resume(names, {**TINY_TRANSFORMER, "lr": 0.01, **subject.settings}, Path(folder))


CALLBACK_CHECKS: tuple[Check, ...] = (a_state_is_a_dict_that_is_loaded_again, a_run_with_it_resumes_exactly)
