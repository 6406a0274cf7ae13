"""`nmtkit clean`: mends and scores the pairs of corpora, and drops bad pairs. Each dropped pair gets a reason.

Cleaning makes three passes over the pairs:

1. The filters learn their statistics from a sample of the pairs.
2. Worker processes mend and score all pairs, and write the mended text and the scores to scratch files.
3. `Decision` drops pairs. The first filter that drops a pair becomes the reason of the pair. Then `Decision` drops
   near-duplicates of kept pairs, and writes the outputs.
"""

import logging
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from nmtkit.corpora import duplicates
from nmtkit.corpora.clean_config import CleanConfig
from nmtkit.corpora.corpus import Corpus, Pairs, locate
from nmtkit.corpora.filters import FILTERS, Filter, FilterContext, Limits
from nmtkit.corpora.late_scores import MODEL, PROBABILITY, LateScorer, PairScorer, late_columns
from nmtkit.corpora.mending import Mender
from nmtkit.corpora.pairs import pairs
from nmtkit.corpora.scores import ScoreReader, ScoreWriter
from nmtkit.corpora.texts import Keys, Mask, Scores, TextBlock
from nmtkit.corpora.writer import CorpusWriter
from nmtkit.processes.workers import Task, Workers

log = logging.getLogger("nmtkit")

DUPLICATE = "duplicate"
QUALITY = (PROBABILITY, MODEL, "alignment")  # the first available score decides which duplicate stays
EXAMPLES = 6  # number of examples on each side of a limit
BINS = 48  # number of bars in a histogram
BLOCK = 4096

Progress = Callable[[int], None]


@dataclass
class FilterReport:
    """The results of one filter. `matching` also counts pairs that an earlier filter drops."""

    name: str
    unit: str = ""
    lowest: float = -np.inf
    highest: float = np.inf
    matching: int = 0
    dropped: int = 0  # pairs that this filter drops and no earlier filter drops
    edges: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
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


class Worker:
    """Mends and scores blocks of pairs in files. Each worker process has one object of this class."""

    def __init__(self, filters: Sequence[Filter], mends: bool) -> None:
        self._filters = filters
        self._mender = Mender() if mends else None

    def score(self, path: Path) -> tuple[npt.NDArray[np.float32], Keys]:
        """Mends the block in a file. Returns the scores [pairs, filters] and the keys of the two sides [pairs, 2]."""
        with path.open("rb") as file:
            block: Pairs = pickle.load(file)
        if self._mender is not None:
            block = Pairs(self._mender(block.sources), self._mender(block.targets), block.extras, block.first)
        texts = TextBlock(block.sources, block.targets)
        matrix = score_block(self._filters, texts)
        with path.open("wb") as file:
            pickle.dump(block, file, pickle.HIGHEST_PROTOCOL)
        return matrix, np.column_stack([side.keys for side in texts.sides])

    def mended(self) -> dict[str, int]:
        return {} if self._mender is None else self._mender.counts


def checked_scores(each: Filter, texts: TextBlock) -> Scores:
    """Returns the scores of a filter. Raises ValueError if the filter does not give a number for each pair."""
    scores = np.asarray(each.score(texts))
    if scores.shape != (len(texts),) or np.isnan(scores).any():
        raise ValueError(f"{type(each).__name__}.score must return a number for each of the {len(texts)} pairs")
    return scores


def score_block(filters: Sequence[Filter], texts: TextBlock) -> npt.NDArray[np.float32]:
    """Returns the scores of all filters: [pairs, filters]."""
    scores = [checked_scores(each, texts) for each in filters]
    return np.column_stack(scores).astype(np.float32) if scores else np.empty((len(texts), 0), np.float32)


def clean(
    config: CleanConfig,
    names: Sequence[str],
    configs: dict[str, Any],
    on_progress: Progress = lambda pairs: None,
    scorer: PairScorer | None = None,
) -> CleanReport:
    """Writes the kept pairs of the corpora `names` to `config.output`, and the other files that `config` names.

    `configs` has the config of each filter, in the order in which the filters are applied. `scorer` uses translation
    models to score the pairs that all filters keep. Raises ValueError or OSError for errors in the settings or the
    text, and then writes no file.
    """
    columns = None if not config.columns else (config.columns[0], config.columns[1])
    languages = config.source_lang, config.target_lang
    corpora = [locate(name, *languages, columns) for name in names]
    exclude = tuple(locate(name, *languages) for name in config.exclude)
    context = FilterContext(*languages, exclude, config.lid_model)
    filters = {name: FILTERS[name].factory(each, context) for name, each in configs.items()}
    with ExitStack() as stack:
        writer = stack.enter_context(CorpusWriter(config.output, languages))
        dropped = stack.enter_context(CorpusWriter(config.dropped, languages)) if config.dropped else None
        scores = stack.enter_context(ScoreWriter(config.scores)) if config.scores else None
        scratch = Path(tempfile.mkdtemp(prefix=".clean.", dir=writer.paths[0].parent))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        late = late_columns(scorer, config.from_scores is not None, config.min_model, config.probability_limit())
        limits: dict[str, Limits] = {**filters, **late.limits}
        scored = score_corpora(config, corpora, filters, list(limits), scratch, on_progress)
        if late.limits and config.from_scores is None:
            each = list(filters.values())
            late_scorer = LateScorer(each, partial(score_block, each), late, config.seed)
            paths = [path for paths in scored.blocks for path in paths]
            scored.scores = late_scorer.add(paths, scored.scores, scratch / "late", on_progress)
        return Decision(config, limits, corpora, scored, scratch).write(writer, dropped, scores)


