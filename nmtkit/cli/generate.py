"""`nmtkit generate`: translates lines or a document, and writes the translations in input order."""

import dataclasses
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from nmtkit.bulk.options import BULK_RULES, BulkOptions
from nmtkit.cli import imports
from nmtkit.cli.command import Command, errors_in_one_line, parsed_known_flags, standard_input, stderr
from nmtkit.cli.flags import flags, given_flags, on_command_line
from nmtkit.cli.generate_output import counted, write
from nmtkit.config import (
    COMMAND_LINE,
    Config,
    changed_flags,
    check_flags,
    check_no_collisions,
    derive,
    flag_of,
    option,
    split_settings,
)
from nmtkit.corpora.corpus import format_of as corpus_format
from nmtkit.documents import Document, ReadOptions, check_text, format_of, notice, read_document
from nmtkit.documents.recognition import COMPRESSIONS, HEAD
from nmtkit.files import atomic_write, check_outputs
from nmtkit.plugins import load_plugins
from nmtkit.search.options import SearchOptions
from nmtkit.text.sentences import has_several
from nmtkit.translation.options import GENERATE_RULES, DeviceOptions, TextOptions, TranslatorOptions

if TYPE_CHECKING:
    from nmtkit.data.binarized import Dataset
    from nmtkit.translation.requests import Request, Translation
    from nmtkit.translation.translator import Translator

logger = logging.getLogger("nmtkit")

# Option that names a file with one line for each input line -> field of the request that receives the line.
LINE_FILES = {"prefix": "prefix", "constraints": "required", "avoid": "avoided", "reference": "reference"}

# A larger share of lines with several sentences causes a warning. Test sets of WMT have a smaller share.
MANY_LINES = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(Config):
    """Settings of `nmtkit generate`, except the settings of the search, the model and the text."""

    gen_subset: str = option("test", "subset of DATA", metavar="NAME")
    prefix: Path | None = option(None, "file with the beginning of the translation of each input line")
    constraints: Path | None = option(
        None, "file with a line for each input line: tab-separated phrases that the translation must contain"
    )
    avoid: Path | None = option(
        None, "file with a line for each input line: tab-separated phrases that the translation must not contain"
    )
    reference: Path | None = option(None, "file of translations for --score-reference; none: the references of DATA")
    source_tag: str | None = option(
        None, "symbol of the vocabulary to put before every line, such as <2de>", metavar="TAG"
    )
    pivot: str | None = option(
        None,
        "translate in two steps, through this language: source to pivot, then pivot to target; scores and --nbest "
        "belong to the second step",
        metavar="CODE",
    )
    pivot_path: Path | None = option(
        None, "checkpoint of the first step, into the language of --pivot; none: --path", metavar="FILE"
    )
    format: Literal["text", "jsonl"] = option(
        "text",
        "text: a line for each input line; jsonl: a JSON object for each input line, with all --nbest translations",
    )
    input_format: Literal["text", "html", "srt", "vtt", "po", "xliff"] | None = option(
        None,
        "text: translate lines; other formats: translate the text of one document and keep its markup; none: choose "
        "by the extension of --input (.html, .srt, .vtt, .po, .xlf, …)",
    )
    output: Path | None = option(
        None, "write to this file instead of standard output; the file is created when the translation is complete",
        metavar="FILE",
    )  # fmt: skip
    overwrite_translations: bool = option(
        False, "also retranslate the existing translations of a catalogue (PO, XLIFF), except final ones"
    )
    glossary_report: Path | None = option(
        None,
        "write a tab-separated table with the result of each term of --glossary, for each input line",
        metavar="FILE",
    )
    quality_report: Path | None = option(
        None, "write a tab-separated table with the estimated quality of each translation; see --quality",
        metavar="FILE",
    )  # fmt: skip
    workers: int = option(1, "number of CPU processes with one thread each; one per core is fastest", min=1, max=1024)


