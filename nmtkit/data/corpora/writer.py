"""Writes pairs as a corpus in any format that `pairs` reads, except PO and XLIFF."""

import json
import logging
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from nmtkit.config.extras import imported
from nmtkit.config.files import atomic_write
from nmtkit.data.corpora.compression import compressed, is_compressed
from nmtkit.data.corpora.corpus import FORMATS, UNCOMPRESSED, Pairs, format_of
from nmtkit.data.corpora.tmx import HEAD, INVALID, TAIL, unit_of
from nmtkit.jobs.progress import quantity

log = logging.getLogger("nmtkit")


def output_paths(name: str, languages: tuple[str, str]) -> list[Path]:
    """Returns the files that `CorpusWriter` writes: one file if `name` ends in a known suffix, otherwise two files.

    Two files get the language codes as suffixes: clean gives clean.en and clean.de, and clean.gz gives clean.en.gz.
    Raises ValueError for a format that cannot be written, and for equal languages unless the format is .tsv.
    """
    path = Path(name)
    format = format_of(path)
    if format in ("po", "xliff"):
        raise ValueError(f"{name}: PO and XLIFF cannot be written; give .tsv, .tmx, .jsonl, .parquet, .zip or a prefix")
    if languages[0] == languages[1] and format != "tsv":  # the target would overwrite the source
        raise ValueError(f"{name}: only a .tsv can hold two sides in the same language, {languages[0]}")
    if format is not None:
        return [path]
    ending = path.suffix if is_compressed(path) else ""
    if Path(name.removesuffix(ending)).suffix.lower() in FORMATS:
        raise ValueError(f"{name}: {' and '.join(UNCOMPRESSED)} files compress text themselves; leave out {ending}")
    return [Path(f"{name.removesuffix(ending)}.{language}{ending}") for language in languages]


