"""`nmtkit export`: writes a checkpoint in the format of another program."""

import logging
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from nmtkit.cli.command import Command, show_next, stderr
from nmtkit.cli.flags import CHECKPOINT, PATH, plugin_option
from nmtkit.config.files import checkpoint_of
from nmtkit.config.plugins import load_plugins
from nmtkit.jobs import progress

if TYPE_CHECKING:
    from nmtkit.data.checkpoint_file import Checkpoint

CALIBRATION_LINES = 500
CARD = "README.md"
PUSHED_NAMES = {"checkpoint": "model.pt", "argos": "model.argosmodel"}  # names of single files in a repository

log = logging.getLogger("nmtkit")


COMMON = {
    "--format [ctranslate2|huggingface|marian|bergamot|argos|safetensors|checkpoint]": "format to write; required",
    "--quantization [float32|int8]": "data type of the weights (default: float32)",
    "--push ORG/NAME": "upload to the Hugging Face Hub, with a model card",
    "--license ID": "licence in the model card, such as mit",
}


@click.command(cls=Command, common=COMMON)
@click.argument("source", type=CHECKPOINT)
@click.argument("destination", type=PATH, required=False)
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
@click.option(
    "--push",
    metavar="ORG/NAME",
    help="Upload the files with a model card to this model repository of the Hugging Face Hub, in one commit. Without "
    "DESTINATION, the files are only uploaded. Needs nmtkit[hub] and a token (HF_TOKEN).",
)
@click.option("--private", is_flag=True, help="With --push: make the repository private.")
@click.option(
    "--license",
    metavar="ID",
    help="With --push: licence, such as mit or cc-by-4.0.  [default: the licence of the base]",
)
@click.option(
    "--scores",
    type=PATH,
    metavar="FILE",
    help="With --push: scores for the model card, written by score --format json.",
)
@plugin_option
def command(
    source: Path,
    destination: Path | None,
    format: str,
    quantization: Literal["float32", "int8"] | None,
    calibration: Path | None,
    pair: str | None,
    push: str | None,
    private: bool,
    license: str | None,
    scores: Path | None,
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
    nmtkit export --format checkpoint averaged.pt --push me/en-de --license mit
    """  # fmt: skip
    if quantization is not None and format not in ("ctranslate2", "argos", "checkpoint"):
        raise ValueError("--quantization needs --format ctranslate2, argos or checkpoint")
    if pair is not None and format != "argos":
        raise ValueError("--pair needs --format argos")
    if (calibration is None) == (format == "bergamot"):
        raise ValueError("--format bergamot needs --calibration FILE, and other formats do not use it")
    if push is None and (private or license is not None or scores is not None):
        raise ValueError("--private, --license and --scores need --push ORG/NAME")
    if push is None and destination is None:
        raise ValueError("give DESTINATION, the file or folder to write, or --push ORG/NAME")
    load_plugins(plugins)
    source = checkpoint_of(source)
    if push is None:
        assert destination is not None
        write(source, destination, format, quantization, calibration, pair)
        return
    from nmtkit.data import hub
    from nmtkit.models.formats.model_card import check_license, published_card, read_scores

    check_license(license)
    results = [] if scores is None else read_scores(scores)
    hub.check_upload(push, private=private)
    with tempfile.TemporaryDirectory() as temporary:
        written = destination or Path(temporary) / PUSHED_NAMES.get(format, format)
        write(source, written, format, quantization, calibration, pair)
        files = pushed_files(written, format)
        text = (written / CARD).read_text(encoding="utf-8") if CARD in files else None
        card = published_card(contents_of(source), text, push, format, license=license, scores=results)
        progress.begin(f"Uploading {push}")
        files |= {CARD: card.encode()}
        address = hub.upload(push, files, private=private, message=f"Upload a model in the format {format}")
    if not re.search("^license: ", card, re.MULTILINE):
        log.warning("%s: the model card names no licence; give --license ID", push)
    stderr.print(f"uploaded {address}", markup=False, highlight=False, soft_wrap=True)
    if format in ("checkpoint", "safetensors", "huggingface"):
        show_next(f"nmtkit generate --path hf:{push} < source.txt")


def pushed_files(written: Path, format: str) -> dict[str, Path | bytes]:
    """Returns the exported files by their names in a repository."""
    if not written.is_dir():
        return {PUSHED_NAMES.get(format, written.name): written}
    return {path.relative_to(written).as_posix(): path for path in sorted(written.rglob("*")) if path.is_file()}


def contents_of(source: Path) -> "Checkpoint":
    """Returns the checkpoint in a file, or in a safetensors folder of nmtkit."""
    from nmtkit.models import checkpoint
    from nmtkit.models.formats import safetensors

    return safetensors.load(source) if source.is_dir() else checkpoint.load(source)


def write(
    source: Path,
    destination: Path,
    format: str,
    quantization: Literal["float32", "int8"] | None,
    calibration: Path | None,
    pair: str | None,
) -> None:
    """Writes the checkpoint `source` to `destination` in a format."""
    from nmtkit.models import checkpoint
    from nmtkit.models.formats import argos, bergamot, ctranslate2, huggingface_export, marian_export, safetensors

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
        checkpoint.export(contents_of(source), destination, quantization == "int8")


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
