"""Encodes blocks of text in any number of languages as blocks of ids, in the worker processes of `preprocess`.

A sentence is encoded once, for all directions of its corpus, such as en-de and de-en. A worker encodes a block and
returns the sizes of the block. The main process then sends the offset of the block in the files, and the worker writes
the block. Offsets follow the order of the text, so the files are the same for any number of workers.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.data.corpora import dropping
from nmtkit.data.corpora.blocks import LineBlock
from nmtkit.data.corpora.dropping import Hashes, Mask, ReasonCounts, RowHash, RowNumbers
from nmtkit.data.corpora.lines import decode
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.dataset_files import SIDES, checksum
from nmtkit.data.dataset.drop_reasons import (
    EQUAL,
    OVERLAP,
    LineBytes,
    kept_pairs,
    over_long_pair,
    piece_masks,
    text_masks,
)
from nmtkit.data.dataset.parallel_corpora import ParallelCorpus
from nmtkit.data.dataset.report import SampledPair, TextStatistics, sampled
from nmtkit.data.dataset.storage import HASHES, TRAIN, Arrays, EncodedBlock, Sizes, Storage, sizes_of
from nmtkit.data.tokenizers.batch_encoder import BatchEncoder, WordPieces
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.text.encoded import Encoded, positions, starts_of

_LINE = re.compile(r"\s*(?:[0-9]{1,6}-[0-9]{1,6}(?:\s+|$))*")


class BlockEncoder:
    """Encodes the lines of corpora. Use one encoder for many blocks, because an encoder caches words."""

    def __init__(self, tokenizer: Tokenizer, dtypes: tuple[str, str]) -> None:
        models = [tokenizer.source] if tokenizer.one_model else [tokenizer.source, tokenizer.target]
        self._encoders = [BatchEncoder(model, dtype) for model, dtype in zip(models, dtypes, strict=False)]
        self._hashes = RowHash(tokenizer.source_size, 0), RowHash(tokenizer.target_size, 1)

    def of(self, language: int) -> BatchEncoder:
        """Returns the encoder of a language. `language` is its index in the languages of the corpus."""
        return self._encoders[language % len(self._encoders)]

    def encode(self, texts: Sequence[bytes], corpus: ParallelCorpus, first_line: int) -> list[Encoded]:
        """Encodes the text of each language, without tags and language tokens. Every line must end in \\n.

        Raises ValueError with file and line for bytes that are not UTF-8.
        """
        return [
            self.of(index).encode(decode(text, name, first_line))
            for index, (text, name) in enumerate(zip(texts, corpus.names, strict=True))
        ]

    def hashes(self, corpus: ParallelCorpus, sides: Sequence[Encoded]) -> list[Hashes]:
        """Returns the hashes [lines, 2] of the sentence pairs for each pair of languages.

        Equal texts have different hashes in different pairs of languages.
        """
        result = []
        for pair in corpus.pairs:
            both = zip(self._hashes, (sides[pair.first], sides[pair.second]), strict=True)
            hashes = np.column_stack([hash(side.ids, side.lengths) for hash, side in both])
            hashes[:, 0] += dropping.salt(f"{corpus.languages[pair.first]} {corpus.languages[pair.second]}")
            result.append(hashes)
        return result


class EncodingWorker:
    """Encodes and writes blocks of the training set in a worker process."""

    def __init__(self, tokenizer: Tokenizer, config: PreprocessConfig, held_out_keys: Hashes, storage: Storage) -> None:
        self._config = config
        self._held_out_keys = held_out_keys  # sorted keys of all valid and test pairs
        self._storage = storage
        self._encoder = BlockEncoder(tokenizer, storage.dtypes)
        self._unwritten: deque[Arrays] = deque()
        self._piece_counts = {
            name: np.zeros(size, np.int64)
            for name, size in zip(storage.ids_of_sides, (tokenizer.source_size, tokenizer.target_size), strict=True)
        }

    def encode(
        self, block: LineBlock, corpus: ParallelCorpus
    ) -> tuple[Sizes, ReasonCounts, TextStatistics | None, list[SampledPair]]:
        """Encodes a block of lines, and keeps the result until `write` stores it.

        Returns the sizes of the arrays, the counts of dropped pairs, statistics of the text, and a few pairs for the
        report.
        """
        count = len(corpus.languages)
        counts, text, links, samples = ReasonCounts(), None, None, []
        texts = [b"" if block.over_long else span.read() for span in block.spans[:count]]
        sides = self._encoder.encode(texts, corpus, block.first_line)
        hashes = self._encoder.hashes(corpus, sides)
        keep = np.zeros((len(corpus.pairs), len(sides[0].lengths)), np.bool_)
        if block.over_long:
            for pair in corpus.pairs:
                sizes = block.spans[pair.first].size, block.spans[pair.second].size
                counts.add(over_long_pair(sizes, block.first_line, corpus, self._config))
        else:
            lines = [LineBytes(text) for text in texts]
            self._decide(block, corpus, lines, sides, hashes, keep, counts)
            samples = sample_of(block.first_line, lines, keep)
            if count == 2:
                unknown = [self._encoder.of(index).unknown_pieces(side) for index, side in enumerate(sides)]
                text = TextStatistics.of(block.first_line, texts, sides, unknown, keep[0])
            if len(block.spans) > count:
                links = self._links(block, corpus, texts, sides, keep[0])
        encoded = EncodedBlock(sides, hashes, keep, links)
        arrays = {HASHES: encoded.row_hashes(corpus), **self._storage.block_arrays(encoded, corpus)}
        self._unwritten.append(arrays)
        return sizes_of(arrays), counts, text, samples

    def _decide(
        self, block: LineBlock, corpus: ParallelCorpus, lines: Sequence[LineBytes], sides: Sequence[Encoded],
        hashes: Sequence[Hashes], keep: Mask, counts: ReasonCounts,
    ) -> None:  # fmt: skip
        """Sets `keep` for each pair of languages, and adds the dropped pairs to `counts`."""
        for number, pair in enumerate(corpus.pairs):
            both = lines[pair.first], lines[pair.second]
            lengths = sides[pair.first].lengths, sides[pair.second].lengths
            masks = text_masks(*both, self._config) | piece_masks(*lengths, self._config)
            same_language = corpus.languages[pair.first] == corpus.languages[pair.second]
            if pair.first == pair.second or (same_language and not self._config.drop_equal):
                del masks[EQUAL]  # the sides of monolingual text are equal
            masks[OVERLAP] = dropping.contained(dropping.pair_keys(hashes[number]), self._held_out_keys)
            keep[number], more = kept_pairs(masks, both, block.first_line, corpus, self._config)
            counts.add(more)

    def _links(
        self, block: LineBlock, corpus: ParallelCorpus, texts: Sequence[bytes], sides: Sequence[Encoded], keep: Mask
    ) -> Encoded:
        """Returns the links between the pieces of each kept pair."""
        path, first_line = corpus.inputs[-1], block.first_line
        links, rows = parse_links(decode(block.spans[-1].read(), path, first_line), path, first_line)
        words = [
            self._encoder.of(index).words(text.decode(), side)
            for index, (text, side) in enumerate(zip(texts, sides, strict=True))
        ]
        result = links_of_pieces(links, rows, keep, words, lambda row: f"{path}:{first_line + row}")
        if corpus.tag is not None:  # the tag shifts all source positions by one piece
            result = Encoded(result.ids + np.uint32(1 << 16), result.lengths)
        return result

    def write(self, offset: Sizes) -> None:
        """Writes the oldest encoded block that is not written yet. `offset` has the sizes of all earlier blocks."""
        arrays = self._unwritten.popleft()
        self._storage.write(TRAIN, arrays, offset)
        if self._config.report is not None:
            for name, counts in self._piece_counts.items():
                counts += np.bincount(arrays[name], minlength=len(counts))

    def find_duplicates(self, partition: Path) -> RowNumbers:
        """Returns the indices of the pairs in the file `partition` that repeat an earlier pair. Deletes the file."""
        rows = dropping.find_duplicates(partition)
        partition.unlink()
        return rows

    def checksum(self, path: Path) -> dict[str, Any]:
        return checksum(path)

    def piece_counts(self) -> list[npt.NDArray[np.int64]]:
        """Returns the counts of all written ids for each side. The counts are 0 if `config.report` is None."""
        return [self._piece_counts[name] for name in self._storage.ids_of_sides]


def sample_of(first_line: int, lines: Sequence[LineBytes], keep: Mask) -> list[SampledPair]:
    """Returns a few kept pairs of a block for the report. A pair is a line number and two texts.

    The texts are in the first two languages. `keep` has a row for each pair of languages and a column for each line.
    """
    source, target = lines[0], lines[min(1, len(lines) - 1)]
    rows = [line - first_line for line in sampled((first_line + np.flatnonzero(keep.any(0))).tolist())]
    return [(first_line + row, source.line(row).decode(), target.line(row).decode()) for row in rows]


# --- word alignments --------------------------------------------------------------------------------------------------
# Each line of an alignment file has the links i-j of one pair in the Pharaoh format (the output of fast_align, eflomal
# and the scripts of GIZA++). i is the index of a source word, and j is the index of a target word. Both count from 0.
# Words are separated by spaces. A link between two words becomes links between all pieces of the source word and all
# pieces of the target word. A link is stored in 32 bits, as source position * 2^16 + target position. A position is the
# index of a piece in its sentence. A tag before the source sentence counts as a piece.


def parse_links(text: str, path: Path, first_line: int) -> tuple[RowNumbers, RowNumbers]:
    """Returns the links [links, 2] of all lines, and for each link the index of its line in `text`, from 0.

    A link is the index of a source word and the index of a target word.
    `first_line` is the number of the first line of `text` in the file. Raises ValueError with file and line if a line
    is not in Pharaoh format.
    """
    lines = text.split("\n")[:-1]
    for row, line in enumerate(lines):
        if not _LINE.fullmatch(line):
            raise ValueError(f"{path}:{first_line + row}: {line[:60]!r} is not an alignment such as 0-0 1-2 2-1")
    links = np.array(text.replace("-", " ").split(), np.int64).reshape(-1, 2)
    return links, np.repeat(np.arange(len(lines)), [line.count("-") for line in lines])


def links_of_pieces(
    links: RowNumbers, rows: RowNumbers, keep: Mask, sides: Sequence[WordPieces], location: Callable[[int], str]
) -> Encoded:
    """Converts links between words to links between pieces. Only the lines where `keep` [lines] is true are converted.

    `links` [links, 2] has word indices, and `rows` [links] has the line index of each link. `sides` has the source and
    target words. `location` converts a line index to the file and line number in error messages. Raises ValueError for
    a link to a word index beyond the end of the line.
    """
    distinct = np.unique(np.column_stack((rows, links))[keep[rows]], axis=0)
    rows, links = distinct[:, 0], distinct[:, 1:]
    first, count = [], []
    for side, words in enumerate(sides):
        outside = np.flatnonzero(links[:, side] >= words.per_line[rows])
        if len(outside):
            row, word = int(rows[outside[0]]), int(links[outside[0], side])
            raise ValueError(
                f"{location(row)} links word {word} of the {SIDES[side]} line, which has {words.per_line[row]} words "
                "(counted from 0, separated by spaces)"
            )
        index = starts_of(words.per_line)[rows] + links[:, side]
        first.append(words.first_piece[index])
        count.append(words.pieces[index])
    products = count[0] * count[1]  # number of links between pieces for each link between words
    within = positions(products)
    source = np.repeat(first[0], products) + within // np.repeat(count[1], products)
    target = np.repeat(first[1], products) + within % np.repeat(count[1], products)
    per_line = np.bincount(np.repeat(rows, products), minlength=len(keep))[keep]
    return Encoded(((source << 16) | target).astype(np.uint32), per_line)
