"""`nmtkit train`: parses the flags of the run and of the chosen components, and trains."""

import logging
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.shell_completion import CompletionItem

from nmtkit.cli import imports
from nmtkit.cli.command import PROGRAM, echo, message_of, print_line, program, show_next, stderr
from nmtkit.cli.components import ComponentCommand
from nmtkit.cli.flags import PATH, completed_name, flags, given_flags, on_command_line
from nmtkit.config import FlagRule, check_flags
from nmtkit.jobs import progress
from nmtkit.training.run_config import RunConfig

if TYPE_CHECKING:
    from nmtkit.config.registry import Registry
    from nmtkit.training.config import JobConfig

MANY_NAMES = 12  # beyond this number of names, the help page has a line for each family (see `families`)
DRY_RUN_RULES = (
    FlagRule("--dry-run-updates", needs=("--dry-run",)),
    FlagRule("--vocab-size", needs=("--dry-run",), excludes=("DATA",), reason="a dataset already has a vocabulary"),
)


# table of a component in the config file -> its flag, the placeholder of the flag, and its kind in words
NAMES = {
    "architecture": ("--arch", "NAME", "Architecture of the model"),
    "criterion": ("--criterion", "NAME", "Training loss"),
    "optimizer": ("--optimizer", "NAME", "Optimizer"),
    "lr-scheduler": ("--lr-scheduler", "NAME", "Schedule of the learning rate"),
    "transforms": ("--transforms", "NAME,…", "Transforms of training pairs"),
    "metrics": ("--metrics", "NAME,…", "Metrics of validations"),
    "callbacks": ("--callbacks", "NAME,…", "Callbacks"),
}
COMMON = {
    "--arch NAME": "architecture (default: transformer_base)",
    "--save-dir PATH": "folder of the run (default: checkpoints)",
    "--config FILE": "settings in TOML; flags override them",
    "--lr X": "highest learning rate (default: 0.0007)",
    "--warmup-updates N": "updates until the highest learning rate (default: 4000)",
    "--dropout X": "dropout (default: 0.1)",
    "--label-smoothing X": "label smoothing (default: 0.1)",
    "--batch-tokens N": "tokens of an update, over all processes",
    "--max-tokens N": "tokens of a micro-batch, which must fit into memory",
    "--max-update N": "updates of the run (default: 100000)",
    "--max-epoch N": "passes over the training set",
    "--patience N": "stop after N validations without a better score",
    "--finetune-from RUN|FILE": "start from the weights of this model",
    "--precision auto|fp32|bf16|fp16": "number type of matrix products (default: auto)",
    "--seed N": "seed of weights, order and dropout (default: 1)",
    "--dry-run": "estimate memory and time of the run",
}


def name_flags() -> list[click.Option]:
    """Returns the flags that choose components. Their help lists no names, to avoid importing the components."""
    return [
        click.Option([flag], metavar=metavar, help=f"{text}.", shell_complete=partial(_complete, table))
        for table, (flag, metavar, text) in NAMES.items()
    ]


