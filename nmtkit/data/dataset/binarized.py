"""Reads datasets that `preprocess` made: memory-maps the splits and makes batches of rows.

Opening a dataset checks every count, size, length and offset, and the checksums of small files. dataset_files.py
describes the files.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nmtkit.config import suggestion
from nmtkit.data.corpora.dropping import RowNumbers
from nmtkit.data.corpora.lines import decode
from nmtkit.data.dataset.dataset_files import (
    ALIGNMENTS,
    DIRECTION_DTYPE,
    LINK_DTYPE,
    SHARED,
    SIDES,
    SMALL_FILE,
    TOKENIZER_FOLDER,
    array_file,
    check_files,
    counts_language_token,
    damaged,
    direction_file,
    map_array,
    read_manifest,
    shard_folders,
    text_file,
)
from nmtkit.data.dataset.stored_side import ConcatArrays, FirstTokens, StoredSide, joined
from nmtkit.data.directions import Direction
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, Tokenizer
from nmtkit.text.encoded import Encoded

if TYPE_CHECKING:
    from nmtkit.data.packed import Batch, Packed

CHUNK_ROWS = 1 << 20  # number of rows that are checked at a time


@dataclass(frozen=True, eq=False)
class Split:
    """The pairs of one subset: `train`, `valid`, `test`, `test1`, … A row is a pair, or the index of a pair."""

    name: str
    source: StoredSide
    target: StoredSide
    tokenizer: Tokenizer
    folder: Path
    alignments: StoredSide | None = None  # links between pieces, see encoding.py
    directions: tuple[Direction, ...] = ()  # directions of the dataset, such as en-de; () if it has only one
    direction_index: npt.NDArray[np.uint16] | ConcatArrays | None = None  # [n], index into `directions` for each row
    rows: RowNumbers | None = None  # numbers of these rows in the subset on disk; None: all rows of the subset
    uncounted: int = 0  # number of tokens at the beginning of each target that the loss does not count
    one_language: bool = False  # whether both sides of a dataset of one direction have the same language

    def counted_tokens(self, rows: RowNumbers | None = None) -> int:
        """Returns the number of target tokens of `rows` (None: all rows) that the loss counts, before transforms."""
        lengths = np.asarray(self.target.lengths) if rows is None else self.target.lengths[rows]
        return int(lengths.sum()) - self.uncounted * len(lengths)

    def select(self, rows: RowNumbers) -> "Split":
        """Returns a split with only the given rows of this split."""
        index = None if self.direction_index is None else self.direction_index[rows]

        def selected(side: StoredSide) -> StoredSide:
            first = None if side.first is None or index is None else replace(side.first, direction_index=index)
            return StoredSide(side.ids, side.offsets[rows], side.lengths[rows], first)

        return replace(
            self, source=selected(self.source), target=selected(self.target), direction_index=index,
            alignments=None if self.alignments is None else selected(self.alignments),
            rows=rows if self.rows is None else self.rows[rows],
        )  # fmt: skip

    def first_rows(self, count: int) -> "Split":
        """Returns a split with the first `count` rows of each direction."""
        parts = [self.rows_of(direction)[:count] for direction in range(max(1, len(self.directions)))]
        return self.select(np.sort(np.concatenate(parts)))

    def monolingual(self, rows: RowNumbers) -> npt.NDArray[np.bool_]:
        """Returns whether the source and target languages of each row are equal, [rows]."""
        if self.direction_index is None:
            return np.full(len(rows), self.one_language)
        return np.array([it.source == it.target for it in self.directions])[self.direction_index[rows]]

    @property
    def has_monolingual_rows(self) -> bool:
        counts = zip(self.directions, self.direction_counts(), strict=True)
        return self.one_language or any(count and it.source == it.target for it, count in counts)

    def rows_of(self, direction: int) -> RowNumbers:
        """Returns the indices of the rows of one direction. `direction` is an index into `directions`."""
        if self.direction_index is None:
            return np.arange(len(self))
        return np.flatnonzero(np.asarray(self.direction_index) == direction)

    def direction_counts(self) -> list[int]:
        """Returns the number of rows of each direction. Reads the directions of all rows."""
        counts = np.zeros(len(self.directions), np.int64)
        if self.direction_index is not None:
            for start in range(0, len(self), CHUNK_ROWS):
                counts += np.bincount(self.direction_index[start : start + CHUNK_ROWS], minlength=len(counts))
        return counts.tolist()

    def __len__(self) -> int:
        return len(self.source.lengths)

    def source_lines(self) -> list[str]:
        """Returns the raw source lines of a valid or test set."""
        return self._raw_lines("source")

    def untagged_source_lines(self) -> list[str]:
        """Returns the raw source lines of a valid or test set, without the tags that preprocess has added."""
        return list(map(self.tokenizer.without_tags, self.source_lines()))

    def references(self) -> list[str]:
        """Returns the raw target lines of a valid or test set."""
        return self._raw_lines("target")

    def _raw_lines(self, side: str) -> list[str]:
        path = self.folder / text_file(self.name, side)
        if not path.is_file():
            raise ValueError(f"{self.folder} has no raw text of {self.name!r}, only of valid and test sets")
        lines = decode(path.read_bytes(), path, 1).split("\n")[:-1]
        if self.rows is not None:
            return [lines[row] for row in self.rows.tolist()]
        if len(lines) != len(self):
            raise damaged(f"{path} has {len(lines):,} lines, not {len(self):,}")
        return lines

    def batch(
        self,
        pairs: RowNumbers,
        transform: Callable[..., tuple[Encoded, Encoded]] | None = None,
    ) -> "Batch":
        """Returns the pairs, in this order, as a batch on the CPU.

        `transform(pairs, source, target, monolingual=…)` may change the ids and the lengths of both sides. The batch
        has the alignments of the pairs if the split has alignments and `transform` is None. Raises ValueError if the
        dataset has ids outside the vocabulary, or alignments beyond the end of a sentence.
        """
        import torch

        from nmtkit.data.packed import IGNORE_INDEX, Batch

        source, target = self.source.gather(pairs), self.target.gather(pairs)
        sizes = self.tokenizer.source_size, self.tokenizer.target_size
        if source.ids.max() >= sizes[0] or target.ids.max() >= sizes[1]:
            raise damaged(f"{self.folder}: {self.name} has ids outside the vocabulary")
        links = None
        if transform is None:
            links = self._links(pairs, source, target)
        else:
            source, target = transform(pairs, source, target, monolingual=self.monolingual(pairs))
        starts = target.starts
        shifted = np.empty_like(target.ids)
        shifted[1:] = target.ids[:-1]
        shifted[starts] = BOS
        output = target.ids.astype(np.int64)
        if self.uncounted:
            output[starts] = IGNORE_INDEX
        return Batch(
            _packed(source.ids, source.lengths),
            _packed(shifted, target.lengths),
            torch.from_numpy(output),
            len(target.ids) - self.uncounted * len(starts),
            torch.from_numpy(np.ascontiguousarray(pairs, dtype=np.int64)),
            None if links is None else torch.from_numpy(links),
        )

    def _links(self, pairs: RowNumbers, source: Encoded, target: Encoded) -> npt.NDArray[np.int64] | None:
        """Returns the alignments of the pairs, [links, 3]: index in `pairs`, source position, target position."""
        if self.alignments is None:
            return None
        links = self.alignments.gather(pairs)
        sentence = links.sentence_of_id
        rows = np.column_stack((sentence, links.ids >> 16, links.ids & 0xFFFF)).astype(np.int64)
        if (rows[:, 1] >= source.lengths[sentence]).any() or (rows[:, 2] >= target.lengths[sentence]).any():
            raise damaged(f"{self.folder}: {self.name} has alignments beyond the end of a sentence")
        return rows


def _packed(ids: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]) -> "Packed":
    import torch

    from nmtkit.data.packed import Layout, Packed

    layout = Layout(torch.from_numpy(lengths), int(lengths.max()), len(ids))
    return Packed(torch.from_numpy(ids.astype(np.int64)), layout)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset: a folder that `preprocess` made, or a folder of shards."""

    folder: Path
    manifests: list[dict[str, Any]]  # one manifest for each shard
    tokenizer: Tokenizer
    splits: Mapping[str, Split]

    @staticmethod
    def open(folder: Path) -> "Dataset":
        """Memory-maps and checks the files. Reads all offsets and lengths, but reads ids from small files only.

        Raises FileNotFoundError or ValueError if the folder is not a dataset, if files or shards are missing, or if the
        manifest is incomplete. Also raises ValueError if the manifest does not match a file or the tokenizer, or if
        shards have different tokenizers or languages.
        """
        shards = shard_folders(folder)
        manifests = [read_manifest(shard) for shard in shards]
        for shard, manifest in zip(shards, manifests, strict=True):
            check_files(shard, manifest, SMALL_FILE)
            if counts_language_token(manifest) != counts_language_token(manifests[0]):
                raise ValueError(
                    f"{shard} and {shards[0]} differ in --no-language-token-loss; preprocess all shards with the same "
                    "flags"
                )
            for name in ("tokenizer", "source_lang", "target_lang", "languages", "directions"):
                if manifest[name] != manifests[0][name]:
                    what, flag = ("tokenizer", "--tokenizer-from") if name == "tokenizer" else ("language", "languages")
                    raise ValueError(
                        f"{shard} and {shards[0]} have different {what}s: {name} {manifest[name]} and "
                        f"{manifests[0][name]}; preprocess all shards with the same {flag}"
                    )
        tokenizer = Tokenizer.load(shards[0] / TOKENIZER_FOLDER)
        if tokenizer.fingerprint != manifests[0]["tokenizer"]:
            raise ValueError(f"{shards[0] / TOKENIZER_FOLDER} is not the tokenizer that made the ids of this dataset")
        names = dict.fromkeys(name for manifest in manifests for name in manifest["splits"])
        splits = {name: _split(name, shards, manifests, tokenizer) for name in names}
        return Dataset(folder, manifests, tokenizer, splits)

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest of the first shard. Only the first shard has the valid and test sets."""
        return self.manifests[0]

    @property
    def source_lang(self) -> str:
        return self.manifest["source_lang"]

    @property
    def target_lang(self) -> str:
        return self.manifest["target_lang"]

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The directions of a dataset of many languages, or () for a dataset of one direction."""
        return tuple(Direction(source, target) for source, target in self.manifest["directions"])

    @property
    def source_language(self) -> str | None:
        """Code of the source language, such as eng_Latn, or None if the tokenizer does not need a code."""
        return self.manifest["languages"]["source"]

    @property
    def target_language(self) -> str | None:
        """Code of the target language, such as deu_Latn, or None if the tokenizer does not need a code."""
        return self.manifest["languages"]["target"]

    @property
    def fingerprint(self) -> str:
        """The SHA-256 over the checksums of all files of all shards."""
        digest = hashlib.sha256()
        for manifest in self.manifests:
            digest.update(json.dumps(manifest["files"], sort_keys=True).encode())
        return digest.hexdigest()

    def __getitem__(self, name: str) -> Split:
        if name not in self.splits:
            raise ValueError(f"{self.folder} has no subset {name!r}; {suggestion(name, self.splits)}")
        return self.splits[name]


