"""Writes the HTML page of a run: curves, results of validations, translations over time, and the resolved config.

The page loads nothing from the network.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmtkit.config.files import atomic_write
from nmtkit.pages.charts import Point, line_chart
from nmtkit.pages.document import Html, render
from nmtkit.training.run_log import numbers_of, shown_scores

RatedTranslation = tuple[str, str, str, float]  # source, translation, reference, chrF

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
TITLES = {"bleu": "BLEU", "chrf": "chrF"}
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


def write(
    folder: Path, config: str, best: Sequence[RatedTranslation] = (), worst: Sequence[RatedTranslation] = ()
) -> None:
    """Writes `folder/report.html` from `folder/log.jsonl`. Raises OSError."""
    records = read_records(folder / "log.jsonl")
    page = html(records, config, sections(records, best, worst), folder.resolve().name)
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
        for field in numbers_of(record, {*drawn, *UNDRAWN}) if record["kind"] in KINDS else ():
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


# --- validations ------------------------------------------------------------------------------------------------------


def sections(
    records: Sequence[Mapping[str, Any]], best: Sequence[RatedTranslation], worst: Sequence[RatedTranslation]
) -> dict[str, Any]:
    """Returns the values of the template `report.html`. `records` are the log records, oldest first."""
    valid = sorted((record for record in records if record["kind"] == "valid"), key=lambda record: record["update"])
    examples = [
        (title, [(round(chrf), source, translation, reference) for source, translation, reference, chrf in rows])
        for title, rows in (("Best", best), ("Worst", worst))
    ]
    latest = valid[-1] if valid else {}
    return {
        "matrices": _matrices(latest),
        "by_length": _by_length(latest) if latest.get("by_length") else None,
        "followed": _followed(valid) if latest.get("followed") else [],
        "examples": examples,
    }


def _matrices(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a matrix of source and target languages for each score of a run of many directions.

    A cell has the score as text, its share of the largest score, and whether the direction was trained. The cell of a
    direction without a validation set is None.
    """
    rows = record.get("directions") or []
    sources, targets = (list(dict.fromkeys(row[side] for row in rows)) for side in ("source", "target"))
    matrices = []
    for name in (key for key, value in (rows[0] if rows else {}).items() if isinstance(value, int | float)):
        if name in ("sentences", "trained", "nll", "ppl"):
            continue
        cells = {(row["source"], row["target"]): (row[name], row.get("trained", True)) for row in rows}
        largest = max((value for value, _ in cells.values() if value), default=0) or 1
        shown = {
            key: None
            if value is None
            else (f"{value:.{3 if name == 'loss' else 1}f}", max(0, value / largest), trained)
            for key, (value, trained) in cells.items()
        }
        matrices.append(
            {
                "title": TITLES.get(name, name),
                "update": record["update"],
                "targets": targets,
                "rows": [(source, [shown.get((source, target)) for target in targets]) for source in sources],
                "untrained": not all(trained for _, trained in cells.values()),
            }
        )
    return matrices


def _by_length(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scores of each range of lengths, as bars: (score / largest score, score as text)."""
    rows = record["by_length"]
    scores = [name for name in ("loss", "bleu") if all(row.get(name) is not None for row in rows)]
    largest = {name: max(row[name] for row in rows) or 1 for name in scores}
    return {
        "update": record["update"],
        "scores": [TITLES.get(name, name) for name in scores],
        "rows": [
            {
                "tokens": row["tokens"],
                "sentences": row["sentences"],
                "bars": [(row[name] / largest[name], f"{row[name]:.{3 if name == 'loss' else 1}f}") for name in scores],
            }
            for row in rows
        ],
    }


def _followed(valid: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns source, reference and translations of each followed sentence.

    A translation is a tuple (update, text). Translations that are equal to the previous translation are left out.
    """
    sentences = []
    for index, sentence in enumerate(valid[-1]["followed"]):
        rows: list[tuple[int, str]] = []
        before = ""
        for record in valid:
            translations = record.get("followed") or []
            text = translations[index]["translation"] if index < len(translations) else before
            if text != before:
                rows.append((record["update"], text))
            before = text
        fixed = {name: sentence.get(name) for name in ("direction", "source", "reference")}
        sentences.append({**fixed, "translations": rows})
    return sentences
