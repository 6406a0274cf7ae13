"""Turns the fields of configs into click options, and tells which flags the user has given."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union

import click
from click.core import ParameterSource

from nmtkit.config import convert, field_types, flag_of, present


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


def given_flags() -> set[str]:
    """Returns the flags, and arguments as DATA, of the running command that were given, unless as none or `--no-…`."""
    context = click.get_current_context()
    given = on_command_line(context.params)
    return {
        max(parameter.opts, key=len) if isinstance(parameter, click.Option) else parameter.name.upper()
        for parameter in context.command.params
        if parameter.name is not None and given.get(parameter.name) not in (None, False, ())
    }


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
        return metavar(present(hint))
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
