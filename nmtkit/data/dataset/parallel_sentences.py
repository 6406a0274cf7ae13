"""Reads and encodes corpora in any number of languages, for `preprocess --corpora`.

A sentence is encoded once, with the token of its language before the text, for all directions of its corpus.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nmtkit.data.corpora import dropping
from nmtkit.data.corpora.blocks import LineBlock
from nmtkit.data.corpora.corpus import locate, locate_side
from nmtkit.data.corpora.dropping import ReasonCounts, contained
from nmtkit.data.corpora.lines import decode
from nmtkit.data.corpora.pairs import pairs
from nmtkit.data.dataset import drop_reasons
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.corpora_file import SPLITS, CorpusEntry
from nmtkit.data.dataset.diagnostics import TextStatistics
from nmtkit.data.dataset.drop_reasons import EQUAL, OVERLAP, LineBytes
from nmtkit.data.dataset.encoding import ArrayFiles, Hashes, Sizes, Worker, kept_pairs, over_long_pair
from nmtkit.data.directions import MAX_DIRECTIONS, Direction
from nmtkit.data.tokenizers.batch_encoder import BatchEncoder
from nmtkit.data.tokenizers.tokenizer import UNK, Encoded, Tokenizer

NO_DIRECTION = MAX_DIRECTIONS

Rows = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint16]


class LanguagePair(NamedTuple):
    """Two languages of a corpus, and the numbers of the two directions between the languages.

    The code of the first language sorts before the code of the second language. A monolingual corpus has a pair of
    equal languages.
    """

    first: int  # index into the languages of the corpus
    second: int
    forward: int  # direction from the first to the second language, or NO_DIRECTION
    backward: int


@dataclass(frozen=True)
class ParallelFiles:
    """A corpus in one or more languages: line i of each file is the translation of line i of the other files."""

    languages: tuple[str, ...]
    paths: tuple[Path, ...]  # files of lines
    names: tuple[Path, ...]  # names of the files in messages: the original file if `paths` were extracted from a file
    directed: tuple[tuple[int, int], ...]  # directions, as indices of the source and target language
    weight: float = 1.0

    @property
    def source(self) -> Path:
        return self.names[0]

    def position(self, number: int) -> str:
        """Returns the files and the number of a line as text for messages. `number` counts from 1."""
        return " and ".join(dict.fromkeys(f"{name}:{number}" for name in self.names))

    def language_pairs(self, numbers: Mapping[Direction, int]) -> list[LanguagePair]:
        """Returns the pairs of languages with at least one direction. `numbers` has the index of each direction."""
        result: dict[tuple[int, int], list[int]] = {}
        for source, target in self.directed:
            first, second = sorted((source, target), key=lambda index: self.languages[index])
            both = result.setdefault((first, second), [NO_DIRECTION, NO_DIRECTION])
            direction = Direction(self.languages[source], self.languages[target])
            both[int((source, target) != (first, second))] = numbers[direction]
        return [LanguagePair(*indices, *both) for indices, both in result.items()]


# --- files of a corpus ------------------------------------------------------------------------------------------------


def open_corpora(entries: Sequence[CorpusEntry], scratch: Path) -> dict[str, list[ParallelFiles]]:
    """Returns the corpora of train, valid and test. Extracts formats such as .tmx to files of lines in `scratch`.

    Raises FileNotFoundError if a file is missing. Raises ValueError if `columns` has no effect, and for a file of three
    or more languages in which the lines of the first language are not the same for all other languages.
    """
    result: dict[str, list[ParallelFiles]] = {split: [] for split in SPLITS}
    for entry in entries:
        for split in SPLITS:
            for name in getattr(entry, split):
                number = sum(map(len, result.values()))
                paths, names = _files(name, entry, scratch / f"texts{number}")
                result[split].append(
                    ParallelFiles(entry.languages, paths, names, tuple(entry.directed()), entry.weight)
                )
    return result


def _files(name: str, entry: CorpusEntry, folder: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Returns two tuples with an item for each language: the files of lines, and the names of the files in messages."""
    languages = entry.languages
    if len(languages) == 1:
        if entry.columns:
            raise ValueError(f"columns have no effect on {name}: a corpus of one language is a file of lines")
        path = locate_side(name, languages[0])
        return (path,), (path,)
    corpora = [
        locate(
            name, languages[0], languages[index], (entry.columns[0], entry.columns[index]) if entry.columns else None
        )
        for index in range(1, len(languages))
    ]
    if corpora[0].format is None:
        paths = (corpora[0].source, *(corpus.target for corpus in corpora))
        return paths, paths
    folder.mkdir(parents=True)
    extracted = tuple(folder / str(index) for index in range(len(languages)))
    sources = []
    for index, corpus in enumerate(corpora, 1):
        digest = hashlib.sha256()
        with extracted[0].open("wb") as source, extracted[index].open("wb") as target:
            for part in pairs(corpus):
                text = "".join(line + "\n" for line in part.sources).encode()
                digest.update(text)
                source.write(text)
                target.write("".join(line + "\n" for line in part.targets).encode())
        sources.append(digest.digest())
        if sources[0] != digest.digest():
            raise ValueError(
                f"{name} has different {languages[0]} lines for {languages[1]} and for {languages[index]}; "
                "write an entry for each pair of languages"
            )
    return extracted, (Path(name),) * len(languages)


