"""Registries: names of components, each with a factory and a preset config."""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nmtkit.config import suggestion

T = TypeVar("T")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A registered name: call `factory(config, …)` with `preset` or a config derived from it."""

    name: str
    factory: Callable[..., T]
    preset: Any
    module: str  # that registered it


class Registry(Generic[T]):
    """Names of one kind of component. `kind` reads as in messages, `flag` is how the command line selects one.

    A job has one component of a kind, or with `several` any number, by a list of names: `--metrics bleu,chrf`.

    >>> @ARCHITECTURES.register("transformer_base", TransformerConfig())
    ... class Transformer(Architecture): ...
    """

    def __init__(self, kind: str, flag: str, several: bool = False) -> None:
        self.kind = kind
        self.flag = flag
        self.several = several
        self.entries: dict[str, Entry[T]] = {}

    def register(self, name: str, preset: Any) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Decorator that puts a factory under `name`; stack several for several presets of one factory.

        A factory that is defined anew, as when a notebook's cell runs twice or a module is reloaded, replaces the
        older one of its module and qualified name. Raises ValueError when the name is taken otherwise, TypeError when
        the preset is no dataclass of `option` fields.
        """
        cls = type(preset)
        if not dataclasses.is_dataclass(cls):
            raise TypeError(f"the preset of {name!r} is a {cls.__name__}, not a dataclass")
        for field in dataclasses.fields(cls):
            if "help" not in field.metadata:
                raise TypeError(f"{cls.__name__}.{field.name} has no help text; declare it with option(default, help)")
        module = sys._getframe(1).f_globals["__name__"]

        def keep(factory: Callable[..., T]) -> Callable[..., T]:
            before = self.entries.get(name)
            if before is not None and (before.factory is factory or _place(before.factory) != _place(factory)):
                where = ".".join(_place(before.factory))
                raise ValueError(f"{self.kind} {name!r} is registered twice; {where} has it: give yours another name")
            self.entries[name] = Entry(name, factory, preset, module)
            return factory

        return keep

    def __getitem__(self, name: str) -> Entry[T]:
        if name not in self.entries:
            known = suggestion(name, self.names())
            raise ValueError(f"unknown {self.kind} {name!r}; {known}. Defined elsewhere? Add --plugin FILE.")
        return self.entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def names(self) -> list[str]:
        return list(self.entries)


def _place(factory: Callable[..., Any]) -> tuple[str, str]:
    """Returns where a class or function is defined: its module and qualified name."""
    named = factory if hasattr(factory, "__qualname__") else type(factory)
    return named.__module__, named.__qualname__
