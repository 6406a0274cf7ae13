"""`nmtkit train`: the flags of the run and of the chosen components, then the run."""

import logging
import os
import shlex
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from nmtkit.cli.command import Command, echo, errors_in_one_line, message_of, parsed_known_flags, stderr
from nmtkit.cli.flags import flags, given_flags, naming_components, on_command_line
from nmtkit.config import FlagRule, check_flags
from nmtkit.jobs import progress
from nmtkit.training.config import DEFAULTS, REGISTRIES, Component, ConfigFile, JobConfig, kind_of
from nmtkit.training.run_config import RunConfig

DRY_RUN_RULES = (
    FlagRule("--dry-run-updates", needs=("--dry-run",)),
    FlagRule("--vocab-size", needs=("--dry-run",)),
    FlagRule("--vocab-size", excludes=("DATA",), reason="a dataset already has a vocabulary"),
)


def name_flags() -> list[click.Option]:
    """Returns the flags that choose components by name. The help texts list all registered names."""
    return [
        click.Option(
            [kind.flag],
            metavar="NAME,…" if kind.several else "NAME",
            help=f"{'Any' if kind.several else 'One'} of {', '.join(kind.names())}.  "
            f"[default: {','.join(DEFAULTS[table]) or 'none'}]",
        )
        for table, kind in REGISTRIES.items()
    ]


def sources(params: Mapping[str, Any]) -> tuple[Path | None, dict[str, str | None], tuple[str, ...]]:
    """Returns the config file, the names of components and the plug-ins that the parsed flags give."""
    names = {table: params[parameter_name(kind.flag)] for table, kind in REGISTRIES.items()}
    return params["config"], names, params["plugin"]


def parameter_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def component_flags(components: Mapping[str, Component]) -> list[click.Option]:
    """Returns the flags of the chosen components, under a heading with the name of each component."""
    return [
        flag
        for table, component in components.items()
        for flag in flags(component.config, f"{REGISTRIES[kind_of(table)].kind.capitalize()} {component.name}")
    ]


class TrainCommand(Command):
    """The train command. Its flags depend on the chosen components, so click parses the arguments twice.

    In the first pass, click ignores unknown flags, and the flags of the run choose the components. In the second pass,
    click also knows the flags of these components.
    """

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        arguments = list(args)  # make_context empties the list `args`
        known = parsed_known_flags(self, info_name, args, parent)
        with errors_in_one_line(known):
            file, chosen, plugins = sources(known.params)
            components = ConfigFile(file).components(chosen, plugins, known.params["finetune_from"])
        names = {flag.name: flag for flag in name_flags()}  # computed again, because plug-ins may have registered names
        params = [names.get(parameter.name or "", parameter) for parameter in self.params]
        full = Command(
            name=self.name, callback=self.callback, help=self.help, params=[*params, *component_flags(components)]
        )
        with naming_components(REGISTRIES.values):
            context = full.make_context(info_name, args, parent, **extra)
        context.obj = arguments
        return context


