"""Every part of benchmarks/gpu.py runs on a CPU with very small models, and reports its rows."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PARTS = ["correctness", "training-base", "profile", "precision", "decoding", "peers"]
SLOW = [pytest.param(part, marks=pytest.mark.slow) for part in ("compiled-base", "end-to-end")]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS + SLOW)
def test_every_part_runs_on_a_cpu(gpu, part: str) -> None:
    module, function, _ = gpu.PARTS[part]
    rows = list(getattr(importlib.import_module(module), function)(gpu.SCALES["cpu"]))
    assert rows
    assert all(row.get("ok", True) for row in rows), rows
    json.dumps(rows)


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_does_not_stop_the_others(
    gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    (tmp_path / "trial.py").write_text(
        "import time\n"
        "def fine(scale): yield {'speed': 3.0, 'device': scale.device}\n"
        "def wrong(scale): yield {'error': 0.5, 'ok': False}\n"
        "def broken(scale):\n    yield {'before': 1}\n    raise KeyError('gone')\n"
        "def endless(scale):\n    yield {'before': 2}\n    time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ["broken", "endless", "wrong", "fine"]
    parts = {name: ("trial", name, 0.2 if name == "endless" else 10.0) for name in names}  # minutes
    monkeypatch.setattr(gpu, "PARTS", parts)
    output = tmp_path / "report.json"
    for runs in (1, 2):  # a second run is added to the first
        assert gpu.run_all(names, "cuda", 60.0, output) == 3
        report = json.loads(output.read_text())["runs"]
        assert len(report) == runs
    parts = report[-1]["parts"]
    assert [parts[name]["status"] for name in names] == ["failed", "took too long", "failed", "ok"]
    assert parts["broken"]["rows"][0] == {"before": 1} and "KeyError" in parts["broken"]["rows"][1]["traceback"]
    assert parts["endless"]["rows"] == [{"before": 2}]
    assert parts["fine"]["rows"] == [{"speed": 3.0, "device": "cuda"}]
    assert "KeyError: 'gone'" in capfd.readouterr().out
