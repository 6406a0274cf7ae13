"""Encodes blocks of text as blocks of ids, in the worker processes of `preprocess`.

A worker encodes a block and returns the sizes of the block. The main process then sends the offset of the block, and
the worker writes the block. Offsets follow the order of the text, so the files are the same for any number of workers.
"""

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nmtkit.data.corpora import dropping
from nmtkit.data.corpora.blocks import Block
from nmtkit.data.corpora.corpus import Corpus
from nmtkit.data.corpora.dropping import EXAMPLES, Mask, PairExample, ReasonCounts, RowNumbers, contained
from nmtkit.data.corpora.lines import decode
from nmtkit.data.dataset import alignments, drop_reasons
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.dataset_files import checksum
from nmtkit.data.dataset.diagnostics import TextStatistics
from nmtkit.data.dataset.drop_reasons import LONG_LINE, OVERLAP, LineBytes
from nmtkit.data.tokenizers.batch_encoder import BatchEncoder
from nmtkit.data.tokenizers.tokenizer import Encoded, Tokenizer

Hashes = npt.NDArray[np.uint64]
Sizes = tuple[int, ...]  # counts in one block or in all earlier blocks: number of pairs, then number of ids per side
LANGUAGE_FLAGS = ("--source-language-token", "--target-language-token")


@dataclass(frozen=True, eq=False)
class EncodedBlock:
    sides: tuple[Encoded, ...]  # source, target and, in a training set, alignment links (see alignments.py)
    hashes: Hashes  # [pairs, 2], see corpora/dropping.py
    statistics: ReasonCounts
    text: TextStatistics | None = None  # None for a block that was not read

    @property
    def sizes(self) -> Sizes:
        return len(self.hashes), *(len(side.ids) for side in self.sides)


