"""The benchmark of decoding on a GPU, as far as it goes without one."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_it_runs_on_a_cpu_and_every_system_puts_out_as_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import generate_speed_gpu as benchmark

    flags = "--device cpu --models tiny --vocabulary 300 --sentences 5 --slots 2 --rounds 1 --output"
    monkeypatch.setattr(sys, "argv", ["benchmark", *flags.split(), str(tmp_path / "report.json")])
    benchmark.main()
    (report,) = json.loads((tmp_path / "report.json").read_text()).values()
    assert set(report) == {"batch by batch", "2 slots"}
    assert report["batch by batch"]["tokens"] == report["2 slots"]["tokens"] > 5