class GenerateCommand(Command):
    """A command that searches. Its flags include the flags of the chosen --logits-processors."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        known = parsed_known_flags(self, info_name, args, parent)
        processors: list[click.Option] = []
        with errors_in_one_line(known):
            if names := known.params["logits_processors"]:
                load_plugins(known.params["plugins"])
                for name, preset in processor_presets(names).items():
                    processors += flags(preset, f"Logits processor {name}")
        full = Command(name=self.name, callback=self.callback, help=self.help, params=[*self.params, *processors])
        return full.make_context(info_name, args, parent, **extra)


def processor_presets(names: Sequence[str]) -> dict[str, Any]:
    """Returns the preset of each named logits processor. Raises ValueError for an unknown name, and for a processor
    whose flag is also a flag of `nmtkit generate` or of another processor."""
    with imports():
        from nmtkit.search.logits_processors import LOGITS_PROCESSORS
    presets = {name: LOGITS_PROCESSORS[name].preset for name in names}
    parts = (GenerateConfig, BulkOptions, DeviceOptions, TranslatorOptions, TextOptions, SearchOptions)
    defaults = {f"nmtkit generate ({part.__name__})": part() for part in parts}
    check_no_collisions(defaults | {f"logits processor {name}": preset for name, preset in presets.items()})
    return presets


def chosen_processors(names: Sequence[str], typed: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of each named logits processor, with the flags of the command line."""
    presets = processor_presets(names) if names else {}
    return {
        name: derive(preset, split_settings(typed, type(preset))[0], COMMAND_LINE) for name, preset in presets.items()
    }


@click.command(cls=GenerateCommand)
@click.argument("data", required=False, type=Path)
@click.option(
    "--path",
    "paths",
    type=Path,
    multiple=True,
    required=True,
    metavar="FILE",
    help="Checkpoint; repeat it for an ensemble.",
)
@click.option(
    "--input",
    "inputs",
    type=Path,
    multiple=True,
    metavar="FILE",
    help="Text file, which may be compressed, or corpus (.tsv, .tmx, .jsonl, .parquet, .zip), repeatable; or one "
    "document.  [default: standard input, or DATA]",
)
@click.option(
    "--plugin", "plugins", multiple=True, metavar="FILE|MODULE", help="Import this plug-in first; repeatable."
)
def command(
    data: Path | None, paths: tuple[Path, ...], inputs: tuple[Path, ...], plugins: tuple[str, ...], **flags: Any
) -> None:
    """Translate a subset of DATA, files, or standard input.

    \b
    nmtkit generate data-bin --path averaged.pt | nmtkit score --data data-bin
    nmtkit generate --path averaged.pt < raw.en > translated.de
    nmtkit generate --path averaged.pt --input page.html --output page.de.html
    torchrun --nproc-per-node 8 -m nmtkit generate --path averaged.pt < in > out
    nmtkit generate --path averaged.pt --input mono.de --output-dir shards

    On a GPU, beam search and greedy search with a Transformer run as CUDA graphs over slots, and the slot of a finished
    sentence takes the next sentence. Other models, sampling, constraints, prefixes, diverse groups, --no-repeat-ngram
    and --alignment run batch by batch.
    """
    typed = on_command_line(flags)
    config: GenerateConfig = derived(GenerateConfig, typed)
    search: SearchOptions = derived(SearchOptions, typed)
    devices: DeviceOptions = derived(DeviceOptions, typed)
    bulk: BulkOptions = derived(BulkOptions, typed)
    text: TextOptions = derived(TextOptions, typed)
    format = document_format(config, inputs)
    facts = facts_of(format, inputs) | {f"--executor {bulk.executor}"}
    check_combination(config, search, devices, facts, data is not None)
    reports = {"--glossary-report": config.glossary_report, "--quality-report": config.quality_report}
    line_files = [getattr(config, name) for name in LINE_FILES]
    sources = [*paths, config.pivot_path, *map(Path, plugins), text.glossary, *line_files]
    check_outputs(reports, [*inputs, config.output])
    check_outputs({"--output": config.output, **reports}, sources)  # --output may overwrite --input
    search = dataclasses.replace(search, quality=search.quality or config.quality_report is not None)
    if format is None:
        check_lines(inputs, config.input_format)
    document = None if format is None else open_document(format, inputs, config, paths[0], search.target_lang)
    load_plugins(plugins)
    if document is not None:
        text = dataclasses.replace(text, markup="html", protect_spans=text.protect_spans or document.protects)
        if text.split_sentences is None:
            warn_of_several_sentences(sum(map(has_several, document.segments)), len(document.segments), "segments")
    options: TranslatorOptions = derived(TranslatorOptions, typed)
    processors = chosen_processors(search.logits_processors, typed)
    generate(data, paths, document or inputs, config, search, devices, options, text, processors, bulk, plugins)


