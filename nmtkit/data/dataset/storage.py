"""How the sentences and rows of a dataset are stored: `SideStorage` for one direction, `SharedStorage` for many.

A direction is a source and a target language, such as en-de. A row is a pair of sentences, or the index of a pair.

A subset is first written as arrays, block by block: the arrays of ids are final, all other arrays are temporary. Then
`write_rows` writes the offset and the length of each row, in the order of training. dataset_files.py describes the
final files.
"""

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.data.corpora.dropping import Hashes, Mask, RowNumbers, salt
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.dataset_files import (
    ALIGNMENTS,
    DIRECTION_DTYPE,
    FORMAT,
    LINK_DTYPE,
    MULTILINGUAL_FORMAT,
    SHARED,
    SIDES,
    array_file,
    direction_file,
    id_dtype,
    map_array,
    text_file,
)
from nmtkit.data.dataset.mixing import write_offsets
from nmtkit.data.dataset.parallel_corpora import NO_DIRECTION, ParallelCorpus
from nmtkit.data.directions import Direction
from nmtkit.data.tokenizers.tokenizer import UNK, Tokenizer
from nmtkit.text.encoded import Encoded

TRAIN = "train"
HASHES = "hashes"  # array [rows, 2] of the hashes of each row, to find duplicates
LANGUAGE_FLAGS = ("--source-language-token", "--target-language-token")

Arrays = dict[str, npt.NDArray[Any]]  # arrays of a block, by name
Sizes = Counter[str]  # lengths of the arrays of one block, or of all earlier blocks together


@dataclass(frozen=True, eq=False)
class EncodedBlock:
    """The sentences of a block without tags and language tokens, and the pairs of sentences to keep."""

    sides: Sequence[Encoded]  # for each language, the sentences of all lines
    hashes: Sequence[Hashes]  # one array [lines, 2] for each pair of languages
    keep: Mask  # [language pairs, lines]
    links: Encoded | None = None  # links between the pieces of each kept pair, see encoding.py

    def row_hashes(self, corpus: ParallelCorpus) -> Hashes:
        """Returns the hashes [rows, 2] of the kept pairs. Different tags or directions give different hashes."""
        line, number = np.nonzero(self.keep.T)
        hashes: Hashes = np.stack(self.hashes)[number, line]
        salts = [salt(f"{corpus.tag} {pair.forward} {pair.backward}") for pair in corpus.pairs]
        hashes[:, 0] += np.array(salts)[number]
        return hashes


