"""`nmtkit compare` reads runs from their folders: settings that differ, best scores, speed, time and state."""

import csv
import io
import json
import statistics
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from nmtkit.cli import main
from nmtkit.experiments import comparison
from nmtkit.jobs.folder_lock import FolderLock

END = {"kind": "end", "update": 20, "state": "finished", "reason": "--max-update 20 is reached", "time": 160}


def compare(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments)], env={"COLUMNS": "80"})


def write_run(
    folder: Path, *more: dict[str, Any], bleus: tuple[float, ...] = (10.0, 12.0, 11.0), **settings: Any
) -> Path:
    """Writes a run of 20 updates, which took 30 seconds until it was killed and 20 seconds after it was resumed."""
    run = {"seed": 1, "max_update": 20, "save_dir": str(folder), "data": "/data/bin"}
    config = {"run": run | settings, "optimizer": {"name": "adam", "adam_eps": 1e-9}}
    records: list[dict[str, Any]] = [{"kind": "start", "update": 0, "config": config, "dataset": "abc", "time": 100}]
    for update, speed, time in ((5, 1000.0, 110), (10, 3000.0, 130), (15, 2000.0, 145), (20, 2500.0, 155)):
        if update == 15:
            records.append({"kind": "resume", "update": 10, "config": config, "dataset": "abc", "time": 140})
        records.append({"kind": "train", "update": update, "updates": 20, "loss": 9 - update / 5, "time": time})
        records[-1]["tokens_per_second"] = speed
    for update, bleu in zip((10, 15, 20), bleus, strict=True):
        records.append(
            {
                "kind": "valid",
                "update": update,
                "loss": 7 - bleu / 10,
                "bleu": bleu,
                "best": True,
                "time": 155,
                "maximized": ["bleu"],
            }
        )
    folder.mkdir(parents=True)
    text = "".join(json.dumps(record) + "\n" for record in (*records, *more)) + '{"kind": "tra'
    (folder / "log.jsonl").write_text(text)
    return folder


def rows_of(*arguments: object) -> list[dict[str, Any]]:
    result = compare(*arguments, "--format", "json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_row_has_what_differs_the_best_scores_speed_time_and_state(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", END, lr=0.1)
    two = write_run(tmp_path / "two", END, lr=0.2, bleus=(15.0, 14.0, 13.0))
    rows = rows_of(one, two)
    assert [row["settings"] for row in rows] == [{"lr": 0.1}, {"lr": 0.2}]
    assert rows[0]["best"]["bleu"] == {"value": 12.0, "update": 15}
    assert rows[1]["best"] == {"loss": {"value": 5.5, "update": 10}, "bleu": {"value": 15.0, "update": 10}}
    assert rows[1]["last"]["bleu"] == {"value": 13.0, "update": 20}
    assert rows[0]["tokens_per_second"] == statistics.median([1000, 3000, 2000, 2500])
    assert rows[0]["seconds"] == 30 + 20
    assert (rows[0]["state"], rows[0]["reason"]) == ("finished", "--max-update 20 is reached")


