"""A run on one page of HTML that needs no network: curves, the worst validation sentences, the resolved config."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from nmtkit.files import atomic_write

CURVES = {
    # title -> (field, kind of record) of each line in it
    "loss": (("loss", "train"), ("loss", "valid")),
    "perplexity": (("ppl", "train"), ("ppl", "valid")),
    "BLEU": (("bleu", "valid"),),
    "learning rate": (("lr", "train"),),
    "target tokens per second": (("tokens_per_second", "train"),),
    "gradient norm": (("norm", "train"),),
}
COLOURS = {"train": "#3572b0", "valid": "#c4512d"}
WIDTH, HEIGHT, MARGIN = 420, 200, 44  # pixels
LOGARITHMIC = ("perplexity",)  # falls by orders of magnitude at first

Point = tuple[float, float]
Example = tuple[str, str, str, float]  # source, translation, reference, chrF

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
svg { margin: .5rem 1rem .5rem 0 } text { font-size: 11px; fill: #555 } th, td { text-align: left; padding: .25rem 1rem
.25rem 0; vertical-align: top } tr { border-bottom: 1px solid #ddd } pre { background: #f5f5f5; padding: 1rem;
overflow-x: auto }
@media (prefers-color-scheme: dark) { body { background: #1c1c1c; color: #ddd } pre { background: #2a2a2a }
text { fill: #aaa } tr { border-color: #444 } }
"""


def read_lines(log: Path) -> list[dict[str, Any]]:
    """Returns the records of a run's log in the order written, without what was cut off when a run was killed."""
    records = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "kind" in record:
            records.append(record)
    return records


def read_records(log: Path) -> list[dict[str, Any]]:
    """Returns the records of a run's log; of an update that was made again after a restart, the last."""
    return latest_records(read_lines(log))


def latest_records(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    latest = {(record["kind"], record.get("update", 0)): record for record in records}
    return list(latest.values())


def write(folder: Path, config: str, examples: Sequence[Example]) -> None:
    """Writes `folder/report.html` from `folder/log.jsonl`. Raises OSError."""
    page = html(read_records(folder / "log.jsonl"), config, examples, folder.resolve().name)
    with atomic_write(folder / "report.html") as file:
        file.write(page.encode())


def html(records: Sequence[dict[str, Any]], config: str, examples: Sequence[Example], name: str) -> str:
    charts = []
    for title, lines in CURVES.items():
        drawn = {kind: points(records, kind, field) for field, kind in lines}
        if any(drawn.values()):
            charts.append(chart(title, drawn, title in LOGARITHMIC))
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(name)}</title><style>{STYLE}</style>',
        f"<h1>{escape(name)}</h1><p>{escape(_summary(records))}</p>",
        *charts,
    ]
    if examples:
        parts.append("<h2>Worst validation sentences</h2>" + _table(examples))
    parts.append(f"<h2>Resolved config</h2><pre>{escape(config)}</pre></html>")
    return "\n".join(parts)


def points(records: Iterable[dict[str, Any]], kind: str, field: str) -> list[Point]:
    return sorted(
        (float(record["update"]), float(record[field]))
        for record in records
        if record["kind"] == kind and record.get(field) is not None
    )


def _summary(records: Sequence[dict[str, Any]]) -> str:
    updates = max((record["update"] for record in records if record["kind"] == "train"), default=0)
    text = f"{updates} updates"
    best = [record for record in records if record["kind"] == "valid" and record.get("best")]
    if best:
        last = max(best, key=lambda record: record["update"])
        bleu = f", BLEU {last['bleu']:.2f}" if "bleu" in last else ""
        text += f"; best validation after update {last['update']}: loss {last['loss']:.3f}{bleu}"
    return text


def chart(
    title: str, lines: dict[str, list[Point]], logarithmic: bool, colours: Mapping[str, str] | None = None
) -> str:
    """Returns an SVG of several curves on shared axes. With `colours` of the curves, these are not named in it."""
    values = [y for points in lines.values() for _, y in points]
    updates = [x for points in lines.values() for x, _ in points]
    scale = math.log10 if logarithmic and min(values) > 0 else float
    low, high = scale(min(values)), scale(max(values))
    left, right = min(updates), max(updates)

    def pixels(x: float, y: float) -> str:
        column = MARGIN + (x - left) / (right - left or 1) * (WIDTH - MARGIN - 8)
        row = HEIGHT - 24 - (scale(y) - low) / (high - low or 1) * (HEIGHT - 24 - 26)
        return f"{column:.1f},{row:.1f}"

    parts = [f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escape(title)} by update">']
    parts.append(f'<text x="{MARGIN}" y="14" font-weight="bold">{escape(title)}</text>')
    for index, (kind, points) in enumerate(line for line in lines.items() if line[1]):
        colour = (colours or COLOURS)[kind]
        drawn = " ".join(pixels(x, y) for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{drawn}"/>')
        parts += [f'<circle r="2" fill="{colour}" cx="{x}" cy="{y}"/>' for x, y in _ends(drawn)]
        if colours is None:
            parts.append(f'<text x="{WIDTH - 90 + 45 * index}" y="14" style="fill:{colour}">{kind}</text>')
    for value, row in ((max(values), 30), (min(values), HEIGHT - 24)):
        parts.append(f'<text x="{MARGIN - 4}" y="{row}" text-anchor="end">{value:.4g}</text>')
    for value, anchor, column in ((left, "start", MARGIN), (right, "end", WIDTH - 8)):
        parts.append(f'<text x="{column}" y="{HEIGHT - 8}" text-anchor="{anchor}">{value:.0f}</text>')
    return "".join(parts) + "</svg>"


def _ends(drawn: str) -> list[tuple[str, str]]:
    """Returns the first and last point of a polyline; a circle there shows a curve of one point."""
    points = drawn.split()
    pairs = [point.split(",") for point in (points[0], points[-1])]
    return [(x, y) for x, y in pairs]


def _table(examples: Sequence[Example]) -> str:
    rows = "".join(
        f"<tr><td>{chrf:.0f}</td><td>{escape(source)}</td><td>{escape(translation)}</td><td>{escape(reference)}</td></tr>"
        for source, translation, reference, chrf in examples
    )
    return f"<table><tr><th>chrF</th><th>source</th><th>translation</th><th>reference</th></tr>{rows}</table>"
