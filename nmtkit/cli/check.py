"""`nmtkit check`: the contract tests of the package, run on a plug-in."""

import sys

import click

from nmtkit.cli.command import Command
from nmtkit.plugins import load_plugins

INDENT = 10  # columns before a reason: below the name of its check


@click.command(cls=Command)
@click.argument("names", nargs=-1, metavar="[NAME]…")
@click.option("--plugin", "plugins", multiple=True, metavar="FILE|MODULE", help="Import this first; repeatable.")
@click.pass_context
def command(context: click.Context, names: tuple[str, ...], plugins: tuple[str, ...]) -> None:
    """Check that components keep to their contracts: those called NAME, or all that plug-ins have registered.

    \b
    nmtkit check --plugin my_model.py
    nmtkit check --plugin my_model.py gru

    Architectures are checked for shapes, causality, steps against the full pass, gradients, resume and more, with the
    settings of their preset and a tiny vocabulary; the other kinds likewise. Exits with 1 if a check failed. The same
    checks in pytest: nmtkit.testing.
    """
    load_plugins(plugins)
    from nmtkit.testing.components import components, results

    failed = total = 0
    for kind, name in components(names):
        click.echo(f"{kind.registry.kind} {name}")
        told: dict[str, str] = {}  # reason -> the check that gave it first
        for result in results(kind, name):
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
            for line in as_above.splitlines():
                click.echo(" " * INDENT + line)
    click.echo(f"{total - failed} of {total} checks passed" + (f", {failed} failed" if failed else ""))
    sys.exit(1 if failed else 0)
