"""Reads the texts to score. All texts have the same number of lines."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from nmtkit.config.files import parse_json
from nmtkit.data.corpora.compression import open_bytes
from nmtkit.data.corpora.corpus import ColumnNames, format_of, holds_pairs
from nmtkit.data.corpora.lines import LineDecoder
from nmtkit.data.corpora.pairs import windows_of_side
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.directions import Direction
from nmtkit.data.fetch.sacrebleu_sets import read_sets, select

logger = logging.getLogger("nmtkit")


def lines_of(text: bytes, name: Path) -> list[str]:
    """Returns the lines of a text without the byte order mark and carriage returns. Only a newline ends a line.

    Warns with the counts of removed characters. Raises ValueError for an empty text and for bytes that are not UTF-8.
    The message contains `name` and the line number.
    """
    if not text:
        raise ValueError(f"{name} is empty")
    decoder = LineDecoder(name)
    lines = decoder.lines(text)
    decoder.warn()
    return lines


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a file, which may be compressed. Raises OSError, and the same errors as `lines_of`."""
    with open_bytes(path) as file:
        return lines_of(file.read(), path)


def read_side(
    path: Path, index: int, languages: tuple[str | None, str | None], columns: ColumnNames | None = None
) -> list[str]:
    """Returns the lines of a text file, or one side of a corpus such as a .tmx.

    `index` is 0 for the source side and 1 for the target side. `languages` are the codes of source and target, which
    select the two sides of a corpus of several languages.
    """
    if columns is None and not holds_pairs(path):
        return read_lines(path)
    return [text for texts in windows_of_side(path, index, languages, columns) for text in texts]


def translations_of(lines: list[str], name: Path) -> list[str]:
    """Returns `lines`, or their best translations if `lines` are records of `nmtkit generate --format jsonl`.

    Warns if the first line is a JSON object but not such a record. Raises ValueError if the first line is a record and
    a later line is not a record.
    """
    if _best_translation(lines[0]) is None:
        with suppress(ValueError):
            if isinstance(parse_json(lines[0]), dict):
                logger.warning("%s: the first line is JSON without a translation: the lines are scored as text", name)
        return lines
    translations = []
    for number, line in enumerate(lines, 1):
        translation = _best_translation(line)
        if translation is None:
            raise ValueError(
                f"{name}:{number}: the first line is a record of nmtkit generate --format jsonl, but this line is not"
            )
        translations.append(translation)
    logger.info("%s: scoring the best translation of each JSON record", name)
    return translations


def read_systems(paths: Sequence[Path], stream: BinaryIO | None) -> dict[str, list[str]]:
    """Reads the translations of several systems: one file of `paths` for each system, and `stream` unless it is None.

    Returns the lines by name: the path of a file, or "standard input" for `stream`. Raises ValueError for a path that
    is given twice and for a corpus of two sides, and the errors of `read_lines` and `translations_of`.
    """
    systems: dict[str, list[str]] = {}
    for path in paths:
        if str(path) in systems:
            raise ValueError(f"--sys {path} is given twice")
        if format_of(path) != "jsonl" and holds_pairs(path):  # the source side would be scored too
            raise ValueError(f"--sys {path} is a corpus; extract the translations, one on each line")
        systems[str(path)] = translations_of(read_lines(path), path)
    if stream is not None:
        name = Path("standard input")
        systems[str(name)] = translations_of(lines_of(stream.read(), name), name)
    return systems


def _best_translation(line: str) -> str | None:
    if not line.startswith("{"):
        return None
    try:
        translation = parse_json(line)["hypotheses"][0]["text"]
    except (ValueError, LookupError, TypeError):
        return None
    return translation if isinstance(translation, str) else None


def check_equal_counts(texts: Mapping[str, list[str]]) -> None:
    """Raises ValueError, with both line counts, if a text has more or fewer lines than the first text."""
    (first, lines), *rest = texts.items()
    for name, other in rest:
        if len(other) != len(lines):
            raise ValueError(
                f"line counts differ: {first} has {len(lines)}, {name} has {len(other)}; "
                "line i of both texts must belong to the same source line"
            )


