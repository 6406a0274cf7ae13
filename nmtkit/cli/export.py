"""`nmtkit export`: writes a checkpoint in the format of another program."""

from pathlib import Path
from typing import Literal

import click

from nmtkit.cli.command import Command
from nmtkit.cli.flags import plugin_option
from nmtkit.plugins import load_plugins


@click.command(cls=Command)
@click.argument("source", type=Path)
@click.argument("destination", type=Path)
@click.option(
    "--format",
    type=click.Choice(["ctranslate2", "huggingface", "marian", "safetensors", "checkpoint"]),
    required=True,
    help="ctranslate2: a folder for ctranslate2.Translator; huggingface: a folder for MarianMTModel of transformers, "
    "or for M2M100ForConditionalGeneration if the model has several languages; marian: a folder for Marian, or "
    "pymarian; safetensors: a folder of standard files; checkpoint: a checkpoint without training state "
    "(SOURCE can also be a safetensors folder).",
)
@click.option(
    "--quantization",
    type=click.Choice(["float32", "int8"]),
    help="Data type of the weights, with --format ctranslate2 or checkpoint.  [default: float32]",
)
@plugin_option
def command(
    source: Path,
    destination: Path,
    format: str,
    quantization: Literal["float32", "int8"] | None,
    plugins: tuple[str, ...],
) -> None:
    """Write the checkpoint SOURCE to DESTINATION in another format.

    \b
    nmtkit export --format ctranslate2 --quantization int8 averaged.pt ct2
    nmtkit export --format huggingface averaged.pt en-de
    nmtkit export --format marian averaged.pt en-de-marian
    nmtkit export --format safetensors averaged.pt averaged
    nmtkit export --format checkpoint averaged averaged.pt
    nmtkit export --format checkpoint --quantization int8 averaged.pt small.pt
    """  # fmt: skip
    if quantization is not None and format not in ("ctranslate2", "checkpoint"):
        raise ValueError("--quantization needs --format ctranslate2 or checkpoint")
    from nmtkit import checkpoint
    from nmtkit.formats import ctranslate2, huggingface_export, marian_export, safetensors

    load_plugins(plugins)
    if format == "ctranslate2":
        ctranslate2.save(source, destination, quantization or "float32")
    elif format == "huggingface":
        huggingface_export.save(source, destination)
    elif format == "marian":
        marian_export.save(source, destination)
    elif format == "safetensors":
        safetensors.save(source, destination)
    else:
        contents = safetensors.load(source) if source.is_dir() else checkpoint.load(source)
        checkpoint.export(contents, destination, quantization == "int8")
