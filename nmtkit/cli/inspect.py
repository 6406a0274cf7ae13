"""`nmtkit inspect`: describes a checkpoint or a dataset."""

import dataclasses
import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nmtkit.cli.command import Command, as_started, echo
from nmtkit.cli.flags import CHECKPOINT
from nmtkit.config.files import portable_name
from nmtkit.jobs import progress

if TYPE_CHECKING:
    from nmtkit.experiments.inspection import Description


@click.command(cls=Command)
@click.argument("path", type=CHECKPOINT, metavar="RUN|FILE|DATA")
@click.option(
    "--all", "everything", is_flag=True, help="Show all facts and all settings that differ from the defaults."
)
@click.option("--verify", is_flag=True, help="Recompute checksums; for a dataset, also decode the first pairs.")
@click.option(
    "--format",
    type=click.Choice(["text", "json", "toml"]),
    default="text",
    help="Output format. With toml, writes the config of the run that made the checkpoint, for train --config.  "
    "[default: text]",
)
def command(path: Path, everything: bool, verify: bool, format: str) -> None:
    """Describe a checkpoint, the best checkpoint of a run, or a dataset: languages, size, scores, commands that use it.

    \b
    nmtkit inspect checkpoints
    nmtkit inspect averaged.pt --all
    nmtkit inspect data-bin --verify
    nmtkit inspect averaged.pt --format toml > again.toml
    """
    from nmtkit.experiments.inspection import config_of, inspect

    if everything and format != "text":
        raise ValueError(f"--all needs --format text; the output of --format {format} is always complete")
    if format == "toml":
        if verify:
            raise ValueError(
                "--verify and --format toml cannot be combined: a config cannot show the result of --verify"
            )
        echo(config_of(path), nl=False)
        return
    if verify:
        progress.begin(f"Verifying {path.name}")
    described = inspect(path, verify)
    described.commands = {purpose: as_started(line) for purpose, line in described.commands.items()}
    if format == "json":
        facts = dataclasses.asdict(described)
        del facts["defaults"]
        echo(json.dumps(facts, default=str, ensure_ascii=False, indent=1))
    else:
        show(described, everything)


def show(described: "Description", everything: bool) -> None:
    """Prints the summary, the commands and, if `everything`, all facts in two columns."""
    echo(f"{portable_name(described.path)} is an nmtkit {described.kind}.\n")
    show_facts(described.summary)
    if described.verified:
        echo("\n" + click.style("Verified", bold=True))
        echo("\n".join(f"  {line}" for line in described.verified))
    echo("\n" + click.style("Commands", bold=True))
    for purpose, line in described.commands.items():
        echo(f"  To {purpose}:\n    {line}")
    if not everything:
        more = shlex.join(["nmtkit", "inspect", portable_name(described.path), "--all"])
        echo(f"\nAll facts: {as_started(more)}")
        return
    for title in described.sections:
        facts = described.changed(title)
        if facts:
            left_out = " (settings that differ from the defaults)" if title in described.defaults else ""
            echo("\n" + click.style(f"{title}{left_out}", bold=True))
            show_facts(facts)


def show_facts(facts: dict[str, Any]) -> None:
    rows = dict(flattened(facts))
    width = max((len(name) for name in rows), default=0)
    indent = " " * (width + 4)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for name, value in rows.items():
        text = f"  {name.replace('_', ' '):{width}}  {shown(value)}"
        if len(text) > columns:  # a long value, such as the reason why a run failed, stays in its column
            text = textwrap.fill(
                text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        echo(text)


def flattened(facts: dict[str, Any], title: str = "") -> Iterator[tuple[str, Any]]:
    """Yields names and values. The name of a nested fact begins with the names of the facts that contain it."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{title}{name}: ")
        else:
            yield title + name, value


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
