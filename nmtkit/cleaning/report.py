"""The page of `clean --report`: counts, overlap of the filters, histograms of the scores, examples at the limits."""

from collections.abc import Iterator

import numpy as np

from nmtkit.cleaning.decision import CleanReport, FilterReport
from nmtkit.data.corpora.dropping import shortened
from nmtkit.pages.charts import histogram
from nmtkit.pages.document import Html, render, visible

CUT = 300  # maximum number of characters of an example


def page(report: CleanReport, source_lang: str, target_lang: str) -> str:
    """Returns the page as HTML."""
    share = f"{report.kept / max(1, report.read):.1%}"
    names = [item.name for item in report.filters[: len(report.overlaps)]]
    return render(
        "cleaning.html",
        title=f"Cleaning {source_lang} → {target_lang}",
        languages=[source_lang, target_lang],
        summary=f"{report.kept:,} of {report.read:,} pairs are kept ({share}).",
        corpora=[(name, read, read - kept, kept) for name, (read, kept) in report.read_of.items()],
        filters=[(item.name, item.matching, item.dropped, _limits(item)) for item in report.filters],
        mended=[(name, count) for name, count in report.mended.items() if count],
        names=names,
        overlaps=[[name, *row.tolist()] for name, row in zip(names, report.overlaps, strict=True)],
        charts=[Html(_chart(item)) for item in report.filters],
        examples=[example for item in report.filters for example in _examples(item)],
        body=[],
    )


def _limits(item: FilterReport) -> str:
    parts = [f"below {item.lowest:g}" if np.isfinite(item.lowest) else "",
             f"above {item.highest:g}" if np.isfinite(item.highest) else ""]  # fmt: skip
    return " or ".join(filter(None, parts))


def _chart(item: FilterReport) -> str:
    if not len(item.edges):
        return ""
    limits = [limit for limit in (item.lowest, item.highest) if np.isfinite(limit)]
    return histogram(item.name, item.edges.tolist(), item.histogram.tolist(), limits, item.unit)


def _examples(item: FilterReport) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yields the title and the texts of the examples on each side of the limit."""
    for title, examples in (("dropped", item.dropped_examples), ("kept, next to the limit", item.kept_examples)):
        if examples:
            yield (
                f"{item.name}: {title}",
                [(visible(shortened(source, CUT)), visible(shortened(target, CUT))) for _, source, target in examples],
            )