class Storage(ABC):
    """Stores the subsets of a dataset in `folder`, and temporary arrays in `scratch`."""

    format: int  # format of the manifest
    ids_of_sides: tuple[str, str]  # names of the arrays with the ids of the source and the target
    arrays: tuple[str, ...]  # names of all arrays of a training set

    def __init__(self, config: PreprocessConfig, tokenizer: Tokenizer, folder: Path, scratch: Path) -> None:
        if not config.language_token_loss and tokenizer.has_target_languages_only:
            raise ValueError(
                "--no-language-token-loss has no effect, because the language tokens of this tokenizer are on the "
                "source side only; leave the flag out"
            )
        self.tokenizer, self.folder, self.scratch = tokenizer, folder, scratch
        self._open: dict[Path, int] = {}  # descriptors of the files of arrays
        self.dtypes = id_dtype(tokenizer.source_size), id_dtype(tokenizer.target_size)

    def path(self, split: str, array: str) -> Path:
        side, _, kind = array.rpartition(".")
        return self.folder / array_file(split, side, kind) if kind == "ids" else self.scratch / f"{split}.{array}"

    @abstractmethod
    def block_arrays(self, block: EncodedBlock, corpus: ParallelCorpus, held_out: bool = False) -> Arrays:
        """Returns the arrays of a block by name. With `held_out`, sentences without a kept pair are stored too."""

    def shifted(self, arrays: Arrays, offset: Sizes) -> Arrays:
        """Returns the arrays of a block, with indices that count from the start of the first block.

        `offset` has the total lengths of the arrays of all earlier blocks.
        """
        return arrays

    def write_held_out(
        self, split: str, corpora: Sequence[ParallelCorpus], blocks: Sequence[EncodedBlock], texts: list[list[bytes]]
    ) -> None:
        """Writes a valid or test set. Block i and `texts[i]` have all sentences of corpus i."""
        offset = Sizes()
        for corpus, block in zip(corpora, blocks, strict=True):
            arrays = self.block_arrays(block, corpus, held_out=True)
            self.write(split, arrays, offset)
            offset.update(sizes_of(arrays))
        while self._open:
            os.close(self._open.popitem()[1])
        self.write_rows(split, [np.arange(sum(int(block.keep.sum()) for block in blocks))])
        for side, text in zip(SIDES, self.raw_texts(split, corpora, texts), strict=True):
            (self.folder / text_file(split, side)).write_bytes(text)

    def write(self, split: str, arrays: Arrays, offset: Sizes) -> None:
        """Writes the arrays of a block of a subset. `offset` has the total lengths of the arrays of all earlier blocks.

        Blocks can be written in any order and by several processes.
        """
        for name, values in self.shifted(arrays, offset).items():
            path = self.path(split, name)
            if path not in self._open:
                self._open[path] = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            rest = memoryview(values.tobytes())
            position = offset[name] * values[:1].nbytes
            while rest:
                written = os.pwrite(self._open[path], rest, position)
                rest, position = rest[written:], position + written

    def row_files(self, split: str) -> list[tuple[str, str]]:
        """Returns the names and dtypes of the files that `write_rows` writes."""
        kinds = ("offsets", "int64"), ("lengths", "int32")
        return [(array_file(split, side, kind), dtype) for side in self.sides(split) for kind, dtype in kinds]

    def sides(self, split: str) -> tuple[str, ...]:
        """Returns the names of the sides of a subset. The alignments, if there are any, are a third side."""
        return SIDES

    @abstractmethod
    def rows(self, split: str, runs: Iterable[RowNumbers]) -> Iterator[Sequence[npt.NDArray[Any]]]:
        """For each array of row numbers in `runs`, yields the entries of these rows in each file of `row_files`."""

    def write_rows(self, split: str, runs: Iterable[RowNumbers]) -> None:
        """Writes the final files of the rows. `runs` has arrays of row numbers, in the order of training."""
        names, dtypes = zip(*self.row_files(split), strict=True)
        with ExitStack() as stack:
            files = [stack.enter_context((self.folder / name).open("wb")) for name in names]
            for columns in self.rows(split, runs):
                for file, dtype, values in zip(files, dtypes, columns, strict=True):
                    file.write(values.astype(dtype, copy=False).tobytes())

    @abstractmethod
    def raw_texts(self, split: str, corpora: Sequence[ParallelCorpus], texts: list[list[bytes]]) -> tuple[bytes, bytes]:
        """Returns the source and target lines of a valid or test set, in the order of its rows.

        `texts` has the text of each corpus in each language.
        """

    def facts(self, split: str) -> dict[str, Any]:
        """Returns the manifest entries of a subset that only this type of storage has. Call `write_rows` first."""
        return {}

    def sentences(self, split: str, array: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Returns the offsets and lengths of the stored sentences. `array` is the name of the array of lengths."""
        lengths, offsets = self.path(split, array), self.path(split, f"{array}.offsets")
        write_offsets(lengths, offsets)
        return map_array(offsets, "int64"), map_array(lengths, "int32")


class SideStorage(Storage):
    """Each side has its own array of ids. Sentence i of each side belongs to row i before mixing."""

    format = FORMAT
    ids_of_sides = ("source.ids", "target.ids")

    def __init__(self, config: PreprocessConfig, tokenizer: Tokenizer, folder: Path, scratch: Path) -> None:
        super().__init__(config, tokenizer, folder, scratch)
        self._prefixes = tokenizer.language_ids(*config.languages, LANGUAGE_FLAGS)
        self._train_sides = (*SIDES, ALIGNMENTS) if any(config.alignments) else SIDES
        self.arrays = tuple(f"{side}.{kind}" for side in self._train_sides for kind in ("ids", "lengths"))

    def sides(self, split: str) -> tuple[str, ...]:
        return self._train_sides if split == TRAIN else SIDES

    def block_arrays(self, block: EncodedBlock, corpus: ParallelCorpus, held_out: bool = False) -> Arrays:
        keep = block.keep[0]
        sides = [side.select(keep) for side in block.sides]
        if corpus.tag is not None:
            sides[0] = sides[0].prepend(int(self.tokenizer.encode_source([corpus.tag]).ids[0]))
        for index, tokens in enumerate(self._prefixes):
            for token in tokens:
                sides[index] = sides[index].prepend(token)
        if ALIGNMENTS in self._train_sides and not held_out:
            sides.append(block.links or Encoded(np.empty(0, LINK_DTYPE), np.zeros(int(keep.sum()), np.int64)))
        arrays: Arrays = {}
        for name, side in zip(self._train_sides, sides, strict=False):
            arrays |= {f"{name}.ids": side.ids, f"{name}.lengths": side.lengths.astype(np.int32)}
        return arrays

    def rows(self, split: str, runs: Iterable[RowNumbers]) -> Iterator[Sequence[npt.NDArray[Any]]]:
        columns = [column for side in self.sides(split) for column in self.sentences(split, f"{side}.lengths")]
        for rows in runs:
            yield [column[rows] for column in columns]

    def raw_texts(self, split: str, corpora: Sequence[ParallelCorpus], texts: list[list[bytes]]) -> tuple[bytes, bytes]:
        (corpus,), ((source, target),) = corpora, texts
        if corpus.tag is not None:
            start = corpus.tag.encode() + b" "
            source = start + source[:-1].replace(b"\n", b"\n" + start) + b"\n"
        return source, target

    def facts(self, split: str) -> dict[str, Any]:
        if ALIGNMENTS not in self.sides(split):
            return {}
        lengths = map_array(self.folder / array_file(split, ALIGNMENTS, "lengths"), "int32")
        return {ALIGNMENTS: {"tokens": int(lengths.sum(dtype=np.int64)), "dtype": LINK_DTYPE}}


class SharedStorage(Storage):
    """Every sentence is stored once, for all directions of its corpus.

    Every stored sentence begins with the token of its language, or with <unk> if the tokenizer lacks this token.

    With language tokens on both sides, a row refers to whole stored sentences. With tokens on the source side only, a
    source begins with the token of the target language (Johnson et al. 2017). The reader puts this token in place of
    the stored token of the source. The target of a row begins after its stored token.
    """

    format = MULTILINGUAL_FORMAT
    ids_of_sides = (f"{SHARED}.ids", f"{SHARED}.ids")
    arrays = (f"{SHARED}.ids", "lengths", "rows", "directions")

    def __init__(
        self, config: PreprocessConfig, tokenizer: Tokenizer, folder: Path, scratch: Path,
        directions: Sequence[Direction],
    ) -> None:  # fmt: skip
        if not tokenizer.one_model:
            raise ValueError("--corpora needs one tokenizer for all languages; yours has one model for each side")
        known, target_only = tokenizer.languages, tokenizer.has_target_languages_only
        needed = {d.target for d in directions} | (set() if target_only else {d.source for d in directions})
        if missing := sorted(needed - known.keys()):
            names = ", ".join(sorted(known)) or "none"
            raise ValueError(
                f"the tokenizer has no token of the language {missing[0]}; it has {names}; "
                "change the codes in the file of --corpora, or train a tokenizer"
            )
        super().__init__(config, tokenizer, folder, scratch)
        self._skipped = int(target_only)  # number of tokens to skip at the start of a stored target
        self._directions = len(directions)
        self._counts: dict[str, npt.NDArray[np.int64]] = {}  # number of rows of each direction, by subset

    def block_arrays(self, block: EncodedBlock, corpus: ParallelCorpus, held_out: bool = False) -> Arrays:
        """Returns the sentences of the first language, then of the second language, …, and the rows.

        Item i of "rows" [n, 2] has the indices of both sentences of row i in the block. Item i of "directions" [n, 2]
        has the indices of the forward and the backward direction of row i.
        """
        used = np.ones(block.keep.shape[1], np.bool_) if held_out else block.keep.max(0)
        line, number = np.nonzero(block.keep.T[used])
        tokens = [self.tokenizer.languages.get(language, UNK) for language in corpus.languages]
        sides = [side.select(used).prepend(token) for side, token in zip(block.sides, tokens, strict=True)]
        ends = np.array([[pair.first, pair.second] for pair in corpus.pairs], np.int64)
        directions = np.array([[pair.forward, pair.backward] for pair in corpus.pairs], DIRECTION_DTYPE)
        return {
            f"{SHARED}.ids": np.concatenate([side.ids for side in sides]),
            "lengths": np.concatenate([side.lengths for side in sides]).astype(np.int32),
            "rows": ends[number] * int(used.sum()) + line[:, None],
            "directions": directions[number],
        }

    def shifted(self, arrays: Arrays, offset: Sizes) -> Arrays:
        return {**arrays, "rows": arrays["rows"] + offset["lengths"]}

    def row_files(self, split: str) -> list[tuple[str, str]]:
        return [*super().row_files(split), (direction_file(split), DIRECTION_DTYPE)]

    def rows(self, split: str, runs: Iterable[RowNumbers]) -> Iterator[Sequence[npt.NDArray[Any]]]:
        offsets, lengths = self.sentences(split, "lengths")
        self._counts[split] = np.zeros(self._directions, np.int64)
        for rows in runs:
            (source, target), directions = self._directed(split, rows)
            self._counts[split] += np.bincount(directions, minlength=self._directions)
            targets = offsets[target] + self._skipped, lengths[target] - self._skipped
            yield offsets[source], lengths[source], *targets, directions

    def _directed(self, split: str, rows: RowNumbers) -> tuple[tuple[RowNumbers, RowNumbers], npt.NDArray[np.uint16]]:
        """Returns the indices of the source sentences, of the target sentences, and of the directions.

        In a training set, the two directions of a row are neighbours. In other subsets, the result is sorted by
        direction.
        """
        sentences = map_array(self.path(split, "rows"), "int64").reshape(-1, 2)[rows]
        directions = map_array(self.path(split, "directions"), DIRECTION_DTYPE).reshape(-1, 2)[rows]
        exists = directions != NO_DIRECTION
        both = np.stack((sentences, sentences[:, ::-1]), axis=1)[exists]  # [rows, sides]
        directions = directions[exists]
        if split != TRAIN:
            order = np.argsort(directions, kind="stable")
            both, directions = both[order], directions[order]
        return (both[:, 0], both[:, 1]), directions

    def raw_texts(self, split: str, corpora: Sequence[ParallelCorpus], texts: list[list[bytes]]) -> tuple[bytes, bytes]:
        lines = [line for of_corpus in texts for text in of_corpus for line in text.split(b"\n")[:-1]]
        sides, _ = self._directed(split, np.arange(self.path(split, "rows").stat().st_size // 16))
        source, target = (b"".join(lines[index] + b"\n" for index in side.tolist()) for side in sides)
        return source, target

    def facts(self, split: str) -> dict[str, Any]:
        stored = self.path(split, f"{SHARED}.ids").stat().st_size // np.dtype(self.dtypes[0]).itemsize
        return {SHARED: {"tokens": stored, "dtype": self.dtypes[0]}, "directions": self._counts[split].tolist()}


def sizes_of(arrays: Arrays) -> Sizes:
    return Sizes({name: len(values) for name, values in arrays.items()})
