"""Registered names, their preset configs, the command-line flags these become, and plug-ins.

A registry maps a name to a factory and a preset: a frozen, keyword-only dataclass whose every field is declared with
`option(default, help)`. The same declaration gives the flag, its help text, and the key in a TOML file.
"""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Union

import click
from click.core import ParameterSource

T = TypeVar("T")


def option(
    default: Any,
    help: str,
    *,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    below: float | None = None,
    flag: str | None = None,
    metavar: str | None = None,
    section: str | None = None,
) -> Any:
    """Declares a config field that is also a command-line flag and a TOML key.

    `min` and `max` are inclusive limits of a number, `above` and `below` exclusive ones; of a tuple they limit every
    item. None always passes, NaN and infinity never do. `help` states the unit where there is one. `flag` overrides
    the flag's name ("-s/--source-lang"), `metavar` how its value is shown, and `section` begins a new heading on the
    help page. Choices are the field's type: `Literal["a", "b"]`.
    """
    declared: dict[str, Any] = {"min": min, "max": max, "above": above, "below": below}
    declared |= {"flag": flag, "metavar": metavar, "section": section}
    return dataclasses.field(default=default, metadata={"help": help, **declared})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base class of configs. Construction raises ValueError for a field outside the limits that its `option` declares.

    A subclass that must also compare fields with each other overrides `__post_init__` and calls this one first.
    """

    def __post_init__(self) -> None:
        check_limits(self)


def check_limits(config: Any) -> None:
    """Raises ValueError for the first field of `config` outside its declared limits, naming flag, value and limits."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if not _within(number, field.metadata):
                limits = _limits(field.metadata) or "a finite number"
                raise ValueError(f"{flag_of(field)} is {number}; it must be {limits}")


def _within(number: float, metadata: Mapping[str, Any]) -> bool:
    low, high, above, below = (metadata.get(name) for name in ("min", "max", "above", "below"))
    return (
        math.isfinite(number)
        and (low is None or number >= low)
        and (high is None or number <= high)
        and (above is None or number > above)
        and (below is None or number < below)
    )


def _limits(metadata: Mapping[str, Any]) -> str:
    """Returns the limits in words: "at least 0 and below 1"."""
    words = (("min", "at least"), ("above", "above"), ("max", "at most"), ("below", "below"))
    return " and ".join(f"{word} {metadata[name]}" for name, word in words if metadata.get(name) is not None)


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A registered name: call `factory(config, …)` with `preset` or a config derived from it."""

    name: str
    factory: Callable[..., T]
    preset: Any


class Registry(Generic[T]):
    """Names of one kind of component. `kind` reads as in messages, `flag` is how the command line selects one.

    >>> @ARCHITECTURES.register("transformer_base", TransformerConfig())
    ... class Transformer(Architecture): ...
    """

    def __init__(self, kind: str, flag: str) -> None:
        self.kind = kind
        self.flag = flag
        self.entries: dict[str, Entry[T]] = {}

    def register(self, name: str, preset: Any) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Decorator that puts a factory under `name`; stack several for several presets of one factory.

        Raises ValueError when the name is taken, TypeError when the preset is no dataclass of `option` fields.
        """
        if name in self.entries:
            raise ValueError(f"{self.kind} {name!r} is registered twice; give yours another name")
        check_config_class(type(preset), name)

        def keep(factory: Callable[..., T]) -> Callable[..., T]:
            self.entries[name] = Entry(name, factory, preset)
            return factory

        return keep

    def __getitem__(self, name: str) -> Entry[T]:
        if name not in self.entries:
            raise ValueError(
                f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}. Defined elsewhere? Add --plugin FILE."
            )
        return self.entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def names(self) -> list[str]:
        return list(self.entries)


# --- config fields --------------------------------------------------------------------------------------------------


def check_config_class(cls: type, name: str) -> None:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"the preset of {name!r} is a {cls.__name__}, not a dataclass")
    for field in dataclasses.fields(cls):
        if "help" not in field.metadata:
            raise TypeError(f"{cls.__name__}.{field.name} has no help text; declare it with option(default, help)")


def field_types(cls: type) -> dict[str, Any]:
    """Field name -> annotated type, in order of declaration."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Returns the long flag of a config field."""
    declared = field.metadata.get("flag")
    return declared.split("/")[-1] if declared else flag_name(field.name)


def flags(config: Any, section: str) -> list[click.Option]:
    """One click option for each field of `config`, listed on the help page under the heading `section`.

    A flag that is not given comes as None, and so does one that says `none`: `on_command_line` tells them apart.
    """
    hints = field_types(type(config))
    fields = dataclasses.fields(config)
    return [_flag(field, hints[field.name], getattr(config, field.name), section) for field in fields]