def _split(name: str, shards: list[Path], manifests: list[dict[str, Any]], tokenizer: Tokenizer) -> Split:
    """Returns the split `name`: the concatenation of the splits with this name in all shards."""
    pairs = zip(shards, (manifest["splits"].get(name) for manifest in manifests), strict=True)
    having = [(shard, facts) for shard, facts in pairs if facts is not None]
    directions = tuple(Direction(source, target) for source, target in manifests[0]["directions"])
    indices = [_direction_index(shard, name, len(directions)) for shard, _ in having if directions]
    index = None if not indices else indices[0] if len(indices) == 1 else ConcatArrays(indices)
    sides = [
        joined([_side(shard, name, side, facts[side], SHARED if directions else side) for shard, facts in having])
        for side in SIDES
    ]
    if index is not None and tokenizer.has_target_languages_only:
        tokens = np.array([tokenizer.languages[direction.target] for direction in directions], np.int64)
        sides[0] = replace(sides[0], first=FirstTokens(index, tokens))
    aligned = [(shard, facts[ALIGNMENTS]) for shard, facts in having if ALIGNMENTS in facts]
    if aligned and len(aligned) < len(having):
        advice = "preprocess all shards with --alignments, or no shard"
        raise ValueError(f"{aligned[0][0]} has alignments and other shards have none; {advice}")
    alignments = joined([_side(shard, name, ALIGNMENTS, facts) for shard, facts in aligned]) if aligned else None
    return Split(
        name, sides[0], sides[1], tokenizer, having[0][0], alignments, directions, index,
        uncounted=0 if counts_language_token(manifests[0]) else 1,
        one_language=not directions and manifests[0]["source_lang"] == manifests[0]["target_lang"],
    )  # fmt: skip


