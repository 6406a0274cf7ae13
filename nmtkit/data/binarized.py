"""The dataset on disk: ids of each split and side in flat files that are memory-mapped, and one manifest.

    manifest.json             format, languages, counts, checksums, options, drop counts; written last
    tokenizer/                joint.model, or source.model and target.model
    train.source.ids.bin      ids of all sentences, end to end, uint16 (uint32 above 65,535 entries)
    train.source.offsets.bin  int64, where each sentence begins
    train.source.lengths.bin  int32, its tokens, eos included
    valid.source.txt          the raw lines of valid and test sets

Row i of the source side belongs to row i of the target side. Rows may share ids: an up-sampled corpus is stored once.
A folder of such folders, made with one tokenizer, is read as one dataset.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nmtkit.data.concat import ConcatArrays
from nmtkit.data.tokenizer import BOS, EOS, Encoded, Tokenizer

if TYPE_CHECKING:
    from nmtkit.packed import Batch, Packed

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
SIDES = ("source", "target")
PART_NAME = re.compile(r"part-(\d+)-of-(\d+)")

Pairs = npt.NDArray[np.int64]


def array_file(split: str, side: str, array: str) -> str:
    return f"{split}.{side}.{array}.bin"


def text_file(split: str, side: str) -> str:
    return f"{split}.{side}.txt"


def id_dtype(vocabulary: int) -> str:
    return "uint16" if vocabulary <= 65_536 else "uint32"


def part_name(part: int, parts: int) -> str:
    """The folder of one part of a dataset that was made in several."""
    return f"part-{part}-of-{parts}"


# --- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Side:
    """One language of one split. Sentence i is ids[offsets[i] : offsets[i] + lengths[i]]."""

    ids: npt.NDArray[Any] | ConcatArrays  # flat, uint16 or uint32
    offsets: npt.NDArray[np.int64] | ConcatArrays  # n
    lengths: npt.NDArray[np.int32] | ConcatArrays  # n; eos included

    def sentence(self, row: int) -> list[int]:
        start = int(self.offsets[row])
        return self.ids[start : start + int(self.lengths[row])].tolist()

    def gather(self, rows: Pairs) -> Encoded:
        """The sentences of these rows, end to end."""
        lengths = self.lengths[rows].astype(np.int64)
        ends = np.cumsum(lengths)
        index = np.repeat(self.offsets[rows] - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
        return Encoded(self.ids[index].astype(np.int32), lengths)


@dataclass(frozen=True, eq=False)
class Split:
    """Pairs of one subset: `train`, `valid`, `test`, `test1`, …"""

    name: str
    source: Side
    target: Side
    tokenizer: Tokenizer
    folder: Path

    def __len__(self) -> int:
        return len(self.source.lengths)

    def source_lines(self) -> list[str]:
        """The raw source lines of a valid or test set, as they were read."""
        return self._raw_lines("source")

    def references(self) -> list[str]:
        """The raw target lines of a valid or test set, as they were read."""
        return self._raw_lines("target")

    def _raw_lines(self, side: str) -> list[str]:
        path = self.folder / text_file(self.name, side)
        if not path.is_file():
            raise ValueError(f"{self.folder} keeps no raw text of {self.name!r}, only of valid and test sets")
        return path.read_bytes().decode("utf-8").split("\n")[:-1]

    def batch(
        self,
        pairs: Pairs,
        source_tokens: int | None = None,
        target_tokens: int | None = None,
        sentences: int | None = None,
        resample: tuple[float, int] | None = None,
    ) -> "Batch":
        """The pairs, in this order, as a batch on the CPU.

        With `source_tokens`, `target_tokens` and `sentences`, both sides get a dead tail up to these sizes: sentences
        of eos whose target is IGNORE_INDEX and whose pair is -1; there must be room for at least one.

        `resample` = (alpha, seed) segments the text anew, as `Tokenizer.encode_source_sampled`: a function of alpha,
        seed and pair, whatever the batch. Lengths then differ from the plan's.
        """
        import torch

        from nmtkit.packed import IGNORE_INDEX, Batch

        source, target = self.source.gather(pairs), self.target.gather(pairs)
        if resample is not None:
            source, target = self._resampled(source, target, pairs, *resample)
        real_tokens, real_sentences = len(target.ids), len(pairs)
        if source_tokens is not None or target_tokens is not None or sentences is not None:
            assert source_tokens is not None and target_tokens is not None and sentences is not None
            source = with_dead_tail(source, source_tokens, sentences)
            target = with_dead_tail(target, target_tokens, sentences)
            pairs = np.concatenate((pairs, np.full(sentences - real_sentences, -1, np.int64)))
        starts = np.cumsum(target.lengths) - target.lengths
        shifted = np.empty_like(target.ids)
        shifted[1:] = target.ids[:-1]
        shifted[starts] = BOS
        output = torch.from_numpy(target.ids.astype(np.int64))
        output[real_tokens:] = IGNORE_INDEX
        return Batch(
            _packed(source.ids, source.lengths),
            _packed(shifted, target.lengths),
            output,
            real_tokens,
            torch.from_numpy(np.ascontiguousarray(pairs, dtype=np.int64)),
        )

    def _resampled(
        self, source: Encoded, target: Encoded, pairs: Pairs, alpha: float, seed: int
    ) -> tuple[Encoded, Encoded]:
        tokenizer = self.tokenizer
        seeds = [(seed * 0x9E3779B1 + pair * 0x85EBCA6B) % (1 << 32) for pair in pairs.tolist()]
        source_text = [tokenizer.decode_source(ids) for ids in map(np.ndarray.tolist, source.split())]
        target_text = [tokenizer.decode_target(ids) for ids in map(np.ndarray.tolist, target.split())]
        return (
            tokenizer.encode_source_sampled(source_text, alpha, seeds),
            tokenizer.encode_target_sampled(target_text, alpha, [seed + 1 for seed in seeds]),
        )


def with_dead_tail(encoded: Encoded, tokens: int, sentences: int) -> Encoded:
    """`encoded` and sentences of eos, of about equal lengths, that fill it up to these sizes."""
    dead, room = sentences - len(encoded.lengths), tokens - len(encoded.ids)
    assert 0 < dead <= room, f"no room for a dead tail: {dead} sentences of {room} tokens"
    lengths = np.full(dead, room // dead, np.int64)
    lengths[: room % dead] += 1
    return Encoded(
        np.concatenate((encoded.ids, np.full(room, EOS, np.int32))), np.concatenate((encoded.lengths, lengths))
    )


def _packed(ids: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]) -> "Packed":
    import torch

    from nmtkit.packed import Layout, Packed

    layout = Layout(torch.from_numpy(lengths), int(lengths.max()), len(ids))
    return Packed(torch.from_numpy(ids.astype(np.int64)), layout)


@dataclass(frozen=True, eq=False)
class Dataset:
    """What `preprocess` made. `parts` are the folders it is read from: itself, or those of `--shard`."""

    folder: Path
    manifest: dict[str, Any]  # of the first part
    tokenizer: Tokenizer
    splits: Mapping[str, Split]

    @staticmethod
    def open(folder: Path) -> "Dataset":
        """Maps the files; reads none of the ids.

        Raises FileNotFoundError or ValueError for a folder that is no dataset, a file that is missing or of another
        size than the manifest says, a tokenizer that is not the one the ids were made with, and parts that are
        missing or were made with another tokenizer.
        """
        parts = part_folders(folder)
        manifests = [read_manifest(part) for part in parts]
        for part, manifest in zip(parts, manifests, strict=True):
            check_sizes(part, manifest)
            if manifest["tokenizer"] != manifests[0]["tokenizer"]:
                raise ValueError(
                    f"{part} was made with another tokenizer than {parts[0]}; make all parts with one --spm-model"
                )
        tokenizer = Tokenizer.load(parts[0] / TOKENIZER_FOLDER)
        if tokenizer.fingerprint != manifests[0]["tokenizer"]:
            raise ValueError(f"{parts[0] / TOKENIZER_FOLDER} is not the tokenizer this dataset was made with")
        names = dict.fromkeys(name for manifest in manifests for name in manifest["splits"])
        splits = {name: _split(name, parts, manifests, tokenizer) for name in names}
        return Dataset(folder, manifests[0], tokenizer, splits)

    @property
    def source_lang(self) -> str:
        return self.manifest["source_lang"]

    @property
    def target_lang(self) -> str:
        return self.manifest["target_lang"]

    def __getitem__(self, name: str) -> Split:
        if name not in self.splits:
            raise ValueError(f"{self.folder} has no subset {name!r}; it has {', '.join(self.splits)}")
        return self.splits[name]


def part_folders(folder: Path) -> list[Path]:
    """The folders that hold a dataset's files, in order. Raises ValueError naming the parts that are missing."""
    if not folder.is_dir():
        raise FileNotFoundError(f"dataset {folder}: no such folder")
    if (folder / MANIFEST).is_file():
        return [folder]
    names = [match for path in folder.iterdir() if (match := PART_NAME.fullmatch(path.name))]
    if not names:
        raise ValueError(f"{folder} is no nmtkit dataset: it has no {MANIFEST}")
    counts = sorted({int(match[2]) for match in names})
    if len(counts) > 1:
        raise ValueError(f"{folder} holds parts of {counts[0]} and parts of {counts[1]}; remove those of one")
    wanted = [folder / part_name(part, counts[0]) for part in range(1, counts[0] + 1)]
    missing = [path.name for path in wanted if not (path / MANIFEST).is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}; preprocess with --shard makes them")
    return wanted


