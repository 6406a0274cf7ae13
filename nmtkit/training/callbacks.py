"""Callbacks by name (`--callbacks a,b`): what else is done at an update, a validation, a checkpoint."""

from abc import ABC

from nmtkit.registry import Registry


class Callback(ABC):  # noqa: B024  # every hook is optional
    """Acts at the events of a run."""


CALLBACKS: Registry[Callback] = Registry("callback", "--callbacks", several=True)