def on_command_line(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the running command's parameters that were given, so that presets show through the others."""
    source = click.get_current_context().get_parameter_source
    return {name: value for name, value in settings.items() if source(name) is ParameterSource.COMMANDLINE}


def _flag(field: dataclasses.Field[Any], hint: Any, default: Any, section: str) -> click.Option:
    name = flag_name(field.name)
    typed: dict[str, Any] = {} if hint is bool else {"type": FieldType(hint), "metavar": metavar(hint)}
    result = click.Option(
        [f"{name}/--no-{name[2:]}" if hint is bool else name, field.name],
        help=f"{field.metadata['help']}  [default: {_shown(default)}]",
        default=None,
        **typed,
    )
    result.section = section  # type: ignore[attr-defined]  # read by cli.command when it groups the help page
    return result


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value) or "none"
    return str(value)


def metavar(hint: Any) -> str:
    options = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return "|".join(str(item) for item in options)
    if typing.get_origin(hint) in (Union, types.UnionType):
        return metavar(next(item for item in options if item is not type(None)))
    if typing.get_origin(hint) is tuple:
        return f"{metavar(options[0])},…"
    return {int: "N", float: "X", str: "TEXT", Path: "PATH"}.get(hint, "VALUE")


class FieldType(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on, to type checkers only
    """A click type that parses by the field's annotation; lists are written `a,b,c`, no value is written `none`."""

    name = "value"

    def __init__(self, hint: Any) -> None:
        self.hint = hint

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse(value, self.hint)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse(text: str, hint: Any) -> Any:
    """`text` as a value of the annotated type `hint`. Raises ValueError naming what is allowed."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if type(None) in arguments and text.lower() == "none":
            return None
        return parse(text, next(item for item in arguments if item is not type(None)))
    if origin is Literal:
        if text not in arguments:
            raise ValueError(f"{text!r} is not one of {', '.join(arguments)}")
        return text
    if origin is tuple:
        return tuple(parse(item.strip(), arguments[0]) for item in text.split(",") if item.strip())
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{text!r} is neither true nor false")
        return text.lower() == "true"
    try:
        return hint(text)
    except ValueError:
        raise ValueError(f"{text!r} is not {'a whole number' if hint is int else 'a number'}") from None


def check_value(value: Any, hint: Any, place: str) -> Any:
    """`value`, as read from TOML or a checkpoint, as the annotated type `hint`. Raises ValueError naming `place`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if type(None) in arguments and value in (None, "none"):
            return None
        return check_value(value, next(item for item in arguments if item is not type(None)), place)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(check_value(item, arguments[0], place) for item in value)
    if origin is Literal and value in arguments:
        return value
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str | Path):
        return Path(value)
    if hint in (bool, int, str) and type(value) is hint:  # exactly: True is an int to isinstance
        return value
    raise ValueError(f"{place} is {value!r}, where {metavar(hint)} is expected")


def derive(config: T, changes: Mapping[str, Any], place: str) -> T:
    """`config` with `changes` by field name; `place` names their source in errors (a TOML table, a checkpoint).

    Raises ValueError for a field the config does not have and for a value of the wrong type.
    """
    hints = field_types(type(config))
    unknown = [name for name in changes if name not in hints]
    if unknown:
        raise ValueError(f"{place} has no setting {unknown[0]!r}; known: {', '.join(hints)}")
    checked = {name: check_value(value, hints[name], f"{place}: {name}") for name, value in changes.items()}
    result = dataclasses.replace(config, **checked)  # type: ignore[type-var]
    check_limits(result)  # configs of plug-ins need not derive from Config
    return result


def plain(config: Any) -> dict[str, Any]:
    """A config as a dict of plain types: what checkpoints and TOML files hold. `derive` reads it back."""
    return {
        name: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
        for name, value in ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    }


def check_no_collisions(configs: Mapping[str, Any]) -> None:
    """Raises ValueError when two components (title -> config) declare one field, hence one flag, naming both."""
    owner: dict[str, str] = {}
    for title, config in configs.items():
        for field in dataclasses.fields(config):
            if field.name in owner:
                raise ValueError(f"{owner[field.name]} and {title} both declare {flag_name(field.name)}; rename one")
            owner[field.name] = title


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """TOML text of tables of plain values, as `--config` reads it; None is written "none"."""
    return "\n".join(
        f"[{title}]\n" + "".join(f"{key} = {_toml_value(value)}\n" for key, value in table.items())
        for title, table in tables.items()
    )


def _toml_value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    escaped = "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped)
    return f'"{escaped}"'


# --- plug-ins -------------------------------------------------------------------------------------------------------


def load_plugin(name: str) -> None:
    """Imports a plug-in, a Python file or a module's dotted name, once. Its import registers its components.

    Raises FileNotFoundError or ModuleNotFoundError naming it.
    """
    if not name.endswith(".py"):
        importlib.import_module(name)
        return
    path = Path(name).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"plug-in {name}: no such file")
    module_name = "nmtkit_plugin_" + "".join(c if c.isalnum() else "_" for c in str(path))
    if module_name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise


def load_installed_plugins() -> None:
    """Imports what installed packages declare under the entry point `nmtkit.plugins`."""
    for entry_point in importlib.metadata.entry_points(group="nmtkit.plugins"):
        entry_point.load()
