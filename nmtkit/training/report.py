"""A run on one page of HTML that needs no network: curves, what validations translated, the resolved config."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from nmtkit.files import atomic_write
from nmtkit.training import report_validation
from nmtkit.training.progress import shown_scores
from nmtkit.training.report_validation import Example

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

# numbers of a record that are not drawn
UNDRAWN = ("update", "updates", "epoch", "seconds", "seconds_left", "time", "nll", "skipped")

Point = tuple[float, float]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
svg { margin: .5rem 1rem .5rem 0 } text { font-size: 11px; fill: #555 } th, td { text-align: left; padding: .25rem 1rem
.25rem 0; vertical-align: top } tr { border-bottom: 1px solid #ddd } pre { background: #f5f5f5; padding: 1rem;
overflow-x: auto } .bar { display: inline-block; height: .7em; background: #3572b0; opacity: .5 }
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


def write(folder: Path, config: str, best: Sequence[Example] = (), worst: Sequence[Example] = ()) -> None:
    """Writes `folder/report.html` from `folder/log.jsonl`. Raises OSError."""
    records = read_records(folder / "log.jsonl")
    page = html(records, config, report_validation.html(records, best, worst), folder.resolve().name)
    with atomic_write(folder / "report.html") as file:
        file.write(page.encode())


def write_translations(folder: Path, update: int, lines: Sequence[str]) -> None:
    """Writes the translations of a validation, in the order of its set. Raises OSError."""
    path = folder / "validation" / f"update_{update:08d}.txt"
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


def curves_of(records: Iterable[dict[str, Any]]) -> dict[str, tuple[tuple[str, str], ...]]:
    """Returns `CURVES` and, by name, whatever else the records have in numbers: metrics, counts of a criterion."""
    drawn = {field for lines in CURVES.values() for field, _ in lines}
    more: dict[str, dict[str, None]] = {}
    for record in records:
        for field, value in record.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if record["kind"] in COLOURS and number and field not in drawn and field not in UNDRAWN:
                more.setdefault(field, {})[record["kind"]] = None
    return CURVES | {field: tuple((field, kind) for kind in kinds) for field, kinds in more.items()}


def html(records: Sequence[dict[str, Any]], config: str, validations: str, name: str) -> str:
    charts = []
    for title, lines in curves_of(records).items():
        drawn = {kind: points(records, kind, field) for field, kind in lines}
        if any(drawn.values()):
            charts.append(chart(title, drawn, title in LOGARITHMIC))
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(name)}</title><style>{STYLE}</style>',
        f"<h1>{escape(name)}</h1><p>{escape(_summary(records))}</p>",
        *charts,
        validations,
    ]
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
        text += f"; best validation after update {last['update']}: " + ", ".join(shown_scores(last))
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
