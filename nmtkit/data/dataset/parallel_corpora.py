"""The corpora of a dataset, in one or more languages: from the flags of `preprocess`, or from the file of --corpora.

The file of --corpora is TOML. Each entry [[corpus]] describes a corpus.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, repeat
from pathlib import Path
from typing import NamedTuple

from nmtkit.config import Config, derive, option, suggestion
from nmtkit.config.files import read_toml
from nmtkit.data.corpora.blocks import BLOCK_BYTES, BLOCK_LINES, LineBlock, blocks, extracted_blocks
from nmtkit.data.corpora.corpus import Corpus, as_columns, check_line_counts, locate, locate_side
from nmtkit.data.corpora.lines import lists_of_lines
from nmtkit.data.corpora.pairs import pairs
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.directions import MAX_DIRECTIONS, Direction
from nmtkit.text.language_identification import exchanged
from nmtkit.text.languages import is_code

SPLITS = ("train", "valid", "test")
NO_DIRECTION = MAX_DIRECTIONS
LANGUAGE_SAMPLE = 400  # number of lines whose language is identified


class LanguagePair(NamedTuple):
    """Two languages of a corpus, and the indices of the two directions between the languages (such as en-de, de-en).

    A monolingual corpus has a pair of equal languages.
    """

    first: int  # index into the languages of the corpus
    second: int
    forward: int = 0  # index of the direction from the first to the second language, or NO_DIRECTION
    backward: int = NO_DIRECTION


@dataclass(frozen=True)
class ParallelCorpus:
    """A corpus in one or more languages: line i of each file is the translation of line i of the other files.

    `names` has the names of the files in messages. `paths` has the files of lines, or, if `container` is given, the
    single file that holds both sides. The tag, if given, precedes every source line.
    """

    languages: tuple[str, ...]
    paths: tuple[Path, ...]
    names: tuple[Path, ...]
    pairs: tuple[LanguagePair, ...]
    weight: float = 1.0  # how often an epoch contains each pair
    tag: str | None = None
    alignments: Path | None = None
    container: Corpus | None = None

    @staticmethod
    def of(
        corpus: Corpus, weight: float = 1.0, tag: str | None = None, alignments: Path | None = None
    ) -> "ParallelCorpus":
        """Returns a corpus of one direction.

        Raises FileNotFoundError if the file `alignments` is missing, and ValueError if `corpus` is a single file with
        `alignments`.
        """
        if alignments is not None and not alignments.is_file():
            raise FileNotFoundError(f"--alignments {alignments}: no such file")
        if alignments is not None and corpus.format is not None:
            needed = "a corpus of two files of lines"
            raise ValueError(f"--alignments {alignments} needs {needed}; {corpus.source} is one file")
        paths = corpus.source, corpus.target
        languages = corpus.languages[0] or "", corpus.languages[1] or ""
        container = corpus if corpus.format else None
        return ParallelCorpus(languages, paths, paths, (LanguagePair(0, 1),), weight, tag, alignments, container)

    @property
    def inputs(self) -> tuple[Path, ...]:
        """The files of the corpus as the user has named them: the text, and the alignments if there are any."""
        return self.names if self.alignments is None else (*self.names, self.alignments)

    def position(self, number: int) -> str:
        """Returns the files and the number of a line or pair as text for messages. `number` counts from 1."""
        if self.container is not None:
            return self.container.position(number)
        return " and ".join(dict.fromkeys(f"{name}:{number}" for name in self.names))

    def blocks(self, folder: Path, longest: int, shard: tuple[int, int] = (1, 1)) -> Iterator[LineBlock]:
        """Yields the lines in blocks, like the function `blocks`. The span of the alignments, if any, is the last."""
        if self.container is not None:
            return extracted_blocks(self.container, folder, longest, shard)
        return blocks([*self.paths, *([] if self.alignments is None else [self.alignments])], folder, longest, shard)

    def line_lists(self, longest: int) -> Iterator[tuple[int, list[str]]]:
        """Yields all lines in order, as tuples of the index of the language and some lines.

        A line of more than `longest` bytes may be yielded as "". Raises ValueError with the counts if the files have
        different numbers of lines.
        """
        if self.container is not None:
            for part in pairs(self.container, BLOCK_LINES, BLOCK_BYTES):
                yield 0, part.sources
                yield 1, part.targets
            return
        counts = [0] * len(self.paths)
        for index, path in enumerate(self.paths):
            for lines in lists_of_lines(path, longest):
                counts[index] += len(lines)
                yield index, lines
        check_line_counts(list(self.paths), counts)

    def first_lines(self, count: int, longest: int) -> list[list[str]]:
        """Returns the first lines of each language: at most `count`, and only lines of the first block that is read."""
        if self.container is not None:
            part = next(iter(pairs(self.container, count, BLOCK_BYTES)), None)
            return [[], []] if part is None else [part.sources, part.targets]
        return [next(iter(lists_of_lines(path, longest)), [])[:count] for path in self.paths]

    def exchanged_languages(self, longest: int) -> list[str]:
        """Returns a warning for each pair of files whose languages seem exchanged. Reads only the first lines."""
        if len(set(self.languages)) < 2:
            return []
        sides = zip(self.languages, self.names, self.first_lines(LANGUAGE_SAMPLE, longest), strict=True)
        found = []
        for (source, source_name, first), (target, target_name, second) in combinations(sides, 2):
            if (share := exchanged(first, second, (source, target))) is not None:
                names = " and ".join(dict.fromkeys((str(source_name), str(target_name))))
                found.append(
                    f"the languages {source} and {target} of {names} seem to be exchanged: at least {share:.0%} of the "
                    "first lines of each side are in the language of the other side"
                )
        return found


@dataclass(frozen=True)
class DatasetCorpora:
    """All corpora of a dataset. `held_out` has the corpora of each valid and test set, by the name of the set.

    `directions` and `languages` are in the order of the file of --corpora; without this file, `languages` is empty.
    """

    train: list[ParallelCorpus]
    held_out: dict[str, list[ParallelCorpus]]
    directions: list[Direction]
    languages: list[str]

    def all(self) -> list[ParallelCorpus]:
        return [*self.train, *(corpus for corpora in self.held_out.values() for corpus in corpora)]

    def train_texts(self) -> dict[str, list[Path]]:
        """Returns the files of lines of all training corpora, grouped by language."""
        result: dict[str, list[Path]] = {}
        for corpus in self.train:
            for language, path in zip(corpus.languages, corpus.paths, strict=True):
                result.setdefault(language, []).append(path)
        return result


def open_corpora(config: PreprocessConfig, scratch: Path) -> DatasetCorpora:
    """Finds the files of all corpora. Raises ValueError or OSError if a file is missing or a setting has no effect.

    With --corpora, corpora in formats such as .tmx are extracted to files of lines in `scratch`.
    """
    if config.corpora is not None:
        return _corpora_of_file(config, scratch)
    columns = as_columns(config.columns)

    def located(
        prefixes: Sequence[str],
        tags: Sequence[str | None],
        weights: Sequence[float] = (),
        alignments: Sequence[Path | None] = (),
    ) -> list[ParallelCorpus]:
        settings = zip(prefixes, weights or repeat(1.0), tags or repeat(None), alignments or repeat(None), strict=False)
        return [
            ParallelCorpus.of(locate(prefix, config.source_lang, config.target_lang, columns), weight, tag, alignment)
            for prefix, weight, tag, alignment in settings
        ]

    train = located(config.train, config.tags, config.weights, config.alignments)
    sets = {"valid": located(config.valid, config.valid_tags), "test": located(config.test, config.test_tags)}
    held_out = {f"{name}{index or ''}": [each] for name, corpora in sets.items() for index, each in enumerate(corpora)}
    return DatasetCorpora(train, held_out, [Direction(config.source_lang, config.target_lang)], [])


# --- the file of --corpora --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CorpusEntry(Config):
    """The settings of an entry [[corpus]] in the file of --corpora. Line i has the same meaning in all languages."""

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
        names = [str(self.direction(*indices)) for indices in possible]
        for name in self.directions:
            if name not in names:
                raise ValueError(f"directions names {name!r}, which is not possible; {suggestion(name, names)}")
            if self.directions.count(name) > 1:
                raise ValueError(f"directions has {name!r} twice")
        return [possible[names.index(name)] for name in self.directions] if self.directions else possible

    def direction(self, source: int, target: int) -> Direction:
        return Direction(self.languages[source], self.languages[target])

    def pairs(self, numbers: Mapping[Direction, int]) -> tuple[LanguagePair, ...]:
        """Returns the pairs of languages with at least one direction. `numbers` has the index of each direction.

        The code of the first language of a pair sorts before the code of the second language.
        """
        result: dict[tuple[int, int], list[int]] = {}
        for source, target in self.directed():
            first, second = sorted((source, target), key=lambda index: self.languages[index])
            both = result.setdefault((first, second), [NO_DIRECTION, NO_DIRECTION])
            both[int((source, target) != (first, second))] = numbers[self.direction(source, target)]
        return tuple(LanguagePair(*indices, *both) for indices, both in result.items())


def read_entries(path: Path) -> list[CorpusEntry]:
    """Reads the entries [[corpus]] of the file `path`. Raises FileNotFoundError if the file is missing.

    Raises ValueError if an entry is invalid. The message names the key and the number of the entry, counted from 1.
    """
    try:
        tables = read_toml(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"--corpora {path}: no such file") from None
    except ValueError as error:
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
    return entries


def _corpora_of_file(config: PreprocessConfig, scratch: Path) -> DatasetCorpora:
    assert config.corpora is not None
    entries = read_entries(config.corpora)
    if not config.tokenizer_from and not any(entry.train for entry in entries):
        raise ValueError(f"{config.corpora} has no training text for a tokenizer; give train, or --tokenizer-from")
    directions = list(dict.fromkeys(entry.direction(*each) for entry in entries for each in entry.directed()))
    if (count := len(directions)) > MAX_DIRECTIONS:
        raise ValueError(f"{config.corpora} has {count:,} directions; a dataset has at most {MAX_DIRECTIONS:,}")
    numbers = {direction: number for number, direction in enumerate(directions)}
    corpora: dict[str, list[ParallelCorpus]] = {split: [] for split in SPLITS}
    for entry in entries:
        for split in SPLITS:
            for name in getattr(entry, split):
                paths, names = _files(name, entry, scratch / f"texts{sum(map(len, corpora.values()))}")
                corpora[split].append(ParallelCorpus(entry.languages, paths, names, entry.pairs(numbers), entry.weight))
    train = corpora.pop("train")
    languages = list(dict.fromkeys(code for entry in entries for code in entry.languages))
    held_out = {split: several for split, several in corpora.items() if several}
    return DatasetCorpora(train, held_out, directions, languages)


def _files(name: str, entry: CorpusEntry, folder: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Returns two tuples with an item for each language: the files of lines, and the names of the files in messages.

    Extracts formats such as .tmx to files of lines in `folder`. Raises FileNotFoundError if a file is missing. Raises
    ValueError if `columns` has no effect. With three or more languages, also raises ValueError if the lines of the
    first language depend on the language that they are paired with.
    """
    languages = entry.languages
    if len(languages) == 1:
        if entry.columns:
            raise ValueError(f"columns have no effect on {name}: a corpus of one language is a file of lines")
        path = locate_side(name, languages[0])
        return (path,), (path,)
    columns = [(entry.columns[0], column) for column in entry.columns[1:]]
    others = zip(languages[1:], columns or repeat(None), strict=False)
    corpora = [locate(name, languages[0], language, each) for language, each in others]
    if corpora[0].format is None:
        paths = (corpora[0].source, *(corpus.target for corpus in corpora))
        return paths, paths
    folder.mkdir(parents=True)
    extracted = tuple(folder / str(index) for index in range(len(languages)))
    digests = []
    for language, path, corpus in zip(languages[1:], extracted[1:], corpora, strict=True):
        digest = hashlib.sha256()
        with extracted[0].open("wb") as source, path.open("wb") as target:  # every pass writes extracted[0] again
            for part in pairs(corpus):
                text = "".join(line + "\n" for line in part.sources).encode()
                digest.update(text)
                source.write(text)
                target.write("".join(line + "\n" for line in part.targets).encode())
        digests.append(digest.digest())
        if digests[0] != digests[-1]:
            raise ValueError(
                f"{name} has different {languages[0]} lines for {languages[1]} and for {language}; "
                "write an entry for each pair of languages"
            )
    return extracted, (Path(name),) * len(languages)