class CorpusWriter:
    """Writes pairs to a corpus, as a context manager. `name` chooses the format, as described at `output_paths`.

    When the context ends, the files appear. After an error, no file appears. The writer logs a warning in two cases:

    - A .tsv file cannot contain tabs in a cell, and a .tmx file cannot contain control characters. These characters are
      replaced by spaces. The warning has the number of changed texts.
    - Two text files and a .zip file can contain only the source and the target texts. Other columns are left out.
    """

    def __init__(self, name: str, languages: tuple[str, str]) -> None:
        self.paths = output_paths(name, languages)
        self.format = format_of(self.paths[0]) if len(self.paths) == 1 else None
        self.languages = languages
        self.changed = 0  # number of texts with a replaced character
        self._names: list[str] | None = None  # names of the other columns, from the first pairs
        self._context = self._opened()
        self._stack = ExitStack()
        self._files: list[Any] = []  # one file, or a file for each side
        self._arrow: Any = None  # the package pyarrow, for a .parquet
        self._parquet: Any = None

    @property
    def has_columns(self) -> bool:
        """Whether the format has columns in addition to the source and the target texts."""
        return self.format not in (None, "zip")

    def __enter__(self) -> "CorpusWriter":
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    @contextmanager
    def _opened(self) -> Iterator[None]:
        with self._stack as stack:
            for path in self.paths:
                file: BinaryIO = stack.enter_context(atomic_write(path))
                self._files.append(file if self.format in UNCOMPRESSED else stack.enter_context(compressed(file, path)))
            if self.format == "tmx":
                self._files[0].write(HEAD.format(source=self.languages[0]).encode())
            elif self.format == "parquet":  # a missing package is noticed before the pairs are computed
                self._arrow = imported("pyarrow", "parquet", need=f"{self.paths[0]} needs pip install 'nmtkit[data]'")
            elif self.format == "zip":
                stack.enter_context(self._zip_members())
            yield
            if self.format == "tmx":
                self._files[0].write(TAIL.encode())
            elif self.format == "parquet" and self._parquet is None:
                self._write_parquet(Pairs([], [], []))
            elif self.format == "tsv" and self._names is None:
                self._files[0].write(self._heading([]))
            self._warn()

    @contextmanager
    def _zip_members(self) -> Iterator[None]:
        """Replaces the archive in `_files` by its members. A temporary file has the target until the source is done."""
        source, target = (f"{self.paths[0].stem}.{language}" for language in self.languages)
        with (
            zipfile.ZipFile(self._files[0], "w", zipfile.ZIP_DEFLATED) as archive,
            tempfile.TemporaryFile() as waiting,
        ):
            with archive.open(source, "w", force_zip64=True) as member:
                self._files = [member, waiting]
                yield
            waiting.seek(0)
            with archive.open(target, "w", force_zip64=True) as member:
                shutil.copyfileobj(waiting, member)

    def _warn(self) -> None:
        if self.changed:
            replaced = "tabs" if self.format == "tsv" else "control characters, which XML cannot hold,"
            log.warning("%s: %s become spaces in %s", self.paths[0], replaced, quantity(self.changed, "texts"))
        if self._names and not self.has_columns:
            log.warning("%s cannot contain the columns %s; a .tsv or .jsonl can", self.paths[0],
                        ", ".join(self._names))  # fmt: skip

    def write(self, pairs: Pairs) -> None:
        """Appends pairs.

        Raises ValueError in these cases:
        - The format has columns, and the name of a column is a language of the corpus.
        - The format is .tsv or .parquet, and a pair has a column that the first pairs lack.
        - The format is .parquet, and the values of a column have different types.
        - The format is .jsonl, and JSON cannot hold a value, such as bytes or a date.
        """
        if not len(pairs):  # an empty block does not show the names of the columns
            return
        names = dict.fromkeys(name for others in pairs.extras for name in others)
        for language in self.languages if self.has_columns else ():
            if language in names:
                raise ValueError(
                    f"{self.paths[0]}: the column {language!r} of the input has the name of a language; rename the "
                    "column"
                )
        if self._names is None or not self.has_columns:  # `_warn` names the columns of all pairs
            self._names = list(dict.fromkeys([*(self._names or ()), *names]))
            if self.format == "tsv":
                self._files[0].write(self._heading(self._names))
        unknown = [name for name in names if name not in self._names]
        if unknown and self.format in ("tsv", "parquet"):
            raise ValueError(
                f"{self.paths[0]}: the first pairs lack the column {unknown[0]!r}; write .jsonl, whose pairs may have "
                "different columns"
            )
        write = self._write_lines if self.format in (None, "zip") else getattr(self, f"_write_{self.format}")
        write(pairs)

    def _heading(self, names: list[str]) -> bytes:
        return ("\t".join([*self.languages, *names]) + "\n").encode()

    def _write_lines(self, pairs: Pairs) -> None:
        for file, lines in zip(self._files, (pairs.sources, pairs.targets), strict=True):
            file.write("".join(line + "\n" for line in lines).encode())

    def _write_tsv(self, pairs: Pairs) -> None:
        rows = []
        for source, target, others in zip(pairs.sources, pairs.targets, pairs.extras, strict=True):
            cells = [source, target, *("" if (value := others.get(name)) is None else str(value)
                                       for name in self._names or ())]  # fmt: skip
            rows.append("\t".join([self._replaced(re.compile(r"[\t\n]"), cell) for cell in cells]) + "\n")
        self._files[0].write("".join(rows).encode())

    def _replaced(self, pattern: re.Pattern[str], text: str) -> str:
        if pattern.search(text) is None:
            return text
        self.changed += 1
        return pattern.sub(" ", text)

    def _write_jsonl(self, pairs: Pairs) -> None:
        lines = (
            json.dumps({self.languages[0]: source, self.languages[1]: target, **others}, ensure_ascii=False) + "\n"
            for source, target, others in zip(pairs.sources, pairs.targets, pairs.extras, strict=True)
        )
        try:
            text = "".join(lines)
        except TypeError:
            for name, value in chain.from_iterable(others.items() for others in pairs.extras):
                self._check_json(name, value)
            raise
        self._files[0].write(text.encode())

    def _check_json(self, name: str, value: object) -> None:
        try:
            json.dumps(value)
        except TypeError as error:
            raise ValueError(
                f"{self.paths[0]}: a value in the column {name!r} cannot be written as JSON: {error}; write .parquet"
            ) from None

    def _write_tmx(self, pairs: Pairs) -> None:
        units = (
            unit_of(self._replaced(INVALID, source), self._replaced(INVALID, target),
                    {name: self._replaced(INVALID, str(value)) for name, value in others.items()}, self.languages)
            for source, target, others in zip(pairs.sources, pairs.targets, pairs.extras, strict=True)
        )  # fmt: skip
        self._files[0].write("".join(units).encode())

    def _write_parquet(self, pairs: Pairs) -> None:
        columns: dict[str, list[Any]] = {self.languages[0]: pairs.sources, self.languages[1]: pairs.targets}
        columns |= {name: [others.get(name) for others in pairs.extras] for name in self._names or ()}
        try:
            if self._parquet is None:
                texts = [self._arrow.field(language, self._arrow.string()) for language in self.languages]
                extra = [self._arrow.field(name, self._arrow.array(columns[name]).type) for name in self._names or ()]
                schema = self._arrow.schema([*texts, *extra])
                writer = self._arrow.parquet.ParquetWriter(self._files[0], schema)
                self._parquet = self._stack.enter_context(writer)
            self._parquet.write_table(self._arrow.table(columns, schema=self._parquet.schema))
        except self._arrow.ArrowException as error:
            raise ValueError(f"{self.paths[0]}: the values of a column have different types: {error}") from None
