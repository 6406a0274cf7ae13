"""Late scores of pairs, computed after all filters: a score from models, and a probability from several scores.

Only pairs that every filter keeps get late scores. All other pairs have NaN. A logistic regression computes the
probability that a pair is good. Its good examples are the best pairs of the corpus. Its bad examples are the same
sources with wrong targets, which `noise` makes.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.blocks import StoredBlock
from nmtkit.cleaning.filters.calibration import logistic_regression, noise
from nmtkit.cleaning.filters.interface import Limits
from nmtkit.cleaning.filters.text_block import ScoreMatrix, Scores, TextBlock
from nmtkit.data.corpora.corpus import Pairs
from nmtkit.data.corpora.dropping import Mask, RowNumbers
from nmtkit.jobs import progress

MODEL, PROBABILITY = "model", "probability"
MODEL_UNIT = "exp(-dual cross-entropy)"
SAMPLE = 200_000  # maximum number of kept pairs in the sample for the models and the regression
CALIBRATION = 4000  # maximum number of good examples for a regression
BEST = 0.75  # share of the sample that counts as good
FEWEST = 100  # minimum number of kept pairs; a smaller sample is not reliable


class PairScorer(Protocol):
    """Scores pairs with models. `unit` is the unit of a score. The progress counts a pair `passes` times."""

    unit: str
    passes: int

    def fit(self, sources: list[str], targets: list[str]) -> None:
        """Loads the models, or trains the models on these good pairs."""

    def score(self, sources: list[str], targets: list[str]) -> Scores:
        """Returns the score of each pair. A higher score is better, and 1 is the maximum."""


def late_limits(
    scorer: PairScorer | None, read: Collection[str] | None, min_model: float, min_probability: float | None
) -> dict[str, Limits]:
    """Returns the limits of the late scores that the settings need, by the names of the scores.

    `read` has the names of the scores if they are read from a file. Late scores in the file are included even without a
    limit, because `clean` needs them to choose the best of several duplicates.
    """
    limits, present = {}, read or ()
    if scorer is not None or MODEL in present or (read is not None and min_model > 0):
        limits[MODEL] = Limits(min_model, unit="score of the models" if scorer is None else scorer.unit)
    if scorer is not None or PROBABILITY in present or min_probability is not None:
        limits[PROBABILITY] = Limits(min_probability or 0, unit="probability")
    return limits


class PairProbability:
    """A logistic regression. It computes the probability that a pair is good from several scores of the pair.

    The probability assumes that half of all pairs are good. Each score gives one feature: the log odds of a
    probability, the logarithm of exp(-dual cross-entropy), the distance to the nearest limit if a filter has two
    limits, or else the score itself.
    """

    def __init__(self, limits: Sequence[Limits]) -> None:
        self._limits = limits

    def fit(self, good: ScoreMatrix, bad: ScoreMatrix) -> None:
        features = self._features(np.concatenate((good, bad)))
        self._mean, self._scale = features.mean(0), features.std(0) + 1e-6
        self._weights = logistic_regression(self._scaled(features), np.repeat((1.0, 0.0), (len(good), len(bad))))

    def score(self, scores: ScoreMatrix) -> Scores:
        logits = self._scaled(self._features(scores)) @ self._weights[1:] + self._weights[0]
        return (1 / (1 + np.exp(-np.clip(logits, -30, 30)))).astype(np.float32)

    def _features(self, scores: ScoreMatrix) -> npt.NDArray[np.float64]:
        columns = []
        for column, limits in zip(scores.T.astype(np.float64), self._limits, strict=True):
            if limits.unit == "probability":
                column = _log_odds(column)
            elif limits.unit == MODEL_UNIT:
                column = np.log(np.maximum(column, 1e-6))
            elif np.isfinite((limits.lowest, limits.highest)).all():
                column = np.minimum(column - limits.lowest, limits.highest - column)
            columns.append(column)
        return np.column_stack(columns)

    def _scaled(self, features: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.clip((features - self._mean) / self._scale, -6, 6)


def _log_odds(probabilities: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    clipped = np.clip(probabilities, 1e-4, 1 - 1e-4)
    return np.log(clipped / (1 - clipped))


def dropped_rows(limits: Sequence[Limits], scores: ScoreMatrix) -> Mask:
    """Returns whether each pair has a score beyond one of the `limits`. `scores` has a column for each limit."""
    masks = [each.drops(column) for each, column in zip(limits, scores.T, strict=True)]
    return np.any(masks, 0) if masks else np.zeros(len(scores), np.bool_)


class LateScorer:
    """Adds late scores to the scores of the filters. `limits` belong to the filters, and `late` to the late scores.

    `score_block` returns the scores of all filters for a block. The probability of a pair depends on the score of the
    models, which `scorer` computes, and on the scores of the filters with `in_probability`. If no filter has
    `in_probability`, all scores count.
    """

    def __init__(
        self,
        limits: Sequence[Limits],
        score_block: Callable[[TextBlock], ScoreMatrix],
        scorer: PairScorer | None,
        late: dict[str, Limits],
        seed: int,
    ) -> None:
        self._limits, self._score_block, self._scorer, self._seed = limits, score_block, scorer, seed
        self._names = list(late)
        self._used = [index for index, each in enumerate(limits) if each.in_probability] or list(range(len(limits)))
        used = [limits[index] for index in self._used]
        self._probability = PairProbability([*used, *(late[name] for name in self._names if name == MODEL)])

    def add(self, blocks: Sequence[StoredBlock], scores: ScoreMatrix, path: Path) -> ScoreMatrix:
        """Returns `scores` [pairs, filters] with further columns: the scores of models, and the probability of a pair.

        `scores` may have one more column, in which the kept pairs already have their scores of models. The result is a
        memory-mapped array in the new file `path`. `blocks` are the pairs in the order of the rows. Raises ValueError
        if the filters keep fewer than FEWEST pairs, because the probability is fitted to the kept pairs.
        """
        width = len(self._limits)
        result = np.memmap(path, np.float32, "w+", shape=(len(scores), width + len(self._names)))
        kept = np.concatenate([
            np.flatnonzero(~dropped_rows(self._limits, part[:, :width])) + start
            for start in range(0, len(scores), 1 << 16) for part in (scores[start : start + (1 << 16)],)
        ])  # fmt: skip
        progress.begin("Fitting models" if self._scorer is not None else "Fitting the probability")
        self._fit(blocks, scores[:, :width], kept)
        runs_models = self._scorer is not None and scores.shape[1] == width
        passes = self._scorer.passes if self._scorer is not None and runs_models else 1
        progress.begin("Scoring kept pairs", "pairs", len(kept), passes=passes)
        for start, block in _read(blocks):
            rows = slice(start, start + len(block))
            result[rows, :width] = scores[rows, :width]
            result[rows, width:] = np.nan
            inside = kept[slice(*np.searchsorted(kept, (rows.start, rows.stop)))]
            if len(inside):
                sides = [[side[row] for row in (inside - start).tolist()] for side in (block.sources, block.targets)]
                result[inside, width:] = self._late(scores[inside], *sides)
            if not runs_models:  # otherwise, the models advance the progress
                progress.advance(len(inside))
        return result

    def _late(self, scores: ScoreMatrix, sources: list[str], targets: list[str]) -> ScoreMatrix:
        """Returns the late columns of pairs. `scores` are the rows of these pairs in the argument of `add`."""
        width = len(self._limits)
        columns = [scores]
        if self._scorer is not None and scores.shape[1] == width:
            columns.append(np.asarray(self._scorer.score(sources, targets), np.float32)[:, None])
        if PROBABILITY in self._names:
            late = np.column_stack(columns)
            used = [*self._used, *range(width, late.shape[1])]
            columns.append(self._probability.score(late[:, used])[:, None])
        return np.column_stack(columns)[:, width:]

    def _fit(self, blocks: Sequence[StoredBlock], scores: ScoreMatrix, kept: RowNumbers) -> None:
        """Finds the best pairs by the scores of the filters. Fits the models and the regression to different pairs."""
        if len(kept) < FEWEST:
            raise ValueError(
                f"the filters keep {len(kept)} pairs, but --self-train, --forward, --quality and --min-probability "
                f"need at least {FEWEST} pairs"
            )
        generator = np.random.default_rng(self._seed)
        rows = np.sort(generator.choice(kept, min(SAMPLE, len(kept)), replace=False))
        sources, targets = _texts(blocks, rows)
        some = generator.permutation(len(rows))[:CALIBRATION].tolist()
        by_filters = PairProbability([self._limits[index] for index in self._used])
        self._fit_probability(by_filters, [sources[row] for row in some], [targets[row] for row in some], None)
        order = np.argsort(-by_filters.score(scores[rows][:, self._used]), kind="stable")
        best = generator.permutation(order[: int(np.ceil(BEST * len(order)))]).tolist()
        held_out = min(CALIBRATION, len(best) // 4)  # number of best pairs for the regression, not for the models
        sources, targets = [sources[row] for row in best], [targets[row] for row in best]
        if self._scorer is not None:
            self._scorer.fit(sources[held_out:], targets[held_out:])
        self._fit_probability(self._probability, sources[:held_out], targets[:held_out], self._scorer)

    def _fit_probability(
        self, probability: PairProbability, sources: list[str], targets: list[str], scorer: PairScorer | None
    ) -> None:
        matrices = []
        for texts in (targets, noise(targets, self._seed)):
            matrix = self._score_block(TextBlock(sources, texts))[:, self._used]
            if scorer is not None:
                matrix = np.column_stack((matrix, np.asarray(scorer.score(sources, texts), np.float32)))
            matrices.append(matrix)
        probability.fit(*matrices)


def _read(blocks: Sequence[StoredBlock]) -> Iterator[tuple[int, Pairs]]:
    """Yields each block with the index of its first pair in the whole corpus. The index counts from 0."""
    start = 0
    for block in (stored.read() for stored in blocks):
        yield start, block
        start += len(block)


def _texts(blocks: Sequence[StoredBlock], rows: RowNumbers) -> tuple[list[str], list[str]]:
    """Returns the sources and the targets of the pairs with the indices `rows`, which must be ascending."""
    sources: list[str] = []
    targets: list[str] = []
    for start, block in _read(blocks):
        inside = rows[slice(*np.searchsorted(rows, (start, start + len(block))))] - start
        sources += [block.sources[row] for row in inside.tolist()]
        targets += [block.targets[row] for row in inside.tolist()]
    return sources, targets