@dataclass(frozen=True, kw_only=True)
class PublishedSelection:
    """Published test sets of a pair of languages, such as wmt14/full of en-de, and the lines to score."""

    names: tuple[str, ...]
    pair: str
    origlang: str | None = None
    subset: str | None = None

    def select(self, texts: Mapping[str, list[str]]) -> dict[str, list[str]]:
        """Returns the chosen lines of each text. A text must have all lines of the sets."""
        selected = select(list(texts.values()), self.names, self.pair, origlang=self.origlang, subset=self.subset)
        return dict(zip(texts, selected, strict=True))

    @property
    def title(self) -> str:
        """The names, the pair and the chosen lines, such as "wmt19 en-de, origlang en"."""
        chosen = [f"{name} {value}" for name in ("origlang", "subset") if (value := getattr(self, name)) is not None]
        return ", ".join([f"{','.join(self.names)} {self.pair}", *chosen])


@dataclass(frozen=True, kw_only=True)
class ScoredTexts:
    """Texts to score, all with the same number of lines. `systems` holds translations by file name."""

    references: list[list[str]]
    systems: dict[str, list[str]]
    sources: list[str] | None
    target_lang: str | None
    # direction of a dataset, such as en-de -> indices of its lines
    directions: Mapping[Direction, Sequence[int]] = field(default_factory=dict)
    untrained: frozenset[Direction] = frozenset()  # directions without training pairs in the dataset
    published: PublishedSelection | None = None  # origin of the references

    def of(self, direction: Direction) -> "ScoredTexts":
        """Returns the texts of one direction."""

        def lines(texts: list[str]) -> list[str]:
            return [texts[row] for row in self.directions[direction]]

        return ScoredTexts(
            references=list(map(lines, self.references)),
            systems={name: lines(system) for name, system in self.systems.items()},
            sources=None if self.sources is None else lines(self.sources),
            target_lang=direction.target,
        )


def read_texts(
    *,
    reference_paths: Sequence[Path] = (),
    data: Path | None,
    subset: str,
    system_paths: Sequence[Path] = (),
    source: Path | None = None,
    stream: BinaryIO | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    columns: ColumnNames | None = None,
    published: PublishedSelection | None = None,
    needs_references: bool = True,
) -> ScoredTexts:
    """Returns the texts to score: references, translations of each system, and sources if there are any.

    References come from files, from a subset of a dataset, or from a published test set. Translations come from
    `system_paths` and from `stream`; they may be JSON Lines of `nmtkit generate --format jsonl`. A file of references
    or sources may be a corpus, such as a .tsv. References come from the target side of the corpus, and sources from the
    source side. `source_lang` and `target_lang` are the languages of the corpus, and `columns` are its source and
    target column. Without `needs_references`, the result may have no references. Raises ValueError or OSError with
    the name of the file.
    """
    origins = bool(reference_paths) + (data is not None) + (published is not None)
    if origins > 1 or (needs_references and not origins):
        raise ValueError("give references either as --ref FILE, as --data FOLDER, or as --test-set NAME")
    directions: dict[Direction, Sequence[int]] = {}
    untrained: frozenset[Direction] = frozenset()
    references = {str(path): read_side(path, 1, (source_lang, target_lang), columns) for path in reference_paths}
    sources = {str(source): read_side(source, 0, (source_lang, target_lang), columns)} if source else {}
    if data is not None:
        dataset = Dataset.open(data)
        split = dataset[subset]
        references[f"{data} ({subset})"] = split.references()
        sources = sources or {f"{data} ({subset}, source)": split.untagged_source_lines()}
        target_lang = None if dataset.directions else dataset.target_language or dataset.target_lang
        for number, direction in enumerate(split.directions):
            if len(rows := split.rows_of(number)):
                directions[direction] = rows.tolist()
        if dataset.directions and "train" in dataset.splits:
            counts = dict(zip(dataset.directions, dataset["train"].direction_counts(), strict=True))
            untrained = frozenset(direction for direction, count in counts.items() if not count)
    if published is not None:
        texts = read_sets(published.names, published.pair)
        target_lang = texts.target_lang
        references = {f"{published.title}, reference {n}": text for n, text in enumerate(texts.references, 1)}
        sources = {f"{published.title}, source": texts.sources}
    systems = read_systems(system_paths, stream)
    check_equal_counts({**systems, **references, **sources})
    if published is not None:
        systems, references, sources = (published.select(each) for each in (systems, references, sources))
    return ScoredTexts(
        references=list(references.values()),
        systems=systems,
        sources=next(iter(sources.values()), None),
        target_lang=target_lang,
        directions=directions,
        untrained=untrained,
        published=published,
    )
