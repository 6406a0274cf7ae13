"""The folder that `nmtkit preprocess` writes appears completely or not at all, and replaces only a dataset."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from preprocess_command import FLAGS, contents, preprocess, refused

from nmtkit.data.dataset.binarized import Dataset, verify


def test_only_a_dataset_is_overwritten_and_only_on_request(corpora: Path, tmp_path: Path) -> None:
    target = tmp_path / "data"
    flags = ["--testpref", corpora / "test", "--tokenizer-from", corpora / "base", "--destdir", target]
    target.mkdir()
    assert preprocess(*flags).exit_code == 0  # an empty folder is replaced, like a folder that does not exist
    refused("holds a dataset; give --overwrite", *flags)
    assert preprocess(*flags, "--overwrite").exit_code == 0
    (target / "manifest.json").rename(target / "thesis.txt")
    refused("not an nmtkit dataset", *flags, "--overwrite")
    assert (target / "thesis.txt").exists()


@pytest.mark.parametrize("name", ["thesis.txt", "tokenizer/notes.txt", "checkpoints/last.pt"])
def test_a_dataset_with_files_of_others_is_not_replaced(name: str, corpora: Path, tmp_path: Path) -> None:
    flags = ["--testpref", corpora / "test", "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    assert preprocess(*flags).exit_code == 0
    (tmp_path / "data" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "data" / name).touch()
    before = contents(tmp_path)
    refused(
        f"{name} was not written by preprocess" if "check" not in name else "was not written", *flags, "--overwrite"
    )
    assert contents(tmp_path) == before


@pytest.mark.parametrize("manifest", ["{}", '{"name": "my browser extension"}', '{"nmtkit_dataset": 1}', "nonsense"])
@pytest.mark.parametrize("name", ["data", "data.tmp", "data.old.tmp", "data/shard-1-of-2"])
def test_a_manifest_alone_makes_no_dataset(name: str, manifest: str, corpora: Path, tmp_path: Path) -> None:
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "manifest.json").write_text(manifest)
    (tmp_path / name / "thesis.txt").touch()
    before = contents(tmp_path)
    flags = ["--testpref", corpora / "test", "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    message = "is not an unfinished dataset" if name.endswith("tmp") else "not an nmtkit dataset"
    if not name.endswith("tmp") and "nmtkit_dataset" in manifest:
        message = "thesis.txt was not written by preprocess"
    for overwrite in ([], ["--overwrite"]):
        refused(message, *flags, *overwrite)
        assert contents(tmp_path) == before


def test_a_link_to_a_dataset_is_followed_and_stays(corpora: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    flags = ["--testpref", corpora / "test", "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "link"]
    assert preprocess(*flags).exit_code == 0
    assert preprocess(*flags, "--overwrite").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]
    (tmp_path / "disk.tmp").symlink_to(corpora)
    refused("is not an unfinished dataset", *flags, "--overwrite")
    assert (corpora / "base" / "manifest.json").exists()


def test_a_full_disk_leaves_nothing(corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    for workers in ("1", "2"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            refused(
                "No space left on device", "--trainpref", corpora / "train", "--tokenizer-from", corpora / "base",
                "--destdir", tmp_path / "data", "--workers", workers,
            )  # fmt: skip
        assert list(tmp_path.iterdir()) == []


# Killed processes

DIE_AT = """
import os, signal, sys
from nmtkit.data.corpora import blocks
from nmtkit.data.dataset import dataset_files, storage
from nmtkit.cli import main
blocks.BLOCK_LINES = 16
name, calls = sys.argv[1].split(":")
module, attribute = {"write": (storage.os, "pwrite"), "rename": (dataset_files.os, "rename")}[name]
original, left = getattr(module, attribute), [int(calls)]
def dying(*arguments):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
setattr(module, attribute, dying)
main(sys.argv[2:])
"""


def killed(point: str, *flags: str | Path) -> None:
    result = subprocess.run([sys.executable, "-c", DIE_AT, point, "preprocess", *FLAGS, *map(str, flags)], check=False)
    assert result.returncode == -signal.SIGKILL


def check_after_kill(point: str, corpora: Path, folder: Path) -> None:
    """Kills a preprocess at `point`. The folder must not look finished, and the next run must make the dataset."""
    flags = ["--trainpref", corpora / "train", "--tokenizer-from", corpora / "base", "--destdir", folder / "data"]
    killed(point, *flags, "--workers", "1")
    assert not (folder / "data").exists()
    result = preprocess(*flags)
    assert result.exit_code == 0, result.output
    assert [path.name for path in folder.iterdir()] == ["data"]
    verify(folder / "data")
    assert len(Dataset.open(folder / "data")["train"]) == 300


@pytest.mark.slow
@pytest.mark.parametrize("point", ["write:30", "write:0", "rename:0"])
def test_a_killed_preprocess_leaves_nothing_that_looks_finished(point: str, corpora: Path, tmp_path: Path) -> None:
    check_after_kill(point, corpora, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("calls", np.random.default_rng(5).integers(1, 95, 6).tolist())
def test_a_preprocess_killed_anywhere_leaves_nothing_that_looks_finished(
    calls: int, corpora: Path, tmp_path: Path
) -> None:
    check_after_kill(f"write:{calls}", corpora, tmp_path)