def _complete(table: str, ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from nmtkit.training.config import REGISTRIES

    return completed_name(REGISTRIES[table].names(), incomplete)


def described_name_flags() -> dict[str, click.Option]:
    """Returns the flags that choose components, by name. The help texts list all registered names."""
    from nmtkit.training.config import DEFAULTS, REGISTRIES

    options = {}
    for option, (table, registry) in zip(name_flags(), REGISTRIES.items(), strict=True):
        default = f"  [default: {','.join(DEFAULTS[table])}]" if DEFAULTS[table] else ""
        option.help = f"{NAMES[table][2]}:\n{families(registry.names())}{default}"
        options[option.name or ""] = option
    return options


def families(names: Sequence[str]) -> str:
    """Returns names as text. If there are many names of few families, each family has a line.

    The names of a family begin with the same word.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition("_")[0], []).append(name)
    if len(names) <= MANY_NAMES or len(groups) > len(names) / 2:
        return ", ".join(names)
    return "\n".join(", ".join(group) for group in groups.values())


def sources(params: Mapping[str, Any]) -> tuple[Path | None, dict[str, str | None], tuple[str, ...]]:
    """Returns the config file, the names of components and the plug-ins that the parsed flags give."""
    names = {table: params[flag.removeprefix("--").replace("-", "_")] for table, (flag, *_) in NAMES.items()}
    return params["config"], names, params["plugin"]


class TrainCommand(ComponentCommand):
    """The train command. Its flags depend on the chosen components, which a config file can choose too."""

    def components(self, known: click.Context) -> dict[str, Any]:
        with imports():
            from nmtkit.training.config import REGISTRIES, ConfigFile, kind_of

        file, chosen, plugins = sources(known.params)
        with known.scope(cleanup=False):
            components = ConfigFile(file).components(chosen, plugins, on_command_line(known.params))
        kinds = {table: REGISTRIES[kind_of(table)].kind.capitalize() for table in components}
        return {f"{kinds[table]} {component.name}": component.config for table, component in components.items()}

    def with_components(self, known: click.Context) -> list[click.Parameter]:
        params = super().with_components(known)
        names = described_name_flags()  # after the import of the plug-ins, which may have registered names
        return [names.get(parameter.name or "", parameter) for parameter in params]

    def registries(self) -> "Iterable[Registry[Any]]":
        from nmtkit.training.config import REGISTRIES

        return REGISTRIES.values()

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        arguments = list(args)  # make_context empties the list `args`
        context = super().make_context(info_name, args, parent, **extra)
        context.obj = arguments
        return context


@click.command(cls=TrainCommand, common=COMMON, params=[])
@click.argument("data", type=PATH, required=False)
@click.option("--config", type=PATH, metavar="FILE", help="TOML file with settings; flags override it.")
@click.option("--plugin", multiple=True, metavar="FILE", help="Python file or module with more components.")
@click.option("--dry-run", is_flag=True, help="Estimate memory and time of the run; do not train.")
@click.option(
    "--dry-run-updates",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    help="With --dry-run, run N updates and measure their time.",
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
    JSON lines (log.jsonl). This help lists the flags of the default components. To see the flags of other components,
    choose the components and add --help.

    \b
    nmtkit train data-bin --arch transformer_base --save-dir checkpoints
    nmtkit train data-bin --arch transformer_big --batch-tokens 25000
    nmtkit train --config checkpoints/config.toml     # resumes or repeats a run
    nmtkit train domain-bin --finetune-from averaged.pt --lr 1e-4 --save-dir tuned
    nmtkit train --arch convs2s --optimizer sgd --help   # flags of these two
    """
    from nmtkit.training.config import ConfigFile, JobConfig

    file, names, plugins = sources(settings)
    typed = on_command_line(settings)
    job = JobConfig.read(file, names, plugins, typed, data)
    check_flags(DRY_RUN_RULES, given_flags(), given_flags())
    if dry_run:
        from nmtkit.experiments.estimate import dry_run as estimated
        from nmtkit.jobs.distributed import is_rank_zero

        if not is_rank_zero():  # torchrun starts several processes, which would all print the report
            return
        echo("\n".join(estimated(job, None if vocab_size else job.data, vocab_size, dry_run_updates or 0)))
        return
    ConfigFile(file).check_paths(job, typed)
    if job.data is None:
        raise ValueError("give a dataset, the folder that nmtkit preprocess wrote")
    from nmtkit.jobs.distributed import launch, launched
    from nmtkit.training.plan import device_of, processes_to_start

    processes = processes_to_start(job.run)
    progress.close()  # a run shows its own progress
    if processes > 1:
        device_of(job.run)  # raises the error of a missing device once, not in every process
        os.environ[PROGRAM] = shlex.join(program())
        sys.exit(launch(["train", *arguments], processes))
    status = _train(job, arguments)
    # A launched process skips the shutdown of Python, because threads of torch sometimes abort during the shutdown.
    if launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _train(job: "JobConfig", arguments: Sequence[str]) -> int:
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

        lines, commands = after_training(job, end)
        for line in lines:
            logging.getLogger("nmtkit").info("%s", line)
        show_next(*commands)
        return 0
    resume = shlex.join([*program(launcher=True), "train", *arguments])
    saved = f"{end.reason}: saved after update {end.updates}"
    print_line(f"{saved}. To resume: {resume}")  # also with --quiet
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
    print_line(f"nmtkit: error: {message}")
    distributed.abort(message)
    sys.stderr.flush()
    os._exit(2 if known else 1)


command.params[1:1] = name_flags()
command.params.extend(flags(RunConfig()))
