"""Log lines, and the page of curves."""

import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.cells import cell_len
from rich.console import Console

from nmtkit.api.training import TrainingResult
from nmtkit.config import to_dict
from nmtkit.jobs.progress import duration
from nmtkit.pages import charts
from nmtkit.training import report
from nmtkit.training.due import RunProgress
from nmtkit.training.optimizers import OPTIMIZERS
from nmtkit.training.run_config import RunConfig
from nmtkit.training.run_log import LIVE, Lines, LiveLine, RunLog, fields, lines_of


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.21, "3.2 s"), (42, "42 s"), (60, "1 min"), (125, "2 min 5 s"), (11520, "3 h 12 min"), (187200, "2 d 4 h")],
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_live_line_never_wraps() -> None:
    record = {"update": 12345, "updates": 100000, "epoch": 12, "loss": 3.14159, "ppl": 23.1, "lr": 0.0007, "norm": 1.5}
    record |= {"tokens_per_second": 123456.7, "seconds_left": 98765}
    for width in (40, 60, 80, 100, 120):
        assert len("  ".join(fields(record, width=width))) <= width
    assert fields(record, width=200) == fields(record)
    assert fields(record, width=40)[:2] == ["update 12,345/100,000", "loss 3.142"]


def test_skipped_updates_leave_the_live_line_with_the_next_log_line(monkeypatch: pytest.MonkeyPatch) -> None:
    line = LiveLine(Console(file=io.StringIO(), width=120))
    line.close()
    shown: list[str] = []
    monkeypatch.setattr(line.live, "update", lambda text: shown.append(str(text)))
    for update, skipped in ((100, {"skipped": 3}), (200, {})):
        line.record({"kind": "train", "update": update, "loss": 2.0, **skipped})
    assert ["3 skipped" in text for text in shown] == [True, False]


def test_a_line_of_80_columns_has_the_epoch_and_the_time_left_instead_of_the_norm() -> None:
    record = {"update": 88300, "updates": 100000, "epoch": 12, "loss": 3.14159, "ppl": 23.14, "lr": 0.000118}
    record |= {"norm": 11.5, "tokens_per_second": 23456.7, "seconds_left": 98765.0, "kind": "train"}
    [line] = lines_of(record, 80)
    assert line == "update 88,300/100,000  loss 3.142  lr 0.000118  epoch 12  1 d 3 h left"
    live = fields(record, LIVE, 80)
    assert live == ["update 88,300/100,000", "epoch 12", "loss 3.142", "23.5k tok/s", "1 d 3 h left"]
    assert all(field in fields(record, width=120) for field in [*live, "lr 0.000118", "ppl 23.14"])


def test_the_lines_of_a_validation_have_at_most_the_width_of_the_terminal() -> None:
    record = {"kind": "valid", "update": 46, "loss": 2738.945, "ppl": 1.01e304, "bleu": 0.0, "epoch": 1, "best": True}
    record |= {
        "seconds": 12.0,
        "followed": [{"source": "Ein Hund.", "translation": "ein " * 50, "reference": "狗" * 60}],
    }
    lines = lines_of(record, 72)
    assert all(cell_len(line) <= 72 for line in lines) and len(lines) == 4
    assert lines[1] == "  source       Ein Hund." and lines[2].endswith("ein …") and lines[3].endswith("狗…")
    assert "best so far" in lines[0] and "in 12 s" not in lines[0]
    assert lines_of(record)[2] == f"  translation  {'ein ' * 50}"


@pytest.mark.parametrize(("ppl", "text"), [(9.876, "9.88"), (999.5, "999.50"), (6843.2, "6,843"), (1.5e9, "1.5e+09")])
def test_perplexities_are_read_without_counting_digits(ppl: float, text: str) -> None:
    assert fields({"ppl": ppl}) == [f"ppl {text}"]


def test_a_total_that_is_an_estimate_says_so() -> None:
    assert fields({"update": 1200, "updates": 4400, "estimated": True}) == ["update 1,200/~4,400"]
    assert fields({"update": 1200, "updates": 100000, "estimated": False}) == ["update 1,200/100,000"]


def test_the_log_is_json_even_where_a_number_is_not_finite(tmp_path: Path) -> None:
    log = RunLog(tmp_path, Lines())
    log.write("train", update=1, loss=float("nan"), ppl=1.23456789)
    record = json.loads((tmp_path / "log.jsonl").read_text())
    assert record["loss"] is None
    assert record["ppl"] == 1.23457


def page(tmp_path: Path, records: list[dict[str, object]]) -> str:
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    report.write(tmp_path, worst=[("a <b>", "x & y", "z", 12.3)])
    return (tmp_path / "report.html").read_text()


