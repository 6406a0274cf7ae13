"""Makes click options from the fields of configs, and lists the flags that the user typed."""

import contextlib
import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union

import click
from click.core import ParameterSource

from nmtkit.config import convert, field_types, flag_of, present
from nmtkit.config.registry import Registry

# The flag of commands that open a checkpoint or use registered components.
plugin_option = click.option(
    "--plugin", "plugins", multiple=True, metavar="FILE|MODULE", help="Import this plug-in first; repeatable."
)


def flags(config: Any, section: str = "Options") -> list[click.Option]:
    """Returns one click option for each field of `config`, which is a config or a config class.

    The help page shows the options under the heading `section`, until a field declares a different heading. The value
    of a missing flag and of `--flag none` is None; `on_command_line` distinguishes the two cases.
    """
    hints = field_types(config if isinstance(config, type) else type(config))
    result = []
    for field in dataclasses.fields(config):
        if not field.metadata.get("is_flag", True):
            continue
        section = field.metadata.get("section") or section
        default = field.default if isinstance(config, type) else getattr(config, field.name)
        result.append(_flag(field, hints[field.name], default, section))
    return result


def on_command_line(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that the user typed as flags of the running command; other settings come from presets."""
    source = click.get_current_context().get_parameter_source
    return {name: value for name, value in settings.items() if source(name) is ParameterSource.COMMANDLINE}


def given_flags() -> set[str]:
    """Returns the flags of the running command that the user typed, without `--flag none` and `--no-flag`.

    Arguments are included with their names in capitals, such as DATA.
    """
    context = click.get_current_context()
    typed = on_command_line(context.params)
    return {
        max(parameter.opts, key=len) if isinstance(parameter, click.Option) else parameter.name.upper()
        for parameter in context.command.params
        if parameter.name is not None and typed.get(parameter.name) not in (None, False, ())
    }


@contextlib.contextmanager
def naming_components(registries: Callable[[], Iterable[Registry[Any]]]) -> Iterator[None]:
    """If a flag is unknown, but components of the registries have the flag, the error names these components.

    The registries are imported only then.
    """
    try:
        yield
    except click.NoSuchOption as error:
        if needs := flags_needed_by(error.option_name, registries()):
            raise click.UsageError(f"{error.option_name} does nothing without {needs}", error.ctx) from None
        raise


def flags_needed_by(unknown: str, registries: Iterable[Registry[Any]]) -> str:
    """Returns the components that have the flag `unknown`, as text: "--optimizer adam or --optimizer adamw"."""
    return " or ".join(
        f"{registry.flag} {name}"
        for registry in registries
        for name, entry in registry.entries.items()
        if any(unknown in (*option.opts, *option.secondary_opts) for option in flags(entry.preset))
    )


def _flag(field: dataclasses.Field[Any], hint: Any, default: Any, section: str) -> click.Option:
    long, required = flag_of(field), default is dataclasses.MISSING
    short = [name for name in (field.metadata.get("flag") or "").split("/") if name and name != long]
    typed: dict[str, Any] = {}
    if hint is not bool:
        typed = {"type": FieldType(hint), "metavar": field.metadata.get("metavar") or metavar(hint)}
    if field.metadata.get("repeatable"):
        typed |= {"type": FieldType(typing.get_args(hint)[0]), "multiple": True}
    if not required:
        typed["default"] = None  # a required flag gets no default: even None would count as a value
    result = click.Option(
        [*short, f"{long}/--no-{long[2:]}" if hint is bool else long, field.name],
        help=field.metadata["help"] + ("" if required else f"  [default: {_shown(default)}]"),
        required=required,
        **typed,
    )
    result.section = section  # type: ignore[attr-defined]  # heading on the help page, read by cli.command
    return result


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value) or "none"
    return str(value) or "none"


def metavar(hint: Any) -> str:
    """Returns the placeholder on the help page for a value of type `hint`, such as N, X, TEXT, a|b or PATH,…"""
    options = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return "|".join(str(item) for item in options)
    if typing.get_origin(hint) in (Union, types.UnionType):
        return metavar(present(hint))
    if typing.get_origin(hint) is tuple:
        return f"{metavar(options[0])},…"
    return {int: "N", float: "X", str: "TEXT", Path: "PATH"}.get(hint, "VALUE")


class FieldType(click.ParamType):  # type: ignore[type-arg]  # type checkers see a generic class from click 8.3 on
    """A click type that converts the text of a flag to the annotated type of the config field."""

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
