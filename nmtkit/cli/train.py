"""`nmtkit train`: the flags of the run and of the chosen components, then the run."""

import logging
import os
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from nmtkit.cli.command import Command, fail, message_of, stderr
from nmtkit.cli.flags import flags, given_flags, on_command_line
from nmtkit.config import FlagRule, check_flags
from nmtkit.plugins import plugins_for
from nmtkit.training.config import DEFAULTS, REGISTRIES, JobConfig, JobTemplate, kind_of
from nmtkit.training.run_config import RunConfig

if TYPE_CHECKING:
    from nmtkit.training.stopping import StopReason

DRY_RUN_RULES = (
    FlagRule("--dry-run-updates", needs=("--dry-run",)),
    FlagRule("--vocab-size", needs=("--dry-run",)),
    FlagRule("--vocab-size", excludes=("DATA",), reason="the dataset has a vocabulary"),
)


def given(arguments: Sequence[str], flag: str) -> list[str]:
    """Returns the values of `flag` among raw command-line arguments, before the other flags are known."""
    values = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument == flag and index + 1 < len(arguments):
            values.append(arguments[index + 1])
        elif argument.startswith(flag + "="):
            values.append(argument[len(flag) + 1 :])
    return values


def template_of(arguments: Sequence[str]) -> JobTemplate:
    """Returns the job that raw arguments choose by config file, plug-ins and names of components."""
    files = given(arguments, "--config")
    names = {table: next(reversed(given(arguments, kind.flag)), None) for table, kind in REGISTRIES.items()}
    starts = given(arguments, "--finetune-from")
    start = Path(starts[-1]) if starts and starts[-1] != "none" else None
    return JobTemplate.read(Path(files[-1]) if files else None, names, given(arguments, "--plugin"), start)


def name_flags() -> list[click.Option]:
    """Returns the flags that choose components by name; their help lists the names registered by now."""
    return [
        click.Option(
            [kind.flag],
            metavar="NAME,…" if kind.several else "NAME",
            help=f"{'Any' if kind.several else 'One'} of {', '.join(kind.names())}.  "
            f"[default: {','.join(DEFAULTS[table]) or 'none'}]",
        )
        for table, kind in REGISTRIES.items()
    ]


def component_flags(template: JobTemplate) -> list[click.Option]:
    """Returns the flags of the chosen components, each component's under a heading with its name."""
    return [
        flag
        for table, component in template.components.items()
        for flag in flags(component.config, f"{REGISTRIES[kind_of(table)].kind.capitalize()} {component.name}")
    ]


