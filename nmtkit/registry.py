"""Registered names, their preset configs, and the command-line flags these become.

A preset is a frozen, keyword-only dataclass whose every field is declared with `option`: flag, help, limits, TOML key.
"""

import dataclasses
import difflib
import operator
import re
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Union, overload

import click
from click.core import ParameterSource

T = TypeVar("T")

LARGEST = 10**12  # limit of a number that declares no other: larger sizes are mistakes, and overflow 64 bits downstream
COMMAND_LINE = "the command line"  # origin of settings that are flags
LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "min": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "max": ("at most", operator.le),
    "below": ("below", operator.lt),
}


# --- declaring settings -----------------------------------------------------------------------------------------------


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
    repeatable: bool = False,
) -> Any:
    """Declares a config field that is also a command-line flag and a TOML key; `...` for a default makes it required.

    `min` and `max` are inclusive limits of a number, `above` and `below` exclusive ones; of a tuple they limit every
    item. None always passes; NaN, infinity and numbers beyond `LARGEST` never do. `help` states the unit where there
    is one. `flag` overrides the flag's name ("-s/--source-lang"), `metavar` how its value is shown, and `section`
    begins a new heading on the help page. A `repeatable` flag of a tuple gives one item each time, which may hold
    commas. Choices are the field's type: `Literal["a", "b"]`.
    """
    metadata = {"help": help, "min": min, "max": max, "above": above, "below": below}
    metadata |= {"flag": flag, "metavar": metavar, "section": section, "repeatable": repeatable}
    if default is ...:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


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
            declared = {name: bound for name in LIMITS if (bound := field.metadata.get(name)) is not None}
            lower = {} if "above" in declared else {"min": -LARGEST}
            limits = lower | ({} if "below" in declared else {"max": LARGEST}) | declared
            unmet = [name for name, bound in limits.items() if not LIMITS[name][1](number, bound)]  # NaN meets none
            if unmet:
                named = [name for name in LIMITS if name in declared or name in unmet]
                words = " and ".join(f"{LIMITS[name][0]} {limits[name]:,}" for name in named)
                raise ValueError(f"{flag_of(field)} is {number}; it must be {words}")


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Returns the long flag of a config field."""
    declared = field.metadata.get("flag")
    return declared.split("/")[-1] if declared else flag_name(field.name)


def field_types(cls: type) -> dict[str, Any]:
    """Returns the annotated type of each field by name, in order of declaration."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def check_no_collisions(configs: Mapping[str, Any]) -> None:
    """Raises ValueError when two components (title -> config) declare one field, hence one flag, naming both."""
    owner: dict[str, str] = {}
    for title, config in configs.items():
        for field in dataclasses.fields(config):
            if field.name in owner:
                raise ValueError(f"{owner[field.name]} and {title} both declare {flag_name(field.name)}; rename one")
            owner[field.name] = title


# --- values: from flags, TOML and checkpoints, and back ---------------------------------------------------------------


def convert(value: Any, hint: Any, text: bool = False) -> Any:
    """Returns `value` as the annotated type `hint`. Raises ValueError saying what is expected.

    With `text` it is as typed on the command line: `a,b,c` is a list, `none` no value, and numbers are written out.
    Without, it comes from TOML or a checkpoint, and has its type: 1 is no boolean and 1.0 no whole number. In a list
    of `str | None`, an empty item is None.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        return convert(value, _present(hint), text)
    if origin is tuple:
        if text:
            value = [item.strip() for item in value.split(",")]
        if isinstance(value, list | tuple):
            optional = type(None) in typing.get_args(arguments[0])
            if text and "" in value and not optional:
                raise ValueError("an item of the list is empty")
            return tuple(None if item == "" and optional else convert(item, arguments[0], text) for item in value)
    elif origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
    elif hint is Path:
        if isinstance(value, str | Path) and str(value):
            return Path(value)
    elif text or (hint is float and type(value) is int):
        try:
            return hint(value)
        except (ValueError, OverflowError):
            pass
    elif type(value) is hint:  # exactly: True is an int to isinstance
        return value
    raise ValueError(f"{reprlib.repr(value)} is not {_expected(hint)}")


def _present(hint: Any) -> Any:
    """Returns the type of an optional value where there is one."""
    return next(item for item in typing.get_args(hint) if item is not type(None))


def _expected(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return "a list"
    return {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}.get(hint, "a text")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns what to say of an unknown name: the nearest of those known, and all of these."""
    known = list(known)
    nearest = difflib.get_close_matches(name, known, 1)
    return f"{f'did you mean {nearest[0]!r}? ' if nearest else ''}known: {', '.join(known)}"


@overload
def derive(config: type[T], changes: Mapping[str, Any], origin: str) -> T: ...


@overload
def derive(config: T, changes: Mapping[str, Any], origin: str) -> T: ...


def derive(config: T | type[T], changes: Mapping[str, Any], origin: str) -> T:
    """Returns `config`, or that of a class with its defaults, with `changes` by field name; dashes are underscores.

    `origin` names in errors where the changes come from (a TOML table, a checkpoint, `COMMAND_LINE`). Raises ValueError
    for a field the config does not have, and for a value of the wrong type or beyond its limits.
    """
    hints = field_types(config if isinstance(config, type) else type(config))
    checked = {}
    for key, value in changes.items():
        name = key.replace("-", "_")
        if name not in hints:
            raise ValueError(f"{origin} has no setting {key!r}; {suggestion(name, hints)}")
        try:
            checked[name] = convert(value, hints[name])
        except ValueError as error:
            raise ValueError(f"{origin}: {key}: {error}") from None
    try:
        result = config(**checked) if isinstance(config, type) else dataclasses.replace(config, **checked)  # type: ignore[type-var]
        check_limits(result)  # configs of plug-ins need not derive from Config
    except ValueError as error:
        raise error if origin == COMMAND_LINE else ValueError(f"{origin}: {error}") from None
    return result


