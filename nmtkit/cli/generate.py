"""`nmtkit generate`: translates lines or a document, and writes the translations in input order."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nmtkit.cli import imports
from nmtkit.cli.components import ComponentCommand
from nmtkit.cli.flags import CHECKPOINT, INPUT, complete_with, flags, from_flags, plugin_option, published_sets
from nmtkit.cli.generate_config import (
    GenerateConfig,
    GenerateJob,
    check_combination,
    check_reports,
    document_format,
    facts_of,
    is_typed,
)
from nmtkit.cli.generate_run import check_lines, generate, open_document, source_files, warn_of_several_sentences
from nmtkit.config import check_no_collisions
from nmtkit.config.files import checkpoint_of
from nmtkit.config.plugins import load_plugins
from nmtkit.jobs.shard_options import ShardOptions
from nmtkit.text.sentences import has_several
from nmtkit.translation.options import DeviceOptions, TextOptions, TranslatorOptions
from nmtkit.translation.search.options import SearchOptions

if TYPE_CHECKING:
    from nmtkit.config.registry import Registry
    from nmtkit.translation.search.logits_processors import LogitsProcessor


class GenerateCommand(ComponentCommand):
    """The commands generate and serve. Their flags include the flags of the chosen --logits-processors."""

    def components(self, known: click.Context) -> dict[str, Any]:
        names = known.params["logits_processors"]
        if not names:
            return {}
        load_plugins(known.params["plugins"])
        return {f"Logits processor {name}": preset for name, preset in processor_presets(names).items()}

    def registries(self) -> "list[Registry[LogitsProcessor]]":
        return [processor_registry()]


def processor_registry() -> "Registry[LogitsProcessor]":
    """Imports the logits processors of the package and returns their registry."""
    with imports():
        from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS
    return LOGITS_PROCESSORS


def processor_presets(names: Sequence[str]) -> dict[str, Any]:
    """Returns the preset of each named logits processor. Raises ValueError for an unknown name, and for a processor
    whose flag is also a flag of `nmtkit generate` or of another processor."""
    registry = processor_registry()
    presets = {name: registry[name].preset for name in names}
    parts = (GenerateConfig, ShardOptions, DeviceOptions, TranslatorOptions, TextOptions, SearchOptions)
    defaults = {f"nmtkit generate ({part.__name__})": part() for part in parts}
    check_no_collisions(defaults | {f"logits processor {name}": preset for name, preset in presets.items()})
    return presets


def chosen_processors(names: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of each named logits processor, with the flags of the command line."""
    presets = processor_presets(names) if names else {}
    return {name: from_flags(preset, settings) for name, preset in presets.items()}


COMMON = {
    "--path RUN|FILE": "checkpoint, or the folder of a run",
    "--input FILE": "text or document, instead of standard input or DATA",
    "--test-set NAME,…": "published test sets, such as wmt14/full",
    "--output FILE": "file to write (default: standard output)",
    "--beam N": "width of the search; 1 is greedy (default: 4)",
    "--lenpen X": "length penalty; higher: longer outputs (default: 0.6)",
    "--source-lang CODE": "source language of a multilingual model",
    "--target-lang CODE": "target language of a multilingual model",
    "--nbest N": "translations per line, in jsonl (default: 1)",
    "--format text|jsonl": "lines, or objects with scores (default: text)",
    "--split-sentences LANGUAGE": "translate each sentence of a line alone",
    "--glossary FILE": "terms and their translations",
    "--engine NAME": "implementation of the search (default: auto)",
    "--precision auto|fp32|bf16|int8": "number type of matrix products; int8 is fastest on CPUs",
    "--workers N": "CPU processes; one per core is best (default: 1)",
    "--device NAME": "cpu, cuda, cuda:1, … (default: auto)",
}