def check_sizes(folder: Path, manifest: dict[str, Any]) -> None:
    """Raises ValueError for a file that is missing or not as long as the manifest says."""
    for name, facts in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{folder} is damaged: {name} is missing; run preprocess again")
        size = path.stat().st_size
        if size != facts["bytes"]:
            raise ValueError(
                f"{path} has {size:,} bytes, not the {facts['bytes']:,} that {MANIFEST} says: "
                "truncated or overwritten; run preprocess again"
            )


def _split(name: str, parts: list[Path], manifests: list[dict[str, Any]], tokenizer: Tokenizer) -> Split:
    """One subset of all parts that have it."""
    having = [
        (part, facts["splits"][name]) for part, facts in zip(parts, manifests, strict=True) if name in facts["splits"]
    ]
    sides = []
    for side in SIDES:
        loaded = [_side(part, name, side, facts["pairs"], facts[side]["dtype"]) for part, facts in having]
        sides.append(loaded[0] if len(loaded) == 1 else _joined(loaded))
    return Split(name, sides[0], sides[1], tokenizer, having[0][0])


def _side(folder: Path, split: str, side: str, pairs: int, dtype: str) -> Side:
    ids, offsets, lengths = (
        map_array(folder / array_file(split, side, array), kind)
        for array, kind in (("ids", dtype), ("offsets", "int64"), ("lengths", "int32"))
    )
    if not len(offsets) == len(lengths) == pairs:
        raise ValueError(f"{folder}: {split} has {pairs} pairs, but its {side} side {len(lengths)} lengths")
    return Side(ids, offsets, lengths)