@click.command(cls=TrainCommand, params=[])
@click.argument("data", type=Path, required=False)
@click.option("--config", type=Path, metavar="FILE", help="TOML file with settings; flags override it.")
@click.option("--plugin", multiple=True, metavar="FILE", help="Python file or module with more components.")
@click.option("--dry-run", is_flag=True, help="Estimate memory and time of the run; do not train.")
@click.option(
    "--dry-run-updates",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    help="With --dry-run, make and time N updates.",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(3, 10_000_000),
    metavar="N",
    help="With --dry-run and without a dataset, size of the vocabulary.",
)
@click.pass_obj
def command(
    arguments: list[str],
    /,
    data: Path | None,
    dry_run: bool,
    dry_run_updates: int | None,
    vocab_size: int | None,
    **settings: Any,
) -> None:
    """Train a model on a binarized dataset. To resume an interrupted run, repeat the command.

    The folder --save-dir receives the checkpoints, a page with curves and translations (report.html) and the log as
    JSON lines (log.jsonl). This page shows the flags of the default components. To see the flags of other components,
    choose the components and add --help.

    \b
    nmtkit train data-bin --arch transformer_base --save-dir checkpoints
    nmtkit train data-bin --arch transformer_big --batch-tokens 25000
    nmtkit train --config checkpoints/config.toml     # resumes or repeats a run
    nmtkit train domain-bin --finetune-from averaged.pt --lr 1e-4 --save-dir tuned
    nmtkit train --arch convs2s --optimizer sgd --help   # flags of these two
    """
    job = JobConfig.read(*sources(settings), on_command_line(settings), data)
    check_flags(DRY_RUN_RULES, given_flags(), given_flags())
    if dry_run:
        from nmtkit.experiments.estimate import dry_run as estimated

        echo("\n".join(estimated(job, None if vocab_size else job.data, vocab_size, dry_run_updates or 0)))
        return
    if job.data is None:
        raise ValueError("give a dataset, the folder that nmtkit preprocess wrote")
    from nmtkit.jobs.distributed import launch, launched
    from nmtkit.training.plan import device_of, processes_to_start

    processes = processes_to_start(job.run)
    progress.close()  # a run shows its own progress
    if processes > 1:
        device_of(job.run)  # raises the error of a missing device once, not in every process
        sys.exit(launch(["train", *arguments], processes))
    status = _train(job, arguments)
    # skips the shutdown of the interpreter, because threads of torch sometimes abort during the shutdown
    if launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _train(job: JobConfig, arguments: Sequence[str]) -> int:
    """Runs the training in this process and returns the exit code of the process."""
    from nmtkit.jobs import distributed
    from nmtkit.training.run import train_job
    from nmtkit.training.run_log import Lines, LiveLine

    rank_zero = distributed.is_rank_zero()
    if not rank_zero:
        logging.getLogger("nmtkit").setLevel(logging.WARNING)
    quiet = logging.getLogger("nmtkit").level > logging.INFO
    live = stderr.is_terminal and not stderr.is_dumb_terminal and rank_zero and not quiet
    display = LiveLine(stderr) if live else Lines(stderr.width if stderr.is_terminal else None)
    try:
        end = train_job(job, display=display)
    except BaseException as error:
        if distributed.launched():
            display.close()
            _fail_together(error, debug=bool(click.get_current_context().meta.get("debug")))
        raise
    finally:
        display.close()
    if not rank_zero:
        return 128 + end.received if end.received else 0
    if end.received is None:
        from nmtkit.experiments.inspection import after_training

        for line in after_training(job, end):
            logging.getLogger("nmtkit").info("%s", line)
        return 0
    resume = shlex.join(["nmtkit", "train", *arguments])
    saved = f"{end.reason}: saved after update {end.updates}"
    stderr.print(f"{saved}. To resume: {resume}", markup=False, soft_wrap=True)  # printed also with --quiet
    return 128 + end.received  # so that `train && …` stops after an interrupted run


def _fail_together(error: BaseException, debug: bool) -> NoReturn:
    """Prints the error of this process, sends it to the other processes, and exits without waiting for them."""
    from nmtkit.jobs import distributed

    known = message_of(error, click.get_current_context().command)
    if distributed.is_connection_error(error):
        time.sleep(3)  # let the process that closed the connection print its error first
    elif debug or not (known or isinstance(error, KeyboardInterrupt)):
        traceback.print_exception(error)
    message = f"rank {distributed.rank()}: {known or str(error) or type(error).__name__}"
    stderr.print(f"nmtkit: error: {message}", markup=False, soft_wrap=True)
    distributed.abort(message)
    sys.stderr.flush()
    os._exit(2 if known else 1)


command.params[1:1] = name_flags()
command.params.extend(flags(RunConfig()))
