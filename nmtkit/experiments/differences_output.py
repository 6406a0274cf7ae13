"""Writes the comparison of the rows of a sweep with the base: as a table in several formats, and as a figure."""

from pathlib import Path
from typing import Any

from nmtkit.config.tables import aligned
from nmtkit.experiments import tables
from nmtkit.experiments.comparison_output import load_pyplot, write_figure_file
from nmtkit.experiments.differences import LEVEL, RowComparison, SweepRow
from nmtkit.jobs.progress import quantity
from nmtkit.scoring.seeds import SeedScores

# Colours of the figure, which are legible on white and on black.
INK, CLEAR, WITHIN = "#7d8590", "#2f81f7", "#9a9a9a"

CellTable = tuple[list[str], list[list[str]]]  # headings, rows


def formatted(compared: RowComparison, format: str) -> str:
    """Returns the comparison as text, TSV, CSV, LaTeX, Markdown or JSON.

    If the text table is wider than the terminal, the costs and each metric have separate tables.
    """
    header, lines = cells(compared)
    return tables.formatted(
        format,
        header,
        lines,
        plain=as_plain(compared),
        unrounded=lambda: unrounded(compared),
        notes=notes(compared),
        text=lambda: _text(compared),
    )


def _text(compared: RowComparison) -> str:
    from rich.console import Console

    blocks = [aligned(*cells(compared))]
    if max(map(len, blocks[0])) > Console().width:
        blocks = [aligned(*block) for block in _blocks(compared)]
    return tables.blocks_of_text([*blocks, notes(compared)])


# --- tables -----------------------------------------------------------------------------------------------------------


def cells(compared: RowComparison) -> CellTable:
    costs, *metrics = _blocks(compared)
    header = [*costs[0], *(name for block, _ in metrics for name in block[1:])]
    parts = zip(costs[1], *(lines for _, lines in metrics), strict=True)
    return header, [[*first, *(cell for cells in others for cell in cells[1:])] for first, *others in parts]


def _blocks(compared: RowComparison) -> list[CellTable]:
    """Returns a table of costs, and a table for each metric. The first column of each table has the names of rows."""
    costs = [["row", "seeds", "M parameters", "updates", "FLOP", f"{compared.device}-minutes"]]
    for row in compared.rows:
        size = "" if row.parameters is None else f"{row.parameters / 1e6:.2f}"
        flop = "" if row.flop is None else f"{row.flop:.2e}"
        minutes = "" if row.device_minutes is None else f"{row.device_minutes:,.0f}"
        costs.append([row.name, str(row.seeds), size, f"{row.updates:,}", flop, minutes])
    header, *rows = tables.without_empty(costs)
    blocks: list[CellTable] = [(header, rows)]
    for index, score in enumerate(compared.rows[0].scores):
        lines = [[row.name, score_text(row.scores[index]), *_difference(compared, row, index)] for row in compared.rows]
        blocks.append((["row", score.name, "difference", "p", "verdict"], lines))
    return blocks


def score_text(score: SeedScores) -> str:
    """Returns the mean of a score with its standard deviation over seeds."""
    return f"{score.mean:.2f}" + ("" if score.deviation is None else f" ± {score.deviation:.2f}")


def _difference(compared: RowComparison, row: SweepRow, metric: int) -> list[str]:
    difference = row.scores[metric].difference
    if difference is None:
        return ["", "", compared.verdict(row, metric)]
    low, high = difference.value - difference.margin, difference.value + difference.margin
    p_value = f"{difference.p_value:.4f}" if difference.p_value >= 0.0001 else "< 0.0001"
    return [f"{difference.value:+.2f} [{low:+.2f}, {high:+.2f}]", p_value, compared.verdict(row, metric)]


def notes(compared: RowComparison) -> list[str]:
    """Returns the sentences below a table: how the scores were computed, and the limits of the comparison."""
    rows, base = compared.rows, compared.rows[0]
    lines = [f"{score.name}: {score.signature}" for score in base.scores]
    lines.append(f"Translations of {compared.sentences:,} sentences: {compared.made_by}.")
    lines.append(
        f"Scores are means ± standard deviation over seeds. Differences to {base.name} have 95 % intervals over "
        'sentences and seeds. The verdict "within spread" means that a difference is not significant.'
    )
    if any(row.seeds == 1 for row in rows) and any(row.seeds > 1 for row in rows):
        lines.append("A row with one seed is assumed to have the spread of the row with which it is compared.")
    if any(compared.verdict(row, 0) == "one seed" for row in rows):
        lines.append("one seed: neither row has a second seed, so the interval covers sentences only.")
    tested = len(rows) - 1
    if tested > 1:
        lines.append(
            f"Among {tested} rows without effect, about {LEVEL * tested:.1g} would have p < {LEVEL:g} by chance; "
            "* marks differences that remain significant after Holm's correction."
        )
    if compared.left_out:
        lines.append("Not compared: " + "; ".join(f"{name} ({why})" for name, why in compared.left_out.items()))
    return lines


