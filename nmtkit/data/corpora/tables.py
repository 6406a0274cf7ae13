"""Reads corpora whose texts are columns: TSV, JSON Lines, Parquet, and folders of the package `datasets`."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from nmtkit.config.extras import imported
from nmtkit.config.files import parse_json
from nmtkit.data.corpora.corpus import Corpus
from nmtkit.data.corpora.lines import WINDOW, line_windows
from nmtkit.text.languages import SHORT_CODES, best_match, is_code, subtags
from nmtkit.text.normalization import check_characters

Row = tuple[str, str, dict[str, object]]  # source, target and the other columns

SIDE_NAMES = (("source", "src"), ("target", "tgt", "trg"))  # names of columns that are not named after a language
NESTED = "translation"  # column of datasets that holds a text for each language


class MissingColumnError(ValueError):
    """A table lacks a column of --columns."""


@lru_cache(maxsize=256)
def find_columns(names: tuple[str, ...], corpus: Corpus) -> tuple[int, int] | None:
    """Returns the indices of the source column and the target column of a table. `names` are the names of its columns.

    The order of preference is: the columns of --columns, columns named after the languages, names such as "source".
    Returns None if a column is not found. If both languages are equal, the only column of this language is both sides.
    Raises MissingColumnError if a column of --columns is missing, and ValueError if two languages get the same column.
    """
    if corpus.columns is not None:
        for column in corpus.columns:
            if column not in names and not (column.isdecimal() and 1 <= int(column) <= len(names)):
                raise MissingColumnError(f"{corpus.source} has no column {column!r}; it has {', '.join(names)}")
        first, second = (names.index(column) if column in names else int(column) - 1 for column in corpus.columns)
        return first, second
    codes = [name if is_code(name) or name in corpus.languages else "" for name in names]
    indexes: list[int | None] = []
    for language, words in zip(corpus.languages, SIDE_NAMES, strict=True):
        index = None if language is None else best_match(language, codes)
        if index is None:
            index = next((position for position, name in enumerate(names) if name.lower() in words), None)
        indexes.append(index)
    named = [index for index, code in enumerate(codes) if subtags(code)[0] in SHORT_CODES.values()]
    if len(named) == 2:  # a side without a language gets the free column, or the first column if both columns are free
        rest = [index for index in named if index not in indexes]
        for side, language in enumerate(corpus.languages):
            if language is None and indexes[side] is None and rest:
                indexes[side] = rest.pop(0)
    source, target = indexes
    if source is None or target is None:
        return None
    if source == target:  # a .tsv of two sides in one language has the name of the language twice
        target = next((index for index in range(source + 1, len(names)) if names[index] == names[source]), source)
    if source == target and corpus.languages[0] != corpus.languages[1]:
        raise ValueError(
            f"{corpus.source}: both {' and '.join(map(str, corpus.languages))} would be the column {names[source]!r}; "
            "give --columns with the names or numbers of the source and target column"
        )
    return source, target


def read_tsv(corpus: Corpus) -> Iterator[Row]:
    """Yields the rows of a tab-separated file. Quotes have no meaning.

    The first line is a heading if it names the columns. Raises ValueError with file and line for a row whose number of
    columns differs from the first line.
    """
    rows = (line.split("\t") for line in chain.from_iterable(line_windows(corpus.source)))
    first = next(rows)
    source, target, heading = _tsv_columns(first, corpus)
    names = first if heading else [f"column {index + 1}" for index in range(len(first))]
    rest = [index for index in range(len(first)) if index not in (source, target)]
    for number, cells in enumerate(rows if heading else chain([first], rows), 2 if heading else 1):
        if len(cells) != len(first):
            raise ValueError(
                f"{corpus.source}:{number}: the line has {len(cells)} columns, but the first line has {len(first)}; is "
                "a tab part of a text?"
            )
        yield cells[source], cells[target], {names[index]: cells[index] for index in rest}


def _tsv_columns(cells: list[str], corpus: Corpus) -> tuple[int, int, bool]:
    """Returns the index of the source column, the index of the target column, and whether the first line is a heading.

    `cells` are the cells of the first line of a .tsv file. Raises ValueError if the columns cannot be found.
    """
    if corpus.columns is not None and all(column.isdecimal() for column in corpus.columns):
        source, target = (int(column) - 1 for column in corpus.columns)
        if not 0 <= min(source, target) <= max(source, target) < len(cells):
            raise ValueError(
                f"{corpus.source} has {len(cells)} columns; --columns {','.join(corpus.columns)} names a missing column"
            )
        return source, target, find_columns(tuple(cells), replace(corpus, columns=None)) == (source, target)
    columns = find_columns(tuple(cells), corpus)
    if columns is not None:
        return *columns, True
    if len(cells) == 2:
        return 0, 1, False
    if len(cells) < 2:
        raise ValueError(f"{corpus.source}:1: the line has no tab; a .tsv needs a column for each language")
    raise ValueError(
        f"{corpus.source} has {len(cells)} columns and no heading that names the languages; give --columns with the "
        f"numbers or names of the source and target column, such as --columns 1,{len(cells)}"
    )


def read_jsonl(corpus: Corpus) -> Iterator[Row]:
    """Yields the pairs of a file with a JSON object on each line: {"en": …, "de": …}.

    The texts may also be in an object with the key "translation". Raises ValueError with file and line for a line that
    is not such an object.
    """
    for number, line in enumerate(chain.from_iterable(line_windows(corpus.source)), 1):
        where = f"{corpus.source}:{number}"
        try:
            record = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{where}: the line is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f'{where}: the line is not a JSON object such as {{"en": …}}')
        yield _row_of(record, corpus, where)


def _row_of(record: dict[str, Any], corpus: Corpus, where: str) -> Row:
    """Returns the pair of a record. Raises ValueError, with the place `where`, if a side is missing or not a text."""
    nested = record.get(NESTED)
    texts, others = record, {}
    if isinstance(nested, dict) and corpus.columns is None:
        texts, others = nested, {name: value for name, value in record.items() if name != NESTED}
    names = tuple(texts)
    columns = find_columns(names, corpus)
    if columns is None:
        raise ValueError(
            f"{where}: no texts of {' and '.join(map(str, corpus.languages))}; the keys are {', '.join(names)}. "
            "Give --columns with the keys of the source and the target."
        )
    source, target = (names[index] for index in columns)
    for name in (source, target):
        if not isinstance(texts[name], str):
            raise ValueError(f"{where}: {name!r} is not a text")
        check_characters(texts[name], f"{where}: {name!r}")
    others |= {name: value for name, value in texts.items() if name not in (source, target)}
    return texts[source], texts[target], others


def _arrow() -> Any:
    need = "Parquet files and folders of datasets need pip install 'nmtkit[data]'"
    return imported("pyarrow", "parquet", need=need)


def _rows_of(batches: Iterable[Any], corpus: Corpus) -> Iterator[Row]:
    """Yields the pairs of the record batches of a file. Each row is read like a JSON object of `read_jsonl`."""
    records = chain.from_iterable(batch.to_pylist() for batch in batches)
    for number, record in enumerate(records, 1):
        yield _row_of(record, corpus, f"{corpus.source}, row {number}")


def read_parquet(corpus: Corpus) -> Iterator[Row]:
    """Yields the pairs of a Parquet file."""
    arrow = _arrow()
    try:
        with arrow.parquet.ParquetFile(corpus.source) as file:
            yield from _rows_of(file.iter_batches(batch_size=WINDOW), corpus)
    except arrow.ArrowException as error:
        raise ValueError(f"{corpus.source} is damaged or is not Parquet: {error}") from None


def _listed(path: Path, names: Callable[[Any], list[str]]) -> list[str]:
    """Returns `names(value)`, where `value` is the JSON value in a file. Raises ValueError if the file is damaged."""
    try:
        return names(parse_json(path.read_bytes()))
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is damaged, or is not a file of the package `datasets`: {error!r}") from None


def read_arrow_folder(corpus: Corpus) -> Iterator[Row]:
    """Yields the pairs of a folder: Parquet files sorted by name, or the files of `datasets.Dataset.save_to_disk`."""
    folder = corpus.source
    if (folder / "dataset_dict.json").is_file():
        splits = _listed(folder / "dataset_dict.json", lambda facts: list(map(str, facts["splits"])))
        folders = ", ".join(f"{folder}/{name}" for name in splits)
        raise ValueError(f"{folder} holds splits, not pairs; give the folder of a split: {folders}")
    if files := sorted(folder.glob("*.parquet")):
        for path in files:
            yield from read_parquet(replace(corpus, source=path))
        return
    state = folder / "state.json"
    if not state.is_file():
        raise ValueError(
            f"{folder} is a folder without *.parquet files, and is not a dataset of the package `datasets`"
        )
    arrow = _arrow()
    for name in _listed(state, lambda facts: [entry["filename"] + "" for entry in facts["_data_files"]]):
        path = folder / name
        try:
            with arrow.memory_map(str(path)) as file, arrow.ipc.open_stream(file) as stream:
                parts = (batch.slice(start, WINDOW) for batch in stream for start in range(0, len(batch), WINDOW))
                yield from _rows_of(parts, replace(corpus, source=path))
        except arrow.ArrowException as error:
            raise ValueError(f"{path} is damaged or is not an Arrow file: {error}") from None
