"""`nmtkit check`: runs the contract checks of the package on components of plug-ins."""

import sys
from pathlib import Path

import click

from nmtkit.cli.command import Command
from nmtkit.plugins import load_plugins

INDENT = 10  # a reason is on the line below the name of the check, indented by this number of columns


@click.command(cls=Command)
@click.argument("names", nargs=-1, metavar="[NAME]…")
@click.option(
    "--plugin", "plugins", multiple=True, metavar="FILE|MODULE", help="Import this plug-in first; repeatable."
)
@click.option(
    "--tokenizer-from",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Check logits processors with the vocabulary of this checkpoint, dataset or tokenizer, if they "
    "need a specific vocabulary.",
)
@click.pass_context
def command(
    context: click.Context, names: tuple[str, ...], plugins: tuple[str, ...], tokenizer_from: tuple[Path, ...]
) -> None:
    """Check that the components NAME keep their contracts. Without NAME, check all components of plug-ins.

    \b
    nmtkit check --plugin my_model.py
    nmtkit check --plugin my_model.py gru

    Components have the settings of their preset and a tiny vocabulary. Architectures are checked for shapes, causality,
    equal results of steps and of a full pass, gradients, resume and more. The exit code is 1 if a check failed. In
    pytest, nmtkit.testing runs the same checks.
    """
    load_plugins(plugins)
    from nmtkit.data.spm_training import load_tokenizer
    from nmtkit.testing.components import components

    tokenizer = load_tokenizer(tokenizer_from) if tokenizer_from else None
    failed = total = 0
    for contract, name in components(names):
        subject = contract.subject(name, tokenizer)
        click.echo(str(subject))
        told: dict[str, str] = {}  # reason -> first check that failed for this reason
        for result in contract.results(subject):
            total += 1
            mark = click.style("ok    ", fg="green") if result.error is None else click.style("failed", fg="red")
            click.echo(f"  {mark}  {result.name}")
            if result.error is None:
                continue
            failed += 1
            if context.meta.get("debug"):
                raise result.error
            as_above = f"as above: {told[result.reason]}" if result.reason in told else result.reason
            told.setdefault(result.reason, result.name)
            for line in as_above.split("\n"):
                click.echo(" " * INDENT + line)
    click.echo(f"{total - failed} of {total} checks passed" + (f", {failed} failed" if failed else ""))
    sys.exit(1 if failed else 0)
