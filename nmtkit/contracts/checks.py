"""Runs the contract checks of a component and reports failed checks."""

import inspect
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import Any, Generic, TypeVar

import torch

from nmtkit.config import derive
from nmtkit.config.plugins import plugin_message
from nmtkit.config.registry import Registry
from nmtkit.data.dataset.dataset_tokenizer import load_tokenizer
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models.architectures.contract import ContractError, described

T = TypeVar("T")
Check = Callable[[Any], None]  # called with a Subject, and raises an exception if the component breaks the contract


@dataclass(eq=False)
class Subject(Generic[T]):
    """A component under test: a registered name with settings that override its preset."""

    registry: Registry[T]
    base: Any  # the class whose instances the factory must return
    name: str
    settings: dict[str, Any]
    tokenizer: Tokenizer | None = None  # default: the tokenizer of a checkpoint in the settings
    config: Any = field(init=False)

    def __post_init__(self) -> None:
        self.config = derive(self.registry[self.name].preset, self.settings, str(self))
        values = (value if isinstance(value, tuple) else (value,) for value in vars(self.config).values())
        paths = (item for item in chain.from_iterable(values) if isinstance(item, Path) and zipfile.is_zipfile(item))
        if self.tokenizer is None and (checkpoint := next(paths, None)):
            self.tokenizer = load_tokenizer([checkpoint])

    def __str__(self) -> str:
        return f"{self.registry.kind} {self.name}"

    def build(self, *arguments: Any) -> T:
        """Returns `factory(config, *arguments)`. Raises ContractError if the result is not an instance of the base."""
        component = self.registry[self.name].factory(self.config, *arguments)
        article = "an" if self.base.__name__[0] in "AEIO" or self.base.__name__.startswith("LR") else "a"
        require(
            isinstance(component, self.base),
            f"the factory of {self.name!r} returned {described(component)}; it must return {article} "
            f"{self.base.__name__}",
        )
        return component


@dataclass(frozen=True)
class Result:
    """The result of a check. A check without an error has passed."""

    name: str
    error: Exception | None = None

    @property
    def reason(self) -> str:
        """The message of a failed check, with the type or the plug-in line of errors other than ContractError."""
        if self.error is None:
            return ""
        if isinstance(self.error, ContractError):
            return str(self.error)
        return plugin_message(self.error) or f"{type(self.error).__name__}: {self.error}"


@dataclass(frozen=True)
class Contract(Generic[T]):
    """The checks of a kind of component. `contract(name, **settings)` runs all checks."""

    registry: Registry[T]
    base: Any  # the class whose instances a factory must return
    checks: tuple[Check, ...]

    def __call__(self, name: str, tokenizer: Tokenizer | None = None, /, **settings: Any) -> None:
        """Raises ContractError, with the reason of each failed check, unless the component passes all checks.

        `settings` override the preset of the component. Small sizes make the checks fast. The checks use `tokenizer`,
        or the tokenizer of the first checkpoint in the settings, or a tiny tokenizer.
        """
        subject = self.subject(name, tokenizer, **settings)
        failed = [result for result in self.results(subject) if result.error is not None]
        if failed:
            reasons = "\n".join(f"  {result.name}: {result.reason}" for result in failed)
            message = f"{subject}: {len(failed)} of {len(self.checks)} checks failed\n{reasons}"
            raise ContractError(message) from failed[0].error

    def subject(self, name: str, tokenizer: Tokenizer | None = None, /, **settings: Any) -> Subject[T]:
        return Subject(self.registry, self.base, name, settings, tokenizer)

    def results(self, subject: Subject[T]) -> Iterator[Result]:
        """Yields the result of each check, in order. The random state of the CPU is restored after each check."""
        for check in self.checks:
            error = None
            with torch.random.fork_rng(devices=[]):  # so that checks can seed the generator of torch
                try:
                    check(subject)
                except Exception as raised:  # plug-ins can raise exceptions of any type
                    error = raised
            yield Result(title(check), error)


def checks_of(module: str, *shared: Check) -> tuple[Check, ...]:
    """Returns the checks that a module defines, in the order of the file, and after them the checks in `shared`.

    A check is a function whose only parameter has the name `subject`, and which returns None.
    """
    own = []
    for value in vars(sys.modules[module]).values():
        if isinstance(value, FunctionType) and value.__module__ == module:
            signature = inspect.signature(value)
            if list(signature.parameters) == ["subject"] and signature.return_annotation is None:
                own.append(value)
    return *own, *shared


def title(check: Check) -> str:
    """Returns the name of a check as words."""
    return check.__name__.replace("_", " ")


def require(condition: object, message: str) -> None:
    """Raises ContractError with the message unless the condition holds."""
    if not condition:
        raise ContractError(message)