class TrainCommand(Command):
    """The train command, whose flags depend on the components chosen: it looks for their names before click parses."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        arguments = list(args)  # click consumes its own
        try:
            template = template_of(arguments)
        except Exception as error:
            message = message_of(error)
            if "--debug" in arguments or message is None:
                raise
            fail(message)
        names = {flag.name: flag for flag in name_flags()}  # again: plug-ins may have registered more
        params = [names.get(parameter.name or "", parameter) for parameter in self.params]
        full = Command(
            name=self.name, callback=self.callback, help=self.help, params=[*params, *component_flags(template)]
        )
        context = full.make_context(info_name, args, parent, **extra)
        context.obj = template, arguments
        return context


@click.command(cls=TrainCommand, params=[])
@click.argument("data", type=Path, required=False)
@click.option("--config", type=Path, metavar="FILE", help="TOML file of settings; flags go before it.")
@click.option("--plugin", multiple=True, metavar="FILE", help="Python file or module with further components.")
@click.option("--dry-run", is_flag=True, help="Print what the run would take, and make no update.")
@click.option(
    "--dry-run-updates", type=click.IntRange(1, 1_000_000), metavar="N", help="With --dry-run: make and time N updates."
)
@click.option(
    "--vocab-size", type=click.IntRange(3, 10_000_000), metavar="N", help="With --dry-run: pieces, without a dataset."
)
@click.pass_obj
def command(
    parsed: tuple[JobTemplate, list[str]],
    /,
    data: Path | None,
    dry_run: bool,
    dry_run_updates: int | None,
    vocab_size: int | None,
    **settings: Any,
) -> None:
    """Train a model on a binarized dataset. The same command again resumes where it stopped.

    The folder --save-dir gets a page of curves and translations, report.html, and the log as JSON lines, log.jsonl.

    \b
    nmtkit train data-bin --arch transformer_base --save-dir checkpoints
    nmtkit train data-bin --arch transformer_big --batch-tokens 25000
    nmtkit train --config checkpoints/config.toml      # that run again, or on
    nmtkit train domain-bin --finetune-from averaged.pt --lr 1e-4 --save-dir tuned
    nmtkit train --arch transformer_base --help   # its flags
    """
    template, arguments = parsed
    for name in ("config", "plugin", *(flag.name for flag in name_flags())):
        settings.pop(name)
    job = template.job(on_command_line(settings), data)
    check_flags(DRY_RUN_RULES, given_flags(), given_flags())
    if dry_run:
        from nmtkit.training.estimate import dry_run as estimated

        click.echo("\n".join(estimated(job, None if vocab_size else job.data, vocab_size, dry_run_updates or 0)))
        return
    if job.data is None:
        raise ValueError("give the dataset to train on: the folder that nmtkit preprocess made")
    from nmtkit.processes.distributed import launch, launched
    from nmtkit.training.plan import device_of, processes_to_start

    processes = processes_to_start(job.run)
    if processes > 1:
        device_of(job.run)  # refuses here, and not in every process, one that is not there
        sys.exit(launch(["train", *arguments], processes))
    status = _train(job, job.data, arguments)
    if launched():  # torch's threads now and then abort an interpreter that ends beside other ranks
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _train(job: JobConfig, data: Path, arguments: Sequence[str]) -> int:
    """Runs one process's part and returns its exit code."""
    from nmtkit.processes import distributed
    from nmtkit.training.progress import Lines, LiveLine
    from nmtkit.training.run import Run

    rank_zero = distributed.is_rank_zero()
    if not rank_zero:
        logging.getLogger("nmtkit").setLevel(logging.WARNING)
    quiet = logging.getLogger("nmtkit").level > logging.INFO
    live = stderr.is_terminal and not stderr.is_dumb_terminal and rank_zero and not quiet
    display = LiveLine(stderr) if live else Lines(stderr.width if stderr.is_terminal else None)
    try:
        end = Run(job, data, display).run()
    except BaseException as error:
        if distributed.launched():
            display.close()
            _fail_together(error, debug="--debug" in arguments)
        raise
    finally:
        display.close()
    distributed.destroy_process_group()
    if not rank_zero:
        return 128 + end.received if end.received else 0
    if end.received is None:
        for line in _next_commands(job, data, end):
            logging.getLogger("nmtkit").info("%s", line)
        return 0
    resume = shlex.join(["nmtkit", "train", *arguments])
    saved = f"{end.reason}: saved after update {end.updates}"
    stderr.print(f"{saved}. To resume: {resume}", markup=False, soft_wrap=True)  # also under --quiet
    return 128 + end.received  # so that `train && …` does not go on with half a run


def _next_commands(job: JobConfig, data: Path, end: "StopReason") -> list[str]:
    """Returns lines that say why the run is finished, and which commands follow."""
    from nmtkit.architectures import ARCHITECTURES
    from nmtkit.data.binarized import Dataset
    from nmtkit.training import averaging

    folder = job.run.save_dir
    count = len(averaging.scheduled(folder))
    model = folder / ("averaged.pt" if count > 1 else "last.pt")
    average = ["nmtkit", "average-checkpoints", str(folder), "--last", str(count), "--output", str(model)]
    needed = plugins_for(ARCHITECTURES[job.components["architecture"].name], job.plugins)
    plugins = [word for plugin in needed for word in ("--plugin", plugin)]
    splits = Dataset.open(data).splits
    subset = next((name for name in splits if name.startswith("test")), job.run.valid_subset[0])
    known = [str(data), "--gen-subset", subset] if subset in splits else []  # else lines of standard input
    generate = ["nmtkit", "generate", *known, "--path", str(model), *plugins]
    steps = [average, generate] if count > 1 else [generate]
    return [
        f"curves and translations: {folder / 'report.html'}",
        f"training is finished: {end.reason} after update {end.updates:,}",
        *(f"{word}: {shlex.join(step)}" for word, step in zip(("next", "then"), steps, strict=False)),
    ]


def _fail_together(error: BaseException, debug: bool) -> NoReturn:
    """Says what went wrong in this process, tells the others, and ends without waiting for them."""
    from nmtkit.processes import distributed

    known = message_of(error)
    if distributed.is_connection_error(error):
        time.sleep(3)  # the process at the other end has more to say, and gets the time to
    elif debug or not (known or isinstance(error, KeyboardInterrupt)):
        traceback.print_exception(error)
    message = f"rank {distributed.rank()}: {known or str(error) or type(error).__name__}"
    stderr.print(f"nmtkit: error: {message}", markup=False, soft_wrap=True)
    distributed.abort(message)
    sys.stderr.flush()
    os._exit(2 if known else 1)


command.params[1:1] = name_flags()
command.params.extend(flags(RunConfig()))
