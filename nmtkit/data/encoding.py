"""Blocks of text to blocks of ids: what each worker of `preprocess` does, from the bytes of a file to the bytes of one.

A worker encodes a block, answers how large it came out, and writes it when it is told where: blocks are given their
places in the order of the text, so that the files are the same for any number of workers.
"""

import hashlib
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.data import cleaning, corpus, duplicates
from nmtkit.data.batch_encoder import BatchEncoder
from nmtkit.data.cleaning import LEAKED, LONG_LINE, Example, Findings, LineBytes, Mask, Rules
from nmtkit.data.corpus import BLOCK_BYTES, Block
from nmtkit.data.tokenizer import Tokenizer

Ids = npt.NDArray[Any]


@dataclass(frozen=True)
class Files:
    """Where a corpus is from, and the tag put before its source lines."""

    source: Path
    target: Path
    tag: str | None = None


@dataclass(frozen=True, eq=False)
class SideIds:
    """Sentences of one side, end to end."""

    ids: Ids
    lengths: npt.NDArray[np.int64]

    def select(self, keep: Mask) -> "SideIds":
        if keep.all():
            return self
        return SideIds(self.ids[np.repeat(keep, self.lengths)], self.lengths[keep])

    def with_first(self, token: int) -> "SideIds":
        """Each sentence with `token` before it."""
        starts = np.cumsum(self.lengths) - self.lengths
        return SideIds(np.insert(self.ids, starts, token), self.lengths + 1)


@dataclass(frozen=True, eq=False)
class EncodedBlock:
    source: SideIds
    target: SideIds
    hashes: npt.NDArray[np.uint64]  # pairs, 2: see duplicates.py
    findings: Findings

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Pairs, source tokens, target tokens."""
        return len(self.source.lengths), len(self.source.ids), len(self.target.ids)


class PairEncoder:
    """Encodes blocks of pairs with one tokenizer. Holds the word caches, so keep it for many blocks."""

    def __init__(self, tokenizer: Tokenizer, dtypes: tuple[str, str]) -> None:
        self._tokenizer = tokenizer
        self._source = BatchEncoder(tokenizer.source_model, dtypes[0])
        self._target = self._source if tokenizer.joint else BatchEncoder(tokenizer.target_model, dtypes[1])
        self._source_hash = duplicates.RowHash(tokenizer.source_size, 0)
        self._target_hash = duplicates.RowHash(tokenizer.target_size, 1)
        self._tags: dict[str, int] = {}

    def encode(
        self, block: Block, files: Files, rules: Rules, leaked: npt.NDArray[np.uint64], strict: bool = False
    ) -> EncodedBlock:
        """The block's pairs, but for those that `rules` drop. `leaked` are the keys, sorted, of valid and test pairs.

        Raises ValueError naming file and line for bytes that are no UTF-8 and, if `strict`, for the first pair that
        is dropped.
        """
        if block.lines == 1 and max(block.source.size, block.target.size) > max(BLOCK_BYTES, rules.max_line_bytes + 1):
            return self._unread(block, files, strict)
        texts = block.source.read(), block.target.read()
        source, target = self.encode_texts(texts, files, block.first_line)
        hashes = self.hashes(source, target)
        lines = LineBytes(texts[0]), LineBytes(texts[1])
        masks = cleaning.text_masks(*lines, rules) | cleaning.piece_masks(source.lengths, target.lengths, rules)
        masks[LEAKED] = _in_sorted(duplicates.pair_keys(hashes), leaked)
        keep, rows = cleaning.first_reasons(masks, rules)
        if strict and not keep.all():
            raise ValueError(_strict_error(rows, keep, block, files))
        source = self.tagged(source.select(keep), files.tag)
        return EncodedBlock(source, target.select(keep), hashes[keep], _findings(rows, lines, block, files, rules))

    def encode_texts(self, texts: tuple[bytes, bytes], files: Files, first_line: int) -> tuple[SideIds, SideIds]:
        """Both sides of lines that each end in \n, without tag."""
        return (
            SideIds(*self._source.encode(corpus.decode(texts[0], files.source, first_line))),
            SideIds(*self._target.encode(corpus.decode(texts[1], files.target, first_line))),
        )

    def hashes(self, source: SideIds, target: SideIds) -> npt.NDArray[np.uint64]:
        """The two numbers that stand for each pair: pairs, 2."""
        return np.column_stack(
            (self._source_hash(source.ids, source.lengths), self._target_hash(target.ids, target.lengths))
        )

    def tagged(self, source: SideIds, tag: str | None) -> SideIds:
        """The same ids as those of the lines with the tag and a space before them."""
        return source if tag is None else source.with_first(self._tag_id(tag))

    def _tag_id(self, tag: str) -> int:
        if tag not in self._tags:
            self._tags[tag] = int(self._tokenizer.encode_source([tag]).ids[0])
        return self._tags[tag]

    def _unread(self, block: Block, files: Files, strict: bool) -> EncodedBlock:
        """One line, too long to be worth reading."""
        for span in (block.source, block.target):
            if span.spool:
                span.path.unlink()
        place = f"{files.source}:{block.first_line}"
        if strict:
            raise ValueError(f"{place}: {LONG_LINE}; --strict allows no pair to be dropped")
        example = Example(place, f"({block.source.size:,} bytes)", f"({block.target.size:,} bytes)")
        nothing = SideIds(np.empty(0, np.uint16), np.empty(0, np.int64))
        findings = Findings({LONG_LINE: 1}, {}, {LONG_LINE: [example]})
        return EncodedBlock(nothing, nothing, np.empty((0, 2), np.uint64), findings)


def _in_sorted(keys: npt.NDArray[np.uint64], of: npt.NDArray[np.uint64]) -> Mask:
    if not len(of):
        return np.zeros(len(keys), np.bool_)
    return of[np.minimum(np.searchsorted(of, keys), len(of) - 1)] == keys


def _findings(
    rows: dict[str, npt.NDArray[np.int64]], lines: tuple[LineBytes, LineBytes], block: Block, files: Files, rules: Rules
) -> Findings:
    findings = Findings()
    for reason, where in rows.items():
        (findings.dropped if rules.drops(reason) else findings.counted)[reason] = len(where)
        findings.examples[reason] = [
            Example(f"{files.source}:{block.first_line + row}", *(_shortened(side.line(row)) for side in lines))
            for row in where[: cleaning.EXAMPLES].tolist()
        ]
    return findings


def _shortened(line: bytes) -> str:
    text = line[: 4 * cleaning.EXAMPLE_CHARACTERS].decode("utf-8", "ignore")
    return text if len(text) <= cleaning.EXAMPLE_CHARACTERS else text[: cleaning.EXAMPLE_CHARACTERS] + "…"


def _strict_error(rows: dict[str, npt.NDArray[np.int64]], keep: Mask, block: Block, files: Files) -> str:
    row = int(np.argmin(keep))
    reason = next(reason for reason in cleaning.REASONS if row in rows.get(reason, ()))
    number = block.first_line + row
    return f"{files.source}:{number} and {files.target}:{number}: {reason}; --strict allows no pair to be dropped"


# --- files ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a block begins in the files of a split."""

    pair: int = 0
    source_token: int = 0
    target_token: int = 0

    def after(self, sizes: tuple[int, int, int]) -> "Place":
        return Place(self.pair + sizes[0], self.source_token + sizes[1], self.target_token + sizes[2])


