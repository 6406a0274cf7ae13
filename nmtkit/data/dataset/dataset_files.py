"""The files of a dataset on disk: file names, the manifest and its checks, and a folder that is written atomically.

    manifest.json             format, languages, counts, checksums, settings, cleaning statistics; written last
    tokenizer/                joint.model, or source.model and target.model
    train.source.ids.bin      uint16 (uint32 above 65,536 pieces), the ids of all sentences, concatenated
    train.source.offsets.bin  int64, the position in ids where each sentence begins
    train.source.lengths.bin  int32, the number of tokens of each sentence, eos included
    train.alignments.….bin    with --alignments: three files for the links between pieces (uint32), see encoding.py
    valid.source.txt          the raw lines; valid and test sets only

A dataset of many directions, such as en-de and de-en (`preprocess --corpora`), has these files in place of the ids of
each side:

    train.shared.ids.bin      the ids of all sentences of both sides; offsets of both sides are positions in this array
    train.directions.bin      uint16, for each row, the index of its direction in the manifest

Row i of the source side belongs to row i of the target side. Rows may share ids: an up-sampled corpus is stored once.
A folder of shards is read as one dataset. Every shard is a dataset folder, and all shards have the same tokenizer.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.config.files import parse_json, sha256_of, sync_folder, write_atomically
from nmtkit.jobs.folder_lock import lock

FORMAT = 2
MULTILINGUAL_FORMAT = 3  # format of a dataset of many directions
MANIFEST = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
SCRATCH_FOLDER = "scratch"  # folder of temporary files; a finished dataset does not have this folder
UNFINISHED = ".nmtkit-unfinished"  # empty file that marks a folder that preprocess is writing or removing
SIDES = ("source", "target")
SHARED = "shared"  # stands in place of the side in the name of the file of ids, if both sides share the ids
ALIGNMENTS = "alignments"  # stands in place of the side in the names of the files of alignments
ID_DTYPES = ("uint16", "uint32")
LINK_DTYPE = "uint32"
DIRECTION_DTYPE = "uint16"
SHARD_NAME = re.compile(r"shard-(\d+)-of-(\d+)")
SMALL_FILE = 1 << 20  # maximum bytes of a file whose checksum is checked when a dataset is opened

_OWN_NAME = re.compile(
    r"(train|valid\d*|test\d*)\.((source|target|alignments|shared)\.((ids|offsets|lengths)\.bin|txt)|directions\.bin)"
    rf"|{re.escape(MANIFEST)}|{TOKENIZER_FOLDER}|{SCRATCH_FOLDER}|{re.escape(UNFINISHED)}"
)


def array_file(split: str, side: str, array: str) -> str:
    return f"{split}.{side}.{array}.bin"


def direction_file(split: str) -> str:
    return f"{split}.directions.bin"


def text_file(split: str, side: str) -> str:
    return f"{split}.{side}.txt"


def id_dtype(vocabulary: int) -> str:
    return "uint16" if vocabulary <= 65_536 else "uint32"


def shard_name(shard: int, shards: int) -> str:
    """Returns the name of the folder of a shard. `shard` is the number of the shard, counted from 1."""
    return f"shard-{shard}-of-{shards}"


def shard_folders(folder: Path) -> list[Path]:
    """Returns the folders with the files of a dataset: [folder], or the folders of the shards in order.

    Raises OSError or ValueError if the folder is not a dataset or shards are missing.
    """
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file; a dataset is a folder that nmtkit preprocess has written")
    if not folder.is_dir():
        raise FileNotFoundError(f"dataset {folder}: no such folder")
    if (folder / MANIFEST).is_file():
        return [folder]
    names = [match for path in folder.iterdir() if (match := SHARD_NAME.fullmatch(path.name))]
    if not names:
        raise ValueError(f"{folder} is not an nmtkit dataset: it has no {MANIFEST}")
    count, *others = sorted({int(match[2]) for match in names})
    if others:
        raise ValueError(
            f"{folder} has shards of two datasets (with {count} and {others[0]} shards); remove the shards of one "
            "dataset"
        )
    shards = [folder / shard_name(shard, count) for shard in range(1, count + 1)]
    missing = [path.name for path in shards if not (path / MANIFEST).is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}; make them with preprocess --shard")
    return shards


# --- manifest -------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest. Raises ValueError if the manifest is damaged or this version cannot read its format."""
    path = folder / MANIFEST
    try:
        manifest = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON, or is damaged: {error}") from error
    if not isinstance(manifest, dict) or "nmtkit_dataset" not in manifest:
        raise ValueError(f"{path} is not the manifest of an nmtkit dataset")
    if manifest["nmtkit_dataset"] not in (FORMAT, MULTILINGUAL_FORMAT):
        raise ValueError(
            f"{path} has format {manifest['nmtkit_dataset']}, but this nmtkit reads only formats {FORMAT} and "
            f"{MULTILINGUAL_FORMAT}; run preprocess again"
        )
    try:
        _check_manifest(manifest)
    except ValueError as error:
        raise damaged(f"{path} is damaged: {error}") from None
    return manifest


