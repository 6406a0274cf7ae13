"""`nmtkit fetch`: writes a corpus that has a name, such as opus:Books, as two text files with their provenance."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nmtkit.config import Config, option, suggestion
from nmtkit.config.files import atomic_write
from nmtkit.data.corpora.compression import COMPRESSIONS, compressed, is_compressed
from nmtkit.data.corpora.corpus import Pairs, as_columns
from nmtkit.data.corpora.provenance import read_provenance, write_provenance
from nmtkit.data.corpora.writer import CorpusWriter, output_paths
from nmtkit.data.fetch import hub_datasets, opus, sacrebleu_sets
from nmtkit.data.fetch.downloads import HttpClient
from nmtkit.data.fetch.text import FetchedText
from nmtkit.jobs import progress
from nmtkit.text.languages import is_code

EXAMPLES = {"opus": "opus:Books", "sacrebleu": "sacrebleu:wmt14/full", "hf": "hf:Helsinki-NLP/opus_books:de-en"}
OPUS_NAME = re.compile(r"(?P<corpus>\w[\w.+-]*)(?:/(?P<version>\w[\w.+-]*))?")

log = logging.getLogger("nmtkit")


@dataclass(frozen=True, kw_only=True)
class FetchConfig(Config):
    """Settings of `nmtkit fetch`."""

    source_lang: str = option(..., "source language, such as en", flag="-s/--source-lang", metavar="LANG")
    target_lang: str = option(..., "target language, such as de", flag="-t/--target-lang", metavar="LANG")
    output: Path = option(Path("."), "folder for the corpora", flag="-o/--output", metavar="DIR")
    max_lines: int | None = option(None, "write only the first N pairs", min=1)
    columns: tuple[str, ...] = option(
        (),
        "source and target column of a dataset of Hugging Face: names, or numbers from 1; none means columns named "
        "after the languages",
        metavar="SOURCE,TARGET",
    )
    compress: Literal["gz", "bz2", "xz", "zst"] | None = option(None, "compress the text files")
    overwrite: bool = option(False, "fetch corpora again, and replace their files")

    def __post_init__(self) -> None:
        super().__post_init__()
        as_columns(self.columns)
        for flag, code in (("--source-lang", self.source_lang), ("--target-lang", self.target_lang)):
            if not is_code(code):
                raise ValueError(f"{flag} {code!r} is not a language code such as en, pt-BR or eng_Latn")
        if self.source_lang == self.target_lang:
            raise ValueError(f"--source-lang and --target-lang are both {self.source_lang}")

    @property
    def languages(self) -> tuple[str, str]:
        return self.source_lang, self.target_lang


class CorpusName(NamedTuple):
    """A name such as opus:Books/v1: the source, and the name of a corpus in this source. "" means all corpora."""

    source: str
    corpus: str

    def __str__(self) -> str:
        return f"{self.source}:{self.corpus}"

    def prefix(self, config: FetchConfig) -> Path:
        """Returns the prefix of the files: data/Books-v1.en-de for opus:Books/v1."""
        name = self.corpus
        if self.source == "hf":
            parsed = hub_datasets.parsed(name)
            parts = parsed.repository.rpartition("/")[2], parsed.config, parsed.split
            name = "-".join(part for part in parts if part is not None)
        name = re.sub(r"[^\w.+]+", "-", name)
        return config.output / f"{name}.{'-'.join(config.languages)}"


def parse_name(text: str) -> CorpusName:
    """Parses a name such as opus:Books/v1. Raises ValueError for an unknown source or a malformed name."""
    source, colon, corpus = text.partition(":")
    if not colon or source not in EXAMPLES:
        known = ", ".join(EXAMPLES.values())
        near = suggestion(source, EXAMPLES) if colon else f"a name begins with {', '.join(f'{s}:' for s in EXAMPLES)}"
        raise ValueError(f"{text!r} is not the name of a corpus: {near}. Examples: {known}")
    if source == "hf":
        if not corpus:
            raise ValueError(f"the datasets of Hugging Face cannot be listed; give a name such as {EXAMPLES['hf']}")
        hub_datasets.parsed(corpus)
    elif source == "opus" and corpus and not OPUS_NAME.fullmatch(corpus):
        raise ValueError(f"{text!r} is not a name of the form opus:CORPUS[/VERSION]")
    return CorpusName(source, corpus)


@dataclass(frozen=True)
class FetchedCorpus:
    """A complete corpus: its prefix, and its provenance. `is_new` is false if the corpus existed before."""

    prefix: Path
    facts: dict[str, Any]
    is_new: bool


def fetch(name: CorpusName, config: FetchConfig, client: HttpClient) -> FetchedCorpus:
    """Writes a corpus and its provenance, completely or not at all.

    A complete corpus is not downloaded again. Raises ValueError or OSError for a name that does not exist, a failed
    download, and existing files that are not this corpus.
    """
    prefix = name.prefix(config)
    ending = "" if config.compress is None else f".{config.compress}"
    paths = output_paths(f"{prefix}{ending}", config.languages)
    wanted = {"name": str(name), "languages": list(config.languages), "max_lines": config.max_lines,
              "columns": list(config.columns) or None}  # fmt: skip
    if (facts := existing(paths, wanted, config.overwrite)) is not None:
        return FetchedCorpus(prefix, facts, is_new=False)
    config.output.mkdir(parents=True, exist_ok=True)
    with opened(name, config, prefix, client) as text:
        progress.begin(f"Writing {prefix.name}", "pairs", config.max_lines)
        count = 0
        references = {  # further references of a test set: set.en-de.ref2.de, and so on
            Path(f"{prefix}.ref{number}.{config.target_lang}{ending}"): lines
            for number, lines in enumerate(text.references, 2)
        }
        existing(list(references), wanted, config.overwrite)
        with CorpusWriter(f"{prefix}{ending}", config.languages) as writer:
            for part in text.pairs:
                kept = len(part) if config.max_lines is None else min(len(part), config.max_lines - count)
                writer.write(Pairs(part.sources[:kept], part.targets[:kept], [{}] * kept, part.first))
                count += kept
                progress.advance(kept)
                if count == config.max_lines:
                    break
            if not count:
                raise ValueError(f"{name} has no pairs")
        facts = {**wanted, **text.facts, "pairs": count, "fetched": datetime.now(UTC).isoformat(timespec="seconds")}
        if references:
            facts["references"] = list(map(str, references))
        for path, lines in references.items():
            with atomic_write(path) as raw, compressed(raw, path) as file:
                file.write("".join(line + "\n" for line in lines[:count]).encode())
    write_provenance(paths, facts)
    return FetchedCorpus(prefix, facts, is_new=True)


def existing(paths: Sequence[Path], wanted: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """Returns the provenance of a complete corpus that was fetched with the same settings.

    Returns None if no file exists or `overwrite` is set. Raises ValueError if the files are incomplete or were fetched
    with other settings, and if the same text exists with a different compression.
    """
    for path in paths:
        plain = path.with_suffix("") if is_compressed(path) else path
        for other in (plain, *(Path(f"{plain}{suffix}") for suffix in COMPRESSIONS)):
            if other not in paths and other.exists():
                raise ValueError(f"{other} exists, so {path} would be a second file of this text; remove the old file")
    present = [path for path in paths if path.exists()]
    if not present or overwrite:
        return None
    facts = read_provenance(paths) if len(present) == len(paths) else None
    if facts is None:
        raise ValueError(
            f"{present[0]} exists, but is not a completely fetched corpus; give --overwrite or another --output"
        )
    references = [paths[0].with_name(Path(name).name) for name in facts.get("references", ())]
    if missing := [path for path in references if not path.exists()]:
        raise ValueError(f"{missing[0]}, a reference of {present[0]}, is missing; give --overwrite to fetch it again")
    for key, value in wanted.items():
        if facts.get(key) != value:
            raise ValueError(
                f"{present[0]} was fetched with {key} {facts.get(key)}, not {value}; give --overwrite or a new --output"
            )
    return facts


def opened(
    name: CorpusName, config: FetchConfig, prefix: Path, client: HttpClient
) -> AbstractContextManager[FetchedText]:
    """Returns a context with the pairs of a corpus."""
    if name.source == "opus":
        match = OPUS_NAME.fullmatch(name.corpus)
        assert match is not None
        archive = prefix.with_name(f".{prefix.name}.zip")
        return opus.opened(match["corpus"], match["version"], config.languages, archive, client)
    if name.source == "hf":
        return hub_datasets.opened(hub_datasets.parsed(name.corpus), config.languages, as_columns(config.columns))
    return published(name.corpus, config.languages, client)


@contextmanager
def published(name: str, languages: tuple[str, str], client: HttpClient) -> Iterator[FetchedText]:
    """Yields the texts of a published test set, such as wmt14/full. Downloads the set if it is missing."""
    pair = sacrebleu_sets.pair_of_languages([name], *languages)
    texts = sacrebleu_sets.read_sets([name], pair, client)
    facts = {
        "source": "sacreBLEU", "corpus": name, "pair": pair, "url": list(texts.downloads),
        "citation": sacrebleu_sets.known_sets()[name].citation,
    }  # fmt: skip
    first, *others = texts.references
    yield FetchedText(pairs=iter([Pairs(texts.sources, first, [])]), facts=facts, references=others)


def listing(source: str, config: FetchConfig, client: HttpClient) -> list[str]:
    """Returns a line of text for each corpus of a source that has the languages of `config`."""
    if source == "sacrebleu":
        sets = sacrebleu_sets.sets_of_languages(*config.languages)
        return aligned([(f"sacrebleu:{name}", text) for name, text in sets])
    found, variants = opus.listed(config.languages, client)
    if variants:
        log.info("OPUS has more corpora in %s; give one of these codes to list them", ", ".join(variants))
    return aligned(
        [
            (f"opus:{each.corpus}/{each.version}", f"{each.pairs:>13,} pairs  {size(each.kilobytes):>9}")
            for each in found
        ]
    )


def aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name.ljust(width)}  {text}".rstrip() for name, text in rows]


def size(kilobytes: int) -> str:
    """Returns a size in KiB, the unit of OPUS, as text in B, KB, MB, GB or TB."""
    count = float(kilobytes * 1024)
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.5:  # the format writes 999.5 as 1e+03
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