for part in (GenerateConfig, BulkOptions, DeviceOptions, TranslatorOptions):
    command.params += flags(part)
command.params += flags(TextOptions, "Text")
command.params += flags(SearchOptions, "Search")


def derived(config: type, given: dict[str, Any]) -> Any:
    """Returns an object of the class `config` with the settings in `given` that are fields of this class."""
    return derive(config, split_settings(given, config)[0], COMMAND_LINE)


def document_format(config: GenerateConfig, files: Sequence[Path]) -> str | None:
    """Returns the format of the input document, or None if the input consists of lines."""
    if config.input_format is not None:
        return None if config.input_format == "text" else config.input_format
    return next((format for file in files if (format := format_of(file.name)) is not None), None)


def facts_of(format: str | None, files: Sequence[Path]) -> set[str]:
    """Returns the facts about the input that the rules of flags need."""
    facts = {"several --input"} if len(files) > 1 else set()
    if format is not None:
        facts |= {"a document", *(["a catalogue (PO or XLIFF)"] if format in ("po", "xliff") else [])}
    return facts


def open_document(
    format: str, files: Sequence[Path], config: GenerateConfig, checkpoint: Path, language: str | None
) -> Document:
    """Reads the document. Prints its format unless --input-format gives the format. Raises OSError or ValueError."""
    name = str(files[0]) if files else "standard input"
    if config.input_format is None and not click.get_current_context().meta.get("quiet"):
        message = f"{name} is read as {format}; to translate its lines, add --input-format text"
        stderr.print(message, style="dim", markup=False, soft_wrap=True)
    data = files[0].read_bytes() if files else standard_input().read()
    if language is None:
        with imports():
            from nmtkit.models import languages_of
        languages = languages_of(checkpoint)
        language = None if languages is None else languages[1]
    return read_document(data, format, name, ReadOptions(language, config.overwrite_translations))


def languages_of_input(search: SearchOptions, checkpoint: Path) -> tuple[str | None, str | None]:
    """Returns the languages of a corpus to translate: from the flags, otherwise from the checkpoint."""
    from nmtkit.models import languages_of

    source, target = languages_of(checkpoint) or (None, None)
    return search.source_lang or source, search.target_lang or target


def check_lines(files: Sequence[Path], format: str | None) -> None:
    """Raises ValueError for a file that is not text. If `format` is None, warns of files that look like documents."""
    for path in files:
        if not path.is_file():  # a pipe cannot be read twice
            continue
        if format is None and corpus_format(path) is not None:  # the source side of a corpus is read
            continue
        with path.open("rb") as file:
            head = file.read(HEAD)
        if path.suffix.lower() not in COMPRESSIONS:
            check_text(head, str(path))
        if format is None and (message := notice(head, str(path))) is not None:
            logger.warning("%s", message)


def warn_of_several_sentences(count: int, total: int, unit: str) -> None:
    """Warns if `count` of the lines or segments look like several sentences."""
    if count:
        logger.warning(
            "%s of %s %s look like several sentences. A model that was trained on single sentences may omit some; "
            "add --split-sentences with the language of the source, such as en", f"{count:,}", f"{total:,}", unit,
        )  # fmt: skip


def noticing_sentences(windows: Iterable[list["Request"]]) -> Iterator[list["Request"]]:
    """Yields the windows of requests. At the end, warns if many lines look like several sentences."""
    count = total = 0
    for window in windows:
        total += len(window)
        count += sum(has_several(request.source) for request in window)
        yield window
    if count >= MANY_LINES * total:
        warn_of_several_sentences(count, total, "lines")


