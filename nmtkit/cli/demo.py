"""`nmtkit demo`: runs five commands, from preprocess to score, on an embedded corpus."""

import sys
from pathlib import Path

import click

from nmtkit.cli.command import Command, program
from nmtkit.cli.flags import PATH
from nmtkit.jobs import progress


@click.command(cls=Command)
@click.option(
    "--dir", "folder", type=PATH, default=Path("nmtkit-demo"), metavar="FOLDER",
    help="Folder for text, dataset, checkpoints and translations.  [default: nmtkit-demo]",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Run the demo again and replace the files of an earlier demo.")
def command(folder: Path, overwrite: bool) -> None:
    """Learn to translate English to German in three minutes, on an embedded corpus.

    The demo runs five commands of nmtkit and shows each command before it runs, so that you can run it yourself.
    At the end, the demo shows translations, their references, the score, and scores of two baselines without a model.
    If you call the demo a second time, the demo shows the same result again.
    """
    from rich.console import Console

    from nmtkit.demo.run import run

    progress.close()  # each command of the demo shows its own progress
    out = Console() if sys.stdout.isatty() else Console(width=200)  # wide, so that lines in a file are not broken
    run(folder, program(), out, overwrite)
