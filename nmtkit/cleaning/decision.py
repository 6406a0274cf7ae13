"""Decides which pairs `nmtkit clean` keeps, writes the outputs, and collects the report."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.blocks import Scored, with_rows
from nmtkit.cleaning.config import CleanConfig
from nmtkit.cleaning.filters.interface import Limits
from nmtkit.cleaning.filters.text_block import TextSide
from nmtkit.cleaning.probability import MODEL, PROBABILITY
from nmtkit.cleaning.scores import ScoreWriter, checksums
from nmtkit.cleaning.similarity import SimilarTexts
from nmtkit.data.corpora.corpus import Corpus, Pairs
from nmtkit.data.corpora.dropping import Mask, RowNumbers, find_duplicates, first_reasons, partition
from nmtkit.data.corpora.writer import CorpusWriter
from nmtkit.jobs import progress

log = logging.getLogger("nmtkit")

DUPLICATE = "duplicate"
# scores that choose the best of equal or similar pairs; only the first score that the run has is used
QUALITY = (PROBABILITY, MODEL, "alignment")
EXAMPLES = 6  # number of examples on each side of a limit
BINS = 48  # number of bars in a histogram


@dataclass
class FilterReport:
    """The results of one filter. `lowest` and `highest` are the limits for the scores of kept pairs."""

    name: str
    unit: str = ""
    lowest: float = -np.inf
    highest: float = np.inf
    matching: int = 0  # pairs outside the limits of this filter
    dropped: int = 0  # pairs outside the limits of this filter, and inside the limits of all earlier filters
    edges: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # edges of the bars of `histogram`
    histogram: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    dropped_examples: list[tuple[float, str, str]] = field(default_factory=list)  # distance to limit, source, target
    kept_examples: list[tuple[float, str, str]] = field(default_factory=list)


@dataclass
class CleanReport:
    read: int
    kept: int
    mended: dict[str, int]
    filters: list[FilterReport]
    overlaps: npt.NDArray[np.int64]  # [filters, filters], number of pairs that both filters would drop
    read_of: dict[str, tuple[int, int]]  # corpus -> pairs read, pairs kept


class Decision:
    """Decides about all pairs from their scores, writes the outputs, and collects the report."""

    def __init__(
        self, config: CleanConfig, filters: dict[str, Limits], corpora: Sequence[Corpus], scored: Scored, scratch: Path
    ) -> None:
        self._config, self._corpora, self._scored, self._scratch = config, corpora, scored, scratch
        self._filters = filters
        self.reasons = [*filters, *([DUPLICATE] if config.duplicates != "none" else [])]
        count = len(scored.keys)
        self._first = np.full(count, -1, np.int16)  # index of the reason of each pair, -1 for a kept pair
        self.reports = [
            FilterReport(name, each.unit, each.lowest, each.highest, edges=self._edges(index, each))
            for index, (name, each) in enumerate(filters.items())
        ]
        for report in self.reports:
            report.histogram = np.zeros(max(0, len(report.edges) - 1), np.int64)
        self._overlaps = np.zeros((len(filters), len(filters)), np.int64)
        # number of kept pairs without a model score: the run that wrote the file of --from-scores dropped these pairs
        self._unscored = 0
        for start in range(0, count, 1 << 16):
            self._apply(slice(start, start + (1 << 16)))
        if self._unscored:
            log.warning("%s pairs are kept now, but have no model score: the run that wrote %s dropped these pairs "
                        "before it computed model scores", f"{self._unscored:,}", config.from_scores)  # fmt: skip
        if config.duplicates != "none":
            self.reports.append(FilterReport(DUPLICATE, "equal normalized pairs"))
            self._drop_duplicates()

    def _edges(self, index: int, each: Limits) -> npt.NDArray[np.float64]:
        """Returns the edges of the bars of a histogram. The bars cover the limits and the middle 99.8 % of scores."""
        column = self._scored.scores[:: max(1, len(self._scored.scores) // 100_000), index]
        column = column[np.isfinite(column)]
        if not len(column):
            return np.zeros(0)
        ends = [*np.quantile(column, (0.001, 0.999)), *(x for x in (each.lowest, each.highest) if np.isfinite(x))]
        low, high = float(min(ends)), float(max(ends))
        return np.linspace(low, high if high > low else low + 1, BINS + 1)

    def _apply(self, rows: slice) -> None:
        scores = self._scored.scores[rows]
        masks = np.zeros(scores.shape, np.bool_)
        for index, (each, report) in enumerate(zip(self._filters.values(), self.reports, strict=True)):
            masks[:, index] = each.drops(scores[:, index])
            report.matching += int(masks[:, index].sum())
            if len(report.edges):
                finite = scores[np.isfinite(scores[:, index]), index]
                inside = np.clip(finite, report.edges[0], report.edges[-1])
                report.histogram += np.histogram(inside, report.edges)[0]
        self._overlaps += masks.T.astype(np.int64) @ masks.astype(np.int64)
        first = first_reasons(masks.T, len(masks))
        self._first[rows] = first
        limited = [each.lowest > 0 for each in self._filters.values()]
        self._unscored += int(((first < 0) & np.isnan(scores[:, limited]).any(1)).sum())
        for index, report in enumerate(self.reports):
            report.dropped += int((first == index).sum())

    def _drop_duplicates(self) -> None:
        """Drops kept pairs that equal another kept pair on the sides that `config.duplicates` names.

        The comparison ignores case, spaces and punctuation. If one side is compared, the best of several equal pairs
        stays. If both sides are compared, the first pair stays: equal pairs then differ only in case, spaces and
        punctuation, and models prefer some of these forms by chance. With --duplicate-similarity, also drops similar
        pairs.
        """
        kept = np.flatnonzero(self._first < 0)
        columns = np.array({"pair": (0, 1), "source": (0, 0)}.get(self._config.duplicates, (1, 1)))
        hashes = self._scratch / "hashes"
        with hashes.open("wb") as file:
            for start in range(0, len(kept), 1 << 18):
                part = kept[start : start + (1 << 18)]
                file.write(self._scored.keys[part][:, columns].tobytes())
        quality = None if self._config.duplicates == "pair" else self._quality(kept)
        for path in partition(hashes, self._scratch):
            rows = kept[find_duplicates(path, quality)]
            self._drop(rows)
        if self._config.duplicate_similarity is not None:
            self._drop_similar(self._config.duplicate_similarity)

    def _drop(self, duplicates: RowNumbers) -> None:
        self._first[duplicates] = len(self._filters)
        self.reports[-1].dropped += len(duplicates)
        self.reports[-1].matching += len(duplicates)

    def _drop_similar(self, similarity: float) -> None:
        """Drops pairs until no two kept pairs are similar. The best of several similar pairs stays.

        The kept pairs are compared from the best to the worst, by the score of `_quality`, or in their order in the
        corpora if the run has no such score. A pair is dropped if an earlier pair of this order stays and is similar.
        """
        texts = SimilarTexts(self._scratch / "texts", similarity)
        kept = np.flatnonzero(self._first < 0)
        names = {"pair": ("sources", "targets"), "source": ("sources",)}.get(self._config.duplicates, ("targets",))
        for rows, block in with_rows(self._scored.blocks):
            pairs = block.select((self._first[rows] < 0).tolist())
            sides = [TextSide(getattr(pairs, name)).normalized for name in names]
            texts.add(["\t".join(lines) for lines in zip(*sides, strict=True)])
        quality = self._quality(kept)
        order = np.arange(len(kept)) if quality is None else np.argsort(-quality, kind="stable")
        self._drop(kept[texts.find(order)])

    def _quality(self, rows: RowNumbers) -> npt.NDArray[np.float32] | None:
        """Returns a score for each pair in `rows`. The best of several equal or similar pairs has the highest score.

        The score is the first of `QUALITY` that the run has. Returns None if the run has none of these scores. The
        scores are rounded to hundredths, so that the first of several pairs with nearly equal scores stays.
        """
        index = next((self.reasons.index(name) for name in QUALITY if name in self._filters), None)
        return None if index is None else np.round(np.nan_to_num(self._scored.scores[rows, index], nan=-1), 2)

    def write(self, writer: CorpusWriter, dropped: CorpusWriter | None, scores: ScoreWriter | None) -> CleanReport:
        # name of a corpus -> number of pairs read, number of pairs kept; a corpus may be given twice
        counts = {corpus.name: np.zeros(2, np.int64) for corpus in self._corpora}
        blocks = self._scored.blocks
        for stored, (rows, block) in zip(blocks, with_rows(blocks), strict=True):
            if stored.path.parent == self._scratch:
                stored.path.unlink()
            first = self._first[rows]
            writer.write(block.select((first < 0).tolist()))
            if dropped is not None:
                dropped.write(self._with_reasons(block, first, dropped.has_columns))
            if scores is not None:
                sums = checksums(block.sources, block.targets)
                names = [None if code < 0 else self.reasons[code] for code in first.tolist()]
                scores.write(stored.corpus, block.first, sums, self._scored.scores[rows], names)
            self._examples(block, rows)
            progress.advance(len(block))
            counts[self._corpora[stored.corpus].name] += len(block), (first < 0).sum()
        read, kept = np.sum([*counts.values()], 0).tolist()
        assert read == len(self._first) == kept + sum(report.dropped for report in self.reports)
        if not kept:
            reasons = ", ".join(f"{report.name}: {report.dropped:,}" for report in self.reports if report.dropped)
            raise ValueError(f"none of {read:,} pairs is left; dropped: {reasons}; are languages or columns exchanged?")
        read_of = {name: (int(of_corpus[0]), int(of_corpus[1])) for name, of_corpus in counts.items()}
        return CleanReport(read, kept, self._scored.mended, self.reports, self._overlaps, read_of)

    def _with_reasons(self, block: Pairs, first: npt.NDArray[np.int16], has_columns: bool) -> Pairs:
        bad = block.select((first >= 0).tolist())
        if has_columns and any("reason" in others for others in bad.extras):
            raise ValueError(
                f"--dropped {self._config.dropped} adds a column 'reason'; rename the input column 'reason'"
            )
        reasons = [self.reasons[code] for code in first[first >= 0].tolist()]
        extras = [{**others, "reason": reason} for others, reason in zip(bad.extras, reasons, strict=True)]
        return Pairs(bad.sources, bad.targets, extras, bad.first)

    def _examples(self, block: Pairs, rows: slice) -> None:
        """Collects examples for each filter: the dropped and the kept pairs with scores nearest to the limits."""
        scores, first = self._scored.scores[rows], self._first[rows]
        for index, report in enumerate(self.reports):
            if report.name == DUPLICATE:
                near = np.flatnonzero(first == index)[: EXAMPLES - len(report.dropped_examples)]
                report.dropped_examples += [(0.0, block.sources[row], block.targets[row]) for row in near.tolist()]
                continue
            column = scores[:, index]
            distance = np.minimum(np.abs(column - report.lowest), np.abs(column - report.highest))
            reached: Mask = (first == index) | (first < 0)
            for outside, examples in ((True, report.dropped_examples), (False, report.kept_examples)):
                candidates = np.flatnonzero(reached & ((first == index) == outside) & np.isfinite(distance))
                near = candidates[np.argsort(distance[candidates], kind="stable")[:EXAMPLES]]
                if not outside and report.matching and len(np.unique(column)) < 3:
                    near = near[:0]  # with at most two different scores, no pair is near the limit
                examples += [(float(distance[row]), block.sources[row], block.targets[row]) for row in near.tolist()]
                examples.sort(key=lambda example: example[0])
                del examples[EXAMPLES:]