def _joined(sides: list[Side]) -> Side:
    ids = ConcatArrays([side.ids for side in sides])
    offsets = ConcatArrays([side.offsets for side in sides], ids.bounds[:-1].tolist())
    return Side(ids, offsets, ConcatArrays([side.lengths for side in sides]))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises ValueError when it is not one that this version can read."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON, or damaged: {error}") from error
    if not isinstance(manifest, dict) or "nmtkit_dataset" not in manifest:
        raise ValueError(f"{path} is no manifest of an nmtkit dataset")
    if manifest["nmtkit_dataset"] != FORMAT:
        raise ValueError(f"{path} has format {manifest['nmtkit_dataset']}; this nmtkit reads format {FORMAT}")
    return manifest


def map_array(path: Path, dtype: str) -> npt.NDArray[Any]:
    """A file of numbers, mapped for reading."""
    if path.stat().st_size == 0:  # nothing to map
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


# --- integrity ------------------------------------------------------------------------------------------------------


def verify(folder: Path, decoded_pairs: int = 3) -> list[str]:
    """Recomputes every checksum, and checks that rows lie within the ids and that the first pairs decode to text.

    Gives a line about each subset, with its first pair. Raises ValueError naming the file that is damaged, and as
    `Dataset.open`.
    """
    dataset = Dataset.open(folder)
    for part in part_folders(folder):
        for name, facts in read_manifest(part)["files"].items():
            with (part / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != facts["sha256"]:
                raise ValueError(
                    f"{part / name} is damaged: its checksum is not the one in {MANIFEST}; run preprocess again"
                )
    lines = []
    for name, split in dataset.splits.items():
        for side_name, side in (("source", split.source), ("target", split.target)):
            _check_rows(side, f"{folder}: the {side_name} side of {name}")
        lines.append(f"{name}: {len(split):,} pairs, checksums right")
        for row in range(min(decoded_pairs, len(split))):
            source = dataset.tokenizer.decode_source(split.source.sentence(row))
            lines.append(f"  {source} → {dataset.tokenizer.decode_target(split.target.sentence(row))}")
    return lines


def _check_rows(side: Side, place: str) -> None:
    for start in range(0, len(side.lengths), 1 << 20):
        rows = slice(start, start + (1 << 20))
        ends = side.offsets[rows] + side.lengths[rows]
        if int(side.lengths[rows].min()) < 1 or int(side.offsets[rows].min()) < 0 or int(ends.max()) > len(side.ids):
            raise ValueError(f"{place} has rows outside its ids; run preprocess again")
        if not (np.asarray(side.ids[ends - 1]) == EOS).all():
            raise ValueError(f"{place} has rows that do not end in eos; run preprocess again")