class PairEncoder:
    """Encodes blocks of pairs with one tokenizer. Use one encoder for many blocks, because an encoder caches words."""

    def __init__(self, tokenizer: Tokenizer, dtypes: tuple[str, str], languages: tuple[str | None, str | None]) -> None:
        self._tokenizer = tokenizer
        self._source = BatchEncoder(tokenizer.source_model, dtypes[0])
        self._target = self._source if tokenizer.one_model else BatchEncoder(tokenizer.target_model, dtypes[1])
        self._source_hash = dropping.RowHash(tokenizer.source_size, 0)
        self._target_hash = dropping.RowHash(tokenizer.target_size, 1)
        self._tag_ids: dict[str, int] = {}
        self._language_ids = tokenizer.language_ids(*languages, LANGUAGE_FLAGS)

    def check_alignable(self) -> None:
        """Raises ValueError for --alignments unless the tokenizers of both sides split text at spaces."""
        if not (self._source.can_align and self._target.can_align):
            raise ValueError("--alignments needs tokenizers that split text at spaces; yours do not")

    def encode(self, block: Block, files: Corpus, config: PreprocessConfig, held_out_keys: Hashes) -> EncodedBlock:
        """Encodes the pairs of a block, and drops pairs according to `config`.

        `held_out_keys` are the sorted keys of all valid and test pairs. Raises ValueError with file and line for bytes
        that are not UTF-8. If `config.strict` is true, also raises ValueError for the first pair to drop.
        """
        if block.over_long:
            nothing = Encoded(np.empty(0, np.uint16), np.empty(0, np.int64))
            sizes = block.source.size, block.target.size
            statistics = over_long_pair(sizes, block.first_line, files, config)
            return EncodedBlock((nothing, nothing, nothing), np.empty((0, 2), np.uint64), statistics)
        texts = block.source.read(), block.target.read()
        source, target = self.encode_texts(texts, files, block.first_line)
        hashes = self.hashes(source, target)
        lines = LineBytes(texts[0]), LineBytes(texts[1])
        masks = drop_reasons.text_masks(*lines, config) | drop_reasons.piece_masks(
            source.lengths, target.lengths, config
        )
        masks[OVERLAP] = contained(dropping.pair_keys(hashes), held_out_keys)
        keep, statistics = kept_pairs(masks, lines, block.first_line, files, config)
        unknown = self._source.unknown_pieces(source), self._target.unknown_pieces(target)
        text = TextStatistics.of(block.first_line, texts, (source, target), unknown, keep)
        links = self._links(texts, source, target, keep, block, files)
        source, target = self.with_prefixes(source.select(keep), target.select(keep), files.tag)
        return EncodedBlock((source, target, links), hashes[keep], statistics, text)

    def _links(
        self, texts: tuple[bytes, bytes], source: Encoded, target: Encoded, keep: Mask, block: Block,
        files: Corpus,
    ) -> Encoded:  # fmt: skip
        """Returns the links between the pieces of each kept pair. A corpus without alignments has no links."""
        if block.alignments is None or files.alignments is None:
            return Encoded(np.empty(0, np.uint32), np.zeros(int(keep.sum()), np.int64))
        path = files.alignments
        links, rows = alignments.parse(decode(block.alignments.read(), path, block.first_line), path, block.first_line)
        words = self._source.words(texts[0].decode(), source), self._target.words(texts[1].decode(), target)
        result = alignments.links_of_pieces(links, rows, keep, words, lambda row: f"{path}:{block.first_line + row}")
        if files.tag is not None:  # the tag shifts all source positions by one piece
            result = Encoded(result.ids + np.uint32(1 << 16), result.lengths)
        return result

    def encode_texts(self, texts: tuple[bytes, bytes], files: Corpus, first_line: int) -> tuple[Encoded, Encoded]:
        """Encodes both sides of a block without a tag. Every line must end in \\n."""
        return (
            self._source.encode(decode(texts[0], files.source, first_line)),
            self._target.encode(decode(texts[1], files.target, first_line)),
        )

    def hashes(self, source: Encoded, target: Encoded) -> Hashes:
        """Returns the two hashes of each pair, [pairs, 2]."""
        return np.column_stack(
            (self._source_hash(source.ids, source.lengths), self._target_hash(target.ids, target.lengths))
        )

    def with_prefixes(self, source: Encoded, target: Encoded, tag: str | None) -> tuple[Encoded, Encoded]:
        """Prepends the tag to the source sentences, then the language tokens of the model to both sides."""
        if tag is not None:
            if tag not in self._tag_ids:
                self._tag_ids[tag] = int(self._tokenizer.encode_source([tag]).ids[0])
            source = source.prepend(self._tag_ids[tag])
        source_tokens, target_tokens = self._language_ids
        for token in source_tokens:
            source = source.prepend(token)
        for token in target_tokens:
            target = target.prepend(token)
        return source, target


class CorpusFiles(Protocol):
    """The files of a corpus, for messages."""

    @property
    def source(self) -> Path: ...

    def position(self, number: int) -> str:
        """Returns the files and the line number of a pair as text. `number` counts from 1."""


def over_long_pair(sizes: tuple[int, int], line: int, files: CorpusFiles, config: PreprocessConfig) -> ReasonCounts:
    """Returns the statistics of a single pair that is too long to be read. `sizes` are the bytes of both sides.

    Raises ValueError if `config.strict` is true.
    """
    if config.strict:
        raise ValueError(_strict_error(files, line, LONG_LINE))
    statistics = ReasonCounts()
    texts = [f"({size:,} bytes)" for size in sizes]
    statistics.count(LONG_LINE, 1, [PairExample(f"{files.source}:{line}", *texts)], drops=True)
    return statistics


def kept_pairs(
    masks: dict[str, Mask], lines: tuple[LineBytes, LineBytes], first_line: int, files: CorpusFiles,
    config: PreprocessConfig,
) -> tuple[Mask, ReasonCounts]:  # fmt: skip
    """Returns a mask [pairs] of the pairs to keep, and counts of the dropped pairs by reason.

    The keys of `masks` are the reasons for which `preprocess` can drop a pair. The mask [pairs] of a reason is true for
    the pairs that this reason concerns. Raises ValueError if `config.strict` is true and a pair would be dropped. The
    message names the first such pair.
    """
    keep, rows = drop_reasons.kept_rows(masks, config)
    if config.strict and not keep.all():
        row = int(np.argmin(keep))
        reason = next(reason for reason in drop_reasons.REASONS if row in rows.get(reason, ()))
        raise ValueError(_strict_error(files, first_line + row, reason))
    statistics = ReasonCounts()
    for reason, matching in rows.items():
        examples = [
            PairExample.of(f"{files.source}:{first_line + row}", lines[0].line(row), lines[1].line(row))
            for row in matching[:EXAMPLES].tolist()
        ]
        statistics.count(reason, len(matching), examples, drops=drop_reasons.drops(reason, config))
    return keep, statistics


