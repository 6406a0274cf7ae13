"""The page of `clean --report`: counts, overlap of the filters, histograms of the scores, examples at the limits."""

from html import escape

import numpy as np

from nmtkit.corpora.cleaning import CleanReport, FilterReport
from nmtkit.pages.charts import histogram
from nmtkit.pages.document import document, table

CUT = 300  # characters of an example


def page(report: CleanReport, source_lang: str, target_lang: str) -> str:
    """Returns the page as HTML."""
    share = f"{report.kept / max(1, report.read):.1%}"
    counts = [(item.name, item.matching, item.dropped, _limits(item)) for item in report.filters]
    corpora = [(name, read, read - kept, kept) for name, (read, kept) in report.read_of.items()]
    names = [item.name for item in report.filters[: len(report.overlaps)]]
    overlap: list[list[str | int]] = [[name, *row.tolist()] for name, row in zip(names, report.overlaps, strict=True)]
    mended = [(name, count) for name, count in report.mended.items() if count]
    return document(
        f"Cleaning {source_lang} → {target_lang}",
        "<h2>Corpora</h2>\n" + table(["corpus", "pairs read", "dropped", "kept"], corpora),
        "<h2>Filters</h2>\n" + table(["filter", "pairs beyond the limit", "dropped first", "limit"], counts),
        "<h2>Mended lines</h2>\n" + table(["", "lines"], mended) if mended else "",
        "<h2>Overlap</h2>\n<p>Pairs that both filters would drop.</p>\n" + table(["", *names], overlap, wide=True),
        "<h2>Scores</h2>\n" + f'<div class="charts">{"".join(_chart(item) for item in report.filters)}</div>',
        "<h2>Examples</h2>\n" + "".join(_examples(item, source_lang, target_lang) for item in report.filters),
        lead=f"{report.kept:,} of {report.read:,} pairs are kept ({share}).",
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


def _examples(item: FilterReport, source_lang: str, target_lang: str) -> str:
    parts = []
    for title, examples in (("dropped", item.dropped_examples), ("kept, next to the limit", item.kept_examples)):
        if examples:
            rows = [(_visible(source), _visible(target)) for _, source, target in examples]
            parts.append(f"<h3>{escape(item.name)}: {title}</h3>" + table([source_lang, target_lang], rows))
    return "".join(parts)


def _visible(text: str) -> str:
    """Returns the beginning of a text. Control characters, which HTML does not allow, become visible symbols."""
    text = text if len(text) <= CUT else text[:CUT] + "…"
    return "".join(chr(0x2400 + ord(c)) if c < " " else "\u2421" if "\x7f" <= c < "\xa0" else c for c in text)
