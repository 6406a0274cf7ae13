"""`nmtkit merge`: joins the shards that `generate --output-dir` has written."""

import sys
from contextlib import nullcontext
from pathlib import Path

import click

from nmtkit.bulk.merging import merge
from nmtkit.bulk.plan import read_plan
from nmtkit.cli.command import Command, stderr
from nmtkit.files import atomic_write


@click.command(cls=Command)
@click.argument("folder", type=Path, metavar="DIR")
@click.option(
    "--output", type=Path, metavar="FILE", help="Write to this file when it is complete.  [default: standard output]"
)
def command(folder: Path, output: Path | None) -> None:
    """Join the shards in DIR, the --output-dir of another command, in order of the input.

    If shards are missing or damaged, the command fails and names these shards.

    \b
    nmtkit generate --path averaged.pt --input mono.de --output-dir shards
    nmtkit merge shards --output mono.en
    """
    plan = read_plan(folder)
    if output is not None and output.absolute().parent.resolve() == folder.resolve():
        raise ValueError(f"--output {output} is inside {folder}; give a file outside the folder of the shards")
    with nullcontext(sys.stdout.buffer) if output is None else atomic_write(output) as out:
        lines, _ = merge(plan, out)
    if not click.get_current_context().meta.get("quiet"):
        stderr.print(f"{lines:,} lines of {len(plan.shards):,} shards", markup=False, highlight=False)