def test_the_page_needs_no_network_and_escapes_text(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [
        {"kind": "start", "update": 0, "config": {"run": {"seed": 1}}},
        {"kind": "train", "update": 10, "loss": 5.0, "ppl": 100.0, "lr": 0.1},
        {"kind": "train", "update": 20, "loss": 4.0, "ppl": 50.0, "lr": 0.2},
        {"kind": "valid", "update": 20, "loss": 4.5, "ppl": 60.0, "bleu": 12.5, "best": True},
    ]
    text = page(tmp_path, records)
    assert not re.search(r"(src|href)=|url\(|https?://|@import", text)
    assert "a &lt;b&gt;" in text and "x &amp; y" in text
    assert "seed = 1" in text.split("<summary>All settings</summary>")[1].split("</details>")[0]
    assert "best validation" in text and "loss 4.500, BLEU 12.50, after update 20" in text
    drawings = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text)]
    assert [svg.get("aria-label", "").split(" by ")[0] for svg in drawings] == [
        "loss",
        "perplexity",
        "learning rate",  # a chart of BLEU would have one point
    ]


def test_curves_span_the_drawing_and_fall_when_values_fall() -> None:
    figure = ElementTree.fromstring(charts.line_chart("loss", {"train": [(0, 5.0), (10, 3.0), (20, 1.0)]}))
    (line,) = figure.iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.get("points", "").split()]
    assert points[0][0] == charts.LEFT and points[-1][0] == charts.WIDTH - charts.RIGHT
    assert points[1][0] == pytest.approx((points[0][0] + points[2][0]) / 2, abs=0.1)
    assert points[0][1] < points[1][1] < points[2][1]  # rows count downwards


def test_a_sentence_with_any_separator_of_lines_costs_no_record(tmp_path: Path) -> None:
    log = RunLog(tmp_path, Lines())
    odd = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh"
    log.write("valid", update=1, loss=2.0, followed=[{"source": odd, "translation": odd, "reference": odd}])
    log.write("end", update=1, state="finished", reason=odd)
    first, second = report.read_lines(tmp_path / "log.jsonl")
    assert first["followed"][0]["source"] == odd and second["reason"] == odd
    result = TrainingResult(reason="", updates=1, save_dir=tmp_path)
    assert [record["kind"] for record in result.log] == ["valid", "end"]


