"""`nmtkit import`: converts a model of another toolkit to a checkpoint."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nmtkit.cli.command import Command, show_next, tell
from nmtkit.cli.flags import INPUT, OUTPUT, flags, from_flags, given_flags
from nmtkit.config import Config, option
from nmtkit.jobs import progress

if TYPE_CHECKING:
    from nmtkit.data.checkpoint_file import Checkpoint
    from nmtkit.data.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ImportConfig(Config):
    """Settings of `nmtkit import`."""

    line: str = option(
        "Hello, world!", "line to translate after the import; empty: no translation", flag="--try", metavar="TEXT"
    )
    source_lang: str | None = option(None, "language of the line, for a multilingual model", metavar="CODE")
    target_lang: str | None = option(
        None, "language to translate the line into, for a multilingual model", metavar="CODE"
    )


@click.command(cls=Command)
@click.argument("source", type=INPUT)
@click.argument("destination", type=OUTPUT)
def command(source: Path, destination: Path, **settings: Any) -> None:
    """Convert the model SOURCE of another toolkit to the checkpoint DESTINATION.

    \b
    nmtkit import opus-mt-en-de en-de.pt
    nmtkit import nllb-200-distilled-600M nllb.pt \\
                  --source-lang eng_Latn --target-lang deu_Latn
    nmtkit generate --path en-de.pt < raw.en > translated.de

    SOURCE is a model of one of three toolkits. Hugging Face transformers: hf:ORG/NAME, or a folder of model type marian
    (OPUS-MT), m2m_100 (M2M-100, NLLB) or mbart (mBART-50). Marian: an .npz file of type transformer, or a folder with
    the .npz file, decoder.yml and vocabularies (.spm, or .yml with source.spm and target.spm). fairseq: a checkpoint of
    a transformer, or a folder with the checkpoint, dict.SRC.txt, dict.TGT.txt and the SentencePiece model. nmtkit runs
    no code from SOURCE.
    """
    from nmtkit.config.files import checkpoint_of, is_hub_name
    from nmtkit.data import checkpoint_file
    from nmtkit.models.building import from_checkpoint, tokenizer_of
    from nmtkit.models.formats.detect import load

    config: ImportConfig = from_flags(ImportConfig, settings)
    line, source_lang, target_lang = config.line, config.source_lang, config.target_lang
    if destination.exists():
        raise ValueError(f"{destination} exists already; remove it or choose another name")
    progress.begin(f"Reading {source.name}")
    found = checkpoint_of(source)
    if found != source and not is_hub_name(source.as_posix()):
        raise ValueError(f"{source} is a run of nmtkit; its checkpoint {found} needs no import")
    contents = load(source) if found == source else checkpoint_file.read(found)
    tokenizer = tokenizer_of(contents, source)
    tries = bool(line.strip()) and (not tokenizer.languages or target_lang is not None)
    if line.strip() and not tries and "--try" in given_flags():
        raise ValueError(f"--try does nothing without --target-lang, because {source} has several target languages")
    if tries or source_lang is not None or target_lang is not None:
        # raises an error for unknown languages before a file is written
        tokenizer.language_ids(source_lang, target_lang)
    progress.begin(f"Writing {destination.name}")
    checkpoint_file.save(destination, contents)
    progress.begin(f"Loading {destination.name}")
    model, _ = from_checkpoint(destination)
    for fact in facts(contents, tokenizer):
        tell(f"{destination}: {fact}")
    if tries:
        from nmtkit.translation.translator import Translator

        languages = {"source_lang": source_lang, "target_lang": target_lang}
        (translation,) = Translator([model], tokenizer).translate([line], **languages)
        tell(f"{line} → {translation.text}")
    generate = ["nmtkit", "generate", "--path", str(destination), *tokenizer.language_flags(source_lang, target_lang)]
    show_next(f"{shlex.join(generate)} < source.txt")


command.params += flags(ImportConfig)


def facts(contents: "Checkpoint", tokenizer: "Tokenizer") -> list[str]:
    """Returns lines that describe the architecture, the vocabulary and the languages of the imported model."""
    from nmtkit.models.checkpoint import tied_to

    config, weights = contents["config"], contents["model"]
    first = tied_to(weights)
    parameters = sum(tensor.numel() for name, tensor in weights.items() if first[name] == name)
    sizes = [tokenizer.source_size] if tokenizer.joint else [tokenizer.source_size, tokenizer.target_size]
    lines = [
        f"Transformer, {parameters:,} parameters: {config['encoder_layers']} encoder and {config['decoder_layers']} "
        f"decoder layers, {config['d_model']} wide, {config['heads']} heads, {config['activation']}, "
        f"{'pre' if config['pre_norm'] else 'post'}-norm",
        f"vocabulary of {' and '.join(f'{size:,}' for size in sizes)} pieces",
    ]
    if tokenizer.languages:
        codes = sorted(tokenizer.languages)
        known = ", ".join(codes[:12]) + (f" and {len(codes) - 12} more" if len(codes) > 12 else "")
        lines.append(f"{len(codes)} languages ({known}): give --target-lang, and --source-lang if the model needs it")
    return lines
