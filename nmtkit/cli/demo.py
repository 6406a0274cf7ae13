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
    help="New folder for the text, the dataset, the checkpoints and the translations.  [default: nmtkit-demo]",
)  # fmt: skip
def command(folder: Path) -> None:
    """Learn English to German in three minutes: the five commands on an embedded corpus.

    Each command is shown before it runs, so that you can run it by hand. At the end you see the score, what it would
    be without a model, and translations beside their references.
    """
    from rich.console import Console

    from nmtkit.demo.run import run

    out = Console() if sys.stdout.isatty() else Console(width=200)  # a file has no edge to break lines at
    run(folder, program(), out)


def program() -> list[str]:
    """How the user called nmtkit."""
    called = sys.argv[0]
    if os.path.basename(called) == "__main__.py":
        return [os.path.basename(sys.executable), "-m", "nmtkit"]
    on_path = shutil.which(os.path.basename(called))
    return [os.path.basename(called) if on_path and os.path.samefile(on_path, called) else called]
