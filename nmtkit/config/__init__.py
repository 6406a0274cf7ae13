"""Configs: frozen dataclasses. Each field is a flag, a TOML key and a keyword argument.

A field is declared once. Its declaration sets the default, the help text, the limits, the flag and the TOML key.
"""

import dataclasses
import difflib
import functools
import json
import operator
import os
import re
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, overload

from nmtkit.config.files import checkpoint_of, located_in, portable_name, tidy

T = TypeVar("T")

# how a command uses a path; "start": a run reads the path when it starts, but not when it resumes
Access = Literal["read", "start", "write"]
LARGEST = 10**12  # limit for fields that declare no limit; products of larger numbers can overflow 64 bits
LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "min": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "max": ("at most", operator.le),
    "below": ("below", operator.lt),
}
COMMAND_LINE = "the command line"  # the `origin` (see `derive`) of settings that are given as flags
MOST_NAMES = 40  # largest number of known names in an error message about an unknown name


# --- fields -----------------------------------------------------------------------------------------------------------


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
    checkpoint: bool = False,
    access: Access | None = None,
    finetuning: Literal["refused", "adapts", "free"] = "refused",
) -> Any:
    """Declares a config field, which is also a flag and a TOML key. A field with the default `...` is required.

    `min` and `max` are inclusive limits, `above` and `below` are exclusive limits. The limits of a tuple apply to every
    item. None is always allowed. NaN, infinity and numbers beyond the declared limits (by default `LARGEST`) are not
    allowed. `help` states the unit. `flag` replaces the name of the flag ("-s/--source-lang"), and `metavar` replaces
    the name of its value on the help page. `section` starts a new heading on the help page. A `repeatable` flag adds
    one item to a tuple each time, and the item may contain commas. A field with choices has the type
    `Literal["a", "b"]`. If `checkpoint` is true, the field is the path of a checkpoint, and the user may also give the
    folder of a run (see `checkpoint_of` in files.py). `access` says whether a command reads or writes the path. The
    command checks the path before it loads anything.

    `finetuning` is for fields of architectures. It says if --finetune-from accepts a value that differs from the
    checkpoint. "free": the field does not change the output of a trained model, or changes the output only through the
    shapes of the parameters. "adapts": the output changes, but training adapts the model, so a warning is enough.
    "refused": a model with another value is a different function.
    """
    metadata = {"help": help, "min": min, "max": max, "above": above, "below": below}
    metadata |= {"flag": flag, "metavar": metavar, "section": section, "repeatable": repeatable}
    access = access or ("read" if checkpoint else None)
    metadata |= {"checkpoint": checkpoint, "access": access, "finetuning": finetuning}
    return dataclasses.field(default=dataclasses.MISSING if default is ... else default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base class of configs. Raises ValueError if a field is outside the limits that its `option` declares.

    A subclass that compares fields with each other overrides `__post_init__` and first calls the method of this class.
    """

    def __post_init__(self) -> None:
        check_limits(self)


def check_limits(config: Any) -> None:
    """Raises ValueError for the first field outside its limits. The message has the flag, the value and the limits."""
    kind: Any = type(config)
    for field, limits in _limits(kind):
        value = getattr(config, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            # NaN is outside all limits, because a comparison with NaN is always false
            unmet = [name for name, bound in limits.items() if not LIMITS[name][1](number, bound)]
            if unmet:
                named = [name for name in LIMITS if field.metadata.get(name) is not None or name in unmet]
                words = " and ".join(f"{LIMITS[name][0]} {limits[name]:,}" for name in named)
                raise ValueError(f"{flag_of(field)} is {number}; it must be {words}")


@functools.lru_cache(256)  # every call of `Model.translate` makes configs
def _limits(cls: Any) -> list[tuple[dataclasses.Field[Any], dict[str, float]]]:
    """Returns the limits of each field of a config class. The defaults are -`LARGEST` and `LARGEST`."""
    result = []
    for field in dataclasses.fields(cls):
        declared = {name: bound for name in LIMITS if (bound := field.metadata.get(name)) is not None}
        lower = {} if "above" in declared else {"min": -LARGEST}
        result.append((field, lower | ({} if "below" in declared else {"max": LARGEST}) | declared))
    return result


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Returns the long flag of a config field."""
    declared = field.metadata.get("flag")
    return declared.split("/")[-1] if declared else flag_name(field.name)


def field_types(cls: Any) -> Mapping[str, Any]:
    """Returns the annotated type of each field by field name, in order of declaration."""
    return _field_types(cls)


@functools.lru_cache(256)  # reading annotations takes a tenth of a millisecond
def _field_types(cls: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def check_no_collisions(configs: Mapping[str, Any]) -> None:
    """Raises ValueError if two configs declare the same field. The message names both configs by their keys."""
    owner: dict[str, str] = {}  # field -> title
    for title, config in configs.items():
        for field in dataclasses.fields(config):
            if field.name in owner:
                raise ValueError(f"{owner[field.name]} and {title} both declare {flag_name(field.name)}; rename one")
            owner[field.name] = title


@dataclass(frozen=True)
class FlagRule:
    """A rule for a flag: `flag` needs one of `needs`, and cannot be combined with any of `excludes`.

    `flag` and the items of `needs` and `excludes` are flags as users type them, with a value if the value matters
    ("--format jsonl"), or facts about the command ("several --sys").
    """

    flag: str
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    reason: str = ""  # end of the message about `excludes`


def check_flags(rules: Collection[FlagRule], given: Collection[str], on: Collection[str]) -> None:
    """Raises ValueError for the first broken rule.

    `given` are the flags that the user typed. `on` are the flags that have an effect. For example, `--diverse-groups 1`
    is given but not on, because 1 is the default. If a flag is given, one of its `needs` must be on. If a flag is on,
    none of its `excludes` may be given.
    """
    for rule in rules:
        if rule.flag in given and rule.needs and not set(rule.needs) & set(on):
            raise ValueError(f"{rule.flag} does nothing without {' or '.join(rule.needs)}")
        for other in rule.excludes:
            if rule.flag in on and other in given:
                because = f": {rule.reason}" if rule.reason else ""
                raise ValueError(f"{rule.flag} and {other} cannot be combined{because}")


def changed_flags(config: Any) -> set[str]:
    """Returns the flags of the fields that differ from their default. Leaves out fields that are not flags."""
    fields = dataclasses.fields(config)
    flags = (field for field in fields if field.metadata.get("is_flag", True))
    return {flag_of(field) for field in flags if getattr(config, field.name) != field.default}


# --- values -----------------------------------------------------------------------------------------------------------


def convert(value: Any, hint: Any, text: bool = False) -> Any:
    """Returns `value` converted to the annotated type `hint`. Raises ValueError if the conversion is not possible.

    With `text`, the value is text from the command line: `a,b,c` is a list, and `none` is None or an empty list.
    Without `text`, the value comes from TOML or a checkpoint and must already have the right type: 1 is not a boolean,
    and 1.0 is not a whole number. An empty item of a list of `str | None` becomes None.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        return convert(value, present(hint), text)
    if origin is tuple:
        if text:
            value = [item.strip() for item in value.split(",")] if value.strip().lower() != "none" else []
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
            return tidy(Path(value))
    elif text or (hint is float and type(value) is int):
        try:
            return hint(value)
        except (ValueError, OverflowError):
            pass
    elif type(value) is hint:  # isinstance would accept True as an int
        return value
    raise ValueError(f"{reprlib.repr(value)} is not {_expected(value, hint)}")


def present(hint: Any) -> Any:
    """Returns T for the annotation `T | None`."""
    return next(item for item in typing.get_args(hint) if item is not type(None))


def _expected(value: Any, hint: Any) -> str:
    """Returns a text for the type `hint`. For a list of choices, adds the choice that is most similar to `value`."""
    if typing.get_origin(hint) is Literal:
        choices = list(map(str, typing.get_args(hint)))
        nearest = difflib.get_close_matches(value, choices, 1) if isinstance(value, str) else []
        return f"one of {', '.join(choices)}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")
    if typing.get_origin(hint) is tuple:
        return "a list"
    return {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}.get(hint, "a text")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message about the unknown `name`: the most similar name, and the known names."""
    known = list(known)
    by_lower = {each.lower(): each for each in known}
    nearest = difflib.get_close_matches(name.lower(), by_lower, 1)
    similar = f"did you mean {by_lower[nearest[0]]!r}? " if nearest else ""
    more = f" and {len(known) - MOST_NAMES:,} more" if len(known) > MOST_NAMES else ""
    return f"{similar}known: {', '.join(known[:MOST_NAMES])}{more}"


@overload
def derive(config: type[T], changes: Mapping[str, Any], origin: str) -> T: ...


@overload
def derive(config: T, changes: Mapping[str, Any], origin: str) -> T: ...


def derive(config: T | type[T], changes: Mapping[str, Any], origin: str) -> T:
    """Returns a copy of `config` with `changes`, a dict by field name. If `config` is a class, copies its defaults.

    Dashes in names are read as underscores. Error messages name `origin`, the source of the changes: a TOML table, a
    checkpoint or `COMMAND_LINE`. Raises ValueError for an unknown field, a value of the wrong type, or a value outside
    the limits of its field.
    """
    hints = field_types(config if isinstance(config, type) else type(config))
    checkpoints = {field.name for field in dataclasses.fields(config) if field.metadata.get("checkpoint")}  # type: ignore[arg-type]
    checked = {}
    for key, value in changes.items():
        name = key.replace("-", "_")
        if name not in hints:
            raise ValueError(f"{origin} has no setting {key!r}; {suggestion(name, hints)}")
        try:
            checked[name] = convert(value, hints[name])
            if name in checkpoints and (found := checked[name]) is not None:
                checked[name] = tuple(map(checkpoint_of, found)) if isinstance(found, tuple) else checkpoint_of(found)
        except ValueError as error:
            raise ValueError(f"{origin}: {key}: {error}") from None
    try:
        result = config(**checked) if isinstance(config, type) else dataclasses.replace(config, **checked)  # type: ignore[type-var]
        check_limits(result)  # a config of a plug-in might not derive from Config
    except ValueError as error:
        raise error if origin == COMMAND_LINE else ValueError(f"{origin}: {error}") from None
    return result


def split_settings(settings: Mapping[str, Any], *classes: type) -> list[dict[str, Any]]:
    """Splits settings by config class. Returns a dict for each class, then a dict of settings that no class has.

    The name of a setting is the name of its field or of its flag, with dashes or underscores. If two classes have a
    field or a flag of this name, the first class gets the setting.
    """
    owners: dict[str, tuple[int, str]] = {}
    for index, cls in enumerate(classes):
        for field in dataclasses.fields(cls):
            for name in (field.name, flag_of(field)[2:].replace("-", "_")):
                owners.setdefault(name, (index, field.name))
    parts: list[dict[str, Any]] = [{} for _ in range(len(classes) + 1)]
    for key, value in settings.items():
        index, name = owners.get(key.replace("-", "_"), (len(classes), key))
        parts[index][name] = value
    return parts


def setting_text(value: Any) -> str:
    """Returns the text of a setting's value, in the form that its flag accepts."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    if isinstance(value, list | tuple):
        return ",".join(setting_text(item) for item in value) or "none"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def flag_words(name: str, value: Any) -> list[str]:
    """Returns command-line words that set the setting `name` to `value`: `--no-compile`, or `--max-update` `100`."""
    flag = flag_name(name)
    return [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, setting_text(value)]


def to_dict(config: Any) -> dict[str, Any]:
    """Returns the config as a dict of plain types, for checkpoints and TOML files. `derive` reads the dict back."""

    def plain_value(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain_value(item) for item in value]
        return portable_name(value) if isinstance(value, Path) else value

    return {field.name: plain_value(getattr(config, field.name)) for field in dataclasses.fields(config)}


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the tables as TOML text that `--config` reads. None becomes the text "none".

    The title `metrics.bleu` names the table `bleu` inside the table `metrics`.
    """
    return "\n".join(
        f"[{_toml_title(title)}]\n" + "".join(f"{key} = {_toml_value(value)}\n" for key, value in table.items())
        for title, table in tables.items()
    )


def _toml_title(title: str) -> str:
    parts = title.split(".", 1)
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else _toml_value(part) for part in parts)


def _toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    # TOML has the escapes of JSON; only JSON allows the character DEL
    return json.dumps("none" if value is None else str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


# --- paths in settings ------------------------------------------------------------------------------------------------


def relative_to(path: str, folder: Path) -> str:
    """Returns `path` relative to `folder`, or absolute if the two share only the root directory."""
    both = os.path.abspath(path), os.path.abspath(folder)
    return both[0] if os.path.commonpath(both) == os.sep else os.path.relpath(*both)


def in_folder(settings: Mapping[str, Any], cls: type, folder: Path) -> dict[str, Any]:
    """Returns `settings` with `folder` as a prefix of each relative path. `folder` is the folder of the config file."""
    return map_paths(settings, cls, lambda text: located_in(folder, text))


def map_paths(settings: Mapping[str, Any], cls: type, change: Callable[[str], str]) -> dict[str, Any]:
    """Returns settings of the config class `cls` in plain types, with `change(path)` in place of each path."""
    types = field_types(cls)

    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(item) for item in value]
        return change(value) if isinstance(value, str) else value

    return {name: changed(value) if Path in _parts(types.get(name)) else value for name, value in settings.items()}


def _parts(hint: Any) -> tuple[Any, ...]:
    """Returns all types in an annotation. For `tuple[Path, ...] | None`, the result contains Path."""
    return (hint, *(part for argument in typing.get_args(hint) for part in _parts(argument)))