def counts_language_token(manifest: dict[str, Any]) -> bool:
    """Returns whether the loss counts the language token, the first token of each target (`--language-token-loss`).

    If the manifest of an older version lacks this setting, the loss counts the language token.
    """
    return bool(manifest["settings"].get("language_token_loss", True))


def _check_manifest(manifest: dict[str, Any]) -> None:
    """Raises ValueError for the first entry that is missing, has a wrong type, or contradicts another entry."""
    for name in ("source_lang", "target_lang", "tokenizer"):
        _entry(manifest, name, str, "")
    settings = _entry(manifest, "settings", dict, "")
    # datasets of early versions lack this entry, and lack the language tokens in their valid and test sets
    if "languages" not in manifest:
        if any(settings.get(f"{side}_language_token") is not None for side in SIDES):
            raise ValueError("its valid and test sets lack the language tokens")
        manifest["languages"] = dict.fromkeys(SIDES)
    languages = _entry(manifest, "languages", dict, "")
    if any(not isinstance(languages.get(side), str | None) for side in SIDES):
        raise ValueError(f"languages is {str(languages)[:40]}, but must have a code or null for source and target")
    directions = manifest.setdefault("directions", [])
    if (manifest["nmtkit_dataset"] == MULTILINGUAL_FORMAT) != bool(directions):
        raise ValueError(f"format {manifest['nmtkit_dataset']} has {len(directions)} directions")
    if not all(isinstance(pair, list) and len(pair) == 2 and set(map(type, pair)) == {str} for pair in directions):
        raise ValueError(f"directions is {str(directions)[:40]}, but must be a list of pairs of codes")
    for index, corpus in enumerate(_entry(_entry(manifest, "report", dict, ""), "corpora", list, "report.")):
        kinds = {"source": str, "target": str, "read": int, "written": int, "dropped": dict, "kept": dict}
        if not isinstance(corpus, dict) or any(type(corpus.get(name)) is not kind for name, kind in kinds.items()):
            raise ValueError(f"report.corpora[{index}] lacks {', '.join(kinds)}")
    files: dict[str, Any] = _entry(manifest, "files", dict, "")
    for name in files:
        entry = _entry(files, name, dict, "files.")
        _entry(entry, "bytes", int, f"files.{name}.")
        _entry(entry, "sha256", str, f"files.{name}.")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"files has {name!r}, which is outside the folder")
    splits: dict[str, Any] = _entry(manifest, "splits", dict, "")
    for name in files:
        if name.split(".")[0] not in splits and not name.startswith(TOKENIZER_FOLDER):
            raise ValueError(f"splits has no entry for {name}")
    for split in splits:
        facts = _entry(splits, split, dict, "splits.")
        pairs = _entry(facts, "pairs", int, f"splits.{split}.")
        for side in SIDES:
            if split != "train" and text_file(split, side) not in files:
                raise ValueError(f"files lacks {text_file(split, side)}")
            described = _entry(facts, side, dict, f"splits.{split}.")
            _entry(described, "tokens", int, f"splits.{split}.{side}.")
            dtype = _entry(described, "dtype", str, f"splits.{split}.{side}.")
            if dtype not in ID_DTYPES:
                raise ValueError(f"splits.{split}.{side}.dtype is {dtype!r}, not {' or '.join(ID_DTYPES)}")
            _check_arrays(split, side, dtype, pairs, files, SHARED if directions else side)
        if directions:
            _check_directions(split, facts, len(directions), pairs, files)
        if ALIGNMENTS in facts:
            _entry(_entry(facts, ALIGNMENTS, dict, f"splits.{split}."), "tokens", int, f"splits.{split}.{ALIGNMENTS}.")
            _check_arrays(split, ALIGNMENTS, LINK_DTYPE, pairs, files)
        elif array_file(split, ALIGNMENTS, "ids") in files:
            raise ValueError(f"splits.{split}.{ALIGNMENTS} is missing")


