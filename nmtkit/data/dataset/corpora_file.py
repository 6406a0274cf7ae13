"""Reads the TOML file of `preprocess --corpora`. Each entry [[corpus]] describes a corpus of the dataset."""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmtkit.config import Config, derive, option, suggestion
from nmtkit.data.directions import MAX_DIRECTIONS, Direction
from nmtkit.text.languages import is_code

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class CorpusEntry(Config):
    """The settings of one entry. Line i of a corpus has the same meaning in all languages."""

    languages: tuple[str, ...] = option(..., "codes of the languages; one code means monolingual text")
    train: tuple[str, ...] = option((), "training corpora: prefixes or files, like --trainpref")
    valid: tuple[str, ...] = option((), "valid sets")
    test: tuple[str, ...] = option((), "test sets")
    directions: tuple[str, ...] = option(
        (), "directions such as en-de; none means all directions between the languages"
    )
    weight: float = option(1.0, "how often an epoch contains each training pair", flag="weight", above=0, max=1_000)
    columns: tuple[str, ...] = option((), "columns of the languages in .tsv, .jsonl and .parquet files")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.languages:
            raise ValueError("languages is empty; give the codes of the languages of the corpus")
        for code in self.languages:
            if not is_code(code):
                raise ValueError(f"languages: {code!r} is not a language code such as en, pt-BR or eng_Latn")
            if self.languages.count(code) > 1:
                raise ValueError(f"languages has {code!r} twice")
        if not any(getattr(self, split) for split in SPLITS):
            raise ValueError(f"no text is given; give {', '.join(SPLITS[:-1])} or {SPLITS[-1]}")
        if self.columns and len(self.columns) != len(self.languages):
            raise ValueError(f"columns has {len(self.columns)} items for {len(self.languages)} languages")
        if self.weight != 1 and not self.train:
            raise ValueError("weight has no effect without train")
        self.directed()

    def directed(self) -> list[tuple[int, int]]:
        """Returns the directions as tuples of two indices into `languages`: source and target.

        Raises ValueError if `directions` contains an impossible direction, or the same direction twice.
        """
        count = range(len(self.languages))
        possible = [(source, target) for source in count for target in count if source != target or len(count) == 1]
        names = [str(Direction(self.languages[source], self.languages[target])) for source, target in possible]
        for name in self.directions:
            if name not in names:
                raise ValueError(f"directions names {name!r}; {suggestion(name, names)}")
            if self.directions.count(name) > 1:
                raise ValueError(f"directions has {name!r} twice")
        return [possible[names.index(name)] for name in self.directions] if self.directions else possible


def read_entries(path: Path) -> list[CorpusEntry]:
    """Reads the entries. Raises FileNotFoundError if the file is missing, and ValueError if an entry is invalid.

    The message names the key and the number of the entry, counted from 1.
    """
    try:
        with path.open("rb") as file:
            tables: dict[str, Any] = tomllib.load(file)
    except FileNotFoundError:
        raise FileNotFoundError(f"--corpora {path}: no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    listed = tables.pop("corpus", None)
    if tables:
        raise ValueError(f"{path} has {next(iter(tables))!r}; describe every corpus in an entry [[corpus]]")
    if not isinstance(listed, list) or not listed or not all(isinstance(entry, dict) for entry in listed):
        raise ValueError(f"{path} has no entry [[corpus]]")
    entries = []
    for number, entry in enumerate(listed, 1):
        origin = f"{path}, corpus {number}"
        if "languages" not in entry:
            raise ValueError(f'{origin} has no languages; give them, such as languages = ["en", "de"]')
        several = {key: [value] if isinstance(value, str) and key in SPLITS else value for key, value in entry.items()}
        if isinstance(columns := several.get("columns"), list):  # [4, 5] means ["4", "5"], like --columns 4,5
            several["columns"] = [str(column) if type(column) is int else column for column in columns]
        entries.append(derive(CorpusEntry, several, origin))
    directions = directions_of(entries)
    if len(directions) > MAX_DIRECTIONS:
        raise ValueError(f"{path} has {len(directions):,} directions; a dataset has at most {MAX_DIRECTIONS:,}")
    return entries


def directions_of(entries: Iterable[CorpusEntry]) -> list[Direction]:
    """Returns each direction of the entries once, in the order of the file."""
    return list(
        dict.fromkeys(
            Direction(entry.languages[source], entry.languages[target])
            for entry in entries
            for source, target in entry.directed()
        )
    )


def languages_of(entries: Sequence[CorpusEntry]) -> list[str]:
    """Returns each language of the entries once, in the order of the file."""
    return list(dict.fromkeys(code for entry in entries for code in entry.languages))
