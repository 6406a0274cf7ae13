"""Before its work, a command sets up the garbage collector and the memory of a GPU."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from nmtkit.cli import main


@pytest.mark.slow
def test_what_a_command_imports_is_out_of_the_collectors_sight() -> None:
    code = (
        "import gc, sys\n"
        "from nmtkit.cli import imports\n"
        "enabled = []\n"
        "with imports():\n"
        "    enabled.append(gc.isenabled())\n"
        "    import torch\n"
        "enabled.append(gc.isenabled())\n"
        "frozen = gc.get_freeze_count()\n"
        "with imports():\n"
        "    enabled.append(gc.isenabled())\n"
        "    objects = [[] for _ in range(1000)]\n"
        "print(enabled, frozen > 100_000, gc.get_freeze_count() == frozen)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[False, True, True] True True\n"), done.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            None,
        ),  # the older name of the variable, which torch still reads
    ],
)
def test_a_gpus_allocator_may_let_blocks_grow_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # monkeypatch restores the value after the test
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert CliRunner().invoke(main, ["average-checkpoints", "--help"]).exit_code == 0
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected
