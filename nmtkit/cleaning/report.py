"""The page of `clean --report`: counts, dropped pairs, overlap of the filters, scores, pairs at the limits."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from nmtkit.cleaning.decision import CleanReport, FilterReport
from nmtkit.data.corpora.dropping import shortened
from nmtkit.pages.charts import histogram
from nmtkit.pages.document import Html, render, visible

CUT = 200  # maximum number of characters of an example
SHOWN = 3  # number of dropped pairs that the page shows for each filter
OVERLAPS = 12  # maximum number of pairs of filters in the table of overlaps


def page(report: CleanReport, source_lang: str, target_lang: str) -> str:
    """Returns the page as HTML. Filters without a pair beyond their limits are collapsed at the end."""
    share, dropped = f"{report.kept / max(1, report.read):.1%}", report.read - report.kept
    used = sorted((item for item in report.filters if item.matching), key=lambda item: -item.dropped)
    idle = [item for item in report.filters if not item.matching]
    near = [item for item in (*used, *idle) if item.kept_examples]
    return render(
        "cleaning.html",
        title=f"Cleaning {source_lang} → {target_lang}",
        languages=[source_lang, target_lang],
        summary=f"{report.kept:,} of {report.read:,} pairs are kept ({share}), {dropped:,} are dropped.",
        corpora=[(name, read, read - kept, kept) for name, (read, kept) in report.read_of.items()],
        filters=[(item.name, item.dropped, item.matching, _limits(item)) for item in used],
        idle=[item.name for item in idle],
        mended=[(name, count) for name, count in report.mended.items() if count],
        dropped=[(item.name, _texts(item.dropped_examples[:SHOWN])) for item in used if item.dropped_examples],
        overlaps=_overlaps(report),
        charts=[Html(_chart(item)) for item in used],
        kept=[(f"{item.name}: kept, next to the limit", _texts(item.kept_examples)) for item in near],
        others=[Html(_chart(item)) for item in idle],
        body=[],
    )


def _overlaps(report: CleanReport) -> list[tuple[str, int]]:
    """Returns at most OVERLAPS rows: "FILTER and FILTER", and the number of sentence pairs that both would drop.

    The largest number comes first.
    """
    names = [item.name for item in report.filters[: len(report.overlaps)]]
    rows = [
        (f"{first} and {second}", int(report.overlaps[i, j]))
        for (i, first), (j, second) in combinations(enumerate(names), 2)
        if report.overlaps[i, j]
    ]
    return sorted(rows, key=lambda row: -row[1])[:OVERLAPS]


def _limits(item: FilterReport) -> str:
    limits = {"below": item.lowest, "above": item.highest}
    return " or ".join(f"{side} {limit:g}" for side, limit in limits.items() if np.isfinite(limit))


def _chart(item: FilterReport) -> str:
    if not len(item.edges):
        return ""
    limits = [limit for limit in (item.lowest, item.highest) if np.isfinite(limit)]
    return histogram(item.name, item.edges.tolist(), item.histogram.tolist(), limits, item.unit)


def _texts(examples: Sequence[tuple[float, str, str]]) -> list[tuple[str, str]]:
    return [(visible(shortened(source, CUT)), visible(shortened(target, CUT))) for _, source, target in examples]
