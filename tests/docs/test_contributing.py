"""CONTRIBUTING's steps to add an architecture to the package, taken literally in a copy of the tree."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def steps() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"## Add an architecture.*?```sh\n(.*?)```", text, re.DOTALL)
    return block.splitlines()


def follow(lines: list[str], folder: Path) -> str:
    """Runs the lines in a copy of the tree, with `python` as this interpreter. Returns their output."""
    for name in ("nmtkit", "tests", "examples/plugin"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "CONTRIBUTING.md"):  # test_imports reads the table of layers
        shutil.copy(ROOT / name, folder)
    (folder / "bin").mkdir()
    (folder / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "bin/python").chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(folder), "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-ec", "\n".join(lines)], cwd=folder, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_architecture_added_to_the_package_passes_its_checks(tmp_path: Path) -> None:
    lines = steps()
    said = follow([line for line in lines if not re.search("train|pytest", line)], tmp_path)
    assert said.startswith("architecture gru\n") and " failed" not in said


@pytest.mark.slow
def test_every_step_works(tmp_path: Path) -> None:
    said = follow(steps(), tmp_path)
    assert "--width N" in said and re.search(r"\d+ passed", said)
