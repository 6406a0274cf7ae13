"""Commands whose flags depend on the components that other flags choose, such as `train --arch`."""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import click

from nmtkit.cli.command import Command, errors_in_one_line, progress_shown
from nmtkit.cli.flags import flags
from nmtkit.config.registry import Registry


class ComponentCommand(Command):
    """A command with the flags of chosen components. Click parses the arguments twice.

    In the first pass, click ignores unknown flags. Then `components` imports the chosen components and returns their
    configs. In the second pass, click knows the flags of these configs. `-h` shows its page after the first pass, so no
    component is imported.
    """

    def components(self, known: click.Context) -> Mapping[str, Any]:
        """Returns the configs of the chosen components. The keys are the headings of the flags on the help page.

        `known` has the flags and arguments that the first pass has parsed.
        """
        raise NotImplementedError

    def with_components(self, known: click.Context) -> list[click.Parameter]:
        """Returns all parameters of the command."""
        components = self.components(known)
        return [*self.params, *(flag for title, config in components.items() for flag in flags(config, title))]

    def registries(self) -> Iterable[Registry[Any]]:
        """Imports and returns the registries of components, for the message about an unknown flag."""
        return []

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        first = Command(
            name=self.name,
            params=[parameter for parameter in self.params if isinstance(parameter, click.Option)],
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
            add_help_option=False,
        )
        known = first.make_context(info_name, list(args), parent, resilient_parsing=True)
        completes = bool(extra.get("resilient_parsing"))
        if self.common and "-h" in known.args and not completes:
            self.show_short_page(click.Context(self, info_name=info_name, parent=parent, **self.context_settings))
        params = self.params
        if completes:
            with contextlib.suppress(ValueError, OSError):
                params = self.with_components(known)
        else:
            with errors_in_one_line(known), progress_shown(known):  # the import of components takes a second
                params = self.with_components(known)
        full = Command(name=self.name, callback=self.callback, help=self.help, params=params, common=self.common)
        try:
            return full.make_context(info_name, args, parent, **extra)
        except click.NoSuchOption as error:
            unknown = error.option_name
            needs = " or ".join(
                f"{registry.flag} {name}"
                for registry in self.registries()
                for name, entry in registry.entries.items()
                if any(unknown in (*option.opts, *option.secondary_opts) for option in flags(entry.preset))
            )
            if needs:
                raise click.UsageError(f"{unknown} does nothing without {needs}", error.ctx) from None
            raise
