"""Lexical shortlists of Marian and Bergamot: text files (lex.s2t) and binary files (lex.….bin).

A line of a text file has a target piece, a source piece and the probability of the target piece. NULL is the empty
source word. A binary file begins with a header of six 64-bit numbers: magic number, checksum of the following numbers,
number of most frequent target pieces, number of best target pieces of each source piece, number of offsets, and total
length of the lists. A list has the ids of the target pieces of a source piece. After the header come the offsets (the
bounds of the lists, 64-bit numbers) and the lists (32-bit numbers). All numbers are little-endian
(`src/data/shortlist.h` of Marian). The most frequent pieces have the first ids of the vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.config.files import atomic_write, write_atomically
from nmtkit.data.tokenizers.spm_model import FOREIGN, pieces_of
from nmtkit.data.tokenizers.tokenizer import EOS, Tokenizer
from nmtkit.models.formats.reading import read_bytes
from nmtkit.models.formats.vocabulary import read_model

MAGIC = 0xF11A48D5013417F5
HEADER = 6  # length in 64-bit numbers
NULL = "NULL"

NumpyArray = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class LexicalEntries:
    """Pairs of pieces: source piece sources[i] may become target piece targets[i]. The arrays have the tokenizer's ids.

    The source id `tokenizer.source_size` is the empty source word.
    """

    sources: NumpyArray
    targets: NumpyArray
    probabilities: NumpyArray | None  # None for a binary file
    frequent: NumpyArray | None  # target pieces that are allowed in all sentences; None for a text file
    unknown: int = 0  # number of entries that were left out because a vocabulary lacks a piece

    def best(self, number: int) -> "LexicalEntries":
        """Returns the `number` best targets of each source piece. Without probabilities, returns all entries."""
        if self.probabilities is None:
            return self
        order = np.lexsort((self.targets, -self.probabilities, self.sources))
        sources = self.sources[order]
        order = order[np.arange(len(order)) - np.searchsorted(sources, sources) < number]
        parts = self.sources[order], self.targets[order], self.probabilities[order]
        return LexicalEntries(*parts, self.frequent, self.unknown)


def read(path: Path, tokenizer: Tokenizer, vocabularies: tuple[Path, ...] = ()) -> LexicalEntries:
    """Reads a text file or a binary file.

    The ids of a binary file belong to the SentencePiece models `vocabularies` (one for both sides, or source and
    target). Without `vocabularies`, they belong to `tokenizer`. Raises ValueError or OSError naming the file.
    """
    data = read_bytes(path, "it is read as a lexical shortlist")
    if data[:8] == MAGIC.to_bytes(8, "little"):
        return _from_binary(data, path, tokenizer, vocabularies)
    if vocabularies:
        raise ValueError(f"{path} is a text file, which names its pieces: leave out --vocab")
    return _from_text(data, path, tokenizer)


def write_text(path: Path, entries: LexicalEntries, tokenizer: Tokenizer) -> None:
    """Writes a text file with the entries in their order. Raises ValueError if the entries have no probabilities."""
    if entries.probabilities is None:
        raise ValueError(
            f"{path}: a text file needs probabilities, which a binary shortlist lacks; name the output ….bin"
        )
    sources, targets = _pieces(tokenizer)
    sources.append(NULL)
    columns = (entries.sources.tolist(), entries.targets.tolist(), entries.probabilities.tolist())
    with atomic_write(path) as file:
        for source, target, probability in zip(*columns, strict=True):
            file.write(f"{targets[target]} {sources[source]} {probability:.7f}\n".encode())


def write_binary(path: Path, entries: LexicalEntries, tokenizer: Tokenizer) -> None:
    """Writes a binary file with a sorted list of target pieces for each source piece.

    The file has no probabilities, and no entries of the empty source word. The most frequent pieces are in the list of
    eos, which is the last piece of every source sentence.
    """
    size = tokenizer.target_size
    real = entries.sources < tokenizer.source_size
    keys = entries.sources[real].astype(np.int64) * size + entries.targets[real]
    frequent = np.empty(0, np.int64) if entries.frequent is None else entries.frequent.astype(np.int64)
    # Marian rejects a file whose last list is empty, so eos is added to the list of the last source piece
    keys = np.unique(np.concatenate((keys, EOS * size + frequent, [(tokenizer.source_size - 1) * size + EOS])))
    lengths = np.bincount(keys // size, minlength=tokenizer.source_size)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    numbers = np.array([EOS + 1, int(lengths.max()), len(offsets), len(keys)])
    body = numbers.astype("<u8").tobytes() + offsets.astype("<u8").tobytes() + (keys % size).astype("<u4").tobytes()
    write_atomically(path, np.array([MAGIC, checksum(body)], "<u8").tobytes() + body)


def checksum(body: bytes) -> int:
    """Returns the checksum of `body`: all bytes of a file after the first two numbers.

    The checksum covers whole 64-bit numbers only; up to 7 bytes at the end are ignored. Source: `hashMem` in
    `src/common/hash.h` of Marian, which combines numbers like Boost.
    """
    seed = 0
    for value in np.frombuffer(body[: len(body) // 8 * 8], "<u8").tolist():
        seed ^= (value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & 0xFFFFFFFFFFFFFFFF
    return seed


def _from_binary(data: bytes, path: Path, tokenizer: Tokenizer, vocabularies: tuple[Path, ...]) -> LexicalEntries:
    numbers = np.frombuffer(data[: 8 * HEADER], "<u8").tolist()
    if len(numbers) < HEADER or len(data) != 8 * HEADER + 8 * numbers[4] + 4 * numbers[5]:
        raise ValueError(f"{path} is a truncated or damaged binary shortlist")
    if checksum(data[16:]) != numbers[1]:
        raise ValueError(f"{path} is damaged: its contents do not match their checksum")
    start = 8 * (HEADER + numbers[4])
    offsets = np.frombuffer(data[8 * HEADER : start], "<u8").astype(np.int64)
    targets = np.frombuffer(data[start:], "<u4").astype(np.int64)
    if not len(offsets) or offsets[0] or offsets[-1] != len(targets) or (np.diff(offsets) < 0).any():
        raise ValueError(f"{path} is a damaged binary shortlist: its offsets are not in order")
    names = pieces = _pieces(tokenizer)
    if vocabularies:
        models = [[piece.text for piece in pieces_of(read_model(vocabulary))] for vocabulary in vocabularies]
        names = models[0], models[-1]
    lists, largest = len(offsets) - 1, int(targets.max(initial=-1))
    if lists != len(names[0]) or largest >= len(names[1]):
        raise ValueError(
            f"{path} has lists of {lists:,} source pieces, and target ids up to {largest:,}, but the vocabularies have "
            f"{len(names[0]):,} and {len(names[1]):,} pieces; give the vocabularies that the file was made with: "
            "--vocab source.spm --vocab target.spm"
        )
    sources = np.repeat(np.arange(lists), np.diff(offsets))
    frequent = np.arange(min(numbers[2], len(names[1])))
    if vocabularies:
        source_ids, target_ids = map(_ids, pieces, names)
        sources, targets, frequent = source_ids[sources], target_ids[targets], target_ids[frequent]
    return _known_entries(sources, targets, None, frequent[frequent >= 0])


def _known_entries(
    sources: NumpyArray, targets: NumpyArray, probabilities: NumpyArray | None, frequent: NumpyArray | None
) -> LexicalEntries:
    """Leaves out and counts the entries with the id -1, which stands for a piece that a vocabulary lacks."""
    known = (sources >= 0) & (targets >= 0)
    if probabilities is not None:
        probabilities = probabilities[known]
    return LexicalEntries(sources[known], targets[known], probabilities, frequent, int((~known).sum()))


def _pieces(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Returns the source and the target vocabulary, without `FOREIGN`, which marks the pieces of the other side."""
    source = tokenizer.source_pieces(range(tokenizer.source_size))
    target = tokenizer.target_pieces(range(tokenizer.target_size))
    return [piece.removeprefix(FOREIGN) for piece in source], [piece.removeprefix(FOREIGN) for piece in target]


def _ids(model_pieces: list[str], file_pieces: list[str]) -> NumpyArray:
    """Returns the id of each piece of `file_pieces` in the vocabulary `model_pieces`, or -1 if the model lacks it."""
    ids = {piece: id for id, piece in enumerate(model_pieces)}
    return np.array([ids.get(piece, -1) for piece in file_pieces], np.int64)


def _from_text(data: bytes, path: Path, tokenizer: Tokenizer) -> LexicalEntries:
    source_ids, target_ids = ({piece: id for id, piece in enumerate(side)} for side in _pieces(tokenizer))
    rows: list[tuple[int, int, float]] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            # bytes are split at ASCII white space only, because a piece can be another space, such as U+00A0
            target, source, probability = (part.decode() for part in line.split())
            value = float(probability)
        except ValueError:
            raise ValueError(
                f"{path}, line {number}: expected a target piece, a source piece and a probability, separated by spaces"
            ) from None
        if NULL not in (source, target):
            rows.append((source_ids.get(source, -1), target_ids.get(target, -1), value))
    columns = np.array(rows, np.float64).reshape(-1, 3)
    return _known_entries(columns[:, 0].astype(np.int64), columns[:, 1].astype(np.int64), columns[:, 2], None)
