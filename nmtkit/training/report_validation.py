"""Prepares validation results for the page of a run: scores, translations over time, best and worst translations."""

from collections.abc import Mapping, Sequence
from typing import Any

Example = tuple[str, str, str, float]  # source, translation, reference, chrF
TITLES = {"bleu": "BLEU", "chrf": "chrF"}


def sections(records: Sequence[Mapping[str, Any]], best: Sequence[Example], worst: Sequence[Example]) -> dict[str, Any]:
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
