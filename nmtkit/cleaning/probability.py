"""Late scores of pairs, computed after all filters: a score from models, and a probability from several scores.

Only pairs that every filter keeps get late scores. All other pairs have NaN. A logistic regression computes the
probability that a pair is good. Its good examples are the best pairs of the corpus. Its bad examples are the same
sources with wrong targets, which `noise` makes.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.blocks import StoredBlock, with_rows
from nmtkit.cleaning.filters.calibration import logistic_regression, noise
from nmtkit.cleaning.filters.interface import Limits, first_limits
from nmtkit.cleaning.filters.text_block import ScoreMatrix, Scores, TextBlock
from nmtkit.data.corpora.corpus import Pairs
from nmtkit.data.corpora.dropping import RowNumbers
from nmtkit.jobs import progress

MODEL, PROBABILITY = "model", "probability"
MODEL_UNIT = "exp(-dual cross-entropy)"
SAMPLE = 200_000  # maximum number of kept pairs in the sample for the models and the regression
CALIBRATION = 4000  # maximum number of good examples for a regression
BEST = 0.75  # share of the sample that counts as good
FEWEST = 100  # minimum number of kept pairs; a smaller sample is not reliable


class PairScorer(Protocol):
    """Scores pairs with models. `unit` is the unit of a score. The progress counts a pair once for each of the models.

    `passes` is the number of models.
    """

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

    If the scores are read from a file, `read` has their names. Late scores in the file are included even without a
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
                clipped = np.clip(column, 1e-4, 1 - 1e-4)
                column = np.log(clipped / (1 - clipped))  # log odds
            elif limits.unit == MODEL_UNIT:
                column = np.log(np.maximum(column, 1e-6))
            elif np.isfinite((limits.lowest, limits.highest)).all():
                column = np.minimum(column - limits.lowest, limits.highest - column)
            columns.append(column)
        return np.column_stack(columns)

    def _scaled(self, features: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.clip((features - self._mean) / self._scale, -6, 6)


class LateScorer:
    """Adds late scores to the scores of the filters. `limits` belong to the filters, and `late` to the late scores.

    `late` comes from `late_limits` and contains PROBABILITY. `score_block` returns the scores of all filters for a
    block. The probability of a pair depends on the score of the models, which `scorer` computes, and on the scores of
    the filters with `in_probability`. If no filter has `in_probability`, the scores of all filters count.
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
        self._late = late
        self._used = [index for index, each in enumerate(limits) if each.in_probability] or list(range(len(limits)))
        models = [each for name, each in late.items() if name == MODEL]
        self._probability = PairProbability([*(limits[index] for index in self._used), *models])

    def add(self, blocks: Sequence[StoredBlock], scores: ScoreMatrix, path: Path) -> ScoreMatrix:
        """Returns `scores` [pairs, filters] with further columns: the scores of models, and the probability of a pair.

        `scores` may have one more column, in which the kept pairs already have their scores of models. The result is a
        memory-mapped array in the new file `path`. `blocks` are the pairs in the order of the rows. Raises ValueError
        if the filters keep fewer than FEWEST pairs, because the probability is fitted to the kept pairs.
        """
        width = len(self._limits)
        result = np.memmap(path, np.float32, "w+", shape=(len(scores), width + len(self._late)))
        parts = (scores[start : start + (1 << 16), :width] for start in range(0, len(scores), 1 << 16))
        kept = np.flatnonzero(np.concatenate([first_limits(self._limits, part) for part in parts]) < 0)
        progress.begin("Fitting models" if self._scorer is not None else "Fitting the probability")
        self._fit(blocks, scores[:, :width], kept)
        scorer = self._scorer if scores.shape[1] == width else None
        progress.begin("Scoring kept pairs", "pairs", len(kept), passes=1 if scorer is None else scorer.passes)
        for rows, block in with_rows(blocks):
            result[rows, :width] = scores[rows, :width]
            result[rows, width:] = np.nan
            inside = _inside(kept, rows)
            if len(inside):
                known = scores[inside]
                if scorer is not None:
                    known = np.column_stack((known, scorer.score(*_texts(block, inside - rows.start))))
                probability = self._probability.score(known[:, [*self._used, *range(width, known.shape[1])]])
                result[inside, width:] = np.column_stack((known[:, width:], probability))
            if scorer is None:  # otherwise, the models advance the progress
                progress.advance(len(inside))
        return result

    def _fit(self, blocks: Sequence[StoredBlock], scores: ScoreMatrix, kept: RowNumbers) -> None:
        """Finds the best pairs by the filters. Fits the models and the regression to different parts of these pairs."""
        if len(kept) < FEWEST:
            raise ValueError(
                f"the filters keep {len(kept)} pairs, but --self-train, --forward, --quality and --min-probability "
                f"need at least {FEWEST} pairs"
            )
        generator = np.random.default_rng(self._seed)
        rows = np.sort(generator.choice(kept, min(SAMPLE, len(kept)), replace=False))
        sources, targets = [], []
        for part, block in with_rows(blocks):
            sides = _texts(block, _inside(rows, part) - part.start)
            sources += sides[0]
            targets += sides[1]
        some = generator.permutation(len(rows))[:CALIBRATION].tolist()
        by_filters = PairProbability([self._limits[index] for index in self._used])
        self._fit_probability(by_filters, [sources[row] for row in some], [targets[row] for row in some], None)
        order = np.argsort(-by_filters.score(scores[rows][:, self._used]), kind="stable")
        best = generator.permutation(order[: int(np.ceil(BEST * len(order)))]).tolist()
        held_out = min(CALIBRATION, len(best) // 4)  # number of best pairs for the regression; models get the rest
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
                matrix = np.column_stack((matrix, scorer.score(sources, texts)))
            matrices.append(matrix)
        probability.fit(*matrices)


def _inside(rows: RowNumbers, part: slice) -> RowNumbers:
    """Returns the numbers in `rows` that are inside `part`. `rows` must be in ascending order."""
    return rows[slice(*np.searchsorted(rows, (part.start, part.stop)))]


def _texts(block: Pairs, rows: RowNumbers) -> tuple[list[str], list[str]]:
    """Returns the sources and the targets of the pairs of a block with the indices `rows`."""
    return [block.sources[row] for row in rows.tolist()], [block.targets[row] for row in rows.tolist()]
