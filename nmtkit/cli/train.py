"""`nmtkit train`: the flags of the run and of the chosen components, then the run."""

import logging
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from nmtkit.cli.command import Command, fail, stderr
from nmtkit.registry import flags, load_installed_plugins, load_plugin, on_command_line
from nmtkit.training.config import SECTIONS, RunConfig

if TYPE_CHECKING:
    from nmtkit.training.job import Component, JobConfig, Tables
    from nmtkit.training.run import StopReason

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
        own.list_known_names()
        context = super(TrainCommand, own).make_context(info_name, args, parent, **extra)
        context.obj = chosen
        return context

    def own_params(self) -> list[click.Parameter]:
        shared = ("quiet", "verbose", "debug")
        return [parameter for parameter in self.params if parameter.name not in shared]

    def list_known_names(self) -> None:
        """Puts the registered names, those of plug-ins too, into the help of the flags that choose by name."""
        from nmtkit.training.job import DEFAULTS, REGISTRIES

        flags = {one.opts[0]: one for one in self.params if isinstance(one, click.Option)}
        for table, flag in NAME_FLAGS.items():
            flags[flag].help = f"One of {', '.join(REGISTRIES[table].names())}.  [default: {DEFAULTS[table]}]"


class Chosen:
    """The components that the arguments and the config file name, with the file's settings."""

    def __init__(
        self,
        arguments: Sequence[str],
        tables: "Tables",
        components: "dict[str, Component]",
        plugins: tuple[str, ...],
        place: str,
    ) -> None:
        self.arguments = list(arguments)  # as given, for the processes to launch and the line that says how to resume
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
        return Chosen(arguments, tables, job.choose(tables, names, place), plugins, place)

    def flags(self) -> list[click.Option]:
        """The flags of the components, each under a heading with its name."""
        return [
            one
            for table, component in self.components.items()
            for one in flags(component.config, f"{table.capitalize()} {component.name}")
        ]


def _component_flag(flag: str, kind: str, default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(flag, metavar="NAME", help=f"The {kind}; unknown names list the known.  [default: {default}]")


@click.command(cls=TrainCommand, params=[])
@click.argument("data", type=Path, required=False)
@_component_flag("--arch", "architecture", "transformer_base")
@_component_flag("--criterion", "criterion", "label_smoothed_cross_entropy")
@_component_flag("--optimizer", "optimizer", "adam")
@_component_flag("--lr-scheduler", "learning-rate scheduler", "inverse_sqrt")
@click.option("--config", type=Path, metavar="FILE", help="TOML file of settings; flags go before it.")
@click.option("--plugin", multiple=True, metavar="FILE", help="Python file or module with further components.")
@click.option("--dry-run", is_flag=True, help="Print what the run would take, and make no update.")
@click.option("--dry-run-updates", type=click.IntRange(1), metavar="N", help="With --dry-run: make and time N updates.")
@click.option("--vocab-size", type=click.IntRange(3), metavar="N", help="With --dry-run: pieces, without a dataset.")
@click.pass_obj
def command(
    chosen: Chosen,
    /,
    data: Path | None,
    dry_run: bool,
    dry_run_updates: int | None,
    vocab_size: int | None,
    **settings: Any,
) -> None:
    """Train a model on a binarized dataset. The same command again resumes where it stopped.

    \b
    nmtkit train data-bin --arch transformer_base --save-dir checkpoints
    nmtkit train data-bin --arch transformer_big --batch-tokens 25000
    nmtkit train --arch transformer_base --help   # its flags
    """
    from nmtkit.training import job

    for name in ("arch", "criterion", "optimizer", "lr_scheduler", "config", "plugin"):
        settings.pop(name)
    resolved = job.resolve(chosen.tables, chosen.components, on_command_line(settings), chosen.plugins, chosen.place)
    if dry_run:
        from nmtkit.training.dry_run import dry_run as planned

        click.echo("\n".join(planned(resolved, data, vocab_size, dry_run_updates or 0)))
        return
    if dry_run_updates or vocab_size:
        raise ValueError("--dry-run-updates and --vocab-size go with --dry-run")
    if data is None:
        raise ValueError("give the dataset to train on: the folder that nmtkit preprocess made")
    processes = _processes(resolved.run)
    if processes > 1:
        from nmtkit.training.launch import launch

        sys.exit(launch(["train", *chosen.arguments], processes))
    sys.exit(_train(resolved, data, chosen.arguments))


def _processes(config: RunConfig) -> int:
    """How many processes to start here; 1 in a process that a launcher started."""
    from nmtkit import distributed

    if distributed.launched():
        return 1
    if config.nproc_per_node is None and config.device != "cpu":
        import torch

        return max(1, torch.cuda.device_count())
    return config.nproc_per_node or 1


def _train(job: "JobConfig", data: Path, arguments: Sequence[str]) -> int:
    """One process's part; gives the exit code."""
    from nmtkit import distributed
    from nmtkit.training.progress import Display, Lines, LiveLine
    from nmtkit.training.run import Run

    first = distributed.is_rank_zero()
    if not first:
        logging.getLogger("nmtkit").setLevel(logging.WARNING)
    quiet = logging.getLogger("nmtkit").level > logging.INFO
    display: Display = LiveLine(stderr) if stderr.is_terminal and first and not quiet else Lines()
    try:
        ending = Run(job, data, display).run()
    except BaseException as error:
        if distributed.launched():
            display.close()
            _fail_together(error)
        raise
    finally:
        display.close()
    distributed.destroy_process_group()
    if not first:
        return 0
    if ending.received is None:
        for line in _finished(job, data, ending):
            logging.getLogger("nmtkit").info("%s", line)
        return 0
    again = shlex.join(["nmtkit", "train", *arguments])
    # also under --quiet: nobody asked for the end of the run but the one who sent the signal
    saved = f"{ending.reason}: saved after update {ending.updates}"
    stderr.print(f"{saved}. To resume: {again}", markup=False, soft_wrap=True)
    return 130 if ending.received.name == "SIGINT" else 0


def _finished(job: "JobConfig", data: Path, ending: "StopReason") -> list[str]:
    """What to say at the end of a run: that it is finished, and the commands that follow."""
    from nmtkit import checkpoint

    folder = job.run.save_dir
    there = len(checkpoint.numbered(folder))
    model = folder / "last.pt"
    lines = [f"training is finished: {ending.reason} after update {ending.updates:,}"]
    if there > 1:
        model = folder / "averaged.pt"
        average = ["nmtkit", "average-checkpoints", str(folder), "--last", str(there), "--output", str(model)]
        lines.append(f"next: {shlex.join(average)}")
    plugins = [part for plugin in job.plugins for part in ("--plugin", plugin)]
    generate = ["nmtkit", "generate", str(data), "--path", str(model), "--gen-subset", "test", *plugins]
    lines.append(f"{'then' if there > 1 else 'next'}: {shlex.join(generate)}")
    return lines


def _fail_together(error: BaseException) -> NoReturn:
    """Says what went wrong in this process, tells the others, and ends without waiting for them."""
    from nmtkit import distributed

    known = isinstance(error, ValueError | OSError | ImportError)
    if not known and not isinstance(error, KeyboardInterrupt):
        if distributed.is_connection_error(error):
            # the process at the other end has more to say, and gets the time to
            time.sleep(3)
        else:
            traceback.print_exception(error)
    message = f"rank {distributed.rank()}: {str(error) or type(error).__name__}"
    stderr.print(f"nmtkit: error: {message}", markup=False, soft_wrap=True)
    distributed.abort(message)
    sys.stderr.flush()
    os._exit(2 if known else 1)


command.params.extend(run_flags())