def check_combination(
    config: GenerateConfig, search: SearchOptions, devices: DeviceOptions, facts: set[str], has_data: bool
) -> None:
    """Raises ValueError for flags that cannot be combined with each other or with the `facts` about the input."""
    conditions = given_flags() | facts
    search_flags = {flag_of(field) for field in dataclasses.fields(search)}
    on = (conditions - search_flags) | changed_flags(search)
    on |= {f"--format {config.format}", f"--engine {devices.engine}"}
    if config.workers == 1:
        on.discard("--workers")
    check_flags((*GENERATE_RULES, *BULK_RULES), conditions, on)
    if search.score_reference and has_data == (config.reference is not None):
        raise ValueError("--score-reference scores the references of a dataset, or the lines of --reference FILE")
    if config.format == "text" and search.nbest > 1 and search.mbr is None:
        raise ValueError("--nbest above 1 needs --format jsonl: text has one translation for each line")
    if config.workers > 1 and devices.device not in ("auto", "cpu"):
        raise ValueError(f"--workers are CPU processes; leave out --device {devices.device}")


def generate(
    data: Path | None,
    paths: tuple[Path, ...],
    source: tuple[Path, ...] | Document,
    config: GenerateConfig,
    search: SearchOptions,
    devices: DeviceOptions,
    options: TranslatorOptions,
    text: TextOptions,
    processors: Mapping[str, Any],
    bulk: BulkOptions,
    plugins: tuple[str, ...],
) -> None:
    """Translates the subset of `data`, a document, the lines of files, or the lines of standard input."""
    with imports():
        import torch

        from nmtkit.processes import openmp
        from nmtkit.translation import inputs
        from nmtkit.translation.directions import DirectionsTranslator
        from nmtkit.translation.line_reports import GlossaryReport, QualityReport
        from nmtkit.translation.parallel import distribute, process_group, rank_device, worker_processes
        from nmtkit.translation.pivot import PivotTranslator
        from nmtkit.translation.translator import WINDOW, Translator

    document, files = (source, ()) if isinstance(source, Document) else (None, source)
    device = rank_device(devices.named_device, config.workers)
    own_processes = config.workers > 1 and devices.engine == "torch"  # CTranslate2 uses threads as workers
    threads = 1 if config.workers > 1 else devices.threads
    if threads is not None:
        torch.set_num_threads(threads)
    if config.workers == 1:
        openmp.start()
    line_files = {field: getattr(config, name) for name, field in LINE_FILES.items() if getattr(config, name)}
    if bulk.output_dir is not None:
        from nmtkit.cli.bulk import translate_shards
        from nmtkit.translation.shards import TranslationJob

        if bulk.executor == "ray":
            device = "cuda" if bulk.actor_gpus else "cpu"
        job = TranslationJob(
            models=paths, texts=[files[0], *line_files.values()], fields=list(line_files), format=config.format,
            device=device, devices=devices, translator=options, search=search, text=text, source_tag=config.source_tag,
            processes=1 if own_processes else config.workers, plugins=plugins, processors=dict(processors),
        )  # fmt: skip
        languages = None if config.input_format else languages_of_input(search, paths[0])
        workers = config.workers if own_processes else 1
        counts = translate_shards(bulk, job, files, languages, workers)
        if text.split_sentences is None and counts["several sentences"] >= MANY_LINES * counts["lines"]:
            warn_of_several_sentences(counts["several sentences"], counts["lines"], "lines")
        return
    with ExitStack() as stack:
        ranks = stack.enter_context(process_group())

        def load(paths: Sequence[Path]) -> Translator:
            settings = dataclasses.asdict(options)
            return Translator.load(paths, device, devices.precision, devices.engine, config.workers, **settings)

        translator = load(paths)
        translator.processor_configs = dict(processors)
        dataset = None if data is None else open_dataset(data, translator, paths[0])
        if dataset is not None:
            search = dataclasses.replace(
                search,
                source_lang=search.source_lang or dataset.source_language,
                target_lang=search.target_lang or dataset.target_language,
            )
        at_terminal = sys.stdin is not None and sys.stdin.isatty()
        has_input = dataset or document or files or line_files
        prompts = at_terminal and ranks == 1 and not (has_input or config.output or config.pivot)
        if prompts and config.format == "text" and not text.active:
            search = dataclasses.replace(search, alignment="hard")  # the prompt shows alignments
        pivot = many = None
        if dataset is not None and dataset.directions:
            if config.pivot is not None:
                raise ValueError(f"--pivot does not translate {data}, a dataset of many directions; give --input FILE")
            subset = dataset[config.gen_subset]
            many = DirectionsTranslator(translator, subset, search, text, config.source_tag, WINDOW * ranks)
        if config.pivot is not None:
            if ranks > 1:
                raise ValueError("--pivot runs in one process or with --workers; leave torchrun out")
            first = translator if config.pivot_path is None else load((config.pivot_path,))
            pivot = PivotTranslator(first, translator, config.pivot, search, text)
        if many is not None:
            pipeline = many.pipelines[0]
        else:
            pipeline = pivot.pipelines[1] if pivot else translator.pipeline(search, text, config.source_tag)
        decoder = None if pivot else distribute(translator.batch_decoder(pipeline.search))
        if decoder is None and pivot is None:  # rank 0 writes the translations
            return
        translations: Iterator[Translation]
        if prompts:
            from nmtkit.cli.prompt import typed_translations

            translations = typed_translations(translator, pipeline)
        else:
            requests: Iterable[list[Request]]
            if many is not None:
                requests = many.requests(search.score_reference)
            elif dataset is not None:
                requests = inputs.dataset_requests(dataset[config.gen_subset], WINDOW * ranks, search.score_reference)
            elif document is not None:
                requests = inputs.segment_requests(document.segments, WINDOW * ranks)
            else:
                stream = None if files else standard_input()
                read_by = config.pivot_path or paths[0]
                languages = None if config.input_format else languages_of_input(search, read_by)
                requests = inputs.text_requests(files, stream, WINDOW * ranks, languages)
                if text.split_sentences is None and not search.score_reference:
                    requests = noticing_sentences(requests)
            requests = inputs.with_fields(requests, line_files)
            steps = [(translator, pipeline)] if pivot is None else pivot.steps
            decoders = [
                stack.enter_context(worker_processes(model, of_step.search, config.workers)) if own_processes else None
                for model, of_step in steps
            ]
            if pivot is not None:
                translations = counted(pivot.run(requests, decoders, config.workers))
            elif many is not None:
                translations = counted(many.run(requests, decoders[0] or decoder, max(ranks, config.workers)))
            else:
                found = translator.run(requests, pipeline, decoders[0] or decoder, max(ranks, config.workers))
                translations = counted(found)
        out = stack.enter_context(atomic_write(config.output) if config.output else nullcontext(sys.stdout.buffer))
        report = None
        if text.glossary is not None:
            report = stack.enter_context(GlossaryReport(config.glossary_report))
            translations = report.observe(translations)
        if config.quality_report is not None:
            translations = stack.enter_context(QualityReport(config.quality_report)).observe(translations)
        if document is not None:
            out.write(document.encoded(document.render([translation.text for translation in translations])))
        else:
            write(translations, config.format, search.score_reference, out)
        if report is not None:
            stderr.print(report.totals, markup=False, highlight=False)


def open_dataset(folder: Path, translator: "Translator", checkpoint: Path) -> "Dataset":
    """Opens a dataset. Raises ValueError if its tokenizer is not the tokenizer of the checkpoint."""
    from nmtkit.data.binarized import Dataset

    dataset = Dataset.open(folder)
    if dataset.tokenizer.fingerprint != translator.tokenizer.fingerprint:
        raise ValueError(
            f"{folder} and {checkpoint} have different tokenizers; give the dataset of the training, or raw text with "
            "--input"
        )
    return dataset
