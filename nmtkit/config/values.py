"""Converts settings between flags, TOML files, checkpoints and the typed fields of a config. Writes TOML."""

import dataclasses
import difflib
import re
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, overload

from nmtkit.config.fields import check_limits, field_types, flag_name, flag_of
from nmtkit.config.files import checkpoint_of, portable_name, tidy

T = TypeVar("T")

COMMAND_LINE = "the command line"  # `origin` of settings that are given as flags
MOST_NAMES = 40  # largest number of known names in an error message about an unknown name


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
    raise ValueError(f"{reprlib.repr(value)} is not {_expected(hint)}{_nearest(value, arguments)}")


def present(hint: Any) -> Any:
    """Returns T for the annotation `T | None`."""
    return next(item for item in typing.get_args(hint) if item is not type(None))


def _nearest(value: Any, choices: tuple[Any, ...]) -> str:
    """Returns "; did you mean CHOICE?" with the choice that is most similar to `value`, or "" if none is similar."""
    texts = [each for each in choices if isinstance(each, str)]
    nearest = difflib.get_close_matches(value, texts, 1) if isinstance(value, str) else []
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def _expected(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return "a list"
    return {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}.get(hint, "a text")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message about the unknown `name`: the most similar name, and the known names."""
    known = list(known)
    by_lower = {each.lower(): each for each in known}
    nearest = difflib.get_close_matches(name.lower(), by_lower, 1)
    more = f" and {len(known) - MOST_NAMES:,} more" if len(known) > MOST_NAMES else ""
    return (
        f"{f'did you mean {by_lower[nearest[0]]!r}? ' if nearest else ''}known: {', '.join(known[:MOST_NAMES])}{more}"
    )


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
            if name in checkpoints:
                found = checked[name]
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
