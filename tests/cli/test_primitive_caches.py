"""Training sets how many compiled products torch and oneDNN keep, before they are loaded."""

import os

import pytest
from click.testing import CliRunner

from nmtkit.cli import main


def test_training_keeps_few_compiled_products(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.setenv(name, "")  # so that the test leaves the environment as it was
        monkeypatch.delenv(name)
    runner = CliRunner()
    runner.invoke(main, ["generate", "--help"])
    assert "LRU_CACHE_CAPACITY" not in os.environ
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    runner.invoke(main, ["train", "--help"])
    assert (os.environ["LRU_CACHE_CAPACITY"], os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) == ("7", "64")
