"""Parallel text in datasets of the Hugging Face Hub: Parquet, JSON Lines and TSV files.

A dataset has one of these layouts, where CONFIG and SPLIT may be missing or have a different order:

    CONFIG/SPLIT-00000-of-00002.parquet   both texts in a row, perhaps in a column `translation`, as in opus_books
    en-de_DE.jsonl                        both texts in a row, as in wmt24pp; the name of the file is the config
    SPLIT/eng_Latn.parquet                one file for each language, as in FLORES+; rows i of all files belong together
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from nmtkit.config import suggestion
from nmtkit.data import hub
from nmtkit.data.corpora.corpus import ColumnNames, Corpus, Pairs, format_of
from nmtkit.data.corpora.pairs import pairs
from nmtkit.data.corpora.tables import MissingColumnError
from nmtkit.data.fetch.text import FetchedText
from nmtkit.text.languages import best_match, includes, is_code

NAME = re.compile(
    r"(?P<repository>[^/@:]+(?:/[^/@:]+)?)(?:@(?P<revision>refs/(?:pr|convert)/[^/:]+|[^/:]+))?"
    r"(?::(?P<config>\w[\w.+-]*))?(?:/(?P<split>\w[\w.+-]*))?"
)
SPLIT = re.compile(r"(?i)(train|training|valid|validation|val|dev|devtest|test|testing|eval|evaluation)(?![a-z])")
# matches a pair of languages, such as en-de, but not the language zh-TW
PAIR = re.compile(r"([a-z]{2,3}(?:_[A-Za-z]+)*)-([a-z]{2,3}(?:_[A-Za-z]+)*)")
SHARD = re.compile(r"-\d{5}-of-(?P<count>\d{5})(?=\.|$)")
TEXT_COLUMNS = ("text", "sentence")  # columns of files with one language
FORMATS = ("parquet", "jsonl", "tsv")


class DatasetName(NamedTuple):
    """The name hf:ORG/DATASET[@REVISION][:CONFIG][/SPLIT]."""

    repository: str
    revision: str | None
    config: str | None
    split: str | None


class DataFile(NamedTuple):
    """A file of a dataset. `language` is a code if the file has the text of one language, else None."""

    path: str
    config: str | None
    split: str | None
    language: str | None


@dataclass(frozen=True)
class Choice:
    """The files of each side in a config and a split. If a row has both texts, both sides have the same files."""

    config: str | None
    split: str | None
    sides: tuple[tuple[str, ...], tuple[str, ...]]


def parsed(name: str) -> DatasetName:
    """Parses the name of a dataset, without hf:. Raises ValueError if the name is malformed."""
    match = NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"hf:{name} is not a name of the form hf:ORG/DATASET[@REVISION][:CONFIG][/SPLIT]")
    hub.check_name(match["repository"])
    return DatasetName(**match.groupdict())


def described(path: str) -> DataFile | None:
    """Derives the config, split and language of a file from its path. Returns None for an unsupported format."""
    if format_of(Path(path)) not in FORMATS:
        return None
    *folders, name = PurePosixPath(path).parts
    stem = SHARD.sub("", name.partition(".")[0])
    split, language = None, None
    if match := SPLIT.match(stem):
        split = match[1]
    elif PAIR.fullmatch(stem):
        folders.append(stem)
    elif is_code(stem):
        language = stem
    splits = list(filter(SPLIT.fullmatch, folders))
    if split is None and splits:
        split = splits[-1]
        folders.remove(split)
    if split is None and language is None and not stem.isdecimal() and stem not in folders:
        split = stem
    config = "/".join(folder for folder in folders if folder != "data") or None
    return DataFile(path, config, split, language)


def choose(files: Sequence[str], name: DatasetName, languages: tuple[str, str]) -> Choice:
    """Returns the files with the pairs of a dataset.

    Raises ValueError if the config or the split is missing or ambiguous, or if a language or a file is missing.
    """
    known = [each for path in sorted(files) if (each := described(path)) is not None]
    title = f"hf:{name.repository}"
    if not known:
        raise ValueError(
            f"{title} has no {', '.join(FORMATS)} files; it has {', '.join(sorted(files)[:8]) or 'no files'}"
        )
    configs = list(dict.fromkeys(each.config for each in known))
    config = configs[0] if len(configs) == 1 and name.config is None else _config(configs, name, languages, title)
    known = [each for each in known if each.config == config]
    splits = list(dict.fromkeys(each.split for each in known))
    split = splits[0] if len(splits) == 1 and name.split is None else name.split
    if split not in splits:
        texts = [each for each in splits if each is not None]
        if split is not None:
            raise ValueError(f"{title} has no split {split!r}; {suggestion(split, texts)}")
        raise ValueError(f"{title} has several splits; add one of them to the name: /{', /'.join(texts)}")
    known = [each for each in known if each.split == split]
    check_shards([each.path for each in known], title)
    codes = list(dict.fromkeys(each.language for each in known if each.language is not None))
    if not codes:
        paths = tuple(each.path for each in known)
        return Choice(config, split, (paths, paths))
    sides = []
    for language in languages:
        index = best_match(language, codes)
        if index is None:
            raise ValueError(f"{title} has no text in {language!r}; {suggestion(language, codes)}")
        sides.append(tuple(each.path for each in known if each.language == codes[index]))
    return Choice(config, split, (sides[0], sides[1]))


def check_shards(paths: Sequence[str], title: str) -> None:
    """Raises ValueError if a file of a numbered series is missing, such as train-00001-of-00002.parquet."""
    for path in paths:
        if match := SHARD.search(path):
            for number in range(int(match["count"])):
                part = f"{path[: match.start()]}-{number:05}-of-{match['count']}{path[match.end() :]}"
                if part not in paths:
                    raise ValueError(f"{title} lacks {part}, a part of the same series as {path}")


def _config(configs: Sequence[str | None], name: DatasetName, languages: tuple[str, str], title: str) -> str | None:
    """Returns the config in `name`, or else the config that is named after the language pair, such as de-en.

    Without such a config, returns None if some files have no config. Raises ValueError if the config in `name` is
    unknown, or if several configs are possible.
    """
    names = [each for each in configs if each is not None]
    if name.config is not None:
        if name.config not in names:
            raise ValueError(f"{title} has no config {name.config!r}; {suggestion(name.config, names)}")
        return name.config
    source, target = languages
    for config in names:
        if names_languages(config, source, target) or names_languages(config, target, source):
            return config
    if None in configs:
        return None
    raise ValueError(f"{title} has several configs; add one to the name, such as :{names[0]}; {suggestion('', names)}")


def names_languages(config: str | None, first: str, second: str) -> bool:
    """Returns whether a config is named after two languages in this order, such as de-en."""
    match = PAIR.fullmatch((config or "").rpartition("/")[2])
    return match is not None and includes(first, match[1]) and includes(second, match[2])


@contextmanager
def opened(name: DatasetName, languages: tuple[str, str], columns: ColumnNames | None) -> Iterator[FetchedText]:
    """Downloads the files of a dataset to the cache of the Hub, and opens their pairs."""
    listing = hub.listing(name.repository, kind="dataset", revision=name.revision)
    choice = choose(list(listing.hashes), name, languages)
    paths = list(dict.fromkeys(path for side in choice.sides for path in side))
    patterns = [re.sub(r"([*?[])", r"[\1]", path) for path in paths]
    folder = hub.download(name.repository, kind="dataset", revision=listing.commit, patterns=patterns)
    facts = {
        "source": "Hugging Face", "repository": name.repository, "commit": listing.commit, "config": choice.config,
        "split": choice.split, "license": listing.license, "hashes": {path: listing.hashes[path] for path in paths},
    }  # fmt: skip
    sides = [[folder / path for path in side] for side in choice.sides]
    if choice.sides[0] == choice.sides[1]:
        in_order = names_languages(choice.config, *languages)
        exchange = columns is None and not in_order and names_languages(choice.config, *languages[::-1])
        rows = _pairs_of_rows(sides[0], languages, columns, exchange=exchange)
    else:
        rows = _pairs_of_sides(sides, columns)
    yield FetchedText(pairs=rows, facts=facts)


def _pairs_of_rows(
    files: Sequence[Path], languages: tuple[str, str], columns: ColumnNames | None, *, exchange: bool
) -> Iterator[Pairs]:
    """Yields the pairs of files whose rows have both texts.

    With `exchange`, the target is the first text of a row, or in a column such as "source". Columns that are named
    after languages are found by these names.
    """
    first, second = languages[::-1] if exchange else languages
    for path in files:
        for part in pairs(Corpus(path, path, format=format_of(path), languages=(first, second), columns=columns)):
            yield Pairs(part.targets, part.sources, part.extras, part.first) if exchange else part


def _pairs_of_sides(sides: Sequence[Sequence[Path]], columns: ColumnNames | None) -> Iterator[Pairs]:
    """Yields the pairs of texts of two sides. Raises ValueError if the number of rows or an `id` of a row differs."""
    first, second = (_rows(files, None if columns is None else columns[index]) for index, files in enumerate(sides))
    names, number = " and ".join(files[0].name for files in sides), 0
    while window := list(islice(zip_longest(first, second), 1024)):
        for row in window:
            number += 1
            if None in row:
                raise ValueError(f"{names} have different numbers of rows: one of them ends before row {number:,}")
            (_, source_id), (_, target_id) = row
            if source_id != target_id:
                raise ValueError(f"{names}: row {number:,} has different ids, {source_id!r} and {target_id!r}")
        yield Pairs([row[0][0] for row in window], [row[1][0] for row in window], [], number - len(window) + 1)


def _rows(files: Sequence[Path], column: str | None) -> Iterator[tuple[str, object]]:
    """Yields the text and the id of each row. Without `column`, reads the first of TEXT_COLUMNS that exists."""
    columns = TEXT_COLUMNS if column is None else (column,)
    for path in files:
        for text_column in columns:
            corpus = Corpus(path, path, format=format_of(path), columns=(text_column, text_column))
            try:
                for part in pairs(corpus):
                    for text, others in zip(part.sources, part.extras, strict=True):
                        yield text, others.get("id")
                break
            except MissingColumnError:
                if text_column == columns[-1]:
                    raise