def _direction_index(folder: Path, split: str, directions: int) -> npt.NDArray[np.uint16]:
    """Memory-maps the direction index of each row. Raises ValueError unless every index is below `directions`."""
    index = map_array(folder / direction_file(split), DIRECTION_DTYPE)
    for start in range(0, len(index), CHUNK_ROWS):
        if int(index[start : start + CHUNK_ROWS].max()) >= directions:
            raise damaged(f"{folder}: {split} has rows of unknown directions")
    return index


def _side(folder: Path, split: str, side: str, facts: dict[str, Any], ids_side: str | None = None) -> StoredSide:
    """Memory-maps one side. Raises ValueError if offsets and lengths exceed the ids or do not match the manifest.

    `ids_side` takes the place of `side` in the name of the file of ids.
    """
    dtype = LINK_DTYPE if side == ALIGNMENTS else facts["dtype"]
    name = f"{folder}: the {side} side of {split}"
    ids = map_array(folder / array_file(split, ids_side or side, "ids"), dtype)
    offsets = map_array(folder / array_file(split, side, "offsets"), "int64")
    lengths = map_array(folder / array_file(split, side, "lengths"), "int32")
    tokens = 0
    for start in range(0, len(lengths), CHUNK_ROWS):
        length, offset = lengths[start : start + CHUNK_ROWS], offsets[start : start + CHUNK_ROWS]
        tokens += int(length.sum(dtype=np.int64))
        is_short = length < (0 if side == ALIGNMENTS else 1)
        if is_short.any() or int(offset.min()) < 0 or bool((offset > len(ids) - length).any()):
            raise damaged(f"{name} has rows beyond the end of its ids")
    if tokens != facts["tokens"]:
        raise damaged(f"{name} has {tokens:,} entries, but the manifest says {facts['tokens']:,}")
    return StoredSide(ids, offsets, lengths)