def texts_of(corpora: Sequence[ParallelFiles]) -> dict[str, list[Path]]:
    """Returns the files of all corpora, grouped by language."""
    result: dict[str, list[Path]] = {}
    for corpus in corpora:
        for language, path in zip(corpus.languages, corpus.paths, strict=True):
            result.setdefault(language, []).append(path)
    return result


# --- blocks of ids ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SentenceBlock:
    """The encoded sentences of a block, and its rows. A row is a kept pair of sentences in two languages."""

    sentences: Encoded  # the kept lines of the first language, then of the second language, …
    rows: Rows  # [rows, 2], indices into `sentences` of the first and second sentence
    numbers: Numbers  # [rows, 2], numbers of the forward and backward direction
    hashes: Hashes  # [rows, 2], see corpora/dropping.py

    @property
    def sizes(self) -> Sizes:
        return len(self.rows), len(self.sentences.lengths), len(self.sentences.ids)


class SentenceEncoder:
    """Encodes blocks of a corpus in any number of languages."""

    def __init__(self, tokenizer: Tokenizer, dtype: str, numbers: Mapping[Direction, int]) -> None:
        self.numbers = numbers
        self._encoder = BatchEncoder(tokenizer.source_model, dtype)
        self._hashes = dropping.RowHash(tokenizer.source_size, 0), dropping.RowHash(tokenizer.source_size, 1)
        self._tokens = tokenizer.languages

    def encode(self, texts: Sequence[bytes], files: ParallelFiles, first_line: int) -> list[Encoded]:
        """Encodes the text of each language, without language tokens. Every line must end in \\n."""
        return [
            self._encoder.encode(decode(text, name, first_line)) for text, name in zip(texts, files.names, strict=True)
        ]

    def unknown_pieces(self, encoded: Encoded) -> int:
        return self._encoder.unknown_pieces(encoded)

    def hashes(self, pair: LanguagePair, files: ParallelFiles, encoded: Sequence[Encoded]) -> Hashes:
        """Returns the hashes [lines, 2] of all sentence pairs of two languages.

        Equal texts have different hashes in different pairs of languages.
        """
        sides = encoded[pair.first], encoded[pair.second]
        result = np.column_stack([hash(side.ids, side.lengths) for hash, side in zip(self._hashes, sides, strict=True)])
        result[:, 0] += dropping.salt(f"{files.languages[pair.first]} {files.languages[pair.second]}")
        return result

    def block(
        self, files: ParallelFiles, encoded: Sequence[Encoded], kept: npt.NDArray[np.bool_], hashes: Sequence[Hashes]
    ) -> SentenceBlock:
        """Returns the block of the kept pairs. `kept` [language pairs, lines] marks the lines to keep.

        `hashes` has the hashes [lines, 2] of each pair of languages.
        """
        pairs = self.language_pairs(files)
        used: npt.NDArray[np.bool_] = kept.max(0)
        line, number = np.nonzero(kept.T[used])
        ends = np.array([[pair.first, pair.second] for pair in pairs], np.int64)
        directions = np.array([[pair.forward, pair.backward] for pair in pairs], np.uint16)
        sides = [
            side.select(used).prepend(self._tokens.get(language, UNK))
            for language, side in zip(files.languages, encoded, strict=True)
        ]
        sentences = Encoded(np.concatenate([side.ids for side in sides]), np.concatenate([s.lengths for s in sides]))
        # pairs with the same texts but different directions are not duplicates
        salts = np.array([dropping.salt(f"{pair.forward} {pair.backward}") for pair in pairs], np.uint64)
        salted = np.stack(hashes)[number, np.flatnonzero(used)[line]]
        salted[:, 0] += salts[number]
        rows = ends[number] * int(used.sum()) + line[:, None]
        return SentenceBlock(sentences, rows, directions[number], salted)

    def language_pairs(self, files: ParallelFiles) -> list[LanguagePair]:
        return files.language_pairs(self.numbers)


