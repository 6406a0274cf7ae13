"""A dataset whose manifest or files are damaged is refused with a ValueError, or its contents are unchanged."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parallel_text import parallel_lines, write_pair

from nmtkit.data.dataset import binarized
from nmtkit.data.dataset.binarized import Dataset, verify
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.dataset_files import MANIFEST
from nmtkit.data.dataset.preprocess import preprocess
from nmtkit.experiments import inspection

VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 10**30, 0.5, float("nan"), "", "en", "uint32", "int8", "../../etc/passwd", [], [1],
    {}, {"bytes": 1}, [[]],
]  # fmt: skip
FUZZ = {"derandomize": True, "deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("damaged")
    train, test = write_pair(here, "train", *parallel_lines(60)), write_pair(here, "test", *parallel_lines(8, 9))
    (here / "train.align").write_text("0-0\n" * 60)
    config = PreprocessConfig(
        source_lang="en",
        target_lang="de",
        train=(train,),
        test=(test,),
        alignments=(here / "train.align",),
        destdir=here / "data",
        vocab_size=320,
        weights=(1.5,),
        workers=1,
    )
    preprocess(config)
    return here / "data"


def contents(folder: Path) -> list[Any]:
    """Reads everything of a dataset, as training and translation do."""
    dataset = Dataset.open(folder)
    inspection.inspect(folder)
    read: list[Any] = []
    for name, split in dataset.splits.items():
        batch = split.batch(np.arange(len(split)))
        read += [name, batch.source.values.tolist(), batch.target_output.tolist()]
        read += [] if batch.alignments is None else batch.alignments.tolist()
    return [*read, dataset["test"].source_lines(), dataset["test"].references()]


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the path of keys to every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [found for key, inside in items for found in paths_of(inside, (*path, key))]


def damage_manifest(data: st.DataObject, folder: Path) -> None:
    """Deletes or replaces a value anywhere in the manifest."""
    manifest = json.loads((folder / MANIFEST).read_text())
    *outer, last = data.draw(st.sampled_from(paths_of(manifest)))
    inside = manifest
    for key in outer:
        inside = inside[key]
    if data.draw(st.booleans()):
        del inside[last]
    else:
        inside[last] = data.draw(st.sampled_from(VALUES))
    (folder / MANIFEST).write_text(json.dumps(manifest))


def damage_file(data: st.DataObject, folder: Path) -> None:
    """Flips bits, cuts the end, or appends to one file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    text = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "flip", "cut", "append"]))
    if kind == "flip":
        for _ in range(data.draw(st.integers(1, 3))):
            text[data.draw(st.integers(0, len(text) - 1))] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del text[data.draw(st.integers(0, len(text) - 1)) :]
    else:
        text += data.draw(st.binary(min_size=1, max_size=8))
    path.write_bytes(text)


def check_damaged(data: st.DataObject, folder: Path, copy: Path, as_small: bool) -> None:
    """Damages a copy. Either it is refused or its contents are unchanged, and `verify` must find every changed file."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    before = contents(copy)
    data.draw(st.sampled_from([damage_manifest, damage_file]))(data, copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binarized, "SMALL_FILE", binarized.SMALL_FILE if as_small else 0)
        try:
            after = contents(copy)
        except (ValueError, OSError):
            return
        if after != before:
            assert not as_small
            with pytest.raises(ValueError, match="damaged"):
                verify(copy)


@pytest.mark.slow
@settings(max_examples=120, **FUZZ)
@given(st.data(), st.booleans())
def test_a_damaged_dataset_is_refused_or_reads_as_before(
    folder: Path, tmp_path: Path, data: st.DataObject, as_small: bool
) -> None:
    check_damaged(data, folder, tmp_path / "copy", as_small)


@pytest.mark.slow
@settings(max_examples=500, **FUZZ)
@given(st.data(), st.booleans())
def test_no_damage_among_hundreds_goes_unnoticed(
    folder: Path, tmp_path: Path, data: st.DataObject, as_small: bool
) -> None:
    check_damaged(data, folder, tmp_path / "copy", as_small)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("splits",), "splits is missing"),
        (("files",), "files is missing"),
        (("source_lang",), "source_lang is missing"),
        (("splits", "train", "target", "dtype"), r"splits\.train\.target\.dtype is missing"),
        (("files", "train.source.offsets.bin"), r"files lacks train\.source\.offsets\.bin"),
    ],
)
def test_a_manifest_that_lacks_an_entry_is_refused_by_its_name(
    path: tuple[str, ...], message: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "data")
    manifest = json.loads((folder / MANIFEST).read_text())
    inside = manifest
    for key in path[:-1]:
        inside = inside[key]
    del inside[path[-1]]
    (tmp_path / "data" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=rf"manifest\.json is damaged: {message};"):
        Dataset.open(tmp_path / "data")


def test_ids_outside_the_vocabulary_are_refused_when_they_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binarized, "SMALL_FILE", 0)
    shutil.copytree(folder, tmp_path / "data")
    ids = np.memmap(tmp_path / "data" / "train.target.ids.bin", np.uint16, "r+")
    ids[3] = 65_000
    ids.flush()
    split = Dataset.open(tmp_path / "data")["train"]
    with pytest.raises(ValueError, match=r"train .*outside the vocabulary"):
        split.batch(np.arange(len(split)))