def verify(folder: Path, decoded_pairs: int = 3) -> list[str]:
    """Recomputes every checksum, checks all ids, and decodes the first pairs.

    Returns the lines of a report: the size of each subset, followed by its first pairs. Raises the errors of
    `Dataset.open`, and ValueError with the name of a damaged file.
    """
    dataset = Dataset.open(folder)
    for shard in shard_folders(folder):
        check_files(shard, read_manifest(shard), None)
    lines = []
    tokenizer = dataset.tokenizer
    for name, split in dataset.splits.items():
        _check_ids(split.source, tokenizer.source_size, f"{folder}: the source side of {name}")
        _check_ids(split.target, tokenizer.target_size, f"{folder}: the target side of {name}")
        lines.append(f"{name}: {len(split):,} pairs, checksums are correct")
        for row in range(min(decoded_pairs, len(split))):
            source = tokenizer.decode_source(split.source.sentence(row))
            lines.append(f"  {source} → {tokenizer.decode_target(split.target.sentence(row))}")
    return lines


def _check_ids(side: StoredSide, vocabulary: int, name: str) -> None:
    for start in range(0, len(side.ids), CHUNK_ROWS):
        if int(np.max(side.ids[start : start + CHUNK_ROWS])) >= vocabulary:
            raise damaged(f"{name} has ids outside the vocabulary")
    for start in range(0, len(side.lengths), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        if not (np.asarray(side.ids[side.offsets[rows] + side.lengths[rows] - 1]) == EOS).all():
            raise damaged(f"{name} has rows that do not end in eos")
