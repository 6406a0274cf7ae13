"""The report as one HTML page that needs no other file: counts, length histograms, pieces, and what was dropped."""

from html import escape

from nmtkit.data.cleaning import Example
from nmtkit.data.report import LONGEST_BAR, CorpusReport, Report, SplitReport, in_order

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem }
th, td { padding: 0.2rem 0.8rem 0.2rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #ddd }
.number { text-align: right; font-variant-numeric: tabular-nums }
.text { white-space: pre-wrap; overflow-wrap: anywhere }
svg { display: block; width: 100%; height: 9rem; background: #f6f6f6 }
figure { margin: 0 0 1.5rem }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd } th, td { border-color: #444 } svg { background: #222 }
}
"""


def page(report: Report) -> str:
    languages = f"{report.source_lang} → {report.target_lang}"
    sections = [
        f"<h1>Dataset {escape(languages)}</h1>",
        _splits(report),
        _corpora(report),
        *(_histograms(name, split, report) for name, split in report.splits.items()),
        _pieces(report),
        _examples(report),
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Dataset {escape(languages)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body>\n'
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _table(head: list[str], rows: list[list[str | int | float]]) -> str:
    def cell(tag: str, value: str | int | float) -> str:
        if isinstance(value, str):
            return f"<{tag}>{escape(value)}</{tag}>"
        return f'<{tag} class="number">{value:,}</{tag}>'

    lines = ["<tr>" + "".join(cell("th", title) for title in head) + "</tr>"]
    lines += ["<tr>" + "".join(cell("td", value) for value in row) + "</tr>" for row in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _splits(report: Report) -> str:
    head = ["subset", "pairs", f"{report.source_lang} tokens", f"{report.target_lang} tokens"]
    rows: list[list[str | int | float]] = [
        [name, split.pairs, split.tokens["source"], split.tokens["target"]] for name, split in report.splits.items()
    ]
    return "<h2>Subsets</h2>\n" + _table(head, rows) + "<p>Tokens count the end of each sentence.</p>"


def _corpora(report: Report) -> str:
    if not report.corpora:
        return ""
    rows: list[list[str | int | float]] = []
    for corpus in report.corpora:
        rows.append([str(corpus.source), corpus.read, _dropped(corpus), corpus.written, round(corpus.weight, 3)])
    reasons: list[list[str | int | float]] = []
    findings = report.findings()
    reasons += [[reason, count, "dropped"] for reason, count in in_order(findings.dropped).items()]
    reasons += [[reason, count, "kept"] for reason, count in in_order(findings.counted).items()]
    return (
        "<h2>Training corpora</h2>\n"
        + _table(["corpus", "pairs read", "dropped", "kept", "weight"], rows)
        + (_table(["reason", "pairs", ""], reasons) if reasons else "<p>No pair was dropped.</p>")
    )


def _dropped(corpus: CorpusReport) -> int:
    return sum(corpus.findings.dropped.values())


def _histograms(name: str, split: SplitReport, report: Report) -> str:
    languages = {"source": report.source_lang, "target": report.target_lang}
    figures = []
    for side, counts in split.lengths.items():
        longest = max((length for length, count in enumerate(counts.tolist()) if count), default=1)
        tallest = max(1, int(counts.max()))
        bars = "".join(
            f'<rect x="{length}" y="{100 - 100 * count / tallest:.2f}" width="0.9" '
            f'height="{100 * count / tallest:.2f}" fill="#4878b0"><title>{length} tokens: {count:,}</title></rect>'
            for length, count in enumerate(counts.tolist())
            if count
        )
        end = f"{longest} or more" if longest == LONGEST_BAR else str(longest)
        figures.append(
            f"<figure><figcaption>{escape(name)}, {escape(languages[side])}: sentences by length, 1 to {end} tokens, "
            f'at most {tallest:,} of one length</figcaption><svg viewBox="0 0 {longest + 1} 100" '
            f'preserveAspectRatio="none">{bars}</svg></figure>'
        )
    return f"<h2>Lengths: {escape(name)}</h2>\n" + "\n".join(figures)


def _pieces(report: Report) -> str:
    parts = []
    for side, top in report.pieces.items():
        size = report.vocabulary[side]
        rows: list[list[str | int | float]] = [[piece, count] for piece, count in top]
        parts.append(
            f"<h2>Pieces: {side}</h2>\n<p>{report.unused[side]:,} of {size:,} entries are in no training sentence. "
            f"The most frequent:</p>\n" + _table(["piece", "count"], rows)
        )
    return "\n".join(parts)


def _examples(report: Report) -> str:
    parts = []
    findings = report.findings()
    for reason, examples in findings.examples.items():
        fate = "dropped" if reason in findings.dropped else "kept"
        parts.append(f"<h3>{escape(reason)} ({fate})</h3>\n<table>" + "".join(map(_example, examples)) + "</table>")
    return "<h2>Examples</h2>\n" + "\n".join(parts) if parts else ""


def _example(example: Example) -> str:
    texts = "".join(f'<td class="text">{escape(_visible(text))}</td>' for text in (example.source, example.target))
    return f"<tr><td>{escape(example.place)}</td>{texts}</tr>"


def _visible(text: str) -> str:
    """Control characters as their pictures (U+2400 …), which HTML can hold."""
    return "".join(chr(0x2400 + ord(c)) if c < " " else "\u2421" if "\x7f" <= c < "\xa0" else c for c in text)