def plain(config: Any) -> dict[str, Any]:
    """Returns a config as a dict of plain types, as checkpoints and TOML files hold it; `derive` reads it back."""

    def plain_value(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain_value(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    return {field.name: plain_value(getattr(config, field.name)) for field in dataclasses.fields(config)}


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the TOML text of tables of plain values, as `--config` reads it; None is written "none".

    A title with a dot, `metrics.bleu`, is that of a table in a table.
    """
    return "\n".join(
        f"[{_toml_title(title)}]\n" + "".join(f"{key} = {_toml_value(value)}\n" for key, value in table.items())
        for title, table in tables.items()
    )


def _toml_title(title: str) -> str:
    parts = title.split(".", 1)
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else _toml_value(part) for part in parts)


def _toml_value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    escaped = "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped)
    return f'"{escaped}"'


# --- flags ------------------------------------------------------------------------------------------------------------


def flags(config: Any, section: str = "Options") -> list[click.Option]:
    """Returns one click option for each field of `config`, a config or a class of them, that shows its default.

    On the help page they are listed under the heading `section` up to the first field that declares its own. A flag
    that is not given comes as None, and so does one that says `none`: `on_command_line` tells them apart.
    """
    hints = field_types(config if isinstance(config, type) else type(config))
    result = []
    for field in dataclasses.fields(config):
        section = field.metadata.get("section") or section
        default = field.default if isinstance(config, type) else getattr(config, field.name)
        result.append(_flag(field, hints[field.name], default, section))
    return result


def on_command_line(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the running command's parameters that were given, so that presets show through the others."""
    source = click.get_current_context().get_parameter_source
    return {name: value for name, value in settings.items() if source(name) is ParameterSource.COMMANDLINE}


def _flag(field: dataclasses.Field[Any], hint: Any, default: Any, section: str) -> click.Option:
    long, required = flag_of(field), default is dataclasses.MISSING
    short = [name for name in (field.metadata.get("flag") or "").split("/") if name and name != long]
    typed: dict[str, Any] = {}
    if hint is not bool:
        typed = {"type": FieldType(hint), "metavar": field.metadata.get("metavar") or metavar(hint)}
    if field.metadata.get("repeatable"):
        typed |= {"type": FieldType(typing.get_args(hint)[0]), "multiple": True}
    result = click.Option(
        [*short, f"{long}/--no-{long[2:]}" if hint is bool else long, field.name],
        help=field.metadata["help"] + ("" if required else f"  [default: {_shown(default)}]"),
        required=required,
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
    """Returns how the help page shows a value of the annotated type `hint`: N, X, TEXT, a|b, PATH,…"""
    options = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return "|".join(str(item) for item in options)
    if typing.get_origin(hint) in (Union, types.UnionType):
        return metavar(_present(hint))
    if typing.get_origin(hint) is tuple:
        return f"{metavar(options[0])},…"
    return {int: "N", float: "X", str: "TEXT", Path: "PATH"}.get(hint, "VALUE")


class FieldType(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on, to type checkers only
    """A click type that reads the text of a flag by the annotation of its field."""

    name = "value"

    def __init__(self, hint: Any) -> None:
        self.hint = hint

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return convert(value, self.hint, text=True)
        except ValueError as error:
            self.fail(str(error), param, ctx)


# --- conditions between flags -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlagRule:
    """A condition between flags: `flag` does something only beside one of `needs`, and nothing beside `excludes`.

    Names are flags as users write them, perhaps with a value ("--format jsonl"), or other facts ("several --sys").
    """

    flag: str
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    reason: str = ""  # ends the message of `excludes`


def check_flags(rules: Collection[FlagRule], given: Collection[str], on: Collection[str]) -> None:
    """Raises ValueError for the first rule that is broken, so that no flag is accepted and ignored.

    `given` are the names that the user wrote, `on` those in effect: `--groups 1` is given, and on only if 1 is not its
    default. A given flag needs one that is on; a flag that is on excludes given ones.
    """
    for rule in rules:
        if rule.flag in given and rule.needs and not set(rule.needs) & set(on):
            raise ValueError(f"{rule.flag} does nothing without {' or '.join(rule.needs)}")
        for other in rule.excludes:
            if rule.flag in on and other in given:
                because = f": {rule.reason}" if rule.reason else ""
                raise ValueError(f"{rule.flag} and {other} cannot be combined{because}")


def changed_flags(config: Any) -> set[str]:
    """Returns the flags of those fields of `config` that differ from their default."""
    fields = dataclasses.fields(config)
    return {flag_of(field) for field in fields if getattr(config, field.name) != field.default}


def given_flags() -> set[str]:
    """Returns the flags, and arguments as DATA, of the running command that were given, unless as none or `--no-…`."""
    context = click.get_current_context()
    given = on_command_line(context.params)
    return {
        max(parameter.opts, key=len) if isinstance(parameter, click.Option) else parameter.name.upper()
        for parameter in context.command.params
        if parameter.name is not None and given.get(parameter.name) not in (None, False, ())
    }


# --- registries ------------------------------------------------------------------------------------------------------


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
