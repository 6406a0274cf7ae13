"""Runs a job of `nmtkit generate`: opens the input, translates in shards or in this process, and writes the output."""

import dataclasses
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nmtkit.cli import imports
from nmtkit.cli.command import standard_input, tell
from nmtkit.cli.generate_config import GenerateConfig, GenerateJob, is_typed
from nmtkit.config.files import atomic_write
from nmtkit.data.corpora.corpus import format_of as corpus_format
from nmtkit.data.corpora.lines import count_lines, count_lines_ahead
from nmtkit.jobs import progress
from nmtkit.text.documents import FORMATS, Document, ReadOptions, check_text, notice, read_document
from nmtkit.text.documents.recognition import COMPRESSIONS, HEAD
from nmtkit.text.sentences import has_several
from nmtkit.translation.search.options import SearchOptions

if TYPE_CHECKING:
    from nmtkit.data.dataset.binarized import Dataset
    from nmtkit.translation.options import DeviceOptions, TranslatorOptions
    from nmtkit.translation.pipeline import Pipeline
    from nmtkit.translation.search.types import BatchDecoder, Request, Translation
    from nmtkit.translation.translator import Translator

logger = logging.getLogger("nmtkit")

# A larger share of lines with several sentences causes a warning. Test sets of WMT have a smaller share.
MANY_LINES = 0.2


# --- input ------------------------------------------------------------------------------------------------------------


def open_document(
    format: str, files: Sequence[Path], config: GenerateConfig, checkpoint: Path, search: SearchOptions
) -> Document:
    """Reads the document. Prints its format unless --input-format gives the format. Raises OSError or ValueError."""
    name = str(files[0]) if files else "standard input"
    if config.input_format is None:
        tell(f"{name} is read as {format}; to translate its lines, add --input-format text", "dim")
    data = files[0].read_bytes() if files else standard_input().read()
    with imports():
        source, target = languages_of_input(config, search, checkpoint)
    options = ReadOptions(target, config.overwrite_translations, source_language=source)
    return read_document(data, format, name, options)


def languages_of_input(
    config: GenerateConfig, search: SearchOptions, checkpoint: Path
) -> tuple[str | None, str | None]:
    """Returns the source and the target language of a corpus to translate: from the flags, else from the checkpoints.

    `checkpoint` translates into the target language. With --pivot-path, the checkpoint of this flag reads the source.
    """
    from nmtkit.models.building import languages_of

    source, target = languages_of(checkpoint) or (None, None)
    if config.pivot_path is not None:
        source, _ = languages_of(config.pivot_path) or (None, None)
    return search.source_lang or source, search.target_lang or target


def source_files(config: GenerateConfig, search: SearchOptions, checkpoint: Path) -> list[Path]:
    """Returns the files with the source lines of --test-set. The checkpoint gives the default of --language-pair."""
    from nmtkit.data.fetch import sacrebleu_sets

    pair = config.language_pair
    if pair is None:
        with imports():
            source, target = languages_of_input(config, search, checkpoint)
        if source and target:
            pair = sacrebleu_sets.pair_of_languages(config.test_set, source, target)
    sacrebleu_sets.check_sets(config.test_set, pair, "--language-pair")
    assert pair is not None
    return sacrebleu_sets.source_files(config.test_set, pair)


def check_lines(files: Sequence[Path], config: GenerateConfig) -> None:
    """Raises ValueError for a file that is not text, for a compressed document (such as PO), and for --columns with a
    file without columns.

    Without --input-format, warns of files that look like documents.
    """
    format = config.input_format
    for path in files:
        if config.both_columns is not None and corpus_format(path) is None:
            raise ValueError(f"--columns does nothing for {path}, which is not .tsv, .jsonl or .parquet")
        # without this error, the file would be read as a corpus, and a corpus has only the translated entries
        if format is None and corpus_format(path) in FORMATS:
            raise ValueError(
                f"{path} is a compressed document; decompress it, or add --input-format text for its lines"
            )
        if not path.is_file():  # a pipe cannot be read twice
            continue
        if format is None and corpus_format(path) is not None:  # a corpus is not plain text
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
            "%s of %s %s look like several sentences. A model that was trained on single sentences may omit sentences; "
            "add --split-sentences with the language of the source, such as en", f"{count:,}", f"{total:,}", unit,
        )  # fmt: skip


