"""Finds the files of a corpus: two files with a common prefix, or one file whose suffix is the format."""

import glob
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

from nmtkit.data.corpora.compression import COMPRESSIONS, open_bytes
from nmtkit.text.languages import best_match, is_code

FORMATS = {
    ".tsv": "tsv", ".tmx": "tmx", ".jsonl": "jsonl", ".parquet": "parquet", ".zip": "zip", ".xlf": "xliff",
    ".xliff": "xliff", ".po": "po",
}  # fmt: skip
UNCOMPRESSED = ("parquet", "zip")  # formats that compress text themselves
ARROW_FOLDER = "arrow"  # the format of a folder that the package datasets has written

log = logging.getLogger("nmtkit")

ColumnNames = tuple[str, str]  # names of the two columns, or their numbers from 1


@dataclass(frozen=True)
class Corpus:
    """A corpus: the files of both sides. If one file has both sides, `source` and `target` are the same path.

    `format` is None if the sides are two files of lines. `languages` and `columns` select the texts of other formats.
    """

    source: Path
    target: Path
    format: str | None = None
    languages: tuple[str | None, str | None] = (None, None)
    columns: ColumnNames | None = None

    @property
    def name(self) -> str:
        return str(self.source) if self.format else f"{self.source} and {self.target}"

    def position(self, number: int) -> str:
        """Returns the position of pair `number` as text for messages. Numbers start at 1."""
        if self.format is not None:
            return f"{self.source}, pair {number}"
        return f"{self.source}:{number} and {self.target}:{number}"

    def paths(self) -> list[Path]:
        return [self.source] if self.format else [self.source, self.target]


@dataclass(frozen=True)
class Pairs:
    """Consecutive pairs of a corpus. `first` is the number of the first pair, from 1.

    A text never contains a line feed. `extras` has the other columns or properties of each pair.
    """

    sources: list[str]
    targets: list[str]
    extras: list[dict[str, object]]
    first: int = 1

    def __len__(self) -> int:
        return len(self.sources)

    def select(self, keep: list[bool]) -> "Pairs":
        """Returns the pairs for which `keep` is true."""
        sources, targets = list(compress(self.sources, keep)), list(compress(self.targets, keep))
        return Pairs(sources, targets, list(compress(self.extras, keep)), self.first)


def as_columns(items: Sequence[str]) -> ColumnNames | None:
    """Returns the two items of --columns, or None if `items` is empty. Raises ValueError for any other number."""
    if len(items) not in (0, 2):
        raise ValueError(f"--columns has {len(items)} items; give the source and the target column")
    return (items[0], items[1]) if items else None


