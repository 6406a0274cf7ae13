"""`nmtkit export`: writes a checkpoint in the format of another program."""

from pathlib import Path
from typing import Literal

import click

from nmtkit.cli.command import Command
from nmtkit.cli.flags import CHECKPOINT, PATH, plugin_option
from nmtkit.config.files import checkpoint_of
from nmtkit.config.plugins import load_plugins
from nmtkit.jobs import progress

CALIBRATION_LINES = 500


@click.command(cls=Command)
@click.argument("source", type=CHECKPOINT)
@click.argument("destination", type=PATH)
@click.option(
    "--format",
    type=click.Choice(["ctranslate2", "huggingface", "marian", "bergamot", "argos", "safetensors", "checkpoint"]),
    required=True,
    help="\n".join(
        [
            "ctranslate2: folder for ctranslate2.Translator",
            "huggingface: folder for transformers: MarianMTModel, or M2M100ForConditionalGeneration for many languages",
            "marian: folder for Marian and pymarian",
            "bergamot: folder with 8-bit weights for Bergamot and slimt, of a student with SSRUs",
            "argos: file for Argos Translate and LibreTranslate",
            "safetensors: folder of standard files",
            "checkpoint: smaller checkpoint, without training state (SOURCE can also be a safetensors folder)",
        ]
    ),
)
@click.option(
    "--quantization",
    type=click.Choice(["float32", "int8"]),
    help="Data type of the weights, with --format ctranslate2, argos or checkpoint.  [default: float32]",
)
@click.option(
    "--calibration",
    type=PATH,
    metavar="FILE",
    help="With --format bergamot: text in the source language, one sentence per line. The first 500 lines are "
    "translated to learn the ranges of the 8-bit numbers.",
)
@click.option(
    "--pair", metavar="en-de", help="Language pair, with --format argos.  [default: the pair of the training data]"
)
@plugin_option
def command(
    source: Path,
    destination: Path,
    format: str,
    quantization: Literal["float32", "int8"] | None,
    calibration: Path | None,
    pair: str | None,
    plugins: tuple[str, ...],
) -> None:
    """Write the checkpoint SOURCE to DESTINATION in another format.

    \b
    nmtkit export --format ctranslate2 --quantization int8 averaged.pt ct2
    nmtkit export --format huggingface averaged.pt en-de
    nmtkit export --format marian averaged.pt en-de-marian
    nmtkit export --format bergamot --calibration valid.en student.pt bergamot
    nmtkit export --format argos --quantization int8 averaged.pt en_de.argosmodel
    nmtkit export --format safetensors averaged.pt averaged
    nmtkit export --format checkpoint averaged averaged.pt
    nmtkit export --format checkpoint --quantization int8 averaged.pt small.pt
    """  # fmt: skip
    if quantization is not None and format not in ("ctranslate2", "argos", "checkpoint"):
        raise ValueError("--quantization needs --format ctranslate2, argos or checkpoint")
    if pair is not None and format != "argos":
        raise ValueError("--pair needs --format argos")
    if (calibration is None) == (format == "bergamot"):
        raise ValueError("--format bergamot needs --calibration FILE, and other formats do not use it")
    from nmtkit.models import checkpoint
    from nmtkit.models.formats import argos, bergamot, ctranslate2, huggingface_export, marian_export, safetensors

    load_plugins(plugins)
    source = checkpoint_of(source)
    progress.begin(f"Writing {destination.name}")
    if format == "ctranslate2":
        ctranslate2.save(source, destination, quantization or "float32")
    elif format == "huggingface":
        huggingface_export.save(source, destination)
    elif format == "marian":
        marian_export.save(source, destination)
    elif calibration is not None:
        bergamot.save(source, destination, translated_lines(source, calibration))
    elif format == "argos":
        argos.save(source, destination, pair_of(source, pair), quantization or "float32")
    elif format == "safetensors":
        safetensors.save(source, destination)
    else:
        contents = safetensors.load(source) if source.is_dir() else checkpoint.load(source)
        checkpoint.export(contents, destination, quantization == "int8")


def translated_lines(model: Path, text: Path) -> list[tuple[str, str]]:
    """Returns the first lines of a file with their translations by the model. Empty lines are left out."""
    from nmtkit.data.corpora.lines import line_windows
    from nmtkit.translation.translator import Translator

    lines = [line for line in next(line_windows(text, CALIBRATION_LINES)) if line.strip()]
    translator = Translator.load(model)
    progress.begin("Translating", "lines", len(lines))
    translations = translator.translate(lines, beam=1)
    progress.begin("Writing")
    return [(line, translation.text) for line, translation in zip(lines, translations, strict=True)]


def pair_of(source: Path, pair: str | None) -> tuple[str, str]:
    """Returns the source and target language of --pair, or of the data of the checkpoint."""
    from nmtkit.models.building import languages_of

    known = languages_of(source) if pair is None else None
    languages = known or tuple((pair or "").split("-"))
    if len(languages) != 2 or not all(languages):
        raise ValueError(f"the language pair of {source} is {pair or 'not known'}; name it with --pair en-de")
    return languages
