"""Commands whose flags depend on the components that other flags choose, such as `train --arch`."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import click

from nmtkit.cli.command import Command, errors_in_one_line, progress_shown
from nmtkit.cli.flags import flags
from nmtkit.config.registry import Registry


class ComponentCommand(Command):
    """A command with the flags of chosen components. Click parses the arguments twice.

    In the first pass, click ignores unknown flags, and `with_components` returns the flags of the chosen components. In
    the second pass, click knows these flags. `-h` needs only the first pass, which imports no component.
    """

    def with_components(self, known: click.Context) -> Sequence[click.Parameter]:
        """Returns all parameters of the command. `known` has the flags and arguments that the first pass has parsed."""
        raise NotImplementedError

    def registries(self) -> Iterable[Registry[Any]]:
        """Returns the registries to search for components that have an unknown flag."""
        return []

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        known = parsed_known_flags(self, info_name, args, parent)
        completes = bool(extra.get("resilient_parsing"))
        if self.common and "-h" in known.args and not completes:
            self.show_short_page(click.Context(self, info_name=info_name, parent=parent, **self.context_settings))
        params: Sequence[click.Parameter] = self.params
        if completes:
            with contextlib.suppress(ValueError, OSError):
                params = self.with_components(known)
        else:
            with errors_in_one_line(known), progress_shown(known):  # the import of components takes a second
                params = self.with_components(known)
        full = Command(name=self.name, callback=self.callback, help=self.help, params=list(params), common=self.common)
        with naming_components(self.registries):
            return full.make_context(info_name, args, parent, **extra)


def parsed_known_flags(
    command: click.Command, info_name: str | None, arguments: Sequence[str], parent: click.Context | None
) -> click.Context:
    """Parses the flags that `command` has. Ignores other flags: their components might not be known yet."""
    first = Command(
        name=command.name,
        params=[parameter for parameter in command.params if isinstance(parameter, click.Option)],
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        add_help_option=False,
    )
    return first.make_context(info_name, list(arguments), parent, resilient_parsing=True)


@contextlib.contextmanager
def naming_components(registries: Callable[[], Iterable[Registry[Any]]]) -> Iterator[None]:
    """If a flag is unknown, but components of the registries have the flag, the error names these components.

    `registries` imports the components, so it is called only after such an error.
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
