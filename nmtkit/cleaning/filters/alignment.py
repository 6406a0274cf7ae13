"""The filter `alignment`, which drops pairs whose words are not translations of each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.filters.calibration import Error, logistic_regression, noise
from nmtkit.cleaning.filters.interface import FILTERS, MIN_SAMPLE, Filter
from nmtkit.cleaning.filters.text_block import Counts, Scores, TextBlock
from nmtkit.cleaning.filters.word_statistics import fit_vocabularies, known_words, stems, word_ids
from nmtkit.config import Config, option
from nmtkit.text.encoded import Encoded, positions
from nmtkit.text.ibm_model1 import FLOOR, LexicalTable, word_probabilities

CALIBRATION = 10_000  # approximate number of pairs for the logistic regression
NOISE: tuple[Error, ...] = ("misaligned", "replaced", "appended", "joined")  # errors that word tables can detect
# Limits of the evidence of a word (see `line_features`), in nats: for halves of a line, and for the whole line. The
# second limit is low, so that a few words with strong evidence do not hide words without evidence.
MAX_EVIDENCE, MAX_MEAN_EVIDENCE = 12.0, 3.0


@dataclass(frozen=True, kw_only=True)
class AlignmentConfig(Config):
    min_alignment: float = option(
        0.15, "drop pairs if the probability that the sides are translations of each other, computed from their words, "
        "is below X", min=0, max=1,
    )  # fmt: skip
    alignment_iterations: int = option(4, "iterations of IBM model 1 on the sample", min=1, max=50)


@FILTERS.register("alignment", AlignmentConfig())
class Alignment(Filter):
    """The probability that the sides are translations of each other, from IBM model 1 in both directions.

    Each half of the sample trains a table for each direction. The features of a pair are the lengths and, for each
    direction, `line_features`. The lower feature of the two tables counts, because a table gives a high feature even to
    a wrong pair if the pair was in its training data. A logistic regression over the features separates the pairs of
    the sample from wrong pairs. A wrong pair has the target of a different pair of similar length, or a target with
    `noise`. The probability is set to 1 for pairs with fewer than 3 known words on a side, for pairs with a side of
    mostly unknown words, and for all pairs if the sample is small.
    """

    unit = "probability"
    in_probability = True
    lowest_setting = "min_alignment"
    min_words = 3
    _tables: Sequence[list[LexicalTable]] = ()  # [directions, halves of the sample]

    def fit(self, sample: TextBlock) -> None:
        if len(sample) < MIN_SAMPLE:
            return
        self._vocabularies = fit_vocabularies(sample, self.context)
        source, target = word_ids(sample, self._vocabularies)
        sizes = self._vocabularies[0].size, self._vocabularies[1].size
        rows = np.arange(len(sample))
        halves, iterations = (rows[::2], rows[1::2]), self.config.alignment_iterations
        self._tables = [
            [LexicalTable.train(first.rows(half), second.rows(half), size, other, iterations) for half in halves]
            for first, second, (size, other) in ((source, target, sizes), (target, source, sizes[::-1]))
        ]
        some = rows[:: max(1, len(rows) // CALIBRATION)]
        order = some[np.lexsort((some, source.lengths[some], target.lengths[some]))]  # neighbours have similar lengths
        good = self._features(source.rows(order), target.rows(order))
        wrong = noise([sample.sides[1].lines[row] for row in order.tolist()], 1, NOISE)
        wrong_targets = target.rows(np.roll(order, 7)), self._vocabularies[1].encode([stems(line) for line in wrong])
        bad = [self._features(source.rows(order), each) for each in wrong_targets]
        features = np.concatenate((good, *bad))
        self._mean, self._scale = features.mean(0), features.std(0) + 1e-6
        labels = (np.arange(len(features)) < len(good)).astype(np.float64)
        self._weights = logistic_regression((features - self._mean) / self._scale, labels)

    def _features(self, source: Encoded, target: Encoded) -> npt.NDArray[np.float64]:
        columns = [np.log1p(source.lengths), np.log1p(target.lengths)]
        for tables, first, second in zip(self._tables, (source, target), (target, source), strict=True):
            probabilities = word_probabilities(tables, first, second)
            columns += [*np.min([line_features(each, first.lengths, second.lengths) for each in probabilities], 0)]
        return np.column_stack(columns)

    def score(self, block: TextBlock) -> Scores:
        if not self._tables:
            return np.ones(len(block), np.float32)
        sides = word_ids(block, self._vocabularies)
        features = (self._features(*sides) - self._mean) / self._scale
        scores = 1 / (1 + np.exp(-(features @ self._weights[1:] + self._weights[0])))
        for side in sides:
            known = known_words(side)
            scores[(known < self.min_words) | (2 * known < side.lengths)] = 1
        return scores.astype(np.float32)


def line_features(
    probabilities: npt.NDArray[np.float64], source_lengths: Counts, lengths: Counts
) -> npt.NDArray[np.float64]:
    """Returns three features of each line from the probabilities of its words: [3, lines].

    `probabilities` [2, words] has two rows. For each word w, the first row has the mean of p(w | s) over the source
    words s and NULL, and the second row has p(w | NULL). The evidence of a word is -log(posterior probability that the
    word is aligned to NULL), limited to 0 … 12. The first feature is the mean log probability of the words. The second
    feature is the mean evidence of the words, where the limit is 3 instead of 12. For the third feature, the line is
    divided into two halves. The third feature is the lower of their two values of mean evidence, so it is low if half
    of a line has no counterpart in the source. `source_lengths` and `lengths` [lines] are numbers of words.
    """
    means, nulls = np.maximum(probabilities, FLOOR)
    line = np.repeat(np.arange(len(lengths)), lengths)
    evidence = np.clip(np.log(means / nulls * (source_lengths + 1)[line]), 0, MAX_EVIDENCE)
    counts = np.column_stack((lengths // 2, lengths - lengths // 2))  # number of words of each half
    half = positions(lengths) >= counts[line, 0]
    sums_of_halves = np.bincount(2 * line + half, evidence, counts.size).reshape(-1, 2)
    halves = sums_of_halves / np.maximum(counts, 1)
    words = np.log(means), np.minimum(evidence, MAX_MEAN_EVIDENCE)
    sums = [np.bincount(line, values, len(lengths)) for values in words]
    lower = np.where(lengths < 2, halves[:, 1], halves.min(1))
    return np.array([*(sums / np.maximum(lengths, 1)), lower])
