"""Every command sets how OpenMP's threads wait, and training how large caches are, before torch is loaded."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from nmtkit.cli import main

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

# prints the policy at the moment when torch would be loaded
CODE = """
import importlib.abc, os, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))
            os._exit(0)

sys.meta_path.insert(0, Finder())
from nmtkit.cli import main
main(["inspect", "nothing.pt"])
"""


@pytest.mark.parametrize(
    ("given", "policy"),
    [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"), ({"GOMP_SPINCOUNT": "7"}, "None")],
)
def test_threads_sleep_while_they_wait_unless_told_otherwise(given: dict[str, str], policy: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | given
    printed = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, stdout=subprocess.PIPE, check=True, text=True
    )
    assert printed.stdout.strip() == policy


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
