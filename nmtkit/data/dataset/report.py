"""The report of `preprocess`: counts for the manifest and the terminal, warnings, and a self-contained HTML page.

Warnings are about likely errors in the training text: unknown text, a tokenizer for a different language, copied lines,
shifted lines, exchanged languages.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.data.corpora.dropping import ReasonCounts, shortened
from nmtkit.data.dataset.dataset_files import SIDES
from nmtkit.data.dataset.drop_reasons import EQUAL, REASONS, in_order
from nmtkit.data.dataset.parallel_corpora import ParallelCorpus
from nmtkit.pages.charts import bar_chart
from nmtkit.pages.document import Html, render, visible
from nmtkit.text.encoded import Encoded

LONGEST_BAR = 256  # maximum length in tokens in a histogram; the last bar also counts longer sentences
TOP_PIECES = 40
SAMPLED = 5  # maximum number of pairs of each corpus on the page
CUT = 300  # maximum number of characters of a sampled sentence

# A value beyond one of these limits causes a warning.
UNKNOWN_SHARE = 0.02  # largest share of unknown pieces without a warning
UNKNOWN_WORD_SHARE = 0.2  # the same limit for a word model; every word model has unknown words
PIECES_FACTOR = 1.5  # largest factor between the pieces per word here and in the dataset of --tokenizer-from
PIECES_PER_WORD = 4.0  # largest number of pieces per word if --tokenizer-from is not a dataset
EQUAL_SHARE = 0.05  # largest share of pairs with equal sides
CORRELATION = 0.3  # smallest correlation of the lengths of the two sides
AGREEMENT = -0.3  # smallest `agreement` of a block with the reference; -1 means that the languages are exchanged

# These numbers decide whether and how a value is computed or compared.
WORDS_PER_LINE = 5  # with fewer words per line, the language perhaps has no spaces between words
MIN_PAIRS = 200  # minimum number of pairs in a block for a correlation
MIN_DEVIATION = 1.0  # minimum standard deviation of the lengths (in pieces) for a correlation
# minimum divergence of the two sides in nats per byte pair; below this, both sides perhaps have the same language
MIN_DIVERGENCE = 0.1
MIN_BYTES = 2000  # a shorter side is too short to recognise its language
PROFILE = 1024  # number of classes of byte pairs; the frequencies of the classes identify a language
SLICES, SLICE_BYTES = 16, 4096  # number and size in bytes of the slices that make up the profile of a side

SampledPair = tuple[int, str, str]  # number of the line, source, target
Profile = npt.NDArray[np.float64]  # counts of byte pairs in each class, [2 sides, PROFILE]


# --- statistics of text ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TextStatistics:
    """Counts of one block of text. Arrays have one entry per side."""

    first_line: int
    lines: int
    words: npt.NDArray[np.int64]
    pieces: npt.NDArray[np.int64]
    unknown: npt.NDArray[np.int64]  # number of pieces that are unk or bytes of characters outside the vocabulary
    pairs: int  # number of kept pairs
    sums: npt.NDArray[np.float64]  # [2 sides], sums of the lengths of the kept pairs
    products: npt.NDArray[np.float64]  # [2 sides, 2 sides], sums of products of the lengths of two sides
    profile: Profile

    @staticmethod
    def of(
        first_line: int, texts: Sequence[bytes], sides: Sequence[Encoded], unknown: Sequence[int],
        keep: npt.NDArray[np.bool_],
    ) -> "TextStatistics":  # fmt: skip
        lengths = np.stack([side.lengths[keep] for side in sides]).astype(np.float64)
        return TextStatistics(
            first_line,
            len(keep),
            np.array([text.count(b" ") + len(keep) for text in texts], np.int64),
            np.array([len(side.ids) - len(keep) for side in sides], np.int64),
            np.array(unknown, np.int64),
            lengths.shape[1],
            lengths.sum(1),
            lengths @ lengths.T,
            profile_of(texts),
        )

    def correlation(self) -> float | None:
        """Returns the correlation of source and target lengths, or None if lengths are too few or too similar."""
        if self.pairs < MIN_PAIRS:
            return None
        covariance = self.products / self.pairs - np.outer(self.sums, self.sums) / self.pairs**2
        deviations = np.sqrt(np.maximum(np.diag(covariance), 0))
        return float(covariance[0, 1] / deviations.prod()) if deviations.min() >= MIN_DEVIATION else None


def profile_of(texts: Sequence[bytes]) -> Profile:
    """Counts the byte pairs of each side by class. Reads only slices that are evenly distributed over a large text."""
    rows = []
    for text in texts:
        data = np.frombuffer(text, np.uint8)
        starts = np.linspace(0, max(0, len(data) - SLICE_BYTES), SLICES).astype(np.int64)
        if len(data) > SLICES * SLICE_BYTES:
            data = np.concatenate([data[start : start + SLICE_BYTES] for start in starts.tolist()])
        pairs = (data[:-1].astype(np.int64) * 31 + data[1:]) * 2654435761 >> 16 & PROFILE - 1
        rows.append(np.bincount(pairs, minlength=PROFILE))
    return np.stack(rows).astype(np.float64)


def sampled(lines: Iterable[int]) -> list[int]:
    """Returns at most `SAMPLED` of the line numbers `lines`, in ascending order. The choice is spread over all lines.

    The lines with the smallest hashes are chosen (multiplicative hashing, Knuth 1973, section 6.4). So sampling
    the samples of the blocks gives the same lines as sampling all lines at once.
    """
    return sorted(heapq.nsmallest(SAMPLED, lines, key=lambda line: line * 2654435761 % 2**32))


# --- counts -----------------------------------------------------------------------------------------------------------


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
    samples: list[SampledPair] = field(default_factory=list)  # kept pairs, in order

    def add_samples(self, pairs: Sequence[SampledPair]) -> None:
        by_line = {pair[0]: pair for pair in (*self.samples, *pairs)}
        self.samples = [by_line[line] for line in sampled(by_line)]

    @staticmethod
    def of(corpus: ParallelCorpus) -> "CorpusReport":
        source, *others = corpus.names
        target = Path(", ".join(map(str, dict.fromkeys(others)))) if others else source
        return CorpusReport(source, target, weight=corpus.weight)


@dataclass
class SplitReport:
    pairs: int
    tokens: dict[str, int]  # number of tokens by side, eos included
    histograms: dict[str, npt.NDArray[np.int64]]  # by side: entry n is the number of sentences of n tokens

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
class DatasetReport:
    source_lang: str
    target_lang: str
    vocabulary: dict[str, int]  # number of entries, by side
    splits: dict[str, SplitReport] = field(default_factory=dict)
    corpora: list[CorpusReport] = field(default_factory=list)
    pieces: dict[str, PieceReport] = field(default_factory=dict)  # by side; empty unless a page is requested

    def cleaning(self) -> ReasonCounts:
        """Returns the counts by reason, summed over all corpora."""
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


# --- warnings ---------------------------------------------------------------------------------------------------------
# The thresholds are far from the values of correct data. In Multi30k English-German, no piece is unknown and no pair
# has equal sides. The correlation of the lengths of the two sides is 0.86. The correlation falls below 0 if the lines
# of one side are shifted by one line. The `agreement` of the training blocks with the valid set is 0.9 to 1.0. The
# `agreement` becomes -0.9 to -1.0 if the sides are exchanged.


def agreement(profile: Profile, reference: Profile) -> float | None:
    """Compares the languages of the two sides with a reference text. The result is 1 for the same languages.

    The result is -1 if the two languages are exchanged. Let r(x) = log(p(x) / q(x)), where p and q are the frequencies
    of byte pairs on the two sides of the reference. The result is the mean of r on side 0 minus the mean of r on side
    1, divided by the same difference on the reference. Returns None if there is too little text or if the two sides of
    the reference are too similar.
    """
    if min(profile.sum(1).min(), reference.sum(1).min()) < MIN_BYTES:
        return None
    shares, other = ((counts + 0.5) / (counts + 0.5).sum(1, keepdims=True) for counts in (profile, reference))
    ratio = np.log(other[0] / other[1])
    divergence = float((other[0] - other[1]) @ ratio)
    return float((shares[0] - shares[1]) @ ratio) / divergence if divergence >= MIN_DIVERGENCE else None


def pieces_per_word(blocks: Sequence[TextStatistics]) -> dict[str, float]:
    """Returns the mean number of pieces per space-separated word of each side, or {} without blocks."""
    if not blocks:
        return {}
    words = np.sum([block.words for block in blocks], axis=0)
    pieces = np.sum([block.pieces for block in blocks], axis=0)
    return dict(zip(SIDES, np.round(pieces / np.maximum(words, 1), 3).tolist(), strict=True))


def find_warnings(
    corpora: Sequence[CorpusReport],
    model_type: str,
    expected: Mapping[str, float],
    trained_here: bool,
    held_out: Profile | None = None,
    languages: bool = True,
) -> list[str]:
    """Returns a warning, with the measured value, for each likely error in the training text of `corpora`.

    `expected` has the mean number of pieces per word for each side of the dataset of --tokenizer-from, or is empty if
    --tokenizer-from is not a dataset. `trained_here` is true if the tokenizer was trained on this text. `held_out` is
    the profile of the valid and test sets. If `languages` is false, no warning compares the languages of the sides with
    `held_out` or with all training text.
    """
    blocks = [block for corpus in corpora for block in corpus.text]
    if not blocks:
        return []
    result = _unknown(blocks, UNKNOWN_WORD_SHARE if model_type == "word" else UNKNOWN_SHARE)
    if not trained_here and model_type in ("bpe", "unigram"):
        result += _other_language(blocks, expected)
    for corpus in corpora:
        share = corpus.cleaning.pairs(EQUAL) / max(1, sum(block.lines for block in corpus.text))
        if share > EQUAL_SHARE:
            result.append(
                f"{share:.1%} of the pairs of {corpus.source} have equal sides: is one language missing? "
                "--drop-equal drops them"
            )
        result += _uncorrelated(corpus)
    reference, title = np.sum([block.profile for block in blocks], axis=0), "all training text"
    if held_out is not None and held_out.sum(1).min() >= MIN_BYTES:
        reference, title = held_out, "the valid and test sets"
    of_languages = [warning for corpus in corpora if languages for warning in _exchanged(corpus, reference, title)]
    return result + of_languages


def _unknown(blocks: Sequence[TextStatistics], limit: float) -> list[str]:
    unknown, pieces = (np.sum([getattr(block, name) for block in blocks], axis=0) for name in ("unknown", "pieces"))
    shares = dict(zip(SIDES, (unknown / np.maximum(pieces, 1)).tolist(), strict=True))
    return [
        f"{share:.1%} of the {side} pieces are unknown or single bytes: was the tokenizer trained on other text, or "
        "does this text have another encoding?"
        for side, share in shares.items()
        if share > limit
    ]


def _other_language(blocks: Sequence[TextStatistics], expected: Mapping[str, float]) -> list[str]:
    result = []
    lines, words = sum(block.lines for block in blocks), np.sum([block.words for block in blocks], axis=0)
    for index, (side, per_word) in enumerate(pieces_per_word(blocks).items()):
        usual = expected.get(side)
        if usual and not 1 / PIECES_FACTOR < per_word / usual < PIECES_FACTOR:
            result.append(
                f"a {side} word has {per_word:.2f} pieces on average, and {usual:.2f} in the dataset of the tokenizer: "
                "are the languages wrong or exchanged?"
            )
        elif not usual and per_word > PIECES_PER_WORD and words[index] >= WORDS_PER_LINE * lines:
            result.append(f"a {side} word has {per_word:.2f} pieces on average: is the tokenizer for another language?")
    return result


def _uncorrelated(corpus: CorpusReport) -> list[str]:
    """Returns a warning if the lengths of the sides are uncorrelated in all blocks or in the last blocks."""
    figures = [(block, figure) for block in corpus.text if (figure := block.correlation()) is not None]
    sick = list(takewhile(lambda measured: measured[1] < CORRELATION, reversed(figures)))[::-1]
    if not sick:
        return []
    mean = float(np.mean([figure for _, figure in sick]))
    start = "" if len(sick) == len(figures) else f" from about line {sick[0][0].first_line:,} on"
    return [
        f"the lengths of the two sides of {corpus.source} have a correlation of {mean:.2f}{start}: are the lines of "
        "one side shifted or shuffled?"
    ]


def _exchanged(corpus: CorpusReport, reference: Profile, title: str) -> list[str]:
    """Returns a warning if some blocks have exchanged languages, compared with the text of the profile `reference`."""
    figures = [(block, figure) for block in corpus.text if (figure := agreement(block.profile, reference)) is not None]
    sick = [(block, figure) for block, figure in figures if figure < AGREEMENT]
    if not sick:
        return []
    mean = float(np.mean([figure for _, figure in sick]))
    first, lines = sick[0][0].first_line, sum(block.lines for block, _ in sick)
    where = "" if len(sick) == len(figures) else f" in about {lines:,} lines, the first near line {first:,}"
    return [
        f"the languages of the two sides of {corpus.source} are exchanged{where}: their agreement with {title} is "
        f"{mean:.2f} (1: equal, -1: exchanged); are files or columns exchanged?"
    ]


# --- the page -------------------------------------------------------------------------------------------------------


def page(report: DatasetReport) -> str:
    """Returns the HTML page of a report of `preprocess`."""
    statistics = report.cleaning()
    weighted = any(each.weight != 1 for each in report.corpora)
    return render(
        "dataset.html",
        title=f"Dataset {report.source_lang} → {report.target_lang}",
        languages=[report.source_lang, report.target_lang],
        lead=_lead(report),
        samples=[
            (
                str(corpus.source),
                [(line, *(visible(shortened(text, CUT)) for text in texts)) for line, *texts in corpus.samples],
            )
            for corpus in report.corpora
        ],
        subsets=[
            (name, split.pairs, split.tokens["source"], split.tokens["target"]) for name, split in report.splits.items()
        ],
        corpora=[
            (str(each.source), each.read, sum(each.cleaning.dropped.values()), each.written)
            + (round(each.weight, 3),) * weighted
            for each in report.corpora
        ],
        weighted=weighted,
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


def _lead(report: DatasetReport) -> str:
    read, kept = sum(each.read for each in report.corpora), sum(each.written for each in report.corpora)
    if not report.corpora:
        return "No training pairs."
    share = f" ({_share(read - kept, read)})" if read else ""
    return f"{kept:,} of {read:,} training pairs are kept, {read - kept:,} are dropped{share}."


def _share(part: int, total: int) -> str:
    """Returns `part` of `total` as a percentage, but "less than 0.1%" if a part above 0 would become "0.0%"."""
    return f"{part / total:.1%}" if part * 2000 >= total or not part else "less than 0.1%"


def _charts(split: SplitReport, report: DatasetReport) -> list[Html]:
    """Returns a chart of the lengths of each side."""
    charts = []
    for language, counts in zip((report.source_lang, report.target_lang), split.histograms.values(), strict=True):
        more = f"; the last bar means {LONGEST_BAR} or more tokens" if counts[LONGEST_BAR] else ""
        charts.append(Html(bar_chart(language, f"sentences by tokens{more}", counts.tolist(), "tokens")))
    return charts
