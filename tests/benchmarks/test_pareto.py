"""benchmarks/pareto.py: the frontier, the figure, and the engines that cannot run a model."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SYSTEMS = [("nmtkit", 30.0, 900.0), ("CTranslate2", 31.0, 700.0), ("slimt", 29.0, 800.0), ("nmtkit", 31.0, 600.0)]


@pytest.fixture
def pareto(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import pareto

    return pareto


def test_the_frontier_has_the_systems_that_no_other_system_beats(pareto: ModuleType, tmp_path: Path) -> None:
    fixed = {"model": "tiny", "precision": "int8", "beam": 4, "shortlist": False, "MB": 5.0}
    rows = [{**fixed, "engine": engine, "BLEU": bleu, "tok/core-s": speed} for engine, bleu, speed in SYSTEMS]
    assert pareto.frontier(rows) == [True, True, False, False]
    assert pareto.frontier([rows[0], rows[0]]) == [True, True]
    sizes = [{**row, "MB": size} for row, size in zip(rows, (5, 4, 3, 4), strict=True)]
    assert pareto.frontier(sizes, "MB", less_is_better=True) == [False, True, True, True]  # BLEU 30, 31, 29, 31


@pytest.mark.slow
def test_the_figure_of_the_readme_is_drawn_from_the_stored_numbers(
    pareto: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = pareto.stored_rows(BENCHMARKS / "pareto.json")
    names = pareto.labelled(pareto.drawn_rows(stored))
    assert [row["engine"] for row in names[:1]] == ["nmtkit"] and len(names) == len({row["engine"] for row in names})
    for row in names:
        assert row["tok/core-s"] == max(each["tok/core-s"] for each in stored if each["engine"] == row["engine"])
    words = ["pareto.py", "--drawn-from", str(BENCHMARKS / "pareto.json"), "--figure", str(tmp_path / "pareto.svg")]
    monkeypatch.setattr("sys.argv", words)
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # letters are text
    pareto.main()
    drawn = (tmp_path / "pareto.svg").read_text(encoding="utf-8")
    assert all(pareto.name_of(row) in drawn for row in names)
    digest = pareto.drawing_digest(pareto.drawn_rows(stored))
    assert digest in drawn
    committed = (BENCHMARKS / "pareto.png").read_bytes()
    assert digest.encode() in committed, "draw pareto.png again: pareto.py --drawn-from pareto.json --figure pareto.png"
    assert all(f">{engine}<" in drawn for engine in ("nmtkit", "CTranslate2", "Marian intgemm", "slimt"))


def test_engines_that_cannot_run_a_model_are_listed_with_the_reason(
    pareto: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").write_bytes(bytes(2_000_000))

    def runs(model: Any) -> Iterator[Any]:
        yield pareto.Candidate("nmtkit", "int8", 4, True, [tmp_path / "weights"], lambda: model.system(list))

    def fails(model: Any) -> Iterator[Any]:
        raise ValueError(f"{model.path} has window 3")

    engines = {"nmtkit": runs, "CTranslate2": fails, "Marian": runs, "slimt": runs}
    monkeypatch.setattr(pareto, "ENGINES", engines)
    arguments = argparse.Namespace(only=None, lines=2, marian=None, slimt=Path("slimt"))
    model = pareto.Model("tiny", Path("tiny.pt"), tmp_path, arguments, ["a", "b", "c"], [])
    systems, missing = pareto.systems_of(model)
    run, row = systems["nmtkit, tiny, int8, beam 4, shortlist"]
    assert run() == ["a", "b", "c"] and row["MB"] == 2.0 and list(systems) == ["nmtkit, tiny, int8, beam 4, shortlist"]
    reasons = {each["engine"]: each["cannot do"] for each in missing}
    assert reasons["CTranslate2"] == "tiny.pt has window 3" and reasons["Marian"] == "not asked for: give --marian"
    assert "beams" in reasons["slimt"] and "nmtkit" not in reasons
