"""Validations on the page of a run: sentences as they change, scores by length, best and worst translations."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

Example = tuple[str, str, str, float]  # source, translation, reference, chrF


def html(records: Sequence[Mapping[str, Any]], best: Sequence[Example], worst: Sequence[Example]) -> str:
    """Returns the sections, empty where there is nothing to show. `records` are those of the log, oldest first."""
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
    """Returns a table with a bar for each score, as long as its share of the largest."""
    scores = [name for name in ("loss", "bleu") if all(row.get(name) is not None for row in rows)]
    head = "".join(f"<th>{title}</th>" for title in ("target tokens", "sentences", *map(_title, scores)))
    body = ""
    for row in rows:
        cells = f"<td>{escape(row['tokens'])}</td><td>{row['sentences']:,}</td>"
        for name in scores:
            share = row[name] / (max(other[name] for other in rows) or 1)
            bar = f'<span class="bar" style="width:{8 * share:.2f}rem"></span>'
            cells += f"<td>{bar} {row[name]:.{3 if name == 'loss' else 1}f}</td>"
        body += f"<tr>{cells}</tr>"
    return f"<table><tr>{head}</tr>{body}</table>"


def _title(score: str) -> str:
    return "BLEU" if score == "bleu" else score


def _followed(valid: Sequence[Mapping[str, Any]]) -> str:
    """Returns for each sentence its source, its reference, and its translations where they change."""
    parts = []
    for index, sentence in enumerate(valid[-1]["followed"]):
        rows, before = "", ""
        for record in valid:
            translations = record.get("followed") or []
            text = translations[index]["translation"] if index < len(translations) else before
            if text != before:
                rows += f"<tr><td>{record['update']:,}</td><td>{escape(text)}</td></tr>"
            before = text
        parts.append(
            f"<p>{escape(sentence['source'])}<br><b>{escape(sentence['reference'])}</b></p>"
            f"<table><tr><th>update</th><th>translation</th></tr>{rows}</table>"
        )
    return "".join(parts)


def _table(examples: Sequence[Example]) -> str:
    rows = "".join(
        f"<tr><td>{chrf:.0f}</td><td>{escape(source)}</td><td>{escape(translation)}</td><td>{escape(reference)}</td></tr>"
        for source, translation, reference, chrf in examples
    )
    return f"<table><tr><th>chrF</th><th>source</th><th>translation</th><th>reference</th></tr>{rows}</table>"