def _check_directions(split: str, facts: dict[str, Any], directions: int, pairs: int, files: dict[str, Any]) -> None:
    counts = _entry(facts, "directions", list, f"splits.{split}.")
    if len(counts) != directions or not all(type(count) is int for count in counts) or sum(counts) != pairs:
        raise ValueError(f"splits.{split}.directions must count {pairs:,} pairs in {directions} directions")
    _check_size(files, direction_file(split), 2, pairs)


def _check_arrays(split: str, side: str, dtype: str, pairs: int, files: dict[str, Any], ids: str | None = None) -> None:
    """Raises ValueError if an array of a side is missing or has a wrong size.

    If `ids` is given, the name of the file of ids has `ids` in place of `side`.
    """
    _check_size(files, array_file(split, ids or side, "ids"), np.dtype(dtype).itemsize, None)
    _check_size(files, array_file(split, side, "offsets"), 8, pairs)
    _check_size(files, array_file(split, side, "lengths"), 4, pairs)


def _check_size(files: dict[str, Any], name: str, width: int, entries: int | None) -> None:
    """Raises ValueError if the file `name` is missing, or is not a sequence of entries of `width` bytes.

    `entries` is the expected number of entries, or None if any number is allowed.
    """
    if name not in files:
        raise ValueError(f"files lacks {name}")
    size = files[name]["bytes"]
    if size % width or entries not in (None, size // width):
        expected = "" if entries is None else f"{entries:,} "
        raise ValueError(f"{name} has {size:,} bytes, which does not match {expected}entries of {width} bytes")


def _entry(table: dict[str, Any], name: str, kind: type, where: str) -> Any:
    value: Any = table.get(name)
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise ValueError(f"{where}{name} is missing" if value is None else f"{where}{name} is {str(value)[:40]!r}")
    return value


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False))


def damaged(facts: str) -> ValueError:
    """Returns the error for a dataset whose files contradict each other or the manifest."""
    return ValueError(f"{facts}; run preprocess again")


def checksum(path: Path) -> dict[str, Any]:
    """Returns the size and SHA-256 of a file for the manifest. First syncs the file to disk."""
    sync_folder(path)
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def check_files(folder: Path, manifest: dict[str, Any], largest: int | None) -> None:
    """Compares the size of every file with the manifest, and the checksum of files up to `largest` bytes (None: all).

    The checksum of the tokenizer is always compared, because SentencePiece may crash on damaged models.

    Raises ValueError with the name of a missing or damaged file.
    """
    for name, facts in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise damaged(f"{folder} is damaged: {name} is missing")
        size, expected = path.stat().st_size, facts["bytes"]
        if size != expected:
            change = "the file was truncated or overwritten"
            raise damaged(f"{path} has {size:,} bytes, and {MANIFEST} says {expected:,}: {change}")
        checked = largest is None or size <= largest or name.startswith(TOKENIZER_FOLDER)
        if checked and sha256_of(path) != facts["sha256"]:
            raise damaged(f"{path} is damaged: its checksum differs from {MANIFEST}")


def map_array(path: Path, dtype: str) -> npt.NDArray[Any]:
    """Returns the numbers of a file as a read-only, memory-mapped array."""
    if path.stat().st_size == 0:  # an empty file cannot be memory-mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


# --- the folder that preprocess makes -------------------------------------------------------------------------------


