"""Files with the scores of each pair and the reason for dropping the pair: Parquet or tab-separated text."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.filters.text_block import ScoreMatrix
from nmtkit.config.extras import imported
from nmtkit.config.files import atomic_write
from nmtkit.data.corpora.compression import compressed
from nmtkit.data.corpora.corpus import format_of
from nmtkit.data.corpora.lines import line_windows

# index of the corpus (from 0), number of the pair in the corpus (from 1), CRC-32 of the pair (see `checksums`)
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
    """Writes the scores `names` of each pair, and the reason of each dropped pair.

    The complete file appears when `stack` is closed. After an error, no file appears.
    """

    def __init__(self, path: Path, names: Sequence[str], stack: ExitStack) -> None:
        self._arrow = _arrow() if check_name(path, "--scores") == "parquet" else None
        file = stack.enter_context(atomic_write(path))
        if self._arrow is None:
            self._file = stack.enter_context(compressed(file, path))
            self._file.write(("\t".join((*FIRST_COLUMNS, *names, "reason")) + "\n").encode())
            return
        types = [self._arrow.int32(), self._arrow.int64(), self._arrow.uint32(), *[self._arrow.float32()] * len(names)]
        columns = [*zip((*FIRST_COLUMNS, *names), types, strict=True), ("reason", self._arrow.string())]
        self._parquet = stack.enter_context(self._arrow.parquet.ParquetWriter(file, self._arrow.schema(columns)))

    def write(
        self,
        corpus: int,
        first: int,
        checksums: npt.NDArray[np.uint32],
        scores: ScoreMatrix,
        reasons: Sequence[str | None],
    ) -> None:
        """Appends the rows of a block whose first pair has the number `first`. A kept pair has the reason None."""
        numbers = [corpus] * len(reasons), range(first, first + len(reasons)), checksums.tolist()
        if self._arrow is None:
            values = ([f"{value:.9g}" for value in column] for column in scores.T.tolist())
            ends = (f"{reason or ''}\n" for reason in reasons)
            texts = (map(str, column) for column in numbers)
            self._file.write("".join(map("\t".join, zip(*texts, *values, ends, strict=True))).encode())
            return
        schema = self._parquet.schema
        columns = zip((*numbers, *scores.T, reasons), schema.types, strict=True)
        arrays = [self._arrow.array(column, kind) for column, kind in columns]
        self._parquet.write_table(self._arrow.Table.from_arrays(arrays, schema=schema))


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


def check_columns(path: Path, present: Sequence[str], names: Sequence[str]) -> None:
    """Raises ValueError if the file of --from-scores lacks the checksums or one of the scores `names`.

    `present` are the columns of the file.
    """
    if "checksum" not in present:
        raise ValueError(f"{path} has no column checksum, so it may belong to other corpora; clean again with --scores")
    missing = [name for name in names if name not in present]
    if missing:
        raise ValueError(
            f"{path} has no scores of {', '.join(missing)}; leave these filters out with --filters, or clean again "
            "without --from-scores"
        )


def read_scores(path: Path, names: Sequence[str], checksums: npt.NDArray[np.uint32], scratch: Path) -> ScoreMatrix:
    """Returns the scores [pairs, scores] in the file of --from-scores, as a memory-mapped array in the file `scratch`.

    `checksums` are the checksums of all pairs. Raises ValueError if the file is damaged, or belongs to other pairs.
    """
    result = np.empty((len(checksums), len(names)), np.float32)
    if result.size:
        result = np.memmap(scratch, np.float32, "w+", shape=result.shape)
    rows = 0
    different: list[int] = []  # first row with a different pair, for each block with such rows
    for block in (_text if check_name(path, "--from-scores") == "tsv" else _table)(path, ["checksum", *names]):
        expected = checksums[rows : rows + len(block)]
        known = block[: len(expected)]
        result[rows : rows + len(known)] = known[:, 1:]
        different += (np.flatnonzero(known[:, 0] != expected)[:1] + rows + 1).tolist()
        rows += len(block)
    if rows != len(checksums):
        raise ValueError(
            f"{path} has {rows:,} rows, but the corpora have {len(checksums):,} pairs; give the corpora of the run "
            "that wrote the scores"
        )
    if different:
        raise ValueError(
            f"row {different[0]:,} of {path} belongs to a different pair; give the corpora of the run that wrote the "
            "scores, in the same order and with the same --mend"
        )
    return result


def _table(path: Path, columns: Sequence[str]) -> Iterator[npt.NDArray[np.float64]]:
    """Yields blocks of rows of a Parquet file: [rows, columns]."""
    arrow = _arrow()
    try:
        with arrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1 << 15, columns=columns):
                yield np.column_stack([batch.column(name).to_numpy().astype(np.float64) for name in columns])
    except arrow.ArrowException as error:
        raise ValueError(f"{path} is damaged or is not Parquet: {error}") from None


def _text(path: Path, columns: Sequence[str]) -> Iterator[npt.NDArray[np.float64]]:
    """Yields blocks of rows of a tab-separated file: [rows, columns]."""
    heading: list[str] = []
    for lines in line_windows(path, 1 << 13):
        rows = [line.split("\t") for line in lines]
        heading = heading or rows.pop(0)
        indices = [heading.index(name) for name in columns]
        try:
            values = [[float(row[index]) for index in indices] for row in rows]
        except (ValueError, IndexError):
            raise ValueError(f"{path} is not a file that --scores has written: a score is missing") from None
        yield np.array(values, np.float64).reshape(len(rows), len(columns))
