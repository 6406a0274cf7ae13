"""The notebook runs from the first cell to the last in an empty folder, and cells may run twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nmtkit

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/python/tour.ipynb"


def cells() -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    code = cells()
    (component,) = [cell for cell in code if "LR_SCHEDULERS.register" in cell]
    code.insert(code.index(component), component)  # like a second run of the cell
    script = tmp_path / "cells.py"
    runner = (
        "import json, sys\nscope = {'__name__': '__main__'}\nfor cell in json.load(sys.stdin):\n    exec(cell, scope)\n"
    )
    script.write_text(runner, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(Path(nmtkit.__file__).parent.parent)}
    result = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(code),
        text=True,
        capture_output=True,
        cwd=tmp_path,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    assert "did you mean 'label_smoothing'" in result.stdout
    assert (tmp_path / "averaged.pt").is_file()