def tell_of_loops(loops: int, total: int) -> None:
    """Logs the number of lines that were decoded again."""
    if loops:
        from nmtkit.translation.search.rules import LONGEST_RUN

        logger.info(
            "%s of %s lines repeated a text again and again, and were decoded again with --no-repeat-ngram %d; "
            "--keep-loops keeps such lines", f"{loops:,}", f"{total:,}", LONGEST_RUN,
        )  # fmt: skip


def open_dataset(folder: Path, translator: "Translator") -> "Dataset":
    """Opens the dataset in `folder`, whose sources `translator` reads.

    Raises ValueError if the dataset and the translator have different tokenizers.
    """
    from nmtkit.data.dataset.binarized import Dataset

    dataset = Dataset.open(folder)
    if dataset.tokenizer.fingerprint != translator.tokenizer.fingerprint:
        raise ValueError(
            f"{folder} and {translator.name} have different tokenizers; give the dataset of the training, or raw text "
            "with --input"
        )
    return dataset


# --- output -----------------------------------------------------------------------------------------------------------


def write_output(job: GenerateJob, translations: Iterator["Translation"], stack: ExitStack) -> None:
    """Writes the translations and the reports of a job. `stack` closes the files."""
    from nmtkit.translation.lines import GlossaryReport, QualityReport, output_line

    config, report = job.config, None
    out = stack.enter_context(atomic_write(config.output) if config.output else nullcontext(sys.stdout.buffer))
    if job.text.glossary is not None:
        report = stack.enter_context(GlossaryReport(config.glossary_report))
        translations = report.observe(translations)
    if config.quality_report is not None:
        translations = stack.enter_context(QualityReport(config.quality_report)).observe(translations)
    if job.document is not None:
        out.write(job.document.encoded(job.document.render([translation.text for translation in translations])))
    else:
        for translation in translations:
            progress.hide()
            out.write(output_line(translation, config.format, job.search.score_reference) + b"\n")
            out.flush()
    if report is not None:
        tell(report.totals)


# --- translation ------------------------------------------------------------------------------------------------------


def generate(job: GenerateJob) -> None:
    """Translates the text of a job, and writes the translations and the reports."""
    with imports():
        import torch

        from nmtkit.jobs import openmp
        from nmtkit.jobs.distributed import process_group, rank_device

    config = job.config
    device = rank_device(job.devices.named_device, config.workers)
    threads = 1 if config.workers > 1 else job.devices.threads
    if threads is not None:
        torch.set_num_threads(threads)
    if config.workers == 1:
        openmp.start()
    if job.bulk.output_dir is not None:
        generate_shards(job, device)
        return
    with ExitStack() as stack:
        ranks = stack.enter_context(process_group())
        generation = Generation(job, device, ranks, stack)  # keeps its decoder until the ranks have finished
        if is_dialogue(job):
            progress.close()
        translations = generation.translations()
        if translations is not None:
            write_output(job, translations, stack)


def is_dialogue(job: GenerateJob) -> bool:
    """Returns whether a person seems to type the lines.

    This is true if stdin is a terminal. This is also true if stdin is a pipe (or a file that is too large to count its
    lines) and stdout is a terminal.
    """
    if job.data is not None or job.document is not None or job.files or sys.stdin is None:
        return False
    return sys.stdin.isatty() or (sys.stdout.isatty() and count_lines_ahead(standard_input()) is None)


def generate_shards(job: GenerateJob, device: str) -> None:
    """Translates the unfinished shards of the files, and warns if many lines have several sentences."""
    from nmtkit.cli.shards import run_shards, this_command
    from nmtkit.translation.shards import ShardedTranslation, TranslationSettings

    config, bulk, text = job.config, job.bulk, job.text
    if bulk.executor == "ray":
        device = "cuda" if bulk.actor_gpus else "cpu"
    workers, batches = (config.workers, 1) if job.has_own_processes else (1, config.workers)
    settings = TranslationSettings(
        models=job.paths, texts=[job.files[0], *config.line_files.values()], fields=list(config.line_files),
        format=config.format, device=device, devices=job.devices, translator=job.options, search=job.search, text=text,
        source_tag=config.source_tag, processes=batches, plugins=job.plugins,
    )  # fmt: skip
    languages = None if config.input_format else languages_of_input(config, job.search, job.paths[0])
    translation = ShardedTranslation(bulk, settings, job.files, languages, config.both_columns, workers, this_command())
    run_shards(bulk, translation.plan, translation.run)
    counts = translation.counts()
    tell_of_loops(counts["loops"], counts["lines"])
    plain = text.split_sentences is None and not job.search.score_reference
    if plain and counts["several sentences"] >= MANY_LINES * counts["lines"]:
        warn_of_several_sentences(counts["several sentences"], counts["lines"], "lines")