def format_of(path: Path) -> str | None:
    """Returns the format of a file that holds source and target text, such as "tmx", by the suffix of its name.

    Returns None for a name without such a suffix, for example a file of plain lines.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        format = FORMATS.get(suffixes[-2]) if len(suffixes) > 1 else None
        return None if format in UNCOMPRESSED else format
    return FORMATS.get(suffixes[-1]) if suffixes else None


def holds_pairs(path: Path) -> bool:
    """Returns whether a file holds source and target text. A .tsv without a tab is a file of plain lines."""
    format = format_of(path)
    if format != "tsv" or not path.is_file():  # a pipe cannot be read twice
        return format is not None
    with open_bytes(path) as file:
        return any(b"\t" in line for line in file)


def locate(
    name: str, source_lang: str | None, target_lang: str | None, columns: ColumnNames | None = None
) -> Corpus:  # fmt: skip
    """Returns the corpus `name`: a file with a known suffix, a folder, or a prefix.

    Raises FileNotFoundError with a hint if no such file exists, and ValueError if several files match, a file is empty,
    one file would be the text of two languages, or `columns` are given for a format without columns.
    """
    path = Path(name)
    format = ARROW_FOLDER if path.is_dir() else format_of(path)
    if format is not None and path.exists():
        if columns is not None and format not in ("tsv", "jsonl", "parquet", ARROW_FOLDER):
            raise ValueError(f"--columns does nothing for {name}, which is not .tsv, .jsonl or .parquet")
        return Corpus(path, path, format=format, languages=(source_lang, target_lang), columns=columns)
    if format is not None or source_lang is None or target_lang is None:
        raise FileNotFoundError(f"no such file: {name}{_similar(path)}")
    if columns is not None:
        raise ValueError(f"--columns does nothing for the prefix {name}; give the name of a .tsv, .jsonl or .parquet")
    source, target = locate_side(name, source_lang), locate_side(name, target_lang)
    if source == target and source_lang != target_lang:
        languages = f"both {source_lang} and {target_lang}"
        raise ValueError(f"{languages} would be the file {source}; give each language a separate file")
    return Corpus(source, target, languages=(source_lang, target_lang))


def locate_side(prefix: str, language: str) -> Path:
    """Returns the file of one side: `prefix.language`, perhaps compressed, or the file of a related language code.

    Raises FileNotFoundError if no such file exists, and ValueError if several files match or the file is empty.
    """
    plain = f"{prefix}.{language}"
    paths = [path for path in (Path(plain + suffix) for suffix in ("", *COMPRESSIONS)) if path.is_file()]
    if not paths:
        codes = _codes(prefix)
        best = best_match(language, list(codes))
        if best is None:
            suffixes = f"with or without the suffix {', '.join(COMPRESSIONS)}"
            raise FileNotFoundError(f"no such file: {plain} ({suffixes}){_hint(prefix, codes)}")
        paths = list(codes.values())[best]
        log.info("%s is read for the language %s", paths[0], language)
    if len(paths) > 1:
        raise ValueError(f"both {paths[0]} and {paths[1]} exist; remove or rename one of them")
    with open_bytes(paths[0]) as file:
        if not file.read(1):
            raise ValueError(f"{paths[0]} is empty")
    return paths[0]


def _codes(prefix: str) -> dict[str, list[Path]]:
    """Returns the files named `prefix.CODE` or, for example, `prefix.CODE.gz`, grouped by language code."""
    path = Path(prefix)
    result: dict[str, list[Path]] = {}
    if path.name:
        for file in sorted(path.parent.glob(f"{glob.escape(path.name)}.*")):
            code = re.sub(r"\.(?:gz|bz2|xz|zst)$", "", file.name[len(path.name) + 1 :])
            if is_code(code) and file.is_file() and f".{code.lower()}" not in FORMATS:
                result.setdefault(code, []).append(file)
    return result


def _hint(prefix: str, codes: dict[str, list[Path]]) -> str:
    """Returns the end of the error message about a missing file. The text names similar files or other languages."""
    path = Path(prefix)
    if path.is_file():
        code = path.suffix[1:] or "LANG"
        return f"; {prefix} is a file: give the prefix {path.with_suffix('')}, without .{code}"
    if codes:
        return f"; there is text in {', '.join(codes)}"
    return _similar(path)


def _similar(path: Path) -> str:
    """Returns a hint: files of a known format whose name begins like the name of `path`, or else the missing folder."""
    stem = path.name.removesuffix(path.suffix) if path.suffix.lower() in FORMATS else path.name
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist"
    files = path.parent.glob(f"{glob.escape(stem)}.*") if stem else ()
    names = sorted(str(file) for file in files if format_of(file) is not None)
    return f"; did you mean {' or '.join(names[:3])}?" if names else ""


def check_line_counts(paths: list[Path], lines: list[int]) -> None:
    """Raises ValueError unless all files have the same number of lines."""
    for path, count in zip(paths[1:], lines[1:], strict=True):
        if count != lines[0]:
            raise ValueError(
                f"{paths[0]} has {lines[0]:,} lines, but {path} has {count:,}; line i of each file must be part of "
                "pair i"
            )