def sample_of(corpora: Sequence[Corpus], limit: int, seed: int) -> Pairs:
    """Returns a uniform sample of at most `limit` pairs, in the order of the text. Equal seeds give equal samples."""
    sources: list[str] = []
    targets: list[str] = []
    numbers = np.empty(0)
    generator = np.random.default_rng(seed)
    threshold = 1.0
    for corpus in corpora:
        for part in pairs(corpus):
            drawn = generator.random(len(part))
            rows = np.flatnonzero(drawn <= threshold).tolist()
            sources += [part.sources[row] for row in rows]
            targets += [part.targets[row] for row in rows]
            numbers = np.append(numbers, drawn[rows])
            if len(numbers) > limit:
                keep = np.sort(np.argpartition(numbers, limit - 1)[:limit])
                numbers, threshold = numbers[keep], float(numbers[keep].max())
                sources, targets = ([side[row] for row in keep.tolist()] for side in (sources, targets))
    return Pairs(sources, targets, [{}] * len(sources))


def fit(filters: dict[str, Filter], sample: Pairs, mends: bool) -> None:
    """Fits each filter on the pairs of the sample that all earlier filters keep. If `mends`, mends the pairs first."""
    if mends:
        mender = Mender()
        sample = Pairs(mender(sample.sources), mender(sample.targets), sample.extras)
    texts = TextBlock(sample.sources, sample.targets)
    for each in filters.values():
        each.fit(texts)
        keep = ~each.drops(checked_scores(each, texts))
        if not keep.all():
            texts = texts.select(keep)


@dataclass
class Scored:
    """The mended text, the scores and the keys of all pairs, in the order of the text."""

    blocks: list[list[Path]]  # files with the mended blocks of each corpus
    scores: npt.NDArray[np.float32]  # [pairs, filters]
    keys: Keys  # [pairs, 2]
    mended: dict[str, int]  # kind of change -> number of mended lines


def score_corpora(
    config: CleanConfig,
    corpora: Sequence[Corpus],
    filters: dict[str, Filter],
    columns: Sequence[str],
    scratch: Path,
    on_progress: Progress,
) -> Scored:
    """Mends and scores all pairs. If `config.from_scores` is given, reads the scores `columns` from this file."""
    earlier = None
    active = list(filters.values())
    if config.from_scores is not None:
        earlier, active = ScoreReader(config.from_scores, columns), []
    else:
        fit(filters, sample_of(corpora, config.sample, config.seed), config.mend)
    blocks: list[list[Path]] = [[] for _ in corpora]
    files = {name: (scratch / name).open("wb+") for name in ("scores", "keys")}
    read = 0

    def tasks() -> Iterator[Task]:
        for index, corpus in enumerate(corpora):
            for number, part in enumerate(pairs(corpus, BLOCK)):
                path = scratch / f"{index}.{number}"
                with path.open("wb") as file:
                    pickle.dump(part, file, pickle.HIGHEST_PROTOCOL)
                blocks[index].append(path)
                yield Worker.score, path

    with Workers(config.worker_count(), partial(Worker, active, config.mend)) as workers:
        for _, (scores, keys) in workers.imap(tasks()):
            if earlier is not None:
                scores = earlier.next(len(keys))
            files["scores"].write(np.ascontiguousarray(scores).tobytes())
            files["keys"].write(np.ascontiguousarray(keys).tobytes())
            read += len(keys)
            on_progress(read)
        mended: dict[str, int] = {}
        for counts in workers.broadcast((Worker.mended,)):
            for name, count in counts.items():
                mended[name] = mended.get(name, 0) + count
    if earlier is not None:
        earlier.finish()
    width = len(filters) if earlier is None else len(columns)
    return Scored(blocks, _mapped(files["scores"], np.float32, width), _mapped(files["keys"], np.uint64, 2), mended)


