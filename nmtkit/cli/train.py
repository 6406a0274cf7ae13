"""`nmtkit train`: the flags of the run and of the chosen components, then the run."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nmtkit.cli.command import Command, fail, stderr
from nmtkit.registry import flags, load_installed_plugins, load_plugin
from nmtkit.training.config import SECTIONS, RunConfig

if TYPE_CHECKING:
    from nmtkit.training.job import Component, Tables

NAME_FLAGS = {
    "architecture": "--arch",
    "criterion": "--criterion",
    "optimizer": "--optimizer",
    "lr-scheduler": "--lr-scheduler",
}


def given(arguments: Sequence[str], flag: str) -> list[str]:
    """The values of `flag` among raw command-line arguments, before anything is known of the other flags."""
    values = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument == flag and index + 1 < len(arguments):
            values.append(arguments[index + 1])
        elif argument.startswith(flag + "="):
            values.append(argument[len(flag) + 1 :])
    return values


def run_flags() -> list[click.Option]:
    """The flags of RunConfig under the headings of SECTIONS."""
    result = flags(RunConfig(), "")
    section = ""
    for one in result:
        assert one.name is not None
        section = SECTIONS.get(one.name, section)
        one.section = section  # type: ignore[attr-defined]
    return result


class TrainCommand(Command):
    """Its flags depend on the components chosen, so it looks for their names before click parses the line."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            chosen = Chosen.from_arguments(args)
        except (ValueError, OSError, ImportError) as error:
            if "--debug" in args:
                raise
            fail(str(error))
        own = TrainCommand(
            name=self.name, callback=self.callback, help=self.help, params=[*self.own_params(), *chosen.flags()]
        )
        context = super(TrainCommand, own).make_context(info_name, args, parent, **extra)
        context.obj = chosen
        return context

    def own_params(self) -> list[click.Parameter]:
        shared = ("quiet", "verbose", "debug")
        return [parameter for parameter in self.params if parameter.name not in shared]


class Chosen:
    """The components that the arguments and the config file name, with the file's settings."""

    def __init__(
        self, tables: "Tables", components: "dict[str, Component]", plugins: tuple[str, ...], place: str
    ) -> None:
        self.tables = tables
        self.components = components
        self.plugins = plugins
        self.place = place

    @staticmethod
    def from_arguments(arguments: Sequence[str]) -> "Chosen":
        from nmtkit.training import job

        files = given(arguments, "--config")
        place = files[-1] if files else "the command line"
        tables = job.read_tables(Path(files[-1])) if files else {}
        plugins = job.plugins_of(tables, given(arguments, "--plugin"), place)
        load_installed_plugins()
        for plugin in plugins:
            load_plugin(plugin)
        names = {table: next(reversed(given(arguments, flag)), None) for table, flag in NAME_FLAGS.items()}
        return Chosen(tables, job.choose(tables, names, place), plugins, place)

    def flags(self) -> list[click.Option]:
        """The flags of the components, each under a heading with its name."""
        return [
            one
            for table, component in self.components.items()
            for one in flags(component.config, f"{table.capitalize()}: {component.name}")
        ]


def _component_flag(flag: str, kind: str, default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(flag, metavar="NAME", help=f"The {kind}; unknown names list the known.  [default: {default}]")


@click.command(cls=TrainCommand, params=[])
@click.argument("data", type=Path)
@_component_flag("--arch", "architecture", "transformer_base")
@_component_flag("--criterion", "criterion", "label_smoothed_cross_entropy")
@_component_flag("--optimizer", "optimizer", "adam")
@_component_flag("--lr-scheduler", "learning-rate scheduler", "inverse_sqrt")
@click.option("--config", type=Path, metavar="FILE", help="TOML file of settings; flags go before it.")
@click.option("--plugin", multiple=True, metavar="FILE", help="Python file or module with further components.")
@click.pass_obj
def command(chosen: Chosen, /, data: Path, **settings: Any) -> None:
    """Train a model on a binarized dataset. The same command again resumes where it stopped.

    \b
    nmtkit train data-bin --arch transformer_base --save-dir checkpoints
    nmtkit train data-bin --arch transformer_big --batch-tokens 25000 --max-tokens 4096
    nmtkit train --arch transformer_base --help     # the flags of that architecture
    """
    from nmtkit.training import job
    from nmtkit.training.progress import Display, Lines, LiveLine
    from nmtkit.training.run import Run

    for name in ("arch", "criterion", "optimizer", "lr_scheduler", "config", "plugin"):
        settings.pop(name)
    changes = {name: value for name, value in settings.items() if value is not None}
    resolved = job.resolve(chosen.tables, chosen.components, changes, chosen.plugins, chosen.place)
    display: Display = LiveLine(stderr) if stderr.is_terminal else Lines()
    run = Run(resolved, data, display)
    ending = run.run()
    again = "run the same command again to resume"
    stderr.print(f"stopped after update {ending.updates}: {ending.reason}; " + again, highlight=False)
    if ending.received is not None and ending.received.name == "SIGINT":
        sys.exit(130)


command.params.extend(run_flags())
