"""A mistake in a plug-in is shown with file, line and code: at import, in a run, in workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.training.criterions import CRITERIONS

CRITERION = """
from dataclasses import dataclass
from nmtkit.training.criterions import CRITERIONS, Criterion, Loss
from nmtkit.training.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig

@CRITERIONS.register("NAME", CrossEntropyConfig())
class Mine(CrossEntropy):
    def compute_loss(self, model, batch):
        BODY
"""
RUN = "--arch transformer_tiny --d-model 16 --d-ff 16 --heads 2 --max-update 2 --batch-tokens 200 --threads 1"


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def train(data: Path, folder: Path, body: str, *more: str) -> tuple[Path, str]:
    """Trains by a criterion with this body, which must fail. Returns the plug-in's file and the error."""
    name = f"mine_{len(CRITERIONS.names())}"
    path = written(folder, name, CRITERION.replace("NAME", name).replace("BODY", body))
    flags = ["--plugin", str(path), "--criterion", name, *RUN.split(), "--save-dir", str(folder / "run"), *more]
    result = CliRunner().invoke(main, ["train", str(data), *flags])
    assert result.exit_code == 2, result.output
    return path, result.stderr


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return batch.no_such_thing", "AttributeError: 'Batch' object has no attribute 'no_such_thing'"),
        ("raise ValueError('not like this')", "ValueError: not like this"),
        ("return batch.target_input.values.float() @ batch.source.values.float()[:1]", "RuntimeError: "),
    ],
)
def test_a_mistake_in_a_run_is_shown_with_its_line(mirror_data: Path, tmp_path: Path, body: str, message: str) -> None:
    path, said = train(mirror_data, tmp_path, body)
    end = said[said.index("nmtkit: error:") :]
    assert end.startswith(f"nmtkit: error: in a plug-in: {message}")
    assert f'  File "{path}", line 9, in compute_loss\n    {body}\n' in end
    assert "--debug" in end and "Traceback" not in end and "nmtkit/training" not in end


def test_our_own_messages_keep_their_one_line(mirror_data: Path, tmp_path: Path) -> None:
    _, said = train(mirror_data, tmp_path, "return 3")
    assert said.splitlines()[-1].startswith("nmtkit: error: criterion Mine returned 3")
    # ValueErrors that our code raises
    for body, message in (
        ("from nmtkit.config import convert; return convert('a', int)", "'a' is not a whole number"),
        ("from nmtkit.jobs.shard_options import part_of; return part_of('9/8')", "--shard '9/8' "),
    ):
        _, said = train(mirror_data, tmp_path, body)
        assert said.splitlines()[-1].startswith(f"nmtkit: error: {message}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\nimport no_such_package\n", ["No module named 'no_such_package'", "line 2", "import no_such"]),
        ("x = 1\nx = = 2\n", ["SyntaxError: invalid syntax", "line 2", "    x = = 2"]),
        ("def f():\n    return y\nf()\n", ["NameError: name 'y' is not defined", "line 2, in f", "    return y"]),
        (CRITERION.replace("NAME", "cross_entropy").replace("BODY", "pass"), ["is registered twice", "line 6"]),
    ],
)
@pytest.mark.parametrize("command", ["train", "generate"])
def test_a_mistake_at_import_is_shown_with_its_line(
    tmp_path: Path, text: str, expected: list[str], command: str
) -> None:
    path = written(tmp_path, "broken", text)
    (tmp_path / "x.pt").touch()
    rest = ["data"] if command == "train" else ["--path", str(tmp_path / "x.pt")]
    result = CliRunner().invoke(main, [command, *rest, "--plugin", str(path)])
    assert result.exit_code == 2
    for part in (f'File "{path}"', *expected):
        assert part in result.stderr
    assert "importlib" not in result.stderr and "Traceback" not in result.stderr


def test_a_module_that_a_plugin_imports_is_shown_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "beside_the_plugin", "def f():\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = written(tmp_path, "above", "import beside_the_plugin\nbeside_the_plugin.f()\n")
    result = CliRunner().invoke(main, ["train", "data", "--plugin", str(path)])
    assert 'above.py", line 2' in result.stderr and 'beside_the_plugin.py", line 2, in f' in result.stderr
    for name in ("no_such.module", "./above", "../above"):  # paths without .py
        missing = CliRunner().invoke(main, ["train", "data", "--plugin", name])
        assert missing.exit_code == 2
        assert f"plug-in {name}: " in missing.stderr


ARCHITECTURE = """
import os
from examples.plugin.gru import GRU, GRUConfig
from nmtkit.models.architectures import ARCHITECTURES

@ARCHITECTURES.register("late", GRUConfig(width=8))
class Late(GRU):
    def decode(self, memory, target_input):
        assert not os.environ.get("LATE_FAILS"), "not today"
        return super().decode(memory, target_input)
"""


@pytest.mark.slow
def test_a_mistake_in_a_worker_is_shown_with_its_line(mirror_data: Path, tmp_path: Path) -> None:
    gru = (Path(__file__).parent.parent.parent / "examples/plugin/gru.py").read_text()
    text = ARCHITECTURE.replace("from examples.plugin.gru import GRU, GRUConfig\n", gru.replace('"gru"', '"late_gru"'))
    path = written(tmp_path, "late", text)
    line = text[: text.index("assert not")].count("\n") + 1
    place = f'File "{path}", line {line}, in decode\n    assert not os.environ.get("LATE_FAILS"), "not today"\n'
    flags = ["--arch", "late", "--plugin", str(path), "--max-update", "1", "--batch-tokens", "200", "--threads", "1"]
    flags += ["--lr", "0.01", "--metrics", "none", "--save-dir", str(tmp_path / "run")]
    assert CliRunner().invoke(main, ["train", str(mirror_data), *flags]).exit_code == 0
    del ARCHITECTURES.entries["late"], ARCHITECTURES.entries["late_gru"]

    rest = ["generate", "--path", str(tmp_path / "run/last.pt"), "--plugin", str(path), "--workers", "2"]
    result = subprocess.run(
        [sys.executable, "-m", "nmtkit", *rest],
        env=os.environ | {"LATE_FAILS": "1"}, input="bado kelu\nmiro\n", capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert place in result.stderr and "AssertionError: not today" in result.stderr
    assert "Traceback" not in result.stderr
