"""Registries of components. Each registered name has a factory and a preset config."""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nmtkit.config import suggestion

T = TypeVar("T")


@dataclass(frozen=True)
class RegistryEntry(Generic[T]):
    """A registered name. `factory(config, …)` is called with `preset` or a config derived from it."""

    name: str
    factory: Callable[..., T]
    preset: Any
    module: str  # module that registered the name


class Registry(Generic[T]):
    """The registered names of one kind of component, such as optimizers.

    `kind` is the word for this kind in messages, and `flag` is the command-line flag that selects a name. By default, a
    job has one component of this kind. With `several`, a job has a list of components: `--metrics bleu,chrf`.

    >>> @ARCHITECTURES.register("transformer_base", TransformerConfig())
    ... class Transformer(Architecture): ...
    """

    def __init__(self, kind: str, flag: str, several: bool = False) -> None:
        self.kind = kind
        self.flag = flag
        self.several = several
        self.entries: dict[str, RegistryEntry[T]] = {}

    def register(self, name: str, preset: Any) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Returns a decorator that registers a factory under `name`. To register several presets, stack decorators.

        A new definition with the same qualified name in the same file or module replaces the old factory. This happens
        if a notebook cell runs again, or if a script imports a plug-in that is also loaded by its path. Raises
        ValueError if a different definition has the name, or if the same factory is registered twice under the name.
        Raises TypeError if the preset is not a dataclass of `option` fields.
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
            if before and (before.factory is factory or _definition(before.factory) != _definition(factory)):
                where = full_name(before.factory)
                raise ValueError(
                    f"{self.kind} {name!r} is registered twice; {where} already has this name; choose a different name"
                )
            self.entries[name] = RegistryEntry(name, factory, preset, module)
            return factory

        return keep

    def __getitem__(self, name: str) -> RegistryEntry[T]:
        if name not in self.entries:
            known = suggestion(name, self.names())
            raise ValueError(f"unknown {self.kind} {name!r}; {known}. If a plug-in defines it, add --plugin FILE.")
        return self.entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def names(self) -> list[str]:
        return list(self.entries)


def _definition(factory: Callable[..., Any]) -> tuple[str, str]:
    """Returns the location of a definition: the file (or the module, if there is no file) and the qualified name."""
    named = factory if hasattr(factory, "__qualname__") else type(factory)
    file = getattr(sys.modules.get(named.__module__), "__file__", None)
    return file or named.__module__, named.__qualname__


def full_name(factory: Callable[..., Any]) -> str:
    """Returns the module and the qualified name of a class or function: "nmtkit.training.trainer.Trainer"."""
    named = factory if hasattr(factory, "__qualname__") else type(factory)
    return f"{named.__module__}.{named.__qualname__}"
