"""Stores, for each target token of a dataset, the most probable pieces according to a teacher model.

A folder has `manifest.json`, `lengths.bin` (int32, number of target tokens of each pair) and the files `00000.bin`, …
with `pairs_per_file` pairs each. The files are memory-mapped. A file has a row for each target token, eos included. A
row has the id of the target token, and the ids and log probabilities of the most probable pieces, best first. A reader
compares the stored target tokens with the target tokens of its batch, to detect different target sentences. `nmtkit
distill` writes the folder. A later call writes the missing files.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.config.files import parse_json, write_atomically

# In shapes, T is the number of target tokens, and C is the number of stored pieces for each target token.

FORMAT = 1
MANIFEST = "manifest.json"
LENGTHS = "lengths.bin"


def row_dtype(vocabulary: int, candidates: int) -> np.dtype[Any]:
    ids = "<u2" if vocabulary <= 1 << 16 else "<u4"
    return np.dtype([("target", ids), ("ids", ids, (candidates,)), ("log_probabilities", "<f4", (candidates,))])


class TeacherFile:
    """Reads and writes the rows of a folder, which the docstring of the module describes."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest
        self.candidates, self.pairs_per_file = int(manifest["candidates"]), int(manifest["pairs_per_file"])
        self.dtype = row_dtype(manifest["vocabulary"], self.candidates)
        self.lengths = np.fromfile(folder / LENGTHS, np.int32)
        # first row of each pair, counted over all files
        self.starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        self.files: dict[int, npt.NDArray[Any]] = {}

    @staticmethod
    def open(folder: Path, tokenizer: str | None = None) -> "TeacherFile":
        """Opens a folder. Raises OSError or ValueError if the folder is incomplete or has a different tokenizer.

        `tokenizer` is the fingerprint of the required tokenizer. With None, any tokenizer is accepted, and files of
        rows may be missing.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no probabilities of a teacher; make them with nmtkit distill")
        try:
            manifest = parse_json(path.read_bytes())
            if manifest["nmtkit_teacher"] != FORMAT:
                raise ValueError(f"its format is {manifest['nmtkit_teacher']}, not {FORMAT}")
            result = TeacherFile(folder, manifest)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error}; remove {folder} and run nmtkit distill again") from error
        if tokenizer is not None:
            if manifest["tokenizer"] != tokenizer:
                raise ValueError(f"{folder} was made with a different tokenizer; run nmtkit distill with this dataset")
            if missing := len(list(result.missing())):
                raise ValueError(f"{folder} lacks {missing} of {result.count} files; run nmtkit distill again")
        return result

    @staticmethod
    def create(folder: Path, lengths: npt.NDArray[np.int32], manifest: dict[str, Any]) -> "TeacherFile":
        """Creates a folder, or opens an existing folder. Raises ValueError if the existing settings differ."""
        manifest = {"nmtkit_teacher": FORMAT, **manifest}
        if (folder / MANIFEST).is_file():
            existing = TeacherFile.open(folder)
            if differences := [name for name, value in manifest.items() if existing.manifest.get(name) != value]:
                change = f"was begun with other settings ({', '.join(differences)})"
                raise ValueError(f"{folder} {change}; remove the folder, or give the same settings")
            return existing
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / LENGTHS, np.ascontiguousarray(lengths, np.int32).tobytes())
        write_atomically(folder / MANIFEST, json.dumps(manifest, indent=2))
        return TeacherFile(folder, manifest)

    @property
    def count(self) -> int:
        """Number of files."""
        return -(-len(self.lengths) // self.pairs_per_file)

    def path(self, number: int) -> Path:
        return self.folder / f"{number:05}.bin"

    def missing(self) -> Iterator[tuple[int, range]]:
        """Yields the number of each missing file, and the range of its pairs."""
        for number in range(self.count):
            if not self.path(number).is_file():
                first = number * self.pairs_per_file
                yield number, range(first, min(first + self.pairs_per_file, len(self.lengths)))

    def write(self, number: int, rows: npt.NDArray[Any]) -> None:
        write_atomically(self.path(number), rows.astype(self.dtype, copy=False).tobytes())

    def rows_of(self, pair: int) -> tuple[int, slice]:
        """Returns the number of the file with the rows of a pair, and the position of the rows in the file."""
        number = pair // self.pairs_per_file
        first = int(self.starts[pair] - self.starts[number * self.pairs_per_file])
        return number, slice(first, first + int(self.lengths[pair]))

    def read(
        self, pairs: list[int], target: npt.NDArray[np.int64], counted: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Returns the teacher's pieces for the target tokens of `pairs`: ids [T, C] and log probabilities [T, C].

        `target` [T] has the target tokens of the batch. `counted` [T] is False for tokens that are not compared.
        Raises ValueError if the folder was made for different target sentences.
        """
        parts = []
        for pair in pairs:
            if pair >= len(self.lengths):
                raise ValueError(f"{self.folder} has {len(self.lengths):,} pairs, but the dataset has more pairs")
            number, part = self.rows_of(pair)
            if number not in self.files:
                self.files[number] = np.memmap(self.path(number), self.dtype, "r")
            parts.append(self.files[number][part])
        rows = np.concatenate(parts)
        if len(rows) != len(target) or (rows["target"] != target)[counted].any():
            raise ValueError(
                f"{self.folder} was made for other target sentences: train on the dataset that nmtkit distill read, "
                "without --transforms that change target sentences"
            )
        return rows["ids"].astype(np.int64), np.ascontiguousarray(rows["log_probabilities"])
