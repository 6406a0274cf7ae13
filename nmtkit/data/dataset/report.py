"""The report of `preprocess`: counts for the manifest and the terminal, and a self-contained HTML page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.data.corpora.dropping import ReasonCounts
from nmtkit.data.dataset.diagnostics import TextStatistics, pieces_per_word
from nmtkit.data.dataset.drop_reasons import REASONS, in_order
from nmtkit.data.dataset.parallel_corpora import ParallelCorpus
from nmtkit.pages.charts import bar_chart
from nmtkit.pages.document import Html, render, visible

LONGEST_BAR = 256  # maximum length in tokens in a histogram; the last bar also counts longer sentences
TOP_PIECES = 40


@dataclass
class CorpusReport:
    """Counts and statistics of one training corpus."""

    source: Path
    target: Path
    read: int = 0  # number of pairs read
    written: int = 0  # number of pairs written, before up-sampling
    weight: float = 1.0
    cleaning: ReasonCounts = field(default_factory=ReasonCounts)
    text: list[TextStatistics] = field(default_factory=list)  # one entry per block

    @staticmethod
    def of(corpus: ParallelCorpus) -> "CorpusReport":
        source, *others = corpus.names
        target = Path(", ".join(map(str, dict.fromkeys(others)))) if others else source
        return CorpusReport(source, target, weight=corpus.weight)


@dataclass
class SplitReport:
    pairs: int
    tokens: dict[str, int]  # number of tokens by side, eos included
    histograms: dict[str, npt.NDArray[np.int64]]  # by side: number of sentences of each length up to LONGEST_BAR

    @staticmethod
    def of(lengths: dict[str, npt.NDArray[Any]]) -> "SplitReport":
        return SplitReport(
            len(lengths["source"]),
            {side: int(values.sum(dtype=np.int64)) for side, values in lengths.items()},
            {side: _histogram(values) for side, values in lengths.items()},
        )


def _histogram(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    total = np.zeros(LONGEST_BAR + 1, np.int64)
    for start in range(0, len(lengths), 1 << 20):
        total += np.bincount(np.minimum(lengths[start : start + (1 << 20)], LONGEST_BAR), minlength=LONGEST_BAR + 1)
    return total


@dataclass
class PieceReport:
    """Counts of the vocabulary entries of one side in the training set."""

    top: list[tuple[str, int]]  # the most frequent pieces and their counts
    unused: int
    size: int

    @staticmethod
    def of(counts: npt.NDArray[np.int64], pieces_of: Callable[[Sequence[int]], list[str]]) -> "PieceReport":
        top = np.argsort(-counts, kind="stable")[:TOP_PIECES].tolist()
        return PieceReport(
            list(zip(pieces_of(top), counts[top].tolist(), strict=True)),
            int(np.count_nonzero(counts == 0)),
            len(counts),
        )


@dataclass
class Report:
    source_lang: str
    target_lang: str
    vocabulary: dict[str, int]  # number of entries, by side
    splits: dict[str, SplitReport] = field(default_factory=dict)
    corpora: list[CorpusReport] = field(default_factory=list)
    pieces: dict[str, PieceReport] = field(default_factory=dict)  # by side; empty unless a page is requested

    def cleaning(self) -> ReasonCounts:
        """Returns the sum of the statistics of all corpora."""
        total = ReasonCounts()
        for corpus in self.corpora:
            total.add(corpus.cleaning)
        return total

    def reason_rows(self) -> list[tuple[str, int, str]]:
        """Returns one row per reason: the reason, the number of pairs, and "dropped" or "kept"."""
        total = self.cleaning()
        return [
            (reason, count, fate)
            for counts, fate in ((total.dropped, "dropped"), (total.kept, "kept"))
            for reason, count in in_order(counts).items()
        ]

    def counts(self) -> dict[str, Any]:
        """Returns the counts for the manifest, as values of built-in types."""
        return {
            "pieces_per_word": pieces_per_word([block for corpus in self.corpora for block in corpus.text]),
            "corpora": [
                {
                    "source": str(corpus.source),
                    "target": str(corpus.target),
                    "read": corpus.read,
                    "written": corpus.written,
                    "weight": corpus.weight,
                    "dropped": in_order(corpus.cleaning.dropped),
                    "kept": in_order(corpus.cleaning.kept),
                }
                for corpus in self.corpora
            ],
        }


# --- the page -------------------------------------------------------------------------------------------------------


def page(report: Report) -> str:
    """Returns the page as HTML."""
    statistics = report.cleaning()
    return render(
        "dataset.html",
        title=f"Dataset {report.source_lang} → {report.target_lang}",
        languages=[report.source_lang, report.target_lang],
        subsets=[
            (name, split.pairs, split.tokens["source"], split.tokens["target"]) for name, split in report.splits.items()
        ],
        corpora=[
            (str(each.source), each.read, sum(each.cleaning.dropped.values()), each.written, round(each.weight, 3))
            for each in report.corpora
        ],
        reasons=report.reason_rows(),
        lengths={name: _charts(split, report) for name, split in report.splits.items()},
        pieces=report.pieces,
        examples=[
            (
                f"{reason} ({'dropped' if reason in statistics.dropped else 'kept'})",
                [(item.position, visible(item.source), visible(item.target)) for item in examples],
            )
            for reason in REASONS
            if (examples := statistics.examples.get(reason))
        ],
        body=[],
    )


def _charts(split: SplitReport, report: Report) -> list[Html]:
    """Returns a chart of the lengths of each side."""
    languages = {"source": report.source_lang, "target": report.target_lang}
    charts = []
    for side, counts in split.histograms.items():
        more = f"; the last bar means {LONGEST_BAR} or more tokens" if counts[LONGEST_BAR] else ""
        charts.append(Html(bar_chart(languages[side], f"sentences by tokens{more}", counts.tolist(), "tokens")))
    return charts
