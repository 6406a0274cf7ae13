"""Files with the scores of each pair and the reason for dropping the pair: Parquet or tab-separated text."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.config.extras import imported
from nmtkit.config.files import atomic_write
from nmtkit.data.corpora.compression import compressed
from nmtkit.data.corpora.corpus import format_of
from nmtkit.data.corpora.lines import line_windows

# index of the corpus from 0, number of the pair in the corpus from 1, and `checksums` of the pair
FIRST_COLUMNS = ("corpus", "line", "checksum")


def check_name(path: Path, flag: str) -> str:
    """Returns the format of a file of scores. Raises ValueError if its suffix is unknown."""
    format = format_of(path)
    if format not in ("parquet", "tsv"):
        raise ValueError(f"{flag} {path}: a file of scores ends in .parquet or .tsv")
    return format


def checksums(sources: Sequence[str], targets: Sequence[str]) -> npt.NDArray[np.uint32]:
    """Returns the CRC-32 of each mended pair in UTF-8: the source, a tab, and the target."""
    pairs = zip(sources, targets, strict=True)
    return np.array([zlib.crc32(f"{x}\t{y}".encode(errors="backslashreplace")) for x, y in pairs], np.uint32)


def _arrow() -> Any:
    need = "scores in .parquet need pip install 'nmtkit[data]'; .tsv needs no package"
    return imported("pyarrow", "parquet", need=need)


class ScoreWriter:
    """A context that writes one row for each pair. The file appears completely at the end of the context, or never."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._format = check_name(path, "--scores")
        self._stack = ExitStack()
        self._parquet: Any = None
        self._heading = False

    def __enter__(self) -> "ScoreWriter":
        with ExitStack() as stack:
            file = stack.enter_context(atomic_write(self.path))
            if self._format == "tsv":
                file = stack.enter_context(compressed(file, self.path))
            else:
                _arrow()
            self._file = file
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._parquet is not None:
            self._parquet.close()
        self._stack.__exit__(*error)

    def write(
        self,
        corpus: int,
        first: int,
        checksums: npt.NDArray[np.uint32],
        scores: dict[str, npt.NDArray[np.float32]],
        reasons: Sequence[str | None],
    ) -> None:
        """Appends the rows of a block whose first pair has the number `first`. A kept pair has the reason None."""
        count = len(reasons)
        if self._format == "tsv":
            if not self._heading:
                self._file.write(("\t".join((*FIRST_COLUMNS, *scores, "reason")) + "\n").encode())
                self._heading = True
            values = ([f"{value:.9g}" for value in column.tolist()] for column in scores.values())
            ends = (f"{reason or ''}\n" for reason in reasons)
            numbers = ([str(corpus)] * count, map(str, range(first, first + count)), map(str, checksums.tolist()))
            self._file.write("".join(map("\t".join, zip(*numbers, *values, ends, strict=True))).encode())
            return
        arrow = _arrow()
        columns = {"corpus": arrow.array([corpus] * count, arrow.int32()),
                   "line": arrow.array(range(first, first + count), arrow.int64()),
                   "checksum": arrow.array(np.ascontiguousarray(checksums)),
                   **{name: arrow.array(np.ascontiguousarray(column)) for name, column in scores.items()},
                   "reason": arrow.array(reasons, arrow.string())}  # fmt: skip
        table = arrow.table(columns)
        if self._parquet is None:
            self._parquet = arrow.parquet.ParquetWriter(self._file, table.schema)
        self._parquet.write_table(table)


def columns_of(path: Path) -> list[str]:
    """Returns the column names of the file of --from-scores. Raises ValueError or OSError for an unreadable file."""
    if check_name(path, "--from-scores") == "tsv":
        return next(line_windows(path, 1))[0].split("\t")
    arrow = _arrow()
    try:
        names: list[str] = arrow.parquet.read_schema(path).names
    except arrow.ArrowException as error:
        raise ValueError(f"{path} is damaged or is not Parquet: {error}") from None
    return names


class ScoreReader:
    """Reads the scores of an earlier run in order.

    Raises ValueError if the file lacks the scores of a filter, or belongs to other pairs.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path, self._names = path, list(names)
        self._batches = self._text() if check_name(path, "--from-scores") == "tsv" else self._table()
        self._rest = np.empty((0, 1 + len(names)))  # checksums and scores
        self._read = 0
        self._different: int | None = None  # number of the first row that belongs to a different pair

    def _check(self, present: Sequence[str]) -> None:
        if "checksum" not in present:
            raise ValueError(
                f"{self.path} has no column checksum, so it may belong to other corpora; clean again with --scores"
            )
        missing = [name for name in self._names if name not in present]
        if missing:
            raise ValueError(
                f"{self.path} has no scores of {', '.join(missing)}; leave these filters out with --filters, or clean "
                "again without --from-scores"
            )

    def _table(self) -> Iterator[npt.NDArray[np.float64]]:
        arrow = _arrow()
        try:
            with arrow.parquet.ParquetFile(self.path) as file:
                self._check(file.schema_arrow.names)
                columns = ["checksum", *self._names]
                for batch in file.iter_batches(batch_size=1 << 15, columns=columns):
                    yield np.column_stack([batch.column(name).to_numpy().astype(np.float64) for name in columns])
        except arrow.ArrowException as error:
            raise ValueError(f"{self.path} is damaged or is not Parquet: {error}") from None

    def _text(self) -> Iterator[npt.NDArray[np.float64]]:
        heading: list[int] | None = None
        for lines in line_windows(self.path, 1 << 13):
            rows = [line.split("\t") for line in lines]
            if heading is None:
                self._check(rows[0])
                heading = [rows[0].index(name) for name in ("checksum", *self._names)]
                del rows[0]
            try:
                values = [[float(row[index]) for index in heading] for row in rows]
            except (ValueError, IndexError):
                raise ValueError(f"{self.path} is not a file that --scores has written: a score is missing") from None
            yield np.array(values, np.float64).reshape(len(rows), len(heading))

    def next(self, checksums: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
        """Reads the scores [pairs, filters] of the next pairs. Raises ValueError if the file has too few rows.

        `finish` raises ValueError if a checksum in `checksums` differs from the file.
        """
        count = len(checksums)
        while len(self._rest) < count:
            batch = next(self._batches, None)
            if batch is None:
                raise ValueError(
                    f"{self.path} has {self._read + len(self._rest):,} rows, but the corpora have more pairs; give "
                    "the corpora of the run that wrote the scores"
                )
            self._rest = np.concatenate((self._rest, batch))
        result, self._rest = self._rest[:count], self._rest[count:]
        different = np.flatnonzero(result[:, 0] != checksums)
        if self._different is None and len(different):
            self._different = self._read + int(different[0]) + 1
        self._read += count
        return result[:, 1:].astype(np.float32)

    def finish(self) -> None:
        """Raises ValueError if the file has more rows than the corpora have pairs, or rows of different pairs."""
        more = len(self._rest) + sum(len(batch) for batch in self._batches)
        if more:
            raise ValueError(
                f"{self.path} has {self._read + more:,} rows, but the corpora have {self._read:,} pairs; give the "
                "corpora of the run that wrote the scores"
            )
        if self._different is not None:
            raise ValueError(
                f"row {self._different:,} of {self.path} belongs to a different pair; give the corpora of the run that "
                "wrote the scores, in the same order and with the same --mend"
            )
