"""Makes click options from the fields of configs, completes their values, and lists the flags that the user typed."""

import dataclasses
import glob
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from nmtkit.config import COMMAND_LINE, Access, convert, derive, field_types, flag_of, present, split_settings
from nmtkit.config.files import check_readable, check_writable, checkpoint_of

# The flag --plugin, for commands that open a checkpoint or use registered components.
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


def from_flags(config: Any, settings: Mapping[str, Any]) -> Any:
    """Returns a config that has the settings that the user typed as flags, and all other settings of `config`.

    `config` is a preset or a config class. `settings` are all parameters of the running command. Raises ValueError for
    a value outside its limits.
    """
    kind = config if isinstance(config, type) else type(config)
    return derive(config, split_settings(on_command_line(settings), kind)[0], COMMAND_LINE)


def given_flags() -> set[str]:
    """Returns the flags of the running command that the user typed, without `--flag none` and `--no-flag`.

    Arguments are included with their names in capitals, such as DATA.
    """
    context = click.get_current_context()
    typed = on_command_line(context.params)
    return {
        max(parameter.opts, key=len) if isinstance(parameter, click.Option) else parameter.name.upper()
        for parameter in context.command.params
        if parameter.name is not None
        and (value := typed.get(parameter.name)) is not None
        and value is not False
        and value != ()
    }


def check_paths(context: click.Context) -> None:
    """Raises OSError for a path of the command line that cannot be read or written, before the command loads anything.

    `nmtkit.training.config.ConfigFile.check_paths` checks the paths of a config file and the files that a run reads at
    its start.
    """
    for parameter in context.command.get_params(context):
        access, value = getattr(parameter.type, "access", None), context.params.get(parameter.name or "")
        repeatable = parameter.multiple or parameter.nargs == -1
        for path in value if isinstance(value, tuple) else (value,):
            if access == "write" and path is not None:
                check_writable(path)
            elif access == "read" and path is not None:
                name = max(parameter.opts, key=len) if isinstance(parameter, click.Option) else ""
                check_readable(path, name, several=repeatable or (None if isinstance(value, tuple) else False))


def completed_path(incomplete: str, checkpoint: bool) -> list[CompletionItem]:
    """Returns the completions of a path: with `checkpoint`, checkpoints and folders of runs, otherwise all files."""
    files = [CompletionItem(incomplete, type="file")]  # the shell completes file names if there are no other items
    if not checkpoint:
        return files
    found = sorted(map(Path, glob.glob(f"{glob.escape(incomplete)}*", include_hidden=True)))
    runs = [path for path in found if path.suffix == ".pt" or checkpoint_of(path) != path]
    return [CompletionItem(str(path)) for path in runs] + files


def completed_name(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    """Returns the names that begin with `incomplete`. In a list such as bleu,ch only the last name is completed."""
    before, comma, beginning = incomplete.rpartition(",")
    return [CompletionItem(before + comma + name) for name in names if name.startswith(beginning)]


def complete_with(options: Iterable[click.Parameter], field: str, names: Callable[[], Iterable[str]]) -> None:
    """Makes the shell complete the option of a field with the result of `names`. Only a completion calls `names`."""
    for option in options:
        if option.name == field and isinstance(option.type, FieldType):
            option.type.names = names


def published_sets() -> Iterable[str]:
    """Returns the names of sacreBLEU's test sets."""
    from nmtkit.data.fetch.sacrebleu_sets import known_sets

    return known_sets()


def _flag(field: dataclasses.Field[Any], hint: Any, default: Any, section: str) -> click.Option:
    metadata, long, required = field.metadata, flag_of(field), default is dataclasses.MISSING
    short = [name for name in (metadata.get("flag") or "").split("/") if name and name != long]
    typed: dict[str, Any] = {}
    if hint is not bool:
        repeatable = metadata.get("repeatable", False)
        of_value = typing.get_args(hint)[0] if repeatable else hint
        kind = FieldType(of_value, metadata.get("access"), metadata.get("checkpoint", False))
        typed = {"type": kind, "metavar": metadata.get("metavar") or metavar(hint), "multiple": repeatable}
    if not required:
        typed["default"] = None  # a required flag gets no default: even None would count as a value
    shown = "" if required or default in (None, (), "") else f"  [default: {_shown(default)}]"
    names = [*short, f"{long}/--no-{long[2:]}" if hint is bool else long, field.name]
    result = click.Option(names, help=metadata["help"] + shown, required=required, **typed)
    result.section = section  # type: ignore[attr-defined]  # heading on the help page, read by cli.help
    return result


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(str(item) for item in value) if isinstance(value, tuple) else str(value)


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
    """A click type that converts the text of a flag to the annotated type of the config field.

    `access` is "read" or "write" for a path that `check_paths` checks before the command begins.
    """

    name = "value"

    def __init__(self, hint: Any, access: Access | None = None, checkpoint: bool = False) -> None:
        self.hint = hint
        self.access = access
        self.checkpoint = checkpoint
        self.names: Callable[[], Iterable[str]] | None = None  # returns the names that can complete a value

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return convert(value, self.hint, text=True)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str | None:
        if typing.get_origin(self.hint) is Literal:
            return f"Choose from: {', '.join(map(str, typing.get_args(self.hint)))}"
        if not self.checkpoint:
            return None
        flag = f"{param.opts[0]} " if isinstance(param, click.Option) else ""
        return f"Name a checkpoint or the folder of a run, such as {flag}averaged.pt"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if self.names is not None:
            return completed_name(self.names(), incomplete)
        if self.hint is Path or Path in typing.get_args(self.hint):
            return completed_path(incomplete, self.checkpoint)
        literals = [kind for kind in (self.hint, *typing.get_args(self.hint)) if typing.get_origin(kind) is Literal]
        return completed_name([str(choice) for kind in literals for choice in typing.get_args(kind)], incomplete)


# the types of arguments
PATH, INPUT, OUTPUT = FieldType(Path), FieldType(Path, "read"), FieldType(Path, "write")
CHECKPOINT = FieldType(Path, "read", checkpoint=True)
