"""Runs a job of `nmtkit generate`: in shards, or in this process and its workers."""

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nmtkit.cli import imports
from nmtkit.cli.command import standard_input
from nmtkit.cli.generate_config import GenerateJob
from nmtkit.cli.generate_input import (
    MANY_LINES,
    languages_of_input,
    noticing_sentences,
    open_dataset,
    warn_of_several_sentences,
)
from nmtkit.cli.generate_output import counted, write_output

if TYPE_CHECKING:
    from nmtkit.data.dataset.binarized import Dataset
    from nmtkit.translation.options import DeviceOptions, TranslatorOptions
    from nmtkit.translation.pipeline import Pipeline
    from nmtkit.translation.search.types import BatchDecoder, Request, Translation
    from nmtkit.translation.translator import Translator


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
        translations = generation.translations()
        if translations is not None:
            write_output(job, translations, stack)


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
    languages = None if config.input_format else languages_of_input(job.search, job.paths[0])
    translation = ShardedTranslation(bulk, settings, job.files, languages, config.both_columns, workers, this_command())
    run_shards(bulk, translation.plan, translation.run)
    counts = translation.counts()
    if text.split_sentences is None and counts["several sentences"] >= MANY_LINES * counts["lines"]:
        warn_of_several_sentences(counts["several sentences"], counts["lines"], "lines")


def load_translator(
    paths: Sequence[Path], device: str, devices: "DeviceOptions", workers: int, options: "TranslatorOptions"
) -> "Translator":
    """Loads the models of a job."""
    from nmtkit.models.building import check_translation_models
    from nmtkit.translation.translator import Translator

    settings = dataclasses.asdict(options)
    translator = Translator.load(paths, device, devices.precision, devices.engine, workers, **settings)
    check_translation_models(paths, translator.models)
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
        self.dataset = None if job.data is None else open_dataset(job.data, self.translator, job.paths[0])
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
            return counted(self.through_pivot(self.config.pivot))
        if self.dataset is not None and self.dataset.directions:
            return self.of_directions(self.dataset)
        if self.prompts:
            return self.typed()
        pipeline = self.translator.pipeline(self.search, self.text, self.config.source_tag)
        if not self.decodes(pipeline):
            return None
        requests = self.requests(self.job.paths[0])
        return counted(self.translator.run(requests, pipeline, self.decoder, self.processes))

    def through_pivot(self, pivot: str) -> Iterator["Translation"]:
        """Translates through the language `pivot`. Raises ValueError for many directions and for several ranks."""
        from nmtkit.translation.pivot import PivotTranslator

        if self.dataset is not None and self.dataset.directions:
            raise ValueError(
                f"--pivot does not translate {self.job.data}, a dataset of many directions; give --input FILE"
            )
        if self.ranks > 1:
            raise ValueError("--pivot runs in one process or with --workers; leave torchrun out")
        path = self.config.pivot_path
        first = self.translator if path is None else self.load([path])
        both = PivotTranslator(first, self.translator, pivot, self.search, self.text)
        requests = self.requests(path or self.job.paths[0])
        decoders = [self.workers(translator, pipeline) for translator, pipeline in both.steps]
        return both.run(requests, decoders, self.config.workers)

    def of_directions(self, dataset: "Dataset") -> Iterator["Translation"] | None:
        """Translates a subset of a dataset of many directions."""
        from nmtkit.translation.directions import DirectionsTranslator

        subset, tag = dataset[self.config.gen_subset], self.config.source_tag
        many = DirectionsTranslator(self.translator, subset, self.search, self.text, tag, self.window)
        pipeline = many.pipelines[0]
        if not self.decodes(pipeline):
            return None
        requests = self.with_line_files(many.requests(self.search.score_reference))
        return counted(many.run(requests, self.decoder, self.processes))

    @property
    def prompts(self) -> bool:
        """Whether the text is typed at a terminal, line by line."""
        job, at_terminal = self.job, sys.stdin is not None and sys.stdin.isatty()
        has_input = self.dataset or job.document or job.files or self.config.line_files
        return at_terminal and self.ranks == 1 and not (has_input or self.config.output)

    def typed(self) -> Iterator["Translation"]:
        """Translates the lines that are typed. Text output shows the alignments, too."""
        from nmtkit.cli.prompt import typed_translations

        search = self.search
        if self.config.format == "text" and not self.text.active:
            search = dataclasses.replace(search, alignment="hard")
        return typed_translations(self.translator, self.translator.pipeline(search, self.text, self.config.source_tag))

    def requests(self, checkpoint: Path) -> Iterator[list["Request"]]:
        """Returns the text in windows. The source language of `checkpoint` chooses the column of a corpus."""
        from nmtkit.translation import inputs

        job, config, scored = self.job, self.config, self.search.score_reference
        requests: Iterable[list[Request]]
        if self.dataset is not None:
            requests = inputs.dataset_requests(self.dataset[config.gen_subset], self.window, scored)
        elif job.document is not None:
            requests = inputs.segment_requests(job.document.segments, self.window)
        else:
            stream = None if job.files else standard_input()
            languages = None if config.input_format else languages_of_input(self.search, checkpoint)
            requests = inputs.text_requests(job.files, stream, self.window, languages, config.both_columns)
            if self.text.split_sentences is None and not scored:
                requests = noticing_sentences(requests)
        return self.with_line_files(requests)

    def with_line_files(self, requests: Iterable[list["Request"]]) -> Iterator[list["Request"]]:
        from nmtkit.translation.inputs import with_fields

        return with_fields(requests, self.config.line_files)

    def decodes(self, pipeline: "Pipeline") -> bool:
        """Starts the decoder of the workers or of all ranks. On ranks other than 0, decodes and returns False."""
        from nmtkit.translation.parallel import distribute

        decoder = self.workers(self.translator, pipeline)
        self.decoder = decoder or distribute(self.translator.batch_decoder(pipeline.search))
        return self.decoder is not None

    def workers(self, translator: "Translator", pipeline: "Pipeline") -> "BatchDecoder | None":
        """Returns a decoder with the --workers processes, if the job has them."""
        from nmtkit.translation.parallel import worker_processes

        job, count = self.job, self.config.workers
        if not job.has_own_processes:
            return None
        load = partial(load_translator, translator.paths, self.device, job.devices, count, job.options)
        return self.stack.enter_context(worker_processes(translator, pipeline.search, count, load))