def for_page(compared: RowComparison) -> dict[str, object]:
    header, rows = cells(compared)
    return {"header": header, "rows": rows, "notes": notes(compared)}


def as_plain(compared: RowComparison) -> dict[str, Any]:
    """Returns a comparison of the rows of a sweep as dicts, lists and unrounded numbers, for JSON."""

    def score(row: SweepRow, index: int) -> dict[str, Any]:
        found = row.scores[index]
        plain = {"name": found.name, "mean": found.mean, "deviation": found.deviation, "seeds": list(found.values)}
        if found.difference is not None:
            value, margin = found.difference.value, found.difference.margin
            plain |= {"difference": value, "low": value - margin, "high": value + margin}
            plain |= {"p_value": found.difference.p_value, "verdict": compared.verdict(row, index)}
        return plain

    rows = [
        {
            "row": row.name,
            "seeds": row.seeds,
            "parameters": row.parameters,
            "updates": row.updates,
            "flop": row.flop,
            f"{compared.device}_minutes".lower(): row.device_minutes,
            "scores": [score(row, index) for index in range(len(row.scores))],
        }
        for row in compared.rows
    ]
    signatures = {each.name: each.signature for each in compared.rows[0].scores}
    facts = {"base": compared.rows[0].name, "sentences": compared.sentences, "made_by": compared.made_by}
    return facts | {"signatures": signatures, "rows": rows, "left_out": dict(compared.left_out)}


def unrounded(compared: RowComparison) -> list[list[str]]:
    """Returns the headings and the rows of the table for other programs: each cell has one text or unrounded number."""
    plain = as_plain(compared)["rows"]
    parts = ("mean", "deviation", "difference", "low", "high", "p_value", "verdict")
    names = [f"{score['name']} {part}" for score in plain[0]["scores"] for part in parts]
    rows = [[*(name for name in plain[0] if name != "scores"), *names]]
    for row in plain:
        scores = row.pop("scores")
        values = [*row.values(), *(score.get(part) for score in scores for part in parts)]
        rows.append(["" if value is None else str(value) for value in values])
    return rows


# --- the figure -------------------------------------------------------------------------------------------------------


def write_figure(path: Path, compared: RowComparison) -> None:
    """Writes a figure of the score differences between the rows of a sweep and the base row, with intervals.

    The figure has a panel for each metric. A filled mark is a significant difference. The background is transparent,
    for light and dark pages. The suffix of `path` chooses the file format (see `check_figure`). Raises OSError if the
    file cannot be written, and ValueError if there is no row to compare with the base row.
    """
    pyplot = load_pyplot()
    base, *others = compared.rows
    if not others:
        raise ValueError("there is only one row, so there are no differences to draw")
    style = {name: INK for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")}
    with pyplot.rc_context(style | {"svg.hashsalt": "nmtkit", "font.size": 9}):
        height = 0.8 + 0.24 * len(others)
        drawing, (axes,) = pyplot.subplots(
            1, len(base.scores), figsize=(9, height), sharey=True, squeeze=False, layout="constrained"
        )
        for metric, axis in enumerate(axes):
            axis.axvline(0, color=INK, linewidth=1)
            for place, row in enumerate(others):
                difference = row.scores[metric].difference
                assert difference is not None
                colour = CLEAR if difference.significant else WITHIN
                axis.errorbar(
                    difference.value, place, xerr=difference.margin, color=colour, capsize=2, linewidth=1.2,
                    marker="o", markersize=5, markerfacecolor=colour if difference.significant else "none",
                )  # fmt: skip
            axis.set_yticks(range(len(others)), [f"{row.name} ({quantity(row.seeds, 'seeds')})" for row in others])
            axis.set_ylim(len(others) - 0.4, -0.6)
            axis.grid(axis="x", color=INK, alpha=0.25, linewidth=0.6)
            axis.tick_params(length=0)
            axis.spines[["top", "left", "right"]].set_visible(False)
            axis.set_xlabel(f"{base.scores[metric].name} minus {base.name} ({score_text(base.scores[metric])})")
        write_figure_file(path, drawing, transparent=True, dpi=160)
