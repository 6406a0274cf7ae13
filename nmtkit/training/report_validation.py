"""Sections about validations on the page of a run: scores by length, translations over time, best and worst."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from nmtkit.pages.document import Html, table

Example = tuple[str, str, str, float]  # source, translation, reference, chrF


def html(records: Sequence[Mapping[str, Any]], best: Sequence[Example], worst: Sequence[Example]) -> str:
    """Returns the HTML of all sections that have content. `records` are the log records, oldest first."""
    valid = sorted((record for record in records if record["kind"] == "valid"), key=lambda record: record["update"])
    parts = []
    if valid and valid[-1].get("by_length"):
        parts.append(f"<h2>By length, after update {valid[-1]['update']}</h2>" + _by_length(valid[-1]["by_length"]))
    if valid and valid[-1].get("followed"):
        parts.append("<h2>Three sentences as they are learnt</h2>" + _followed(valid))
    for title, examples in (("Best", best), ("Worst", worst)):
        if examples:
            parts.append(f"<h2>{title} validation sentences</h2>" + _table(examples))
    return "\n".join(parts)


def _by_length(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of scores by length, with bars in proportion to the scores."""
    scores = [name for name in ("loss", "bleu") if all(row.get(name) is not None for row in rows)]

    def bar(row: Mapping[str, Any], name: str) -> Html:
        share = row[name] / (max(other[name] for other in rows) or 1)
        width = f"{8 * share:.2f}rem"
        return Html(f'<span class="bar" style="width:{width}"></span>{row[name]:.{3 if name == "loss" else 1}f}')

    return table(
        ["target tokens", "sentences", *map(_title, scores)],
        [[row["tokens"], row["sentences"], *(bar(row, name) for name in scores)] for row in rows],
    )


def _title(score: str) -> str:
    return "BLEU" if score == "bleu" else score


def _followed(valid: Sequence[Mapping[str, Any]]) -> str:
    """Returns source and reference of each sentence, and a row for each update at which its translation changes."""
    parts = []
    for index, sentence in enumerate(valid[-1]["followed"]):
        rows: list[tuple[int, str]] = []
        before = ""
        for record in valid:
            translations = record.get("followed") or []
            text = translations[index]["translation"] if index < len(translations) else before
            if text != before:
                rows.append((record["update"], text))
            before = text
        texts = f'<p dir="auto">{escape(sentence["source"])}<br><b>{escape(sentence["reference"])}</b></p>'
        parts.append(texts + table(["update", "translation"], rows))
    return "".join(parts)


def _table(examples: Sequence[Example]) -> str:
    rows = [(round(chrf), source, translation, reference) for source, translation, reference, chrf in examples]
    return table(["chrF", "source", "translation", "reference"], rows)
