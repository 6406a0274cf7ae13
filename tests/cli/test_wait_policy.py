"""Every command sets how OpenMP's threads wait, and training how large caches are, before torch is loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from nmtkit.cli import main, other_processes_run

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

# prints the policy at the moment when torch would be loaded
CODE = """
import importlib.abc, os, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            os._exit(0)

sys.meta_path.insert(0, Finder())
from nmtkit.cli import main
main(["inspect", "nothing.pt"])
"""


@pytest.mark.parametrize(
    ("given", "spins"),
    [
        ({}, "1000"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "None"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"WORLD_SIZE": "2"}, "None"),
    ],
)
def test_threads_spin_briefly_beside_a_busy_process_unless_told_otherwise(given: dict[str, str], spins: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | given
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            printed = subprocess.run(
                [sys.executable, "-c", CODE], env=environment, stdout=subprocess.PIPE, check=True, text=True
            )
        finally:
            busy.kill()
    assert printed.stdout.strip() == spins


@pytest.mark.parametrize(("running", "busy"), [(1, False), (2, True), (9, True)])
def test_other_processes_are_read_from_the_kernel(tmp_path: Path, running: int, busy: bool) -> None:
    (tmp_path / "stat").write_text(f"cpu 1 2 3\nprocs_running {running}\nprocs_blocked 4\n")
    assert other_processes_run(tmp_path / "stat") is busy
    assert not other_processes_run(tmp_path / "none")  # no Linux


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
