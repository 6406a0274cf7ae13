"""Settings of `nmtkit serve`, and the search and text options that are flags of the server."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmtkit.config import Config, FlagRule, option
from nmtkit.config.files import checkpoint_of, listed_lines, located_in
from nmtkit.jobs.threads import usable_cores
from nmtkit.translation.options import GLOSSARY_RULE, PIVOT_RULE, DeviceOptions, TextOptions, TranslatorOptions
from nmtkit.translation.search.options import CTRANSLATE2_RULE, SEARCH_RULES, SearchOptions

CPU_MAX_TOKENS = 1024  # default of --max-tokens on a CPU; small, because new requests wait for the running batch

# Fields of SearchOptions that are flags of the server. They apply to all requests.
SEARCH_FIELDS = (
    *("beam", "lenpen", "max_len_a", "max_len_b", "min_len", "no_repeat_ngram", "diverse_groups", "diversity"),
    *("unkpen", "replace_unknown", "keep_loops", "shortlist", "logits_processors"),
)

# Fields of TextOptions that are not flags here: a request sets `markup`. The switch --split-sentences of `ServeConfig`
# sets `split_sentences` to the source language of each pair.
OWN_TEXT_FIELDS = ("markup", "split_sentences")

RULES = (
    *(rule for rule in SEARCH_RULES if rule.flag == "--diversity"),
    CTRANSLATE2_RULE,
    GLOSSARY_RULE,
    PIVOT_RULE,
    FlagRule("--workers", excludes=("--threads",), reason="every worker has one thread"),
)

FORMALITY_TAGS = {"more": "<formal>", "less": "<informal>"}  # DeepL's values -> tags before the source
WEBLATE_PLACEHOLDER = re.compile(r"\[X[0-9]{1,9}X\]")  # stands for a variable in the texts that Weblate sends

_PAIR = re.compile(r"([A-Za-z]\w*)-([A-Za-z]\w*)")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Config):
    """Address, processes and limits of the server."""

    models: Path | None = option(
        None,
        "file with a checkpoint per line, each written like the argument of --path; when the file changes, the server "
        "loads and drops models without a restart",
        metavar="FILE",
        access="read",
    )
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 listens on all networks", metavar="ADDRESS")
    port: int = option(5000, "port to listen on; 0 chooses a free port", min=0, max=65_535)
    workers: int | None = option(
        None,
        "number of worker processes on a CPU, each with one thread; default: one per core, or a single "
        "worker with --threads",
        min=1,
        max=1024,
    )
    char_limit: int = option(100_000, "maximum characters of a request; longer requests are refused", min=1, max=10**9)
    batch_limit: int = option(
        1000, "maximum lines of a request, in all texts together; longer requests are refused", min=1, max=10**7
    )
    max_queue: int = option(
        10_000,
        "maximum waiting lines in each of two queues, for large and for small requests; a request that would exceed "
        "this number gets status 429, unless its queue is empty",
        min=1,
        max=10**8,
    )
    timeout: float = option(60.0, "maximum seconds of a request, including its upload", above=0, max=86_400)
    api_keys: Path | None = option(
        None,
        "file of API keys, one per line, optionally with quotas such as characters=500000/month; requests must then "
        "contain one of these keys",
        access="read",
    )
    state: Path | None = option(
        None,
        "folder in which the server keeps the counts of API keys and the glossaries of clients; default: both are lost "
        "when the server ends",
        metavar="FOLDER",
    )
    split_sentences: bool = option(
        False,
        "split lines into sentences by the rules of the source language of each pair, and join the translations with "
        "the same white space",
    )
    pivot: str | None = option(
        None,
        "also serve pairs without a trained model, by translating into this language first, and from there into the "
        "target language",
        metavar="CODE",
    )
    disable_web_ui: bool = option(False, "do not serve the translator page at /; the HTTP interface and /docs remain")
    public_url: str | None = option(
        None,
        "address of the server in links, such as https://example.org/translator; default: the Host of each request",
        metavar="URL",
    )
    cors_origin: tuple[str, ...] = option(
        (), "origins whose web pages may read answers, such as https://example.org; * allows all", metavar="URL,…"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.public_url is not None and not re.match(r"https?://[^/\s]+", self.public_url):
            raise ValueError(f"--public-url {self.public_url!r} is not an address such as https://example.org/nmt")

    def listed_models(self) -> list["ModelPath"]:
        """Returns the checkpoints of --models. Relative paths begin at the folder of the file.

        Lines that begin with # are comments. Raises OSError or ValueError if the file does not list checkpoints.
        """
        if self.models is None:
            return []
        lines = listed_lines(self.models, "checkpoint").values()
        return [ModelPath.parse(line, self.models.parent) for line in lines]


@dataclass(frozen=True)
class ModelPath:
    """A checkpoint to serve. `pair` is None if the checkpoint names its languages."""

    path: Path
    pair: tuple[str, str] | None = None

    @staticmethod
    def parse(text: str, folder: Path = Path()) -> "ModelPath":
        """Parses `averaged.pt` or `en-de=averaged.pt`. The path may be the folder of a run.

        Relative paths begin at `folder`.
        """
        name, equals, path = text.partition("=")
        match = _PAIR.fullmatch(name)
        if equals and match:
            return ModelPath(checkpoint_of(Path(located_in(folder, path))), (match[1], match[2]))
        return ModelPath(checkpoint_of(Path(located_in(folder, text))))


@dataclass(frozen=True, kw_only=True)
class ServeJob:
    """The models to load and the options of all requests, from a parsed and checked command.

    The server sends the job to the process that loads the models.
    """

    config: ServeConfig
    paths: Sequence[ModelPath]  # models of --path
    plugins: Sequence[str]
    search: SearchOptions
    devices: DeviceOptions
    translator: TranslatorOptions
    text: TextOptions
    processors: Mapping[str, Mapping[str, Any]]  # settings of the logits processors, by name
    listed: Sequence[ModelPath] = ()  # models of --models

    @property
    def all_paths(self) -> Sequence[ModelPath]:
        return [*self.paths, *self.listed]

    @property
    def worker_count(self) -> int:
        """Number of workers on a CPU: --workers if given, else 1 if --threads is given, else the number of cores."""
        if self.config.workers is not None or self.devices.threads is not None:
            return self.config.workers or 1
        return usable_cores()


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the loaded models, which the process that loads the models sends in answer to a `ServeJob`."""

    pairs: Sequence[tuple[str, str]]
    device: str
    workers: int
    forks: bool  # True: the process that loaded the models forks the workers; False: this process is the only worker
    streams: bool  # whether the worker translates several batches at once
    max_tokens: int  # maximum number of estimated tokens of a batch
    engines: Mapping[str, str]  # `ServedModel.engine` of each pair, such as "en-de"
    waits: bool  # whether PyTorch translates until the search is compiled
    with_formality: Sequence[tuple[str, str]] = ()  # pairs whose model has the tags of FORMALITY_TAGS
    with_glossary: Sequence[tuple[str, str]] = ()  # pairs that can be translated with a glossary of the client

    @property
    def longest(self) -> float:
        """Maximum tokens of a line in a small request. Such a line takes about as long as a full batch of sentences."""
        return max(self.max_tokens, CPU_MAX_TOKENS) / 8

    @property
    def small_request(self) -> float:
        """Maximum tokens of a small request, in all its lines together."""
        return max(self.max_tokens, CPU_MAX_TOKENS) / 2