class SentenceFiles(ArrayFiles):
    """The files of the sentences and rows of a training set: the final file `ids`, and temporary files."""

    def __init__(self, ids: Path, scratch: Path, hashes: Path) -> None:
        super().__init__()
        self.ids, self.hashes = ids, hashes
        self.lengths, self.rows, self.numbers = (scratch / name for name in ("lengths", "rows", "directions"))

    def write(self, block: SentenceBlock, offset: Sizes) -> None:
        """Writes a block. `offset` has the number of rows, sentences and ids in all earlier blocks."""
        rows, sentences, ids = offset[:3]
        self.write_at(self.ids, block.sentences.ids, ids)
        self.write_at(self.lengths, block.sentences.lengths.astype(np.int32), sentences)
        self.write_at(self.rows, block.rows + sentences, 2 * rows)
        self.write_at(self.numbers, block.numbers, 2 * rows)
        self.write_at(self.hashes, block.hashes, 2 * rows)


class SentenceWorker(Worker):
    """Encodes and writes blocks of parallel sentences in a worker process."""

    def __init__(
        self, tokenizer: Tokenizer, dtype: str, config: PreprocessConfig, held_out_keys: Hashes, files: SentenceFiles,
        numbers: Mapping[Direction, int],
    ) -> None:  # fmt: skip
        self._config = config
        self._held_out_keys = held_out_keys
        self._sentence_files = files
        self._sentences = SentenceEncoder(tokenizer, dtype, numbers)
        self._blocks: list[SentenceBlock] = []
        self._counts = np.zeros(tokenizer.source_size, np.int64)

    def encode(self, block: Any, files: Any) -> tuple[Sizes, ReasonCounts, TextStatistics | None]:
        """Encodes a block, keeps the result until `write`, and returns the sizes and statistics of the block."""
        statistics = ReasonCounts()
        pairs = self._sentences.language_pairs(files)
        if block.over_long:
            texts, text_statistics = [b"\n" for _ in files.languages], None
            for pair in pairs:
                sizes = block.spans[pair.first].size, block.spans[pair.second].size
                statistics.add(over_long_pair(sizes, block.first_line, files, self._config))
            kept = np.zeros((len(pairs), 1), np.bool_)
            encoded = self._sentences.encode(texts, files, block.first_line)
            hashes = [self._sentences.hashes(pair, files, encoded) for pair in pairs]
        else:
            texts = [span.read() for span in block.spans]
            encoded = self._sentences.encode(texts, files, block.first_line)
            lines = [LineBytes(text) for text in texts]
            hashes = [self._sentences.hashes(pair, files, encoded) for pair in pairs]
            kept = np.stack(
                [
                    self._kept(pair, key, lines, encoded, block, files, statistics)
                    for pair, key in zip(pairs, hashes, strict=True)
                ]
            )
            text_statistics = self._text_statistics(texts, encoded, kept, block) if len(texts) == 2 else None
        result = self._sentences.block(files, encoded, kept, hashes)
        self._blocks.append(result)
        return result.sizes, statistics, text_statistics

    def _kept(
        self, pair: LanguagePair, hashes: Hashes, lines: Sequence[LineBytes], encoded: Sequence[Encoded],
        block: LineBlock, files: ParallelFiles, statistics: ReasonCounts,
    ) -> npt.NDArray[np.bool_]:  # fmt: skip
        """Returns a mask of the lines to keep for a pair of languages. Adds the dropped pairs to `statistics`."""
        both = lines[pair.first], lines[pair.second]
        lengths = encoded[pair.first].lengths, encoded[pair.second].lengths
        masks = drop_reasons.text_masks(*both, self._config) | drop_reasons.piece_masks(*lengths, self._config)
        if pair.first == pair.second:
            del masks[EQUAL]
        masks[OVERLAP] = contained(dropping.pair_keys(hashes), self._held_out_keys)
        keep, more = kept_pairs(masks, both, block.first_line, files, self._config)
        statistics.add(more)
        return keep

    def _text_statistics(
        self, texts: Sequence[bytes], encoded: Sequence[Encoded], kept: npt.NDArray[np.bool_], block: LineBlock
    ) -> TextStatistics:
        unknown = [self._sentences.unknown_pieces(side) for side in encoded]
        return TextStatistics.of(block.first_line, texts, encoded, unknown, kept[0])

    def write(self, offset: Sizes) -> None:
        """Writes the oldest encoded block that is not written yet."""
        block = self._blocks.pop(0)
        self._sentence_files.write(block, offset)
        if self._config.report is not None:
            self._counts += np.bincount(block.sentences.ids, minlength=len(self._counts))

    def piece_counts(self) -> list[npt.NDArray[np.int64]]:
        """Returns the counts of all written ids. Both sides have the same counts, because they share all sentences."""
        return [self._counts, self._counts]
