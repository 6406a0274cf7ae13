"""Writes the HTML page of a run: curves, translations of the validation set, and the resolved config.

The page loads nothing from the network.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmtkit.config.files import atomic_write
from nmtkit.pages.charts import Point, line_chart
from nmtkit.pages.document import Html, render
from nmtkit.training import report_validation
from nmtkit.training.progress import shown_scores
from nmtkit.training.report_validation import Example

CURVES = {
    # title -> (field, kind of record) of each curve
    "loss": (("loss", "train"), ("loss", "valid")),
    "perplexity": (("ppl", "train"), ("ppl", "valid")),
    "BLEU": (("bleu", "valid"),),
    "chrF": (("chrf", "valid"),),
    "learning rate": (("lr", "train"),),
    "target tokens per second": (("tokens_per_second", "train"),),
    "gradient norm": (("norm", "train"),),
}
KINDS = ("train", "valid")
UNITS = {
    "loss": "nats per token",
    "BLEU": "points",
    "chrF": "points",
    "learning rate": "step size",
    "gradient norm": "L2 norm",
}
LOGARITHMIC = ("perplexity",)  # titles of charts with a logarithmic axis

# numbers of a record that have no curve
UNDRAWN = ("update", "updates", "epoch", "seconds", "seconds_left", "time", "nll", "skipped")


def read_lines(log: Path) -> list[dict[str, Any]]:
    """Returns the records of a log in order. Skips incomplete lines, such as the last line of a killed run."""
    records = []
    for line in log.read_text(encoding="utf-8", errors="replace").split("\n"):  # splitlines would also split at U+2028
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "kind" in record:
            records.append(record)
    return records


def read_records(log: Path) -> list[dict[str, Any]]:
    """Returns the last record of each kind and update in a log file."""
    return latest_records(read_lines(log))


def latest_records(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the last record of each kind and update, because a resumed run may log an update again."""
    latest = {(record["kind"], record.get("update", 0)): record for record in records}
    return list(latest.values())


def write(folder: Path, config: str, best: Sequence[Example] = (), worst: Sequence[Example] = ()) -> None:
    """Writes `folder/report.html` from `folder/log.jsonl`. Raises OSError."""
    records = read_records(folder / "log.jsonl")
    page = html(records, config, report_validation.sections(records, best, worst), folder.resolve().name)
    with atomic_write(folder / "report.html") as file:
        file.write(page.encode())


def write_translations(folder: Path, update: int, lines: Sequence[str]) -> None:
    """Writes the translations of a validation, in the order of the validation set. Raises OSError."""
    path = folder / "validation" / f"update_{update:08d}.txt"
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


def curves_of(records: Iterable[dict[str, Any]]) -> dict[str, tuple[tuple[str, str], ...]]:
    """Returns `CURVES`, and one more chart for each other metric or count of the criterion in the records."""
    drawn = {field for lines in CURVES.values() for field, _ in lines}
    more: dict[str, dict[str, None]] = {}
    for record in records:
        for field, value in record.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if record["kind"] in KINDS and number and field not in drawn and field not in UNDRAWN:
                more.setdefault(field, {})[record["kind"]] = None
    return CURVES | {field: tuple((field, kind) for kind in kinds) for field, kinds in more.items()}


def html(records: Sequence[dict[str, Any]], config: str, validations: Mapping[str, Any], name: str) -> str:
    charts = []
    for title, lines in curves_of(records).items():
        drawn: dict[str, list[Point]] = {kind: [] for kind in KINDS}
        drawn |= {kind: points(records, kind, field) for field, kind in lines}
        if any(drawn.values()):
            charts.append(Html(line_chart(title, drawn, title in LOGARITHMIC, unit=UNITS.get(title, ""))))
    return render("report.html", title=name, lead=_summary(records), body=charts, config=config, **validations)


def points(records: Iterable[dict[str, Any]], kind: str, field: str) -> list[Point]:
    return sorted(
        (float(record["update"]), float(record[field]))
        for record in records
        if record["kind"] == kind and record.get(field) is not None
    )


def _summary(records: Sequence[dict[str, Any]]) -> str:
    updates = max((record["update"] for record in records if record["kind"] == "train"), default=0)
    text = f"{updates:,} updates"
    best = [record for record in records if record["kind"] == "valid" and record.get("best")]
    if best:
        last = max(best, key=lambda record: record["update"])
        text += f"; best validation after update {last['update']:,}: " + ", ".join(shown_scores(last))
    return text