def test_settings_of_where_and_how_a_run_ran_are_no_columns_and_other_data_is(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one", threads=1), write_run(tmp_path / "two", threads=4)
    assert rows_of(one, two)[0]["settings"] == {}
    text = (two / "log.jsonl").read_text().replace('"dataset": "abc"', '"dataset": "def"')
    (two / "log.jsonl").write_text(text)
    assert [row["settings"] for row in rows_of(one, two)] == [{"dataset": "bin (abc)"}, {"dataset": "bin (def)"}]


def resumed(update: int, **settings: Any) -> list[dict[str, Any]]:
    """Returns the records of a resume with other settings, and of an update."""
    config = {"run": {"seed": 1, "max_update": 99} | settings, "optimizer": {"name": "adam", "adam_eps": 1e-9}}
    records = [{"kind": "resume", "update": update, "config": config, "dataset": "abc", "time": 200}]
    return [*records, {"kind": "train", "update": update + 1, "updates": 99, "loss": 2.0, "time": 210}]


def test_settings_that_changed_midway_are_shown(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain,seed=1", END, lr=0.2)
    # the updates with lr 0.3 are lost, because the last resume is from an older checkpoint
    changed = write_run(
        tmp_path / "changed,seed=1", *resumed(20, lr=0.3), *resumed(20, lr=0.2, threads=4, new=1), lr=0.1
    )
    row, other = rows_of(changed, plain)
    assert row["changed"] == [{"update": 20, "name": "lr", "before": 0.1, "now": 0.2}] and "changed" not in other
    assert len(rows_of(changed, plain, "--mean-over-seeds")) == 2
    for format in ("text", "tsv", "csv", "latex", "markdown"):
        text = compare(changed, plain, "--format", format).stdout
        assert "lr 0.1 until update 20" in text and "0.3" not in text, format
    page = tmp_path / "page.html"
    assert compare(changed, plain, "--report", page).exit_code == 0
    assert "lr 0.1 until update 20" in page.read_text()
    assert "until update" not in compare(plain).stdout


@pytest.mark.parametrize("change", [{"valid_subset": ["test"]}, {"valid_sentences": 100}, {"clip_norm": 1.0}], ids=str)
def test_the_best_score_is_of_the_last_valid_set(tmp_path: Path, change: dict[str, Any]) -> None:
    later = {"kind": "valid", "update": 25, "bleu": 9.0, "loss": 6.2, "maximized": ["bleu"]}
    before = {"valid_subset": ["valid"], "valid_sentences": None, "clip_norm": 0.0}
    (row,) = rows_of(write_run(tmp_path / "run", *resumed(20, **before | change), later, **before))
    best = {name: (row["best"][name]["value"], row["best"][name]["update"]) for name in ("loss", "bleu")}
    compared = "clip_norm" in change
    assert best == {"loss": (5.8, 15) if compared else (6.2, 25), "bleu": (12.0, 15) if compared else (9.0, 25)}


def test_states_are_those_of_lock_and_log(tmp_path: Path) -> None:
    failed = END | {"state": "failed", "reason": "out of memory"}
    folders = [
        write_run(tmp_path / "killed"),
        write_run(tmp_path / "failed", failed),
        write_run(tmp_path / "stopped", END | {"state": "stopped", "reason": "SIGTERM"}),
        write_run(tmp_path / "running", failed, lr=1),
    ]
    lock = FolderLock(folders[-1])
    lock.acquire()
    rows = rows_of(*folders)
    assert [row["state"] for row in rows] == ["stopped", "failed", "stopped", "running"]
    assert rows[0]["reason"].startswith("killed") and rows[1]["reason"] == "out of memory"
    assert rows[3]["reason"].startswith("process ")
    lock.release()
    assert rows_of(*folders)[3]["state"] == "failed"


def test_runs_that_differ_in_the_seed_alone_become_means(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        for seed, bleu in ((1, 20.0), (2, 23.0), (3, 29.0)):
            write_run(tmp_path / f"lr={lr},seed={seed}", END, lr=lr, seed=seed, bleus=(bleu, bleu - 1, bleu - 2))
    rows = rows_of(tmp_path, "--mean-over-seeds")
    assert [Path(row["run"]).name for row in rows] == ["lr=0.1", "lr=0.2"]
    assert rows[0]["runs"] == 3
    assert rows[0]["best"]["bleu"]["value"] == pytest.approx(24.0)
    assert rows[0]["best"]["bleu"]["deviation"] == pytest.approx(statistics.stdev([20, 23, 29]))
    text = compare(tmp_path, "--mean-over-seeds").stdout
    assert "24.00 ± 4.58" in text


def test_a_second_run_with_the_same_seed_is_not_part_of_the_mean(tmp_path: Path) -> None:
    for name, seed, bleu in (("a", 1, 20.0), ("b", 2, 23.0), ("c", 1, 20.0)):
        write_run(tmp_path / name, END, seed=seed, bleus=(bleu, bleu - 1, bleu - 2))
    (row,) = rows_of(tmp_path, "--mean-over-seeds")
    assert row["runs"] == 2 and row["best"]["bleu"]["value"] == pytest.approx(21.5)
    said = " ".join(compare(tmp_path, "--mean-over-seeds").stderr.split())
    assert "part of the mean" in said and str(tmp_path / "c") in said


def test_the_table_fits_80_columns_and_tsv_has_everything(tmp_path: Path) -> None:
    names = {f"a_long_name_of_a_setting_{index}": index for index in range(4)}
    folders = [write_run(tmp_path / "one", END, **names), write_run(tmp_path / "two", END, **dict.fromkeys(names, 9))]
    text = compare(*folders).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "12.00 at 15" in text and "2,250" in text and "finished" in text and "50 s" in text
    assert "a_long_name_of_a_setting_3" in text.replace("\n", "")
    table = list(csv.reader(io.StringIO(compare(*folders, "--format", "tsv").stdout), delimiter="\t"))
    assert table[0][1:5] == list(names) and [row[1:5] for row in table[1:]] == [list("0123"), ["9"] * 4]


def test_a_latex_table_escapes_signs_and_aligns_numbers(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        for seed, bleu in ((1, 20.0), (2, 23.0)):
            write_run(tmp_path / f"50%_{lr},{seed}", END, arch=f"a_{lr}", seed=seed, bleus=(bleu, 1.0, 1.0))
    lines = compare(tmp_path, "--mean-over-seeds", "--format", "latex").stdout.split("\n")
    assert lines[0] == r"\begin{tabular}{llrrrrrl}"
    assert lines[1:4:2] == [r"\toprule", r"\midrule"]
    assert lines[-3:] == [r"\bottomrule", r"\end{tabular}", ""]
    assert lines[2].startswith(r"run & arch & best loss & best bleu") and lines[2].endswith(r"& state \\")
    assert r"50\%\_0.1" in lines[4] and r"a\_0.1" in lines[4] and r"21.50 $\pm$ 2.12" in lines[4]
    rows = list(csv.reader(io.StringIO(compare(tmp_path, "--format", "csv").stdout)))
    assert rows[0][:3] == ["run", "seed", "arch"] and len(rows) == 5
    assert rows[0][-7:] == ["best bleu", "best bleu update", "tokens/s", "seconds", "updates", "state", "reason"]
    assert sorted(row[5:7] for row in rows[1:]) == [["20", "10"], ["20", "10"], ["23", "10"], ["23", "10"]]
    assert all(row[7:11] == ["2250", "50", "20", "finished"] for row in rows[1:]), rows
    means = list(csv.DictReader(io.StringIO(compare(tmp_path, "--mean-over-seeds", "--format", "csv").stdout)))
    assert [float(row["best bleu deviation"]) for row in means] == pytest.approx([4.5**0.5] * 2)


def test_curves_have_each_update_once(tmp_path: Path) -> None:
    again = {"kind": "train", "update": 20, "loss": 4.5, "time": 160}
    folder = write_run(tmp_path / "run", {"kind": "resume", "update": 15, "time": 156, "config": {}}, again)
    assert compare(folder, "--curves", tmp_path / "curves.csv").exit_code == 0
    rows = list(csv.DictReader((tmp_path / "curves.csv").open()))
    losses = [(row["update"], row["value"]) for row in rows if (row["kind"], row["name"]) == ("train", "loss")]
    assert losses == [("5", "8.0"), ("10", "7.0"), ("15", "6.0"), ("20", "4.5")]


@pytest.mark.slow
def test_curves_are_written_as_numbers_and_as_a_figure(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, END) for name in ("one", "two")]
    assert compare(*folders, "--curves", tmp_path / "curves.csv").exit_code == 0
    rows = list(csv.DictReader((tmp_path / "curves.csv").open()))
    assert {row["run"] for row in rows} == set(map(str, folders))
    bleu = [(row["kind"], row["update"], float(row["value"])) for row in rows if row["name"] == "bleu"]
    assert bleu == [("valid", "10", 10.0), ("valid", "15", 12.0), ("valid", "20", 11.0)] * 2
    assert not {row["name"] for row in rows} & {"update", "updates", "time", "best"}
    pytest.importorskip("matplotlib")
    for suffix, beginning in ((".pdf", b"%PDF"), (".svg", b"<?xml"), (".png", b"\x89PNG")):
        assert compare(*folders, "--curves", tmp_path / f"curves{suffix}").exit_code == 0
        assert (tmp_path / f"curves{suffix}").read_bytes().startswith(beginning)
    refused = compare(*folders, "--curves", tmp_path / "curves.doc")
    assert refused.exit_code == 2 and "one of these suffixes" in refused.stderr
    missing = compare(*folders, "--curves", tmp_path / "no/curves.csv")
    assert missing.exit_code == 2 and "does not exist" in missing.stderr


def test_a_figure_that_cannot_be_written_is_refused_before_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "one", END)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    for words, said in (
        (["--curves", "a.doc"], ".csv"),
        (["--curves", "a.pdf"], "nmtkit[plots]"),
        (["--base", "one", "--plot", "a.txt"], ".svg"),
        (["--base", "one", "--plot", "a.svg"], "nmtkit[plots]"),
    ):
        refused = compare(folder, *words)
        assert (refused.exit_code, refused.stdout) == (2, "") and said in refused.stderr, words


@pytest.mark.parametrize("columns", ["80", "100", "160"])
def test_the_reason_of_a_failure_can_be_read_at_any_width(tmp_path: Path, columns: str) -> None:
    reason = "the loss of update 17 is not finite; lower --lr, or clip gradients with --clip-norm, and start again"
    failed = END | {"state": "failed", "reason": reason}
    runs = [write_run(tmp_path / "a_run_with_a_rather_long_name" / name, failed) for name in ("one", "two")]
    arguments = ["compare", *map(str, runs)]
    result = CliRunner().invoke(main, arguments, env={"COLUMNS": columns})
    lines = result.stdout.splitlines()
    assert max(map(len, lines[1:])) <= int(columns)
    assert len(lines) <= 10 and result.stdout.replace("\n  ", " ").count(reason) == 2


def test_a_reason_of_several_lines_is_one_line_of_each_table(tmp_path: Path) -> None:
    failed = END | {"state": "failed", "reason": "NCCL error\n\nno device"}
    runs = [write_run(tmp_path / name, failed) for name in ("one", "two")]
    for format, rows in (("markdown", 4), ("latex", 8), ("tsv", 3)):
        table = compare(*runs, "--format", format).stdout.splitlines()
        assert len(table) == rows and sum("NCCL error no device" in line for line in table) == 2, format


@pytest.mark.parametrize("columns", ["66", "70", "80"])
def test_states_are_whole_in_a_narrow_terminal(tmp_path: Path, columns: str) -> None:
    more = [{"kind": "train", "update": 1_234_567, "tokens_per_second": 123_456.0, "time": 40_000}, END]
    runs = [write_run(tmp_path / f"run_of_many_updates_{name}", *more) for name in ("one", "two")]
    result = CliRunner().invoke(main, ["compare", *map(str, runs)], env={"COLUMNS": columns})
    assert result.stdout.count("finished") == 2
    assert max(map(len, result.stdout.splitlines()[1:])) <= int(columns)


def test_the_page_has_a_curve_for_each_run_and_needs_no_network(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, END, lr=lr) for name, lr in (("a <b>", 0.1), ("c", 0.2))]
    assert compare(*folders, "--report", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text()
    assert "a &lt;b&gt;" in page and "http" not in page and "src=" not in page
    assert page.count(f"2 runs in {tmp_path}") == 2 and str(tmp_path) + "/" not in page  # in the title and the heading
    parts = [page.index(f"<h2>{title}</h2>") for title in ("Scores", "Curves", "Settings that differ")]
    assert parts == sorted(parts)
    assert "<th>best bleu</th>" in page[parts[0] : parts[1]] and "<th>lr</th>" in page[parts[2] :]
    drawings = [
        ElementTree.fromstring(svg)
        for svg in page.split("<svg")[1:]
        for svg in ["<svg" + svg.split("</svg>")[0] + "</svg>"]
    ]
    bleu = next(svg for svg in drawings if svg.get("aria-label", "").startswith("BLEU"))
    assert len(bleu.findall("polyline")) == 2
    assert len({line.get("class") for line in bleu.findall("polyline")}) == 2


def test_a_run_that_is_read_while_it_writes_and_one_that_has_begun(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "log.jsonl").write_text("")
    assert comparison.summarize(tmp_path / "new").state == "new"
    assert compare(tmp_path / "new").exit_code == 0


@pytest.mark.parametrize("file", ["log.jsonl", "config.toml"])
def test_files_of_runs_are_not_overwritten(file: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one")
    (folder / "config.toml").write_text("")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    result = CliRunner().invoke(main, ["compare", str(tmp_path), "--report", str(folder / file)])
    assert result.exit_code == 2 and "overwrite a file which" in result.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    both = [str(tmp_path / "out.csv")] * 2
    result = CliRunner().invoke(main, ["compare", str(tmp_path), "--report", both[0], "--curves", both[1]])
    assert result.exit_code == 2 and "file that --report writes" in result.stderr


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    for folder, said in (
        (tmp_path, "holds no run: it has no log.jsonl"),
        (tmp_path / "nowhere", "no such folder of a run"),
    ):
        result = compare(folder)
        assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1
