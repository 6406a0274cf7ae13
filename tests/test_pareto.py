"""benchmarks/pareto.py: the frontier and the figure."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SYSTEMS = [("nmtkit", 30.0, 900.0), ("CTranslate2", 31.0, 700.0), ("nmtkit", 29.0, 800.0), ("nmtkit", 31.0, 600.0)]


def test_the_frontier_has_the_systems_that_no_other_system_beats(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(BENCHMARKS)
    import pareto

    fixed = {"model": "tiny", "precision": "int8", "beam": 4, "shortlist": False, "MB": 5.0}
    rows = [{**fixed, "engine": engine, "BLEU": bleu, "tok/core-s": speed} for engine, bleu, speed in SYSTEMS]
    assert pareto.frontier(rows) == [True, True, False, False]
    assert pareto.frontier([rows[0], rows[0]]) == [True, True]
    pareto.draw(rows, tmp_path / "pareto.png")
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
