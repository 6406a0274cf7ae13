"""Rows of a sweep compared with a base row: translations of runs, verdicts, formats, and mistakes."""

import csv
import io
import json
import random
import shlex
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from sacrebleu.metrics.bleu import BLEU

from nmtkit.cli import main
from nmtkit.cli.command import PROGRAM
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.experiments.differences import RowComparison, SweepRow
from nmtkit.scoring.seeds import Difference, SeedScores

END = {"kind": "end", "update": 20, "state": "finished", "reason": "--max-update 20 is reached", "time": 160}


def invoke(*arguments: object, columns: int = 200) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)], env={"COLUMNS": str(columns)})


def write_run(
    folder: Path, data: Path, *, wrong: float, seed: int = 1, state: str = "finished", **settings: Any
) -> list[str]:
    """Writes a run whose last validation has a share of wrong words. Returns the translations."""
    run = {"seed": seed, "data": str(data), "valid_subset": ["valid"], "valid_beam": 4, "valid_sentences": None}
    facts = {"dataset": "abc", "parameters": 2_500_000, "device": "cpu of here", "processes": 1}
    config = {"run": run | settings}
    records: list[dict[str, Any]] = [{"kind": "start", "config": config, **facts, "time": 100, "cpu_seconds": 5}]
    records.append({"kind": "train", "update": 20, "updates": 20, "loss": 4.0, "time": 150, "cpu_seconds": 125})
    records.append({"kind": "valid", "update": 20, "loss": 4.0, "time": 155, "cpu_seconds": 185})
    records.append(END | {"state": state, "cpu_seconds": 185})
    (folder / "validation").mkdir(parents=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    references = Dataset.open(data)["valid"].references()
    noise = random.Random(f"{wrong} {seed}")
    lines = [" ".join(word if noise.random() > wrong else "x" for word in line.split()) for line in references]
    (folder / "validation" / "update_00000020.txt").write_text("".join(line + "\n" for line in lines))
    return lines


@pytest.fixture
def runs(mirror_data: Path, tmp_path: Path) -> Path:
    """Returns a folder with three seeds of a base, three of a much better row, and one of a row like the base."""
    for seed in (1, 2, 3):
        write_run(tmp_path / f"base,seed={seed}", mirror_data, wrong=0.5, seed=seed)
        write_run(tmp_path / f"better,seed={seed}", mirror_data, wrong=0.05, seed=seed, dropout=0.2)
    write_run(tmp_path / "alike,seed=4", mirror_data, wrong=0.5, seed=4, dropout=0.3)
    return tmp_path


def rows_of(*arguments: object) -> dict[str, dict[str, Any]]:
    result = invoke("compare", *arguments, "--format", "json")
    assert result.exit_code == 0, result.stderr
    return {row["row"]: row for row in json.loads(result.stdout)["rows"]}


@pytest.mark.slow
def test_each_row_has_its_scores_costs_and_difference_to_the_base(runs: Path, mirror_data: Path) -> None:
    rows = rows_of(runs, "--base", "base")
    assert list(rows) == ["base", "alike", "better"]
    references = Dataset.open(mirror_data)["valid"].references()
    scores = [
        BLEU().corpus_score((path / "validation/update_00000020.txt").read_text().splitlines(), [references]).score
        for path in sorted(runs.glob("better*"))
    ]
    base, better = rows["base"]["scores"][0], rows["better"]["scores"][0]
    assert better["seeds"] == pytest.approx(scores) and better["mean"] == pytest.approx(statistics.fmean(scores))
    assert better["deviation"] == pytest.approx(statistics.stdev(scores))
    assert better["difference"] == pytest.approx(better["mean"] - base["mean"])
    assert better["low"] > 0 and better["p_value"] < 0.05 and better["verdict"] == "higher *"
    alike = rows["alike"]["scores"][0]
    assert alike["low"] < 0 < alike["high"] and alike["p_value"] > 0.05 and alike["verdict"] == "within spread"
    assert "difference" not in base
    assert (rows["better"]["parameters"], rows["better"]["updates"], rows["better"]["seeds"]) == (2_500_000, 20, 3)
    assert rows["better"]["core_minutes"] == (185 - 5) / 60
    lower = rows_of(runs, "--base", "better")["base"]["scores"][1]
    assert (lower["name"], lower["verdict"]) == ("chrF2", "lower *")


@pytest.mark.slow
def test_the_table_is_written_in_every_format(runs: Path, tmp_path: Path) -> None:
    arguments = ("compare", runs, "--base", "base")
    plain = rows_of(runs, "--base", "base")["better"]["scores"][0]
    shown = f"{plain['difference']:+.2f} [{plain['low']:+.2f}, {plain['high']:+.2f}]"
    wide, narrow = (invoke(*arguments, columns=columns).stdout for columns in (200, 80))
    assert shown in wide and shown in narrow and f"{plain['mean']:.2f} ± {plain['deviation']:.2f}" in wide
    (row,) = [line for line in wide.splitlines() if line.startswith("better")]
    assert "2.50" in row and row.endswith("higher *")
    tables = narrow.split("\n\n")[:3]  # costs, BLEU, chrF
    assert all(max(map(len, table.splitlines())) <= 80 for table in tables)
    markdown = invoke(*arguments, "--format", "markdown").stdout.splitlines()
    assert markdown[0].startswith("| row | seeds |") and set(markdown[1]) == set("|-:")
    assert {line.count("|") for line in markdown[:5]} == {markdown[0].count("|")}
    assert shown in invoke(*arguments, "--format", "latex").stdout
    lines = list(csv.DictReader(io.StringIO(invoke(*arguments, "--format", "tsv").stdout), delimiter="\t"))
    assert [line["row"] for line in lines] == ["base", "alike", "better"]
    assert float(lines[2]["BLEU low"]) == plain["low"] and lines[0]["BLEU low"] == ""
    page = tmp_path / "page.html"
    assert invoke(*arguments, "--report", page).exit_code == 0
    assert "<h2>Differences</h2>" in page.read_text() and shown in page.read_text()


@pytest.mark.slow
def test_the_figure_has_the_difference_of_each_row(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for suffix, beginning in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        assert invoke("compare", runs, "--base", "base", "--plot", tmp_path / f"plot{suffix}").exit_code == 0
        assert (tmp_path / f"plot{suffix}").read_bytes().startswith(beginning)
    drawing = (tmp_path / "plot.svg").read_text()
    ElementTree.fromstring(drawing)
    assert "better (3 seeds)" in drawing and "alike (1 seed)" in drawing and "#000000" not in drawing
    assert invoke("compare", runs, "--plot", tmp_path / "plot.svg").exit_code == 2
    refused = invoke("compare", runs, "--base", "base", "--plot", tmp_path / "plot.txt")
    assert refused.exit_code == 2 and ".svg" in refused.stderr


@pytest.mark.slow
def test_only_finished_runs_with_equal_texts_and_searches_are_compared(runs: Path, mirror_data: Path) -> None:
    write_run(runs / "broken,seed=1", mirror_data, wrong=0.1, state="failed", dropout=0.4)
    (runs / "silent,seed=1").mkdir()
    log = (runs / "base,seed=1" / "log.jsonl").read_text().replace('"seed": 1', '"seed": 1, "dropout": 0.6')
    (runs / "silent,seed=1" / "log.jsonl").write_text(log)
    write_run(runs / "base_again,seed=2", mirror_data, wrong=0.5, seed=2)
    said = json.loads(invoke("compare", runs, "--base", "base", "--format", "json").stdout)
    assert {Path(name).name for name in said["left_out"]} == {"broken,seed=1", "silent,seed=1", "base_again,seed=2"}
    assert str(runs / "broken,seed=1") in invoke("compare", runs, "--base", "base").stdout
    write_run(runs / "wider,seed=1", mirror_data, wrong=0.1, valid_beam=9)
    refused = invoke("compare", runs, "--base", "base")
    assert refused.exit_code == 2 and "beam 9" in refused.stderr and "wider,seed=1" in refused.stderr


def test_a_base_that_is_no_row_is_named_with_the_nearest_row(runs: Path, mirror_data: Path) -> None:
    refused = invoke("compare", runs, "--base", "bettre")
    assert refused.exit_code == 2 and "'bettre'" in refused.stderr and "'better'" in refused.stderr
    write_run(runs / "stopped,seed=1", mirror_data, wrong=0.1, state="stopped", dropout=0.4)
    refused = invoke("compare", runs, "--base", "stopped")
    assert refused.exit_code == 2 and "finished" in refused.stderr


def test_seeds_with_other_settings_or_plug_ins_are_rows_of_their_own(mirror_data: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "base,seed=1", mirror_data, wrong=0.5)
    write_run(tmp_path / "base,seed=2", mirror_data, wrong=0.2, seed=2, dropout=0.2)
    write_run(tmp_path / "base,seed=3", mirror_data, wrong=0.5, seed=3)
    path = tmp_path / "base,seed=3/log.jsonl"
    path.write_text(path.read_text().replace('"dataset": "abc"', '"dataset": "abc", "plugin_sources": {"mine": "12"}'))
    write_run(tmp_path / "other,seed=1", mirror_data, wrong=0.5, dropout=0.9)
    names = [str(tmp_path / f"base,seed={seed}") for seed in (1, 2, 3)]
    found = rows_of(tmp_path, "--base", names[0])
    assert list(found) == [*names, "other"] and all(row["seeds"] == 1 for row in found.values())
    result = invoke("compare", tmp_path, "--base", "base")
    assert result.exit_code == 2 and "no row 'base'" in result.stderr


def test_holm_marks_differences_that_remain_among_many_rows() -> None:
    def row(name: str, p_value: float | None, covers_seeds: bool = True) -> SweepRow:
        difference = None
        if p_value is not None:
            difference = Difference(value=-1, margin=0.5, p_value=p_value, covers_seeds=covers_seeds)
        score = SeedScores(name="BLEU", signature="", values=[1.0], difference=difference)
        return SweepRow(name=name, seeds=1, parameters=1, updates=1, flop=None, device_minutes=None, scores=[score])

    # Holm (1979): 0.001 < 0.05 / 4 and 0.016 < 0.05 / 3, but 0.03 >= 0.05 / 2
    rows = [row("base", None), row("a", 0.03), row("b", 0.001), row("c", 0.2), row("d", 0.016), row("e", 0.0, False)]
    compared = RowComparison(rows=rows, left_out={}, made_by="", sentences=1, device="core")
    verdicts = [compared.verdict(row, 0) for row in rows]
    assert verdicts == ["base", "lower", "lower *", "within spread", "lower *", "one seed"]


SWEEP = """
[run]
data = "{data}"
max_update = 4
save_interval = "none"
save_interval_updates = 1
keep_last = 3
keep_best = 0
validate_interval = "none"
max_tokens = 200
log_interval = 1
device = "cpu"
precision = "fp32"
metrics = []
[architecture]
name = "transformer_tiny"
d_model = 16
d_ff = 32
heads = 2
encoder_layers = 1
decoder_layers = 1
[sweep]
seeds = [1, 2]
base = "base"
average = 2
[sweep.runs]
base = {{}}
deep = {{ encoder_layers = 2 }}
[sweep.generate]
beam = 2
lenpen = 1.2
threads = 1
"""


@pytest.mark.slow
def test_a_sweep_translates_with_averages_and_compares_the_rows(
    mirror_data: Path, tmp_path: Path, within_this_process: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.sweep.toml"
    file.write_text(SWEEP.format(data=mirror_data))
    monkeypatch.setenv(PROGRAM, "python3 -m nmtkit")
    result = invoke("sweep", file, "--format", "json")
    assert result.exit_code == 0, result.stderr
    assert "seed=1: python3 -m nmtkit train " in result.stderr
    assert [words[1] for words in within_this_process] == ["train", "average-checkpoints", "generate"] * 4
    found = json.loads(result.stdout)
    assert found["base"] == "base" and found["sentences"] == 20
    assert {"average 2", "beam 2", "lenpen 1.2", "gen_subset valid"} == set(found["made_by"].split(", "))
    base, deep = found["rows"]
    assert deep["row"] == "deep" and deep["seeds"] == 2 and deep["flop"] > base["flop"] > 0
    assert deep["parameters"] > base["parameters"]
    folder = tmp_path / "runs/mine/deep,seed=2"
    lines = (folder / "translations.txt").read_text().splitlines()
    references = Dataset.open(mirror_data)["valid"].references()
    assert deep["scores"][0]["seeds"][1] == pytest.approx(BLEU().corpus_score(lines, [references]).score)
    expected = invoke("generate", mirror_data, "--gen-subset", "valid", "--path", folder / "averaged.pt", "--beam", 2,
                      "--lenpen", 1.2, "--device", "cpu")  # fmt: skip
    assert expected.stdout.splitlines() == lines
    within_this_process.clear()
    assert invoke("sweep", file, "--format", "json").stdout == result.stdout and not within_this_process
    file.write_text(file.read_text().replace("threads = 1", "threads = 2"))
    assert invoke("sweep", file, "--format", "json").stdout == result.stdout and not within_this_process
    again = invoke("compare", tmp_path / "runs/mine", "--base", "base", "--format", "json")
    assert json.loads(again.stdout) == found
    file.write_text(file.read_text().replace("beam = 2", "beam = 1"))
    half = invoke("sweep", file, "--only", "deep*")  # the base still has translations of the other beam
    assert half.exit_code == 2 and "beam 1" in half.stderr and "beam 2" in half.stderr
    assert [words[1] for words in within_this_process] == ["average-checkpoints", "generate"] * 2
    assert "beam 1" in json.loads(invoke("sweep", file, "--format", "json").stdout)["made_by"]


def test_a_run_that_the_sweep_has_not_yet_translated_is_left_out(runs: Path, mirror_data: Path) -> None:
    for path in sorted(runs.glob("b*")):
        translated = (path / "validation/update_00000020.txt").read_bytes()
        (path / "translations.txt").write_bytes(translated)
        record = {"settings": {"gen_subset": "valid", "beam": 4}, "trained": [20, 150], "data": str(mirror_data)}
        (path / "translations.json").write_text(json.dumps(record | {"flop": None}))
    said = json.loads(invoke("compare", runs, "--base", "base", "--format", "json").stdout)
    assert [row["row"] for row in said["rows"]] == ["base", "better"]
    assert [Path(name).name for name in said["left_out"]] == ["alike,seed=4"]


@pytest.mark.slow
def test_translations_of_a_run_that_was_trained_further_are_made_again(
    mirror_data: Path, tmp_path: Path, within_this_process: list[list[str]]
) -> None:
    file = tmp_path / "mine.sweep.toml"
    file.write_text(SWEEP.format(data=mirror_data).replace("seeds = [1, 2]", "seeds = [1]"))
    assert invoke("sweep", file).exit_code == 0
    assert invoke("train", "--config", tmp_path / "runs/mine/deep,seed=1/config.toml", "--max-update", 6).exit_code == 0
    said = json.loads(invoke("compare", tmp_path / "runs/mine", "--base", "base", "--format", "json").stdout)
    assert [Path(name).name for name in said["left_out"]] == ["deep,seed=1"]
    within_this_process.clear()
    file.write_text(file.read_text().replace("max_update = 4", "max_update = 6"))
    assert invoke("sweep", file).exit_code == 0
    assert [words[1] for words in within_this_process].count("generate") == 2


@pytest.mark.slow
def test_translations_are_made_again_if_a_file_of_their_settings_has_other_contents(
    mirror_data: Path, tmp_path: Path, within_this_process: list[list[str]]
) -> None:
    file, prefixes = tmp_path / "mine.sweep.toml", tmp_path / "prefixes.txt"
    text = SWEEP.format(data=mirror_data).replace("seeds = [1, 2]", "seeds = [1]")
    file.write_text(f"{text}prefix = '{prefixes}'\n")
    for prefix, made in (("KELU", 2), ("KELU", 0), ("TERA", 2), ("TERA", 0)):
        prefixes.write_text(f"{prefix}\n" * 20)
        within_this_process.clear()
        assert invoke("sweep", file).exit_code == 0
        assert [words[1] for words in within_this_process].count("generate") == made


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("beam = 2", "baem = 2", "--baem"),
        ("beam = 2", "beam = 0", "beam"),
        ("beam = 2", "gen_subset = 'tset'", "tset"),
        ("beam = 2", "output = 'x'", "output"),
        ("beam = 2", "score_reference = true", "score_reference"),
        ("beam = 2", "quality_report = 'x'", "quality_report"),
        ("beam = 2", "mbr = 'bleu'", "--mbr"),
        ("average = 2", "average = 4", "keep_last"),
        ("average = 2", "average = true", "average"),
        ('base = "base"', 'base = "bsae"', "'base'"),
    ],
)
def test_a_mistake_in_the_translation_is_found_before_anything_is_trained(
    old: str, new: str, said: str, mirror_data: Path, tmp_path: Path, within_this_process: list[list[str]]
) -> None:
    file = tmp_path / "mine.sweep.toml"
    file.write_text(SWEEP.format(data=mirror_data).replace(old, new))
    refused = invoke("sweep", file)
    assert refused.exit_code == 2 and said in refused.stderr and "mine.sweep.toml" in refused.stderr, refused.stderr
    assert not within_this_process


@pytest.mark.slow
def test_a_base_needs_runs_that_translate(
    mirror_data: Path, tmp_path: Path, within_this_process: list[list[str]]
) -> None:
    file = tmp_path / "mine.sweep.toml"
    text = SWEEP.format(data=mirror_data).partition("[sweep.generate]")[0].replace("average = 2", "")
    file.write_text(text)
    refused = invoke("sweep", file)
    assert refused.exit_code == 2 and "[sweep.generate]" in refused.stderr and not within_this_process
    file.write_text(
        text.replace("metrics = []", "").replace('interval = "none"\nmax_tokens', "interval = 1\nmax_tokens")
    )
    compared = invoke("sweep", file, "--format", "json")
    assert compared.exit_code == 0, compared.stderr
    assert json.loads(compared.stdout)["made_by"] == "gen_subset valid, last validation, beam 4"


def test_the_dry_run_of_a_sweep_lists_the_translations(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.sweep.toml"
    file.write_text(SWEEP.format(data=mirror_data))
    monkeypatch.setenv(PROGRAM, "python3 -m nmtkit")
    first, *lines = invoke("sweep", file, "--dry-run", "--only", "base,seed=1").stdout.splitlines()
    assert first == "# base,seed=1" and all(line.startswith("python3 -m nmtkit ") for line in lines)
    assert [line.split()[3] for line in lines] == ["train", "average-checkpoints", "generate"]


def test_translations_have_the_plug_ins_of_the_runs_and_paths_beside_the_file(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sweeps").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweeps/mine.py").write_text("A = 1\n")
    text = SWEEP.format(data=mirror_data).replace("[run]", '[run]\nplugin = ["mine.py"]')
    fused = "logits_processors = 'lm_fusion'\nlm = 'lm.pt'\n"
    (tmp_path / "sweeps/mine.sweep.toml").write_text(text + fused)
    result = invoke("sweep", "sweeps/mine.sweep.toml", "--dry-run", "--only", "base,seed=1")
    assert result.exit_code == 0, result.stderr
    words = shlex.split(result.stdout.splitlines()[-1])
    given = [(flag, value) for flag, value in pairwise(words) if flag in ("--plugin", "--lm")]
    assert given == [("--plugin", "sweeps/mine.py"), ("--lm", "sweeps/lm.pt")]
