"""`nmtkit check`: runs the contract checks of the package on components of plug-ins."""

import logging
import sys
from pathlib import Path
from typing import Any

import click

from nmtkit.cli.command import echo
from nmtkit.cli.components import ComponentCommand
from nmtkit.cli.flags import CHECKPOINT, on_command_line, plugin_option
from nmtkit.config import split_settings
from nmtkit.config.plugins import load_plugins
from nmtkit.jobs import progress

log = logging.getLogger("nmtkit")
INDENT = 10  # columns before the reason of a failure, which is on the line below the name of the check


class CheckCommand(ComponentCommand):
    """The command `nmtkit check`. If it checks a single component, the settings of this component are flags too."""

    def components(self, known: click.Context) -> dict[str, Any]:
        """Returns the preset of the component that the arguments name.

        Returns no preset if the arguments name several components, because their flags may have the same names.
        """
        load_plugins(known.params["plugins"])
        if all(word.startswith("-") for word in known.args):
            return {}
        from nmtkit.contracts import CONTRACTS

        registries = [contract.registry for contract in CONTRACTS]
        pairs = {(registry, name) for registry in registries for name in known.args if name in registry}
        if len(pairs) != 1:
            return {}
        ((registry, name),) = pairs
        return {f"{registry.kind[0].upper()}{registry.kind[1:]} {name}": registry[name].preset}


@click.command(cls=CheckCommand)
@click.argument("names", nargs=-1, metavar="[NAME]…")
@plugin_option
@click.option(
    "--tokenizer-from",
    multiple=True,
    type=CHECKPOINT,
    metavar="PATH",
    help="Check with the vocabulary of this checkpoint, dataset or tokenizer; default: the vocabulary of a checkpoint "
    "in the settings, such as --teacher, or a tiny vocabulary.",
)
@click.pass_context
def command(
    context: click.Context,
    /,
    names: tuple[str, ...],
    plugins: tuple[str, ...],
    tokenizer_from: tuple[Path, ...],
    **settings: Any,
) -> None:
    """Check that the components NAME keep their contracts. Without NAME, check all components of plug-ins.

    \b
    nmtkit check --plugin my_model.py
    nmtkit check --plugin my_model.py gru --width 8
    nmtkit check kd_cross_entropy --teacher averaged.pt

    The checks use a tiny vocabulary and the preset of each component. If you give a single NAME, the settings of this
    component are flags; small sizes make the checks fast. Architectures are checked for shapes, causality, equal
    results of step-by-step decoding and a full pass, gradients, resume and more. The exit code is 1 if a check failed.
    In pytest, nmtkit.contracts runs the same checks.
    """
    load_plugins(plugins)
    from nmtkit.contracts import components
    from nmtkit.data.dataset.dataset_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_from) if tokenizer_from else None
    level = log.level
    if not context.meta.get("verbose"):  # messages about the engines of the tiny models would hide the results
        log.setLevel(logging.WARNING)
    failed = total = 0
    for contract, name in components(names):
        component_settings = split_settings(on_command_line(settings), type(contract.registry[name].preset))[0]
        subject = contract.subject(name, tokenizer, **component_settings)
        echo(str(subject))
        progress.begin(f"Checking {name}")
        told: dict[str, str] = {}  # reason -> first check that failed for this reason
        for result in contract.results(subject):
            total += 1
            mark = click.style("ok    ", fg="green") if result.error is None else click.style("failed", fg="red")
            echo(f"  {mark}  {result.name}")
            if result.error is None:
                continue
            failed += 1
            if context.meta.get("debug"):
                raise result.error
            as_above = f"as above: {told[result.reason]}" if result.reason in told else result.reason
            told.setdefault(result.reason, result.name)
            for line in as_above.split("\n"):
                echo(" " * INDENT + line)
    log.setLevel(level)
    echo(f"{total - failed} of {total} checks passed" + (f", {failed} failed" if failed else ""))
    sys.exit(1 if failed else 0)
