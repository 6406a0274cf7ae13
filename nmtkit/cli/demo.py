"""`nmtkit demo`: the five commands on an embedded corpus."""

import os
import shutil
import sys
from pathlib import Path

import click

from nmtkit.cli.command import Command


@click.command(cls=Command)
@click.option(
    "--dir", "folder", type=Path, default=Path("nmtkit-demo"), metavar="FOLDER",
    help="Folder for the text, the dataset, the checkpoints and the translations.  [default: nmtkit-demo]",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Run again where a demo has run before, and replace its files.")
def command(folder: Path, overwrite: bool) -> None:
    """Learn English to German in three minutes: the five commands on an embedded corpus.

    Each command is shown before it runs, so that you can run it by hand. At the end you see the score, what it would
    be without a model, and translations beside their references. A second call shows this end again.
    """
    from rich.console import Console

    from nmtkit.demo.run import run

    out = Console() if sys.stdout.isatty() else Console(width=200)  # a file has no edge to break lines at
    run(folder, program(), out, overwrite)


def program() -> list[str]:
    """Returns the words by which the user called nmtkit."""
    called = sys.argv[0]
    if os.path.basename(called) == "__main__.py":
        return [os.path.basename(sys.executable), "-m", "nmtkit"]
    on_path = shutil.which(os.path.basename(called))
    return [os.path.basename(called) if on_path and os.path.samefile(on_path, called) else called]
