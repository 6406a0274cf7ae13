"""`nmtkit export`: writes a checkpoint in the format of another program."""

import logging
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from nmtkit.cli.command import Command, show_next, tell
from nmtkit.cli.flags import CHECKPOINT, PATH, flags, from_flags, given_flags, plugin_option
from nmtkit.config import Config, FlagRule, check_flags, option
from nmtkit.config.files import checkpoint_of
from nmtkit.config.plugins import load_plugins
from nmtkit.jobs import progress

if TYPE_CHECKING:
    from nmtkit.data.checkpoint_file import Checkpoint

CALIBRATION_LINES = 500
CARD = "README.md"
PUSHED_NAMES = {"checkpoint": "model.pt", "argos": "model.argosmodel"}  # names of single files in a repository

EXPORT_RULES = (
    FlagRule("--quantization", needs=("--format ctranslate2", "--format argos", "--format checkpoint")),
    FlagRule("--pair", needs=("--format argos",)),
    FlagRule("--calibration", needs=("--format bergamot",)),
    *(FlagRule(flag, needs=("--push",)) for flag in ("--private", "--license", "--scores")),
)

log = logging.getLogger("nmtkit")


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Config):
    """Settings of `nmtkit export`."""

    format: Literal["ctranslate2", "huggingface", "marian", "bergamot", "argos", "safetensors", "checkpoint"] = option(
        ...,
        "ctranslate2: folder for ctranslate2.Translator\n"
        "huggingface: folder for transformers: MarianMTModel, or M2M100ForConditionalGeneration for many languages\n"
        "marian: folder for Marian and pymarian\n"
        "bergamot: folder with 8-bit weights for Bergamot and slimt, for a student model with SSRUs in the decoder\n"
        "argos: file for Argos Translate and LibreTranslate\n"
        "safetensors: folder with model.safetensors, nmtkit.json and SentencePiece models\n"
        "checkpoint: smaller checkpoint, without training state (SOURCE can also be a safetensors folder)",
    )
    quantization: Literal["float32", "int8"] = option(
        "float32", "data type of the weights, with --format ctranslate2, argos or checkpoint"
    )
    calibration: Path | None = option(
        None,
        "with --format bergamot: text in the source language, one sentence per line; the first 500 lines are "
        "translated to learn the ranges of the 8-bit numbers",
        metavar="FILE",
        access="read",
    )
    pair: str | None = option(
        None, "language pair, with --format argos; default: the pair of the training data", metavar="en-de"
    )
    push: str | None = option(
        None,
        "upload the files with a model card to this model repository of the Hugging Face Hub, in one commit; without "
        "DESTINATION, the files are only uploaded; needs nmtkit[hub] and a token (HF_TOKEN)",
        metavar="ORG/NAME",
    )
    private: bool = option(False, "with --push: make the repository private")
    license: str | None = option(
        None, "with --push: licence, such as mit or cc-by-4.0; default: the licence of the base model", metavar="ID"
    )
    scores: Path | None = option(
        None, "with --push: scores for the model card, written by score --format json", metavar="FILE", access="read"
    )


COMMON = {
    "--format ctranslate2|huggingface|marian|bergamot|argos|safetensors|checkpoint": "format to write; required",
    "--quantization float32|int8": "data type of the weights (default: float32)",
    "--push ORG/NAME": "upload to the Hugging Face Hub, with a model card",
    "--license ID": "licence in the model card, such as mit",
}