@dataclass
class SplitFiles:
    """The files of one split while they are made, open for writing at any place."""

    source_ids: Path
    target_ids: Path
    source_lengths: Path
    target_lengths: Path
    keys: Path | None = None  # None where nobody looks for duplicates
    _open: dict[Path, int] = field(default_factory=dict)

    def write(self, block: EncodedBlock, at: Place) -> None:
        self._put(self.source_ids, block.source.ids, at.source_token)
        self._put(self.target_ids, block.target.ids, at.target_token)
        self._put(self.source_lengths, block.source.lengths.astype(np.int32), at.pair)
        self._put(self.target_lengths, block.target.lengths.astype(np.int32), at.pair)
        if self.keys is not None:
            self._put(self.keys, block.hashes, 2 * at.pair)

    def _put(self, path: Path, values: npt.NDArray[Any], first: int) -> None:
        if path not in self._open:
            self._open[path] = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        rest = memoryview(values.tobytes())
        position = first * values.itemsize
        while rest:
            written = os.pwrite(self._open[path], rest, position)
            rest, position = rest[written:], position + written

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


# --- the worker -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encode:
    """Answer: sizes and findings of the block. It is held until a `Write` for it comes."""

    block: Block
    files: Files


@dataclass(frozen=True)
class Write:
    """Puts the block held longest in its place."""

    place: Place


@dataclass(frozen=True)
class FindCopies:
    """Answer: the rows of a partition of keys that repeat an earlier one."""

    partition: Path


@dataclass(frozen=True)
class Sum:
    """Answer: size and SHA-256 of a file, which is on the disk by then."""

    path: Path


@dataclass(frozen=True)
class Statistics:
    """Answer: how often each id was written, of either side."""


@dataclass(frozen=True)
class WorkerSettings:
    tokenizer: Tokenizer
    dtypes: tuple[str, str]
    rules: Rules
    strict: bool
    leaked: npt.NDArray[np.uint64]
    files: SplitFiles
    count_pieces: bool


class Worker:
    """The handler of one worker process: see the messages above."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._encoder = PairEncoder(settings.tokenizer, settings.dtypes)
        self._held: deque[EncodedBlock] = deque()
        sizes = settings.tokenizer.source_size, settings.tokenizer.target_size
        self._pieces = [np.zeros(size, np.int64) for size in sizes]

    def __call__(self, message: Any) -> Any:
        settings = self._settings
        match message:
            case Encode(block, files):
                encoded = self._encoder.encode(block, files, settings.rules, settings.leaked, settings.strict)
                if files.tag is not None:  # one pair under two tags is no duplicate
                    encoded.hashes[:, 0] += duplicates.tag_salt(files.tag)
                self._held.append(encoded)
                return encoded.sizes, encoded.findings
            case Write(place):
                encoded = self._held.popleft()
                settings.files.write(encoded, place)
                if settings.count_pieces:
                    for counts, side in zip(self._pieces, (encoded.source, encoded.target), strict=True):
                        counts += np.bincount(side.ids, minlength=len(counts))
            case FindCopies(partition):
                rows = duplicates.later_copies(partition)
                partition.unlink()
                return rows
            case Sum(path):
                return checksum(path)
            case Statistics():
                return self._pieces
        return None


def checksum(path: Path) -> dict[str, Any]:
    """Bytes and SHA-256 of a file, for the manifest; the file is synced first, so that both stay true."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
