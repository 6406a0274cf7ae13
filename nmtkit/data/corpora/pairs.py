"""Reads any corpus as blocks of pairs of lines, in bounded memory."""

import logging
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from nmtkit.data.corpora.compression import open_bytes
from nmtkit.data.corpora.corpus import ARROW_FOLDER, ColumnNames, Corpus, Pairs, check_line_counts, locate
from nmtkit.data.corpora.lines import WINDOW, LineDecoder, line_windows
from nmtkit.data.corpora.tables import Row, read_arrow_folder, read_jsonl, read_parquet, read_tsv
from nmtkit.data.corpora.tmx import read_tmx
from nmtkit.jobs.progress import quantity
from nmtkit.text.documents import translated_pairs
from nmtkit.text.languages import best_match, is_code

BLOCK_PAIRS = 8192
BLOCK_CHARACTERS = 4 << 20  # maximum characters of a side of a block; a single text may exceed this size

log = logging.getLogger("nmtkit")


def pairs(corpus: Corpus, size: int = BLOCK_PAIRS, characters: int = BLOCK_CHARACTERS) -> Iterator[Pairs]:
    """Yields all pairs of a corpus in blocks of up to `size` pairs and about `characters` characters per side.

    A line feed inside a text becomes a space, and a warning has the number of such texts. Carriage returns at the end
    of a text are removed. Raises ValueError if the corpus has no pair. Also raises ValueError, at the end of the
    shorter side, if the sides have different numbers of lines.
    """
    rows = _READERS[corpus.format](corpus)
    part = Pairs([], [], [])
    source_size = target_size = broken = 0
    for source, target, others in rows:
        if "\n" in source or "\n" in target or source.endswith("\r") or target.endswith("\r"):
            broken += ("\n" in source) + ("\n" in target)
            source, target = _one_line(source), _one_line(target)
        count, largest = len(part.sources), max(source_size + len(source), target_size + len(target))
        if count == size or (count and largest > characters):
            yield part
            part = Pairs([], [], [], part.first + count)
            source_size = target_size = 0
        part.sources.append(source)
        part.targets.append(target)
        part.extras.append(others)
        source_size += len(source) + 1
        target_size += len(target) + 1
    if not len(part):
        raise ValueError(f"{corpus.name}: there are no pairs")
    yield part
    if broken:
        log.warning("%s: line breaks inside %s become spaces", corpus.source, quantity(broken, "texts"))


def _one_line(text: str) -> str:
    return text.replace("\r\n", " ").replace("\n", " ").rstrip("\r")


def windows_of_side(
    path: Path,
    index: int,
    languages: tuple[str | None, str | None],
    columns: ColumnNames | None = None,
    size: int = BLOCK_PAIRS,
) -> Iterator[list[str]]:
    """Yields the texts of a side of a file, `size` texts at a time. `index` is 0 for the source, 1 for the target."""
    for part in pairs(locate(str(path), *languages, columns), size):
        yield (part.sources, part.targets)[index]


def _lines(corpus: Corpus) -> Iterator[Row]:
    """Yields the pairs of two files of lines."""
    paths = [corpus.source, corpus.target]
    yield from _joined([line_windows(path) for path in paths], paths)


def _joined(sides: list[Iterator[list[str]]], names: list[Path]) -> Iterator[Row]:
    """Yields pairs of lines. Raises ValueError, with both counts, if one side has more lines than the other."""
    counts = [0, 0]
    while True:
        windows = [next(side, []) for side in sides]
        counts = [count + len(window) for count, window in zip(counts, windows, strict=True)]
        for source, target in zip(*windows, strict=False):
            yield source, target, {}
        if counts[0] != counts[1]:
            counts = [count + sum(map(len, side)) for count, side in zip(counts, sides, strict=True)]
            check_line_counts(names, counts)
        if not windows[0]:
            return


def _zip(corpus: Corpus) -> Iterator[Row]:
    """Yields the pairs of a ZIP archive with two files of lines, such as the Moses archives of OPUS."""
    path = corpus.source
    try:
        with zipfile.ZipFile(path) as archive:
            names = zip_members(archive.namelist(), corpus)
            yield from _joined([_member_lines(archive, name, path) for name in names], [path / n for n in names])
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError) as error:
        raise ValueError(f"{path} is damaged or is not a ZIP archive: {error}") from None


def zip_members(names: list[str], corpus: Corpus) -> list[str]:
    """Returns the names of the members with the source and the target text. The names differ only in the language code.

    Raises ValueError unless the archive has exactly one such pair of members.
    """
    stems: dict[str, dict[str, str]] = {}
    for name in names:
        stem, _, code = name.rpartition(".")
        if stem and (is_code(code) or code in corpus.languages) and not name.endswith("/"):
            stems.setdefault(stem, {})[code] = name
    complete = []
    for members in stems.values():
        codes = list(members)
        if None in corpus.languages and len(codes) != 2:
            continue
        indices = [index if language is None else best_match(language, codes)
                   for index, language in enumerate(corpus.languages)]  # fmt: skip
        if None not in indices and indices[0] != indices[1]:
            complete.append([members[codes[index]] for index in indices if index is not None])
    if len(complete) != 1:
        wanted = " and ".join(f"*.{language or 'CODE'}" for language in corpus.languages)
        many = "; ".join(" and ".join(names) for names in complete)
        raise ValueError(
            f"{corpus.source} has no two files {wanted}; it has {', '.join(names[:10])}"
            if not complete else f"{corpus.source} has several corpora: {many}; unpack the archive and give a prefix"
        )  # fmt: skip
    return complete[0]


def _member_lines(archive: zipfile.ZipFile, name: str, path: Path) -> Iterator[list[str]]:
    decoder = LineDecoder(path / name)
    if archive.getinfo(name).flag_bits & 1:
        raise ValueError(f"{path} is encrypted; unpack it and give a prefix")
    with archive.open(name) as file:
        while raw := list(islice(file, WINDOW)):
            yield decoder.lines(b"".join(raw))
    decoder.warn()


def _document(corpus: Corpus) -> Iterator[Row]:
    """Yields the translated units of a PO or XLIFF file."""
    assert corpus.format is not None
    with open_bytes(corpus.source) as file:
        data = file.read()
    for source, target in translated_pairs(data, corpus.format, str(corpus.source), corpus.languages):
        yield source, target, {}


_READERS: dict[str | None, Callable[[Corpus], Iterator[Row]]] = {
    None: _lines, "tsv": read_tsv, "jsonl": read_jsonl, "tmx": read_tmx, "parquet": read_parquet,
    ARROW_FOLDER: read_arrow_folder, "zip": _zip, "po": _document, "xliff": _document,
}  # fmt: skip
