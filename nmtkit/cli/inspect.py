"""`nmtkit inspect`: describes a checkpoint or a dataset."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nmtkit.cli.command import Command, echo

if TYPE_CHECKING:
    from nmtkit.experiments.inspection import Description


@click.command(cls=Command)
@click.argument("path", type=Path, metavar="FILE")
@click.option("--verify", is_flag=True, help="Recompute checksums; for a dataset, also decode the first pairs.")
@click.option(
    "--format",
    type=click.Choice(["text", "json", "toml"]),
    default="text",
    help="Output format. With toml, writes the config of the run that made the checkpoint, for train --config.  "
    "[default: text]",
)
def command(path: Path, verify: bool, format: str) -> None:
    """Describe a checkpoint or a dataset folder: sizes, config, origin, and commands that use it.

    \b
    nmtkit inspect checkpoints/last.pt
    nmtkit inspect data-bin --verify
    nmtkit inspect averaged.pt --format toml > again.toml
    """
    from nmtkit.experiments.inspection import config_of, inspect

    if format == "toml" and path.exists():
        if verify:
            raise ValueError(
                "--verify and --format toml cannot be combined: a config cannot show the result of --verify"
            )
        echo(config_of(path), nl=False)
        return
    described = inspect(path, verify)
    if format == "json":
        echo(json.dumps(dataclasses.asdict(described), default=str, ensure_ascii=False, indent=1))
    else:
        show(described)


def show(described: "Description") -> None:
    """Prints the facts in two columns, then the commands."""
    echo(f"{described.path} is an nmtkit {described.kind}.")
    for title, facts in described.sections.items():
        echo("\n" + click.style(title, bold=True))
        rows = dict(flattened(facts))
        width = max((len(name) for name in rows), default=0)
        for name, value in rows.items():
            echo(f"  {name.replace('_', ' '):{width}}  {shown(value)}")
    if described.verified:
        echo("\n" + click.style("Verified", bold=True))
        echo("\n".join(f"  {line}" for line in described.verified))
    echo("\n" + click.style("Commands", bold=True))
    for purpose, line in described.commands.items():
        echo(f"  To {purpose}:\n    {line}")


def flattened(facts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from flattened(value)
        else:
            yield name, value


def shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(shown(item) for item in value) or "none"
    return str(value)
