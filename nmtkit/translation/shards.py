"""Translates a text in shards: `generate --output-dir`."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import nmtkit
from nmtkit.config import flag_of
from nmtkit.config.files import atomic_write
from nmtkit.config.plugins import load_plugins, source_digests
from nmtkit.data.corpora.compression import is_compressed
from nmtkit.data.corpora.corpus import ColumnNames, format_of
from nmtkit.data.corpora.lines import LineDecoder
from nmtkit.jobs import distributed, machine_code
from nmtkit.jobs.processes import is_first
from nmtkit.jobs.shard_options import ShardOptions
from nmtkit.jobs.shard_plan import Shard, check_regular, divide, open_plan
from nmtkit.jobs.shard_processes import Factory, ShardResults, shard_processes
from nmtkit.jobs.workers import Shared
from nmtkit.models.building import check_translation_models
from nmtkit.text.sentences import has_several
from nmtkit.translation.engines import AUTO
from nmtkit.translation.lines import field_value, output_line, text_requests, with_fields
from nmtkit.translation.options import DeviceOptions, TextOptions, TranslatorOptions
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Request
from nmtkit.translation.translator import WINDOW, Translator

# settings that do not change the output, and settings whose files or values have their own entries in the fingerprint
ELSEWHERE = ("--max-tokens", "--glossary", "--processor-configs")


@dataclass(frozen=True, kw_only=True)
class TranslationSettings:
    """The settings of a translation in shards. They can be sent to other machines.

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

    def load(self, threads: int | None = None) -> "ShardTranslator":
        """Loads the model. If `threads` is given, torch computes with this number of threads.

        Raises OSError or ValueError if the files or the settings cannot be used.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        load_plugins(self.plugins)
        translator = Translator.load(
            self.models, self.device, self.devices.precision, self.devices.engine, self.processes,
            **dataclasses.asdict(self.translator),
        )  # fmt: skip
        check_translation_models(self.models, translator.originals)
        return ShardTranslator(self, translator)

    def fingerprint(self) -> dict[str, Any]:
        """Returns a dict from flag or name to value, for the settings that can change the translations."""
        parts = self.search, self.text, self.translator
        settings = {flag: value for part in parts for flag, value in by_flag(part).items() if flag not in ELSEWHERE}
        files = self.processor_files()
        processors = {
            name: {flag: value for flag, value in by_flag(config).items() if flag not in files}
            for name, config in self.search.processors.items()
        }
        return settings | {
            "command": "generate", "version of nmtkit": nmtkit.__version__, "--format": self.format,
            "--source-tag": self.source_tag, "device": self.device.partition(":")[0],
            "--precision": self.devices.precision, "--engine": engine_of(self.devices),
            "plug-ins": source_digests(self.plugins), "logits processors": processors,
        }  # fmt: skip

    def processor_files(self) -> dict[str, Path]:
        """Returns a dict from flag to file, for the files that the logits processors read, such as a language model."""
        values = [pair for config in self.search.processors.values() for pair in by_flag(config).items()]
        return {flag: path for flag, path in values if isinstance(path, Path) and not path.is_dir()}


def engine_of(devices: DeviceOptions) -> str:
    """Returns the name of the engine for `fingerprint`. Names are different if translations can be different.

    In int8, the translations of the compiled search and of PyTorch differ, so machines with and without Numba do not
    share a job with --engine auto.
    """
    if devices.engine != AUTO or devices.precision != "int8":
        return devices.engine
    return f"{AUTO}, {'with' if machine_code.installed() else 'without'} numba"


class ShardTranslator:
    """Translates shards with one model. Lines are numbered from the beginning of the whole text, not of the shard.

    Random samples and the `id`s of the output depend on these numbers.
    """

    def __init__(self, settings: TranslationSettings, translator: Translator) -> None:
        self.settings, self.translator = settings, translator
        # created here, so that errors are raised before the plan is made
        self.pipeline = translator.pipeline(settings.search, settings.text, settings.source_tag)
        translator.batch_decoder(settings.search)  # prepares the engine, whose memory forked processes share

    def output(self, shard: Shard, counts: Counter[str]) -> Iterator[bytes]:
        """Yields the output line of each line of a shard, with its \\n.

        Adds to `counts` the lines with several sentences, the lines that were decoded again because of a loop, and the
        removed carriage returns and byte-order marks.
        """
        settings = self.settings
        requests = self._requests(shard, counts)
        decoder = self.translator.decoder.decoder(self.pipeline.search, tell=is_first())
        translations = self.translator.run(requests, self.pipeline, decoder, settings.processes, first=shard.first)
        written = 0
        for translation in translations:
            yield output_line(translation, settings.format, settings.search.score_reference) + b"\n"
            counts["loops"] += translation.decoded_again
            written += 1
        assert written == shard.lines, f"{written} lines of {shard}"

    def _requests(self, shard: Shard, counts: Counter[str]) -> Iterator[list[Request]]:
        names = ("source", *self.settings.fields)
        decoders = [LineDecoder(path, shard.first + 1) for path in self.settings.texts]
        for columns in windows_of_shard(shard, decoders):
            counts["several sentences"] += sum(map(has_several, columns[0]))
            yield [
                Request(**{name: field_value(name, value) for name, value in zip(names, row, strict=True)})
                for row in zip(*columns, strict=True)
            ]
        for name, decoder in zip(names, decoders, strict=True):
            counts[f"carriage returns of {name}"] += decoder.carriage_returns
            counts[f"byte-order marks of {name}"] += decoder.has_byte_order_mark


def windows_of_shard(shard: Shard, decoders: Sequence[LineDecoder]) -> Iterator[tuple[list[str], ...]]:
    """Yields the lines of a shard in windows of at most WINDOW lines.

    A window has one list of lines for each decoder. Each decoder reads a different file, such as the input or the
    prefixes.
    """

    def lines_of(decoder: LineDecoder, start: int) -> Iterator[list[str]]:
        with decoder.path.open("rb") as file:
            file.seek(start)
            for done in range(0, shard.lines, WINDOW):
                raw = list(islice(file, min(WINDOW, shard.lines - done)))
                if len(raw) < min(WINDOW, shard.lines - done):
                    raise ValueError(f"{decoder.path} became shorter while it was read")
                yield decoder.lines(b"".join(raw))

    return zip(*map(lines_of, decoders, shard.starts), strict=True)


class ShardedTranslation:
    """Translates `files` in shards. The constructor reads the plan of the shards in `options.output_dir`, or makes it.

    `settings.texts` has the input and a line file for each field of `settings.fields`. With `languages`, the source
    side of a corpus such as a .tsv is translated, with the given `columns`. Without `languages`, the lines of the file
    are translated. `command` is the command line that makes all shards.

    Raises ValueError in a process of torchrun, and the errors of `TranslationSettings.load` and `open_plan`.
    """

    def __init__(
        self,
        options: ShardOptions,
        settings: TranslationSettings,
        files: Sequence[Path],
        languages: tuple[str | None, str | None] | None,
        columns: ColumnNames | None,
        workers: int,
        command: str,
    ) -> None:
        assert options.output_dir is not None
        folder = options.output_dir
        if distributed.launched():
            raise ValueError(
                "--output-dir and torchrun cannot be combined; start a process for each GPU, with --device cuda:0 "
                "--shard 1/2, --device cuda:1 --shard 2/2, and so on"
            )
        self._processes = shard_processes(options, workers)
        # With Ray, each actor loads the model. Otherwise, errors of the model are raised before the plan is made.
        loaded = settings.load() if options.executor == "local" else None
        line_files = dict(zip(settings.fields, settings.texts[1:], strict=True))
        check_regular((*files, *line_files.values()))
        glossary = settings.text.glossary
        inputs = {
            **numbered("model", settings.models), **numbered("input", files), **line_files,
            **({} if glossary is None else {"glossary": glossary}), **settings.processor_files(),
        }  # fmt: skip
        is_corpus = languages is not None and any(map(format_of, files))
        is_text = len(files) == 1 and not is_compressed(files[0]) and not is_corpus

        def texts(new: bool) -> list[Path]:
            paths = list(files) if is_text else [plain_copy(folder / "input.txt", files, languages, columns, new)]
            for name, path in line_files.items():
                copy = folder / f"{name}.txt"
                paths.append(plain_copy(copy, [path], None, None, new) if is_compressed(path) else path)
            return paths

        def new_shards() -> Sequence[Shard]:
            """Returns the shards of a new job. If the model is loaded, first checks the request fields of all lines."""
            if loaded is not None and line_files:
                requests = text_requests(files, None, WINDOW, languages, columns)
                loaded.pipeline.check_all(with_fields(requests, line_files))
            return divide(texts(True), options.shard_lines)

        self.plan = open_plan(
            folder,
            settings.fingerprint() | {"--columns": columns, "input read as": "a corpus" if is_corpus else "lines"},
            inputs, ".jsonl" if settings.format == "jsonl" else ".txt", options.shard_lines, command, new_shards,
        )  # fmt: skip
        self._texts = texts(False)
        self._fields = settings.fields
        if loaded is not None:
            loaded.settings = dataclasses.replace(settings, texts=self._texts)
            self._factory: Factory = Shared(loaded, loaded.settings.load)
        else:
            models, copies = ([path.absolute() for path in paths] for paths in (settings.models, self._texts))
            self._factory = dataclasses.replace(settings, models=models, texts=copies).load

    def run(self, shards: Sequence[Shard]) -> ShardResults:
        """Translates shards. Yields each finished shard with its record."""
        return self._processes.run(self._factory, self.plan, shards)

    def counts(self) -> Counter[str]:
        """Returns the sums of the counts of all finished shards, and warns of removed characters of the input."""
        counts = self.plan.counts()
        for name, path in zip(("source", *self._fields), self._texts, strict=True):
            LineDecoder(
                path, carriage_returns=counts[f"carriage returns of {name}"],
                has_byte_order_mark=bool(counts[f"byte-order marks of {name}"]),
            ).warn()  # fmt: skip
        return counts


def numbered(name: str, paths: Sequence[Path]) -> dict[str, Path]:
    """Maps names to the paths: `name` if there is one path, otherwise `name` with the numbers 1, 2 and so on."""
    return {name if len(paths) == 1 else f"{name} {number}": path for number, path in enumerate(paths, 1)}


def by_flag(config: Any) -> dict[str, Any]:
    """Returns the settings of a config as a dict from flag to value."""
    return {flag_of(field): getattr(config, field.name) for field in dataclasses.fields(config)}


def plain_copy(
    copy: Path,
    files: Sequence[Path],
    languages: tuple[str | None, str | None] | None,
    columns: ColumnNames | None,
    new: bool,
) -> Path:
    """Writes the lines of `files` to the text file `copy`. If the job is not `new`, keeps an existing copy."""
    if new or not copy.exists():
        with atomic_write(copy) as out:
            for window in text_requests(files, None, WINDOW, languages, columns):
                out.writelines(request.source.encode() + b"\n" for request in window)
    return copy