@click.command(cls=Command, common=COMMON)
@click.argument("source", type=CHECKPOINT)
@click.argument("destination", type=PATH, required=False)
@plugin_option
def command(source: Path, destination: Path | None, plugins: tuple[str, ...], **settings: Any) -> None:
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
    """
    config: ExportConfig = from_flags(ExportConfig, settings)
    check_flags(EXPORT_RULES, given_flags(), given_flags() | {f"--format {config.format}"})
    if config.format == "bergamot" and config.calibration is None:
        raise ValueError("--format bergamot needs --calibration FILE")
    if config.push is None and destination is None:
        raise ValueError("give DESTINATION, the file or folder to write, or --push ORG/NAME")
    load_plugins(plugins)
    source = checkpoint_of(source)
    if config.push is not None:
        push(config, config.push, source, destination)
    elif destination is not None:
        write(source, destination=destination, config=config)
        files = [path for path in (destination, *destination.rglob("*")) if path.is_file()]
        tell(f"{destination}: {sum(path.stat().st_size for path in files) / 1e6:,.1f} MB")
        if config.format == "checkpoint":
            from nmtkit.data import checkpoint_file

            show_next(usage(destination, checkpoint_file.read(destination, mmap=True)))


command.params[:0] = flags(ExportConfig)


def push(config: ExportConfig, repository: str, source: Path, destination: Path | None) -> None:
    """Exports `source` to `destination`, or to temporary files, and uploads the exported files with a model card."""
    from nmtkit.data import hub
    from nmtkit.models.formats.model_card import check_license, published_card, read_scores

    check_license(config.license)
    results = [] if config.scores is None else read_scores(config.scores)
    hub.check_upload(repository, private=config.private)
    with tempfile.TemporaryDirectory() as temporary:
        written = destination or Path(temporary) / PUSHED_NAMES.get(config.format, config.format)
        write(source, destination=written, config=config)
        files = pushed_files(written, config.format)
        text = (written / CARD).read_text(encoding="utf-8") if CARD in files else None
        contents = contents_of(source)
        plugins = [Path(name).name for name in contents["plugins"]]  # publish no folder names of this machine
        command = usage(Path(f"hf:{repository}"), contents | {"plugins": plugins})
        card = published_card(contents, text, command, config.format, license=config.license, scores=results)
        progress.begin(f"Uploading {repository}")
        files |= {CARD: card.encode()}
        message = f"Upload a model in the format {config.format}"
        address = hub.upload(repository, files, private=config.private, message=message)
    if not re.search("^license: ", card, re.MULTILINE):
        log.warning("%s: the model card names no licence; give --license ID", repository)
    tell(f"uploaded {address}")
    if config.format in ("checkpoint", "safetensors", "huggingface"):
        show_next(command)


def usage(path: Path, contents: "Checkpoint") -> str:
    """Returns a command that uses a model, with the flags that the model needs, such as its languages and plug-ins.

    `path` is the checkpoint, or the name of the model on the Hugging Face Hub. `contents` is the checkpoint.
    """
    from nmtkit.experiments import inspection
    from nmtkit.models.building import tokenizer_of

    return next(iter(inspection.commands(path, contents, tokenizer_of(contents, path)).values()))


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


def write(source: Path, *, destination: Path, config: ExportConfig) -> None:
    """Writes the checkpoint `source` to `destination` in the format of `config`."""
    from nmtkit.models import checkpoint
    from nmtkit.models.formats import argos, bergamot, ctranslate2, huggingface_export, marian_export, safetensors

    progress.begin(f"Writing {destination.name}")
    match config.format:
        case "ctranslate2":
            ctranslate2.save(source, destination, config.quantization)
        case "huggingface":
            huggingface_export.save(source, destination)
        case "marian":
            marian_export.save(source, destination)
        case "bergamot":
            assert config.calibration is not None
            bergamot.save(source, destination, translated_lines(source, config.calibration))
        case "argos":
            argos.save(source, destination, pair_of(source, config.pair), config.quantization)
        case "safetensors":
            safetensors.save(source, destination)
        case "checkpoint":
            checkpoint.export(contents_of(source), destination, config.quantization == "int8")


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
    """Returns the source and target language of --pair, or else of the data that the checkpoint was trained on.

    Raises ValueError if the languages are unknown, or if --pair is not two codes with a hyphen between them.
    """
    from nmtkit.models.building import languages_of

    known = languages_of(source) if pair is None else None
    languages = known or tuple((pair or "").split("-"))
    if len(languages) != 2 or not all(languages):
        raise ValueError(f"the language pair of {source} is {pair or 'not known'}; name it with --pair en-de")
    return languages
