"""Translates shards of a text: the worker of `generate --output-dir`."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from nmtkit.config.plugins import load_plugins
from nmtkit.data.corpora.lines import LineDecoder
from nmtkit.jobs.shard_plan import Shard
from nmtkit.models.building import check_translation_models
from nmtkit.text.sentences import has_several
from nmtkit.translation.inputs import field_value
from nmtkit.translation.options import DeviceOptions, TextOptions, TranslatorOptions
from nmtkit.translation.output_lines import output_line
from nmtkit.translation.requests import Request
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.translator import WINDOW, Translator


@dataclass(frozen=True, kw_only=True)
class TranslationJob:
    """The settings of a translation in shards. A job can be sent to other machines.

    `texts` are the parallel text files: the input, then a file for each of the request fields in `fields`.
    """

    models: Sequence[Path]
    texts: Sequence[Path]
    fields: Sequence[str]
    format: str
    device: str
    devices: DeviceOptions
    translator: TranslatorOptions
    search: SearchOptions
    text: TextOptions
    source_tag: str | None
    processes: int  # number of batches that CTranslate2 decodes at the same time
    plugins: Sequence[str] = ()
    processors: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> "ShardTranslator":
        """Loads the model. Raises OSError or ValueError if the files or the settings cannot be used."""
        load_plugins(self.plugins)
        translator = Translator.load(
            self.models, self.device, self.devices.precision, self.devices.engine, self.processes,
            **dataclasses.asdict(self.translator),
        )  # fmt: skip
        check_translation_models(self.models, translator.models)
        translator.processor_configs = dict(self.processors)
        return ShardTranslator(self, translator)

    def load_with_threads(self, threads: int) -> "ShardTranslator":
        """Loads the model in a new process, which computes with `threads` threads."""
        torch.set_num_threads(threads)
        return self.load()


class ShardTranslator:
    """Translates shards with one model. Lines are numbered from the beginning of the whole text, not of the shard.

    Random samples and the `id`s of the output depend on these numbers.
    """

    def __init__(self, job: TranslationJob, translator: Translator) -> None:
        self.job, self.translator = job, translator
        self.pipeline = translator.pipeline(job.search, job.text, job.source_tag)
        translator.processors(job.search)  # loads the files of the processors now, so errors come before the plan

    def output(self, shard: Shard, counts: Counter[str]) -> Iterator[bytes]:
        """Yields the output line of each line of a shard, with its \\n.

        Adds to `counts` the lines with several sentences, and the removed carriage returns and byte-order marks.
        """
        job = self.job
        requests = self._requests(shard, counts)
        decoder = self.translator.batch_decoder(self.pipeline.search)
        translations = self.translator.run(requests, self.pipeline, decoder, job.processes, first=shard.first)
        written = 0
        for translation in translations:
            yield output_line(translation, job.format, job.search.score_reference) + b"\n"
            written += 1
        assert written == shard.lines, f"{written} lines of {shard}"

    def _requests(self, shard: Shard, counts: Counter[str]) -> Iterator[list[Request]]:
        names = ("source", *self.job.fields)
        decoders = [LineDecoder(path, shard.first + 1) for path in self.job.texts]
        columns = zip(
            *(
                _windows(path, start, shard.lines, decoder)
                for path, start, decoder in zip(self.job.texts, shard.starts, decoders, strict=True)
            ),
            strict=True,
        )
        for column in columns:
            counts["several sentences"] += sum(map(has_several, column[0]))
            yield [
                Request(**{name: field_value(name, value) for name, value in zip(names, row, strict=True)})
                for row in zip(*column, strict=True)
            ]
        for name, decoder in zip(names, decoders, strict=True):
            counts[f"carriage returns of {name}"] += decoder.carriage_returns
            counts[f"byte-order marks of {name}"] += decoder.has_byte_order_mark


def _windows(path: Path, start: int, lines: int, decoder: LineDecoder) -> Iterator[list[str]]:
    """Yields `lines` lines of a file in windows of WINDOW lines. The first line begins at byte `start` of the file."""
    with path.open("rb") as file:
        file.seek(start)
        for done in range(0, lines, WINDOW):
            raw = list(islice(file, min(WINDOW, lines - done)))
            if len(raw) < min(WINDOW, lines - done):
                raise ValueError(f"{path} became shorter while it was read")
            yield decoder.lines(b"".join(raw))