@click.command(cls=GenerateCommand, common=COMMON)
@click.argument("data", required=False, type=INPUT)
@click.option(
    "--path",
    "paths",
    type=CHECKPOINT,
    multiple=True,
    required=True,
    metavar="RUN|FILE",
    help="Checkpoint; repeat it for an ensemble.",
)
@click.option(
    "--input",
    "inputs",
    type=INPUT,
    multiple=True,
    metavar="FILE",
    help="Text file, which may be compressed, or corpus (.tsv, .tmx, .jsonl, .parquet, .zip), repeatable; or one "
    "document.  [default: standard input, or DATA]",
)
@plugin_option
def command(
    data: Path | None, paths: tuple[Path, ...], inputs: tuple[Path, ...], plugins: tuple[str, ...], **flags: Any
) -> None:
    """Translate a subset of DATA, files, or standard input.

    \b
    nmtkit generate data-bin --path averaged.pt | nmtkit score --data data-bin
    nmtkit generate --path averaged.pt < raw.en > translated.de
    nmtkit generate --path averaged.pt --test-set wmt14/full |
    nmtkit score --test-set wmt14/full -l en-de
    nmtkit generate --path averaged.pt --input page.html --output page.de.html
    torchrun --nproc-per-node 8 -m nmtkit generate --path averaged.pt < in > out
    nmtkit generate --path averaged.pt --input mono.de --output-dir shards

    On a GPU, beam search and greedy search with a Transformer run as CUDA graphs with continuous batching: the next
    sentence takes the place of a finished sentence. Other models, sampling, avoided phrases, prefixes, diverse groups,
    logits processors, --unkpen and --no-repeat-ngram run batch by batch.
    """
    generate(parsed_job(data, paths, inputs, plugins, flags))


for part, title in (
    (SearchOptions, "Search"), (GenerateConfig, "Input and output"), (DeviceOptions, "Model and devices"),
    (TranslatorOptions, "Model and devices"), (TextOptions, "Text"), (ShardOptions, "Shards"),
):  # fmt: skip
    command.params += flags(part, title)
complete_with(command.params, "test_set", published_sets)


def parsed_job(
    data: Path | None, paths: Sequence[Path], files: Sequence[Path], plugins: Sequence[str], settings: Mapping[str, Any]
) -> GenerateJob:
    """Makes and checks the job of a command line. If the input is a document, reads the document. Imports the plug-ins.

    Raises ValueError or OSError.
    """
    if data is not None and data.is_file():
        raise ValueError(
            f"{data} is a file, but DATA is the folder of a dataset; to translate the file: --input {data}"
        )
    paths = [checkpoint_of(path) for path in paths]
    config: GenerateConfig = from_flags(GenerateConfig, settings)
    search: SearchOptions = from_flags(SearchOptions, settings)
    devices: DeviceOptions = from_flags(DeviceOptions, settings)
    bulk: ShardOptions = from_flags(ShardOptions, settings)
    text: TextOptions = from_flags(TextOptions, settings)
    format = document_format(config, files)
    facts = facts_of(format, files) | {f"--executor {bulk.executor}"}
    if config.pivot is None and is_typed(config, bool(data or files or format or config.test_set)):
        facts |= {"typed text", f"--alignment {search.alignment} with typed text"}
    check_combination(config, search, devices, facts, data is not None)
    if config.test_set:
        files = source_files(config, search, paths[0])
    check_reports(config, files, [*paths, config.pivot_path, *map(Path, plugins), text.glossary])
    configs = chosen_processors(search.logits_processors, settings)
    quality = search.quality or config.quality_report is not None
    search = dataclasses.replace(search, quality=quality, processor_configs=tuple(configs.values()))
    if format is None:
        check_lines(files, config)
    document = None if format is None else open_document(format, files, config, paths[0], search)
    load_plugins(plugins)
    if document is not None:
        text = dataclasses.replace(text, markup="html", protect_spans=text.protect_spans or document.protects)
        if text.split_sentences is None:
            warn_of_several_sentences(sum(map(has_several, document.segments)), len(document.segments), "segments")
    return GenerateJob(
        data=data, paths=paths, files=files if document is None else (), document=document, config=config,
        search=search, devices=devices, options=from_flags(TranslatorOptions, settings), text=text, bulk=bulk,
        plugins=plugins,
    )  # fmt: skip