def test_of_an_update_that_was_made_twice_the_later_record_counts(tmp_path: Path) -> None:
    lines = [{"kind": "train", "update": 1, "loss": 9.0}, {"kind": "train", "update": 1, "loss": 8.0}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tra'
    (tmp_path / "log.jsonl").write_text(text)
    assert [record["loss"] for record in report.latest_records(report.read_lines(tmp_path / "log.jsonl"))] == [8.0]


def test_updates_whose_checkpoints_were_deleted_belong_to_no_run(tmp_path: Path) -> None:
    """Someone deletes the checkpoints of a run and starts again, or deletes the last ones and goes on from an older."""
    steps = [("start", 0), ("train", 40), ("valid", 40), ("start", 0), ("train", 10), ("valid", 10), ("train", 20)]
    lines = [{"kind": kind, "update": update} for kind, update in [*steps, ("resume", 10), ("end", 10)]]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = report.read_lines(tmp_path / "log.jsonl")
    assert [(it["kind"], it["update"]) for it in records] == [*steps[3:], ("resume", 10), ("end", 10)]
    kept = [(it["kind"], it["update"]) for it in report.latest_records(records)]
    assert kept == [*steps[3:-1], ("resume", 10), ("end", 10)]


START: dict[str, object] = {
    "kind": "start", "update": 0, "command": "nmtkit train <data>", "data": "/d/bin", "dataset": "ab12",
    "device": "cpu", "languages": ["en", "de"], "parameters": 1234567, "pairs": 29000, "precision": "fp32",
    "time": 1000,
    "config": {
        "run": to_dict(RunConfig()) | {"seed": 7, "freeze": ["encoder.*"], "save_dir": "/x"},
        "optimizer": {"name": "adam"} | to_dict(OPTIMIZERS["adam"].preset) | {"adam_betas": [0.8, 0.98]},
    },
}  # fmt: skip
TRAIN: dict[str, object] = {
    "kind": "train",
    "update": 30,
    "updates": 120,
    "seconds_left": 605.0,
    "loss": 4.0,
    "time": 1090,
}


def test_the_page_of_a_running_run_refreshes_itself_and_has_its_facts(tmp_path: Path) -> None:
    text = page(tmp_path, [START, TRAIN])
    assert '<meta http-equiv="refresh"' in text
    for fact in ("running", "update 30 of 120", "10 min 5 s left", "&lt;data&gt;", "/d/bin", "1,234,567"):
        assert fact in text, fact
    for fact in ("en to de", "29,000 pairs", "1 min 30 s"):
        assert fact in text, fact
    differing = text.split("Settings that differ")[1].split("</table>")[0]
    rows = re.findall(r"<td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td>", differing)
    assert ("--seed", "7", "1") in rows and ("--freeze", "encoder.*", "none") in rows and len(rows) == 3
    assert not re.findall("<svg", text)  # one log line is no curve


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_the_page_of_a_run_that_has_ended_has_the_reason_and_stays(state: str, tmp_path: Path) -> None:
    end = {"kind": "end", "update": 30, "state": state, "reason": "because <so>", "time": 1100}
    text = page(tmp_path, [START, TRAIN, end])
    assert f'class="state {state}"' in text and "because &lt;so&gt;" in text
    assert "refresh" not in text.split("<style>")[0] and " left" not in text.split("<main>")[1].split("<h2>")[0]
    resumed = page(tmp_path, [START, TRAIN, end, START | {"kind": "resume", "update": 30, "time": 91000}])
    assert 'class="state running"' in resumed and "refresh" in resumed.split("<style>")[0]
    assert "1 min 40 s" in resumed  # without the day between the end and the resume


def test_components_other_than_the_defaults_are_settings_that_differ() -> None:
    run = {"transforms": [], "metrics": ["bleu"], "callbacks": ["profile"]}
    tables = {"run": run, "architecture": {"name": "transformer_tiny"}, "optimizer": {"name": "adam"}}
    assert report.changed_settings(tables) == [
        ("--callbacks", "profile", "none"), ("--arch", "transformer_tiny", "transformer_base")
    ]  # fmt: skip


def test_the_page_of_a_run_that_diverged_has_no_curve_of_overflows(tmp_path: Path) -> None:
    """An axis from 1e304 to 1e304, and a loss with six digits before the point, could not be read."""
    trained = [TRAIN | {"update": update, "ppl": 1e304, "loss": 137154.0} for update in (1, 2)]
    valid = {"kind": "valid", "update": 2, "loss": 137154.0, "best": True, "time": 1095}
    text = page(tmp_path, [START, *trained, valid])
    assert "1e304" not in text and "perplexity by update" not in text and "loss by update" in text
    assert "137,154" in text


def test_a_score_that_the_first_direction_lacks_has_a_matrix() -> None:
    rows = [{"source": "de", "target": "en", "sentences": 2, "trained": False, "loss": 2.0, "share": None}]
    rows.append(rows[0] | {"source": "en", "target": "de", "share": 0.5})
    valid = [{"kind": "valid", "update": 1, "directions": rows}]
    matrices = report.sections(valid, best=[], worst=[])["matrices"]
    assert [matrix["title"] for matrix in matrices] == ["loss", "share"]
    assert matrices[1]["rows"] == [("de", [None, None]), ("en", [None, ("0.5", 1.0, False)])]


def test_a_run_writes_its_page_between_validations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(report.time, "monotonic", lambda: now)
    (tmp_path / "log.jsonl").write_text(json.dumps(START) + "\n")
    run_page = report.RunPage(tmp_path, RunProgress())
    written = []
    for seconds in (0, 10, 29, 30, 50, 61):
        now = 100.0 + seconds
        (tmp_path / "report.html").unlink(missing_ok=True)
        run_page.keep_current()
        written.append((tmp_path / "report.html").exists())
    assert written == [True, False, False, True, False, True]


def test_a_run_that_repeats_a_word_has_a_page_that_can_be_read() -> None:
    """A phone showed one word per line, thousands of lines; a flag was broken after its first hyphen."""
    long = "Freien " * 200
    valid = [{"kind": "valid", "update": 1, "followed": [{"source": "a", "translation": long, "reference": "b"}]}]
    shown = report.sections(valid, best=[], worst=[("a", long, "b", 2.1)])
    texts = [shown["followed"][0]["translations"][0][1], shown["examples"][1][1][0][2]]
    assert all(text.endswith("Freien …") and len(text) < 310 for text in texts)
    assert report.state_of([{"kind": "start", "time": 1}, {**valid[0], "update": 84}])["progress"] == "update 84"
    facts = report.state_of([{"kind": "start", "command": "nmtkit train <data> --lr 5", "time": 1}])["facts"]
    assert '<span class="unbroken">--lr</span> 5' in dict(facts)["command"]
    assert "&lt;data&gt;" in dict(facts)["command"]
    ended = report.state_of([{"kind": "start", "time": 1}, {"kind": "end", "time": 2, "reason": "give --lr < 5"}])
    assert '<span class="unbroken">--lr</span>' in ended["reason"] and "&lt;" in ended["reason"]
