"""nmtkit preprocess: raw parallel text to a binarized dataset."""

from pathlib import Path
from typing import Any

import click

from nmtkit.cli.command import Command


def comma_list(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(item.strip() for item in value.split(",") if item.strip()) if value else ()


@click.command(cls=Command, short_help="Raw parallel text to a binarized dataset.")
@click.option("-s", "--source-lang", required=True, metavar="LANG")
@click.option("-t", "--target-lang", required=True, metavar="LANG")
@click.option("--trainpref", "train", callback=comma_list, metavar="PREFIX,…")
@click.option("--validpref", "valid", callback=comma_list, metavar="PREFIX,…")
@click.option("--testpref", "test", callback=comma_list, metavar="PREFIX,…")
@click.option("--destdir", required=True, type=click.Path(path_type=Path))
@click.option("--vocab-size", default=32_000, show_default=True)
@click.option("--model-type", type=click.Choice(["bpe", "unigram", "word"]), default="bpe", show_default=True)
@click.option("--separate-vocab", is_flag=True)
@click.option("--overwrite", is_flag=True)
def command(**settings: Any) -> None:
    """Makes a dataset folder from parallel text."""
    from nmtkit.data.preparation import Options, prepare

    prepare(Options(**settings))