def _mapped(file: BinaryIO, dtype: Any, columns: int) -> npt.NDArray[Any]:
    file.flush()
    size = file.seek(0, 2)
    if not size:
        return np.empty((0, columns), dtype)
    return np.memmap(file, dtype, "r").reshape(-1, columns)


class Decision:
    """Decides about all pairs from their scores, writes the outputs, and collects the report."""

    def __init__(
        self, config: CleanConfig, filters: dict[str, Limits], corpora: Sequence[Corpus], scored: Scored, scratch: Path
    ) -> None:
        self._config, self._corpora, self._scored = config, corpora, scored
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
        self._unscored = 0  # kept pairs without late scores, because a filter dropped these pairs in the earlier run
        for start in range(0, count, 1 << 16):
            self._apply(slice(start, start + (1 << 16)))
        if self._unscored:
            log.warning("%s pairs are kept without a model score, because a filter dropped these pairs when %s was "
                        "written", f"{self._unscored:,}", config.from_scores)  # fmt: skip
        if config.duplicates != "none":
            self.reports.append(FilterReport(DUPLICATE, "equal normalized pairs"))
            self._drop_duplicates(scratch)

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
        first = np.full(len(masks), -1)
        for index in reversed(range(len(self._filters))):
            first[masks[:, index]] = index
        self._first[rows] = first
        self._unscored += int(((first < 0) & np.isnan(scores).any(1)).sum())
        for index, report in enumerate(self.reports):
            report.dropped += int((first == index).sum())

    def _drop_duplicates(self, scratch: Path) -> None:
        """Drops kept pairs that equal a better kept pair on the sides that `config.duplicates` names.

        The comparison ignores case, spaces and punctuation.
        """
        kept = np.flatnonzero(self._first < 0)
        columns = np.array({"pair": (0, 1), "source": (0, 0)}.get(self._config.duplicates, (1, 1)))
        hashes = scratch / "hashes"
        with hashes.open("wb") as file:
            for start in range(0, len(kept), 1 << 18):
                part = kept[start : start + (1 << 18)]
                file.write(np.ascontiguousarray(self._scored.keys[part][:, columns]).tobytes())
        quality = self._quality(kept)
        for path in duplicates.partition(hashes, scratch):
            rows = kept[duplicates.find_duplicates(path, quality)]
            self._first[rows] = len(self._filters)
            self.reports[-1].dropped += len(rows)
            self.reports[-1].matching += len(rows)

    def _quality(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32] | None:
        """Returns the score that decides which duplicate stays, or None if the run has no such score.

        The score is rounded to hundredths, so that the first of several nearly equal pairs stays.
        """
        index = next((self.reasons.index(name) for name in QUALITY if name in self._filters), None)
        return None if index is None else np.round(np.nan_to_num(self._scored.scores[rows, index], nan=-1), 2)

    def write(self, writer: CorpusWriter, dropped: CorpusWriter | None, scores: ScoreWriter | None) -> CleanReport:
        row = 0
        read_of: dict[str, tuple[int, int]] = {}
        for index, (corpus, paths) in enumerate(zip(self._corpora, self._scored.blocks, strict=True)):
            first_row, first_kept = row, int((self._first[:row] < 0).sum())
            for path in paths:
                with path.open("rb") as file:
                    block: Pairs = pickle.load(file)
                path.unlink()
                rows = slice(row, row + len(block))
                first = self._first[rows]
                writer.write(block.select((first < 0).tolist()))
                if dropped is not None:
                    dropped.write(self._with_reasons(block, first))
                if scores is not None:
                    values = dict(zip(self._filters, self._scored.scores[rows].T, strict=True))
                    scores.write(index, block.first, values, [self._reason(code) for code in first.tolist()])
                self._examples(block, rows)
                row += len(block)
            kept = int((self._first[:row] < 0).sum()) - first_kept
            read_of[corpus.name] = row - first_row, kept
        kept = int((self._first < 0).sum())
        assert row == len(self._first) == kept + sum(report.dropped for report in self.reports)
        if not kept:
            counts = ", ".join(f"{report.name}: {report.dropped:,}" for report in self.reports if report.dropped)
            raise ValueError(f"no pair is left of {row:,}; dropped: {counts}; are languages or columns exchanged?")
        return CleanReport(row, kept, self._scored.mended, self.reports, self._overlaps, read_of)

    def _reason(self, code: int) -> str | None:
        return None if code < 0 else self.reasons[code]

    def _with_reasons(self, block: Pairs, first: npt.NDArray[np.int16]) -> Pairs:
        bad = block.select((first >= 0).tolist())
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