def load_translator(
    paths: Sequence[Path], device: str, devices: "DeviceOptions", workers: int, options: "TranslatorOptions"
) -> "Translator":
    """Loads the models of a job."""
    from nmtkit.models.building import check_translation_models
    from nmtkit.translation.translator import Translator

    settings = dataclasses.asdict(options)
    translator = Translator.load(paths, device, devices.precision, devices.engine, workers, **settings)
    check_translation_models(paths, translator.originals)
    return translator


class Generation:
    """Translates the text of a job with `ranks` processes of torchrun, or with the workers of this process.

    `stack` ends the workers.
    """

    def __init__(self, job: GenerateJob, device: str, ranks: int, stack: ExitStack) -> None:
        with imports():
            from nmtkit.translation.translator import WINDOW

        self.job, self.config, self.device, self.ranks, self.stack = job, job.config, device, ranks, stack
        self.search, self.text, self.window = job.search, job.text, WINDOW * ranks
        self.processes = max(ranks, job.config.workers)
        self.decoder: BatchDecoder | None = None
        self.translator = self.load(job.paths)
        # the translator of the first step of --pivot, which reads the sources
        self.first = self.translator if job.config.pivot_path is None else self.load([job.config.pivot_path])
        self.dataset = None if job.data is None else open_dataset(job.data, self.first)
        if self.dataset is not None:
            self.search = dataclasses.replace(
                self.search,
                source_lang=self.search.source_lang or self.dataset.source_language,
                target_lang=self.search.target_lang or self.dataset.target_language,
            )

    def load(self, paths: Sequence[Path]) -> "Translator":
        return load_translator(paths, self.device, self.job.devices, self.config.workers, self.job.options)

    def translations(self) -> Iterator["Translation"] | None:
        """Returns the translations in order. Ranks other than 0 translate for rank 0, and then return None."""
        if self.config.pivot is not None:
            return self.counted(self.through_pivot(self.config.pivot))
        if self.dataset is not None and self.dataset.directions:
            return self.of_directions(self.dataset)
        if self.prompts:
            return self.typed()
        pipeline = self.translator.pipeline(self.search, self.text, self.config.source_tag)
        if not self.decodes(pipeline):
            return None
        self.check_lines(pipeline)
        requests = self.requests()
        return self.counted(self.translator.run(requests, pipeline, self.decoder, self.processes))

    def counted(self, translations: Iterable["Translation"]) -> Iterator["Translation"]:
        """Yields translations, and shows their progress. Warns if many lines look like several sentences."""
        several = count = loops = 0
        plain = self.dataset is None and self.job.document is None and self.text.split_sentences is None
        progress.begin("Translating", "lines", self.total_lines, 1 if self.config.pivot is None else 2)
        for translation in translations:
            yield translation
            count += 1
            several += plain and has_several(translation.source)
            loops += translation.decoded_again
        tell_of_loops(loops, count)
        if not self.search.score_reference and several >= MANY_LINES * count:
            warn_of_several_sentences(several, count, "lines")

    def total_lines(self) -> int | None:
        """Returns the number of lines to translate, or None if counting is not cheap."""
        job, config = self.job, self.config
        if self.dataset is not None:
            return len(self.dataset[config.gen_subset])
        if job.document is not None:
            return len(job.document.segments)
        if config.input_format is None and any(corpus_format(path) is not None for path in job.files):
            return None
        return count_lines(job.files) if job.files else count_lines_ahead(standard_input())

    def through_pivot(self, pivot: str) -> Iterator["Translation"]:
        """Translates through the language `pivot`. Raises ValueError for several directions and for several ranks."""
        from nmtkit.translation.pivot import PivotTranslator

        if self.dataset is not None and self.dataset.directions:
            raise ValueError(
                f"--pivot does not translate {self.job.data}, a dataset of many directions; give --input FILE"
            )
        if self.ranks > 1:
            raise ValueError("--pivot runs in one process or with --workers; leave torchrun out")
        both = PivotTranslator(self.first, self.translator, pivot, self.search, self.text)
        requests = self.requests()
        self.check_lines(both.pipelines[1])
        decoders = [self.workers(translator, pipeline) for translator, pipeline in both.steps]
        return both.run(requests, decoders, self.config.workers)

    def of_directions(self, dataset: "Dataset") -> Iterator["Translation"] | None:
        """Translates the subset --gen-subset of a dataset with many directions (language pairs).

        Under torchrun, rank 0 returns the translations; the other ranks work for rank 0 and return None.
        """
        from nmtkit.translation.directions import DirectionsTranslator

        subset, tag = dataset[self.config.gen_subset], self.config.source_tag
        many = DirectionsTranslator(self.translator, subset, self.search, self.text, tag, self.window)
        pipeline = many.pipelines[0]
        if not self.decodes(pipeline):
            return None
        requests = self.with_line_files(many.requests(self.search.score_reference))
        return self.counted(many.run(requests, self.decoder, self.processes))

    @property
    def prompts(self) -> bool:
        """Whether the text is typed at a terminal, line by line."""
        has_input = bool(self.dataset or self.job.document or self.job.files)
        return self.ranks == 1 and is_typed(self.config, has_input)

    def typed(self) -> Iterator["Translation"]:
        """Translates the lines that are typed."""
        from nmtkit.cli.prompt import typed_translations

        pipeline = self.translator.pipeline(self.search, self.text, self.config.source_tag)
        return typed_translations(self.translator, pipeline)

    def requests(self) -> Iterator[list["Request"]]:
        """Returns the lines to translate, in lists of at most `window` lines.

        In a corpus with several columns, the source language of the model chooses the column.
        """
        from nmtkit.translation import lines

        job, config, scored = self.job, self.config, self.search.score_reference
        requests: Iterable[list[Request]]
        if self.dataset is not None:
            requests = lines.dataset_requests(self.dataset[config.gen_subset], self.window, scored)
        elif job.document is not None:
            requests = lines.segment_requests(job.document.segments, self.window)
        else:
            stream = None if job.files else standard_input()
            languages = None if config.input_format else languages_of_input(config, self.search, job.paths[0])
            requests = lines.text_requests(job.files, stream, self.window, languages, config.both_columns)
        return self.with_line_files(requests)

    def check_lines(self, pipeline: "Pipeline") -> None:
        """Checks the constraints and references of all lines before the first batch.

        Lines of a stream cannot be read twice, so `Pipeline.segments` checks these lines, window by window.
        """
        files = [*self.job.files, *self.config.line_files.values()]
        stream = self.dataset is None and not self.job.files
        if stream or not all(map(Path.is_file, files)) or not (self.config.line_files or self.search.score_reference):
            return
        pipeline.check_all(self.requests())

    def with_line_files(self, requests: Iterable[list["Request"]]) -> Iterator[list["Request"]]:
        from nmtkit.translation.lines import with_fields

        return with_fields(requests, self.config.line_files)

    def decodes(self, pipeline: "Pipeline") -> bool:
        """Starts the decoder of the workers or ranks, and returns True.

        Ranks other than 0 decode for rank 0, and then return False.
        """
        from nmtkit.translation.parallel import distribute

        self.decoder = self.workers(self.translator, pipeline) or self.stack.enter_context(
            distribute(self.translator.batch_decoder(pipeline.search))
        )
        return self.decoder is not None

    def workers(self, translator: "Translator", pipeline: "Pipeline") -> "BatchDecoder | None":
        """Returns a decoder with the --workers processes, or None if the job has no such processes."""
        from nmtkit.translation.parallel import worker_processes

        job, count = self.job, self.config.workers
        if not job.has_own_processes:
            return None
        load = partial(load_translator, translator.paths, self.device, job.devices, count, job.options)
        return self.stack.enter_context(worker_processes(translator, pipeline.search, count, load))
