"""Settings of `nmtkit generate`, and the checks of their combinations and of their files."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from nmtkit.cli.flags import given_flags
from nmtkit.config import Config, FlagRule, changed_flags, check_flags, flag_of, option
from nmtkit.config.files import check_outputs
from nmtkit.data.corpora.corpus import ColumnNames, as_columns, holds_pairs
from nmtkit.jobs.shard_options import SHARD_RULES, TRANSLATION_RULES, ShardOptions
from nmtkit.text.documents import Document, format_of
from nmtkit.translation.options import GENERATE_RULES, DeviceOptions, TextOptions, TranslatorOptions
from nmtkit.translation.search.options import SearchOptions

# Option that names a file with one line for each input line -> field of the request that receives the line.
LINE_FILES = {"prefix": "prefix", "constraints": "required", "avoid": "avoided", "reference": "reference"}

PROMPT_RULE = FlagRule("--workers", excludes=("typed text",), reason="each line is translated when it is typed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(Config):
    """Settings of `nmtkit generate`, except the settings of the search, the model and the text."""

    gen_subset: str = option("test", "subset of DATA", metavar="NAME")
    test_set: tuple[str, ...] = option(
        (), "translate the source of sacreBLEU's test sets, such as wmt14/full, instead of --input", metavar="NAME,…"
    )
    language_pair: str | None = option(
        None,
        "languages of --test-set, such as en-de; none: the languages of the checkpoint",
        flag="-l/--language-pair",
        metavar="PAIR",
    )
    prefix: Path | None = option(None, "file with the beginning of the translation of each input line", access="read")
    constraints: Path | None = option(
        None, "file with a line for each input line: tab-separated texts to put into the translation", access="read"
    )
    avoid: Path | None = option(
        None, "file with a line for each input line: tab-separated texts to avoid in the translation", access="read"
    )
    reference: Path | None = option(
        None, "file of translations for --score-reference; none: the references of DATA", access="read"
    )
    source_tag: str | None = option(
        None, "symbol of the vocabulary to put before every line, such as <2de>", metavar="TAG"
    )
    pivot: str | None = option(
        None,
        "translate in two steps, through this language: source to pivot, then pivot to target; scores, --nbest and "
        "--logits-processors belong to the second step",
        metavar="CODE",
    )
    pivot_path: Path | None = option(
        None, "checkpoint of the first step of --pivot; none: --path", metavar="RUN|FILE", checkpoint=True
    )
    format: Literal["text", "jsonl"] = option(
        "text", "text: a line for each input line; jsonl: a JSON object for each line, with all --nbest translations"
    )
    input_format: Literal["text", "html", "srt", "vtt", "po", "xliff"] | None = option(
        None,
        "text: translate lines; other formats: translate the text of one document and keep its markup; none: choose "
        "by the extension of --input (.html, .srt, .vtt, .po, .xlf, …)",
    )
    columns: tuple[str, ...] = option(
        (), "source column of .tsv, .jsonl and .parquet files, optionally the target column: names, or numbers from 1",
        metavar="SOURCE[,TARGET]",
    )  # fmt: skip
    output: Path | None = option(
        None, "write to this file instead of standard output; the file is created when the translation is complete",
        metavar="FILE", access="write",
    )  # fmt: skip
    overwrite_translations: bool = option(
        False, "also retranslate the existing translations of a catalogue (PO, XLIFF), except final ones"
    )
    glossary_report: Path | None = option(
        None,
        "write a tab-separated table with the result of each term of --glossary, for each input line",
        metavar="FILE",
        access="write",
    )
    quality_report: Path | None = option(
        None, "write a tab-separated table with the estimated quality of each translation; see --quality",
        metavar="FILE", access="write",
    )  # fmt: skip
    workers: int = option(1, "number of CPU processes with one thread each; one per core is fastest", min=1, max=1024)

    @property
    def both_columns(self) -> ColumnNames | None:
        """The columns of both sides. Only the source is read, so the source column replaces a missing target column."""
        return as_columns(self.columns * 2 if len(self.columns) == 1 else self.columns)

    @property
    def line_files(self) -> dict[str, Path]:
        """The files with a line for each input line, by field of a request."""
        return {field: path for name, field in LINE_FILES.items() if (path := getattr(self, name)) is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateJob:
    """A parsed and checked command: the settings, the checkpoints, and the text to translate.

    The text comes from one of four sources: a subset of `data`, the `document`, the lines of `files`, or else standard
    input.
    """

    data: Path | None
    paths: Sequence[Path]
    files: Sequence[Path]
    document: Document | None
    config: GenerateConfig
    search: SearchOptions
    devices: DeviceOptions
    options: TranslatorOptions
    text: TextOptions
    bulk: ShardOptions
    plugins: Sequence[str]

    @property
    def has_own_processes(self) -> bool:
        """Whether --workers are processes. CTranslate2 uses threads as workers."""
        return self.config.workers > 1 and self.devices.engine != "ctranslate2"


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


def is_typed(config: GenerateConfig, has_input: bool) -> bool:
    """Returns whether lines are typed at a prompt: standard input is a terminal, and no input or output is given."""
    at_terminal = sys.stdin is not None and sys.stdin.isatty()
    return at_terminal and not (has_input or config.line_files or config.output)


def flags_in_effect(search: SearchOptions, devices: DeviceOptions) -> set[str]:
    """Returns the flags of the command line that change something, for `check_flags`.

    A flag of the search is left out if its value is the default.
    """
    search_flags = {flag_of(field) for field in dataclasses.fields(search)}
    return (given_flags() - search_flags) | changed_flags(search) | {f"--engine {devices.engine}"}


def check_combination(
    config: GenerateConfig, search: SearchOptions, devices: DeviceOptions, facts: set[str], has_data: bool
) -> None:
    """Raises ValueError for flags that cannot be combined with each other or with the `facts` about the input."""
    on = flags_in_effect(search, devices) | facts | {f"--format {config.format}"}
    if config.workers == 1:
        on.discard("--workers")
    check_flags((*GENERATE_RULES, *SHARD_RULES, *TRANSLATION_RULES, PROMPT_RULE), given_flags() | facts, on)
    if search.score_reference and has_data == (config.reference is not None):
        raise ValueError("--score-reference needs translations to score: give either DATA or --reference FILE")
    if config.format == "text" and search.nbest > 1 and search.mbr is None:
        raise ValueError("--nbest above 1 needs --format jsonl: text has one translation for each line")
    if config.workers > 1 and devices.device not in ("auto", "cpu"):
        raise ValueError(f"--workers are CPU processes; leave out --device {devices.device}")


def check_reports(config: GenerateConfig, files: Sequence[Path], others: Sequence[Path | None]) -> None:
    """Raises ValueError if an output would overwrite an input: one of `files` (--input) or of `others`.

    Also raises ValueError if --prefix or --reference is a corpus. --output may replace a file of --input, because the
    output is written when the translation is complete.
    """
    for flag, path in {"--prefix": config.prefix, "--reference": config.reference}.items():
        if path is not None and holds_pairs(path):
            raise ValueError(f"{flag} {path} is a corpus; extract the texts of its target side, one on each line")
    reports = {"--glossary-report": config.glossary_report, "--quality-report": config.quality_report}
    check_outputs(reports, [*files, config.output])
    check_outputs({"--output": config.output, **reports}, [*others, *config.line_files.values()])