class AtomicFolder:
    """A context manager that writes a dataset to the folder `final` completely or not at all.

    The caller writes the files into `folder` and calls `finish`, which renames `folder` to `final`. Leaving the context
    without `finish` removes `folder`. A folder is removed or replaced only if preprocess wrote all of its files.

    Raises ValueError, before anything is written, if `final` must not be replaced or another process is writing to
    `final`.
    """

    def __init__(self, final: Path, overwrite: bool) -> None:
        self.final = Path(os.path.realpath(final))  # Path.resolve raises RuntimeError for a link to itself
        self.folder = self.final.with_name(self.final.name + ".tmp")
        self._old = self.final.with_name(self.final.name + ".old.tmp")
        check_replaceable(self.final, overwrite)

    def __enter__(self) -> "AtomicFolder":
        self.final.parent.mkdir(parents=True, exist_ok=True)
        for stale in (self.folder, self._old):
            if stale.exists() or stale.is_symlink():
                self._remove(stale)
        self.folder.mkdir()
        (self.folder / UNFINISHED).touch()
        self._lock = os.open(self.folder, os.O_RDONLY)
        lock(self._lock)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._lock)
        shutil.rmtree(self.folder, ignore_errors=True)  # the folder is gone if `finish` was called

    def finish(self) -> None:
        """Renames `folder` to `final`. The files must be synced to disk."""
        sync_folder(self.folder)
        if self.final.is_dir() and any(self.final.iterdir()):
            (self.final / UNFINISHED).touch()  # the mark allows a later run to remove the folder if this run is killed
            os.rename(self.final, self._old)
        os.rename(self.folder, self.final)
        (self.final / UNFINISHED).unlink()
        sync_folder(self.final)
        sync_folder(self.final.parent)
        if self._old.exists():
            _remove_folder(self._old)

    def _remove(self, stale: Path) -> None:
        if stale.is_symlink() or not (stale / UNFINISHED).is_file() or foreign_files(stale):
            raise ValueError(
                f"preprocess needs the name {stale}, which is not an unfinished dataset; move or remove it"
            )
        handle = os.open(stale, os.O_RDONLY)
        try:
            if not lock(handle):
                raise ValueError(
                    f"another process is writing {self.final}; wait for its end, or give another --destdir"
                )
        finally:
            os.close(handle)
        _remove_folder(stale)


def _remove_folder(folder: Path) -> None:
    """Removes a folder. The file UNFINISHED is removed last, so that a later run can finish an interrupted removal."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != UNFINISHED:
            path.unlink()
    shutil.rmtree(folder)


def check_replaceable(folder: Path, overwrite: bool) -> None:
    """Raises ValueError unless `folder` is new or empty, or has only dataset files and `overwrite` is true."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if not any(folder.iterdir()):
        return
    shards = [path for path in folder.iterdir() if SHARD_NAME.fullmatch(path.name)]
    parts = shards if shards and not (folder / MANIFEST).exists() else [folder]
    foreign = [path for path in folder.iterdir() if path not in shards] if parts == shards else []
    for part in parts:
        if not _has_manifest(part):
            raise ValueError(f"{part} is not empty and is not an nmtkit dataset; give another --destdir")
        foreign += foreign_files(part)
    if foreign:
        raise ValueError(f"{foreign[0]} was not written by preprocess; move it, or give another --destdir")
    if not overwrite:
        raise ValueError(f"{folder} holds a dataset; give --overwrite to replace it, or another --destdir")


def _has_manifest(folder: Path) -> bool:
    """Returns whether the folder has the manifest of an nmtkit dataset, of any format version."""
    try:
        return "nmtkit_dataset" in parse_json((folder / MANIFEST).read_bytes())
    except (ValueError, OSError, TypeError):
        return False


def foreign_files(folder: Path) -> list[Path]:
    """Returns the paths in a dataset folder that `preprocess` did not write. The dataset may be unfinished."""
    foreign = []
    for path in sorted(folder.iterdir()):
        if not _OWN_NAME.fullmatch(path.name) or path.is_symlink():
            foreign.append(path)
        elif path.name == TOKENIZER_FOLDER and path.is_dir():
            foreign += [inside for inside in path.iterdir() if inside.suffix != ".model"]
    return foreign
