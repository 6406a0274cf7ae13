"""Corpora and a dataset that the tests of `nmtkit preprocess` read."""

from pathlib import Path

import pytest
from preprocess_command import lines, preprocess, write

from nmtkit.data.corpora import blocks


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefixes train, more, valid and test, and a tokenizer in the dataset `base` of train, valid and test."""
    folder = tmp_path_factory.mktemp("corpora")
    for seed, (name, count) in enumerate((("train", 300), ("more", 100), ("valid", 15), ("test", 12))):
        write(folder / name, lines(count, seed))
    flags = [f"--{name}pref={folder / name}" for name in ("train", "valid", "test")]
    result = preprocess(*flags, "--destdir", folder / "base", "--vocab-size", "320", "--workers", "1")
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_LINES", 16)
