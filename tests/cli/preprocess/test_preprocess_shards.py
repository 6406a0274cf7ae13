"""`nmtkit preprocess --shard`: shards of a dataset, made one at a time."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from preprocess_command import lines, preprocess, refused, write

from nmtkit.data.dataset.batching import BatchSampler
from nmtkit.data.dataset.binarized import Dataset, verify


@pytest.mark.usefixtures("small_blocks")
def test_shards_read_as_one_dataset(corpora: Path, tmp_path: Path) -> None:
    flags = ["--trainpref", corpora / "train", "--validpref", corpora / "valid", "--tokenizer-from", corpora / "base"]
    flags += ["--destdir", tmp_path / "data"]
    for shard in (1, 3, 2):
        if shard == 2:
            with pytest.raises(ValueError, match="lacks shard-2-of-3"):
                Dataset.open(tmp_path / "data")
        result = preprocess(*flags, "--shard", f"{shard}/3")
        assert result.exit_code == 0, result.output
    shards, whole = Dataset.open(tmp_path / "data"), Dataset.open(corpora / "base")
    assert shards["valid"].references() == whole["valid"].references()
    split = shards["train"]
    pairs = sorted((split.source.sentence(row), split.target.sentence(row)) for row in range(len(split)))
    train = whole["train"]
    assert pairs == sorted((train.source.sentence(row), train.target.sentence(row)) for row in range(len(train)))
    updates = list(BatchSampler(split.source.lengths, split.target.lengths, 100, 1).epoch(1))
    assert sorted(np.concatenate(updates).tolist()) == list(range(300))
    batch = split.batch(updates[0])
    assert batch.target_output.tolist() == [token for row in updates[0] for token in split.target.sentence(row)]
    assert "train: 300 pairs, checksums are correct" in verify(tmp_path / "data")

    shutil.rmtree(tmp_path / "data" / "shard-2-of-3")
    write(tmp_path / "other", lines(300, 77))
    other = ["--trainpref", tmp_path / "other", "--vocab-size", "310", "--destdir", tmp_path / "other-data"]
    assert preprocess(*other).exit_code == 0
    flags[5] = tmp_path / "other-data"
    assert preprocess(*flags, "--shard", "2/3").exit_code == 0
    with pytest.raises(ValueError, match=r"shard-2-of-3 .*different tokenizers"):
        Dataset.open(tmp_path / "data")


def test_a_shard_without_text_is_empty(corpora: Path, tmp_path: Path) -> None:
    flags = ["--trainpref", corpora / "train", "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    for shard in ("1/2", "2/2"):
        assert preprocess(*flags, "--shard", shard).exit_code == 0
    assert len(Dataset.open(tmp_path / "data")["train"]) == 300


def test_shards_are_not_added_to_a_whole_dataset(corpora: Path, tmp_path: Path) -> None:
    flags = ["--trainpref", corpora / "train", "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    assert preprocess(*flags).exit_code == 0
    refused("made without --shard", *flags, "--shard", "1/2")


@pytest.mark.parametrize("changed", [0, 1])
def test_a_dataset_of_shards_is_identified_by_the_files_of_every_shard(
    changed: int, corpora: Path, tmp_path: Path
) -> None:
    """A run resumes only on the dataset with the fingerprint of its start."""
    flags = ["--trainpref", corpora / "train", "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    for shard in ("1/2", "2/2"):
        assert preprocess(*flags, "--shard", shard).exit_code == 0
    before = Dataset.open(tmp_path / "data").fingerprint
    path = tmp_path / "data" / f"shard-{changed + 1}-of-2" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["train.source.ids.bin"] = "0" * 64
    manifests = Dataset.open(tmp_path / "data").manifests
    manifests[changed] = manifest
    assert replace(Dataset.open(tmp_path / "data"), manifests=manifests).fingerprint != before