def _strict_error(files: CorpusFiles, line: int, reason: str) -> str:
    return f"{files.position(line)}: {reason}; --strict allows no pair to be dropped"


# --- files ----------------------------------------------------------------------------------------------------------


class ArrayFiles:
    """Array files that are written in parts. A part can be written at any position."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def write_at(self, path: Path, values: npt.NDArray[Any], first: int) -> None:
        """Writes `values` so that the first value gets the index `first`."""
        if path not in self._open:
            self._open[path] = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        rest = memoryview(values.tobytes())
        position = first * values.itemsize
        while rest:
            written = os.pwrite(self._open[path], rest, position)
            rest, position = rest[written:], position + written

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


class SplitFiles(ArrayFiles):
    """The files of one split: ids and lengths of each side, and `hashes`, or None if no duplicates are searched."""

    def __init__(self, sides: list[tuple[Path, Path]], hashes: Path | None = None) -> None:
        super().__init__()
        self.sides = sides
        self.hashes = hashes

    def write(self, block: EncodedBlock, offset: Sizes) -> None:
        """Writes a block. `offset` has the number of pairs, then the number of ids per side, in all earlier blocks."""
        pair, *first_ids = offset
        for (ids, lengths), side, first in zip(self.sides, block.sides, first_ids, strict=False):
            self.write_at(ids, side.ids, first)
            self.write_at(lengths, side.lengths.astype(np.int32), pair)
        if self.hashes is not None:
            self.write_at(self.hashes, block.hashes, 2 * pair)


# --- the worker -----------------------------------------------------------------------------------------------------


class Worker:
    """Encodes and writes blocks in a worker process. `files` are the files of the training set."""

    def __init__(
        self, tokenizer: Tokenizer, dtypes: tuple[str, str], config: PreprocessConfig, held_out_keys: Hashes,
        files: SplitFiles
    ) -> None:  # fmt: skip
        self._config = config
        self._held_out_keys = held_out_keys
        self._files = files
        self._encoder = PairEncoder(tokenizer, dtypes, config.languages)
        self._unwritten: deque[EncodedBlock] = deque()
        self._piece_counts = [np.zeros(size, np.int64) for size in (tokenizer.source_size, tokenizer.target_size)]

    def encode(self, block: Block, files: Corpus) -> tuple[Sizes, ReasonCounts, TextStatistics | None]:
        """Encodes a block, keeps the result until `write`, and returns the sizes and statistics of the block."""
        encoded = self._encoder.encode(block, files, self._config, self._held_out_keys)
        if files.tag is not None:  # equal pairs with different tags are not duplicates
            encoded.hashes[:, 0] += dropping.salt(files.tag)
        self._unwritten.append(encoded)
        return encoded.sizes, encoded.statistics, encoded.text

    def write(self, offset: Sizes) -> None:
        """Writes the oldest encoded block that is not written yet."""
        encoded = self._unwritten.popleft()
        self._files.write(encoded, offset)
        if self._config.report is not None:
            for counts, side in zip(self._piece_counts, encoded.sides, strict=False):
                counts += np.bincount(side.ids, minlength=len(counts))

    def find_duplicates(self, partition: Path) -> RowNumbers:
        """Returns the rows of the file `partition` that repeat an earlier row. Deletes the file."""
        rows = dropping.find_duplicates(partition)
        partition.unlink()
        return rows

    def checksum(self, path: Path) -> dict[str, Any]:
        return checksum(path)

    def piece_counts(self) -> list[npt.NDArray[np.int64]]:
        """Returns the counts of all written ids for each side. The counts are 0 if `config.report` is None."""
        return self._piece_counts
