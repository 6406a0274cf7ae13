"""The filter `word_order`, which drops lines whose words have an order that is unusual in the corpus."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nmtkit.config import Config, option
from nmtkit.corpora.filters import FILTERS, MIN_SAMPLE, Filter, FilterContext
from nmtkit.corpora.texts import Scores, TextBlock
from nmtkit.corpora.word_ids import WordIds, fit_vocabularies, word_ids

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
DISCOUNT = 0.75  # count that each seen bigram gives to unseen bigrams (Ney et al. 1994)


@dataclass(frozen=True, kw_only=True)
class WordOrderConfig(Config):
    min_word_order: float = option(
        -2.0,
        "drop pairs with a side whose sum of log(p(word | previous word) / p(word)) over its n pairs of words, divided "
        "by √n, is below X; the probabilities come from the corpus",
    )


class BigramTable:
    """Counts of bigrams, with absolute discounting. `bigrams` [2, bigrams] has two word ids below `size` per column."""

    def __init__(self, bigrams: Integers, size: int) -> None:
        first, second = bigrams
        self._size, self._total = size, bigrams.shape[1]
        self._keys, self._counts = np.unique(first * size + second, return_counts=True)
        self._first, self._second = (np.bincount(words, minlength=size) for words in bigrams)
        self._followers = np.bincount(self._keys // size, minlength=size)

    def log_ratios(self, bigrams: Integers) -> Floats:
        """Returns log(p(second | first) / p(second)) for each bigram, in nats."""
        first, second = bigrams
        keys = first * self._size + second
        entries = np.searchsorted(self._keys, keys)
        known = np.append(self._keys, -1)[entries] == keys
        counts = np.where(known, np.append(self._counts, 0)[entries], 0)
        occurrences = np.maximum(self._first[first], 1)
        unigrams = (self._second[second] + 0.5) / max(1, self._total)
        unseen = np.where(self._first[first] > 0, DISCOUNT * self._followers[first] / occurrences, 1)
        ratios: Floats = np.log(np.maximum(counts - DISCOUNT, 0) / occurrences / unigrams + unseen)
        return ratios


@FILTERS.register("word_order", WordOrderConfig())
class WordOrder(Filter):
    """The sum of log(p(word | previous word) / p(word)) over the n bigrams of a line, divided by √n, in nats.

    A line whose words follow each other by chance has a score near or below 0. The division by √n gives long lines the
    scale of short lines, because the standard deviation of a sum of n independent numbers grows with √n.

    The side with the lower score counts. Each half of the sample makes a table of bigrams for each side. The table that
    gives the lower score counts, because a table gives too high scores to the lines that made the table. Bigrams with a
    rare word are left out. A line with fewer than 4 other bigrams has the mean score of the sample. All pairs have the
    score 0 if the sample is small.
    """

    unit = "log ratio / √bigrams"
    min_bigrams = 4

    def __init__(self, config: WordOrderConfig, context: FilterContext) -> None:
        super().__init__(config, context)
        self.lowest = config.min_word_order
        self._tables: list[list[BigramTable]] = []  # [sides, halves of the sample]
        self._sample_means = [0.0, 0.0]  # mean score of each side

    def fit(self, sample: TextBlock) -> None:
        if len(sample) < MIN_SAMPLE:
            return
        self._vocabularies = fit_vocabularies(sample, self.context)
        sides = word_ids(sample, self._vocabularies)
        rows = np.arange(len(sample))
        self._tables = [
            [BigramTable(_bigrams(side.rows(half), vocabulary.size)[0], vocabulary.size + 1)
             for half in (rows[::2], rows[1::2])]
            for side, vocabulary in zip(sides, self._vocabularies, strict=True)
        ]  # fmt: skip
        for index, side in enumerate(sides):
            scores, counts = self._side_scores(index, side)
            self._sample_means[index] = float(scores[counts >= self.min_bigrams].mean())

    def _side_scores(self, index: int, side: WordIds) -> tuple[Floats, Integers]:
        """Returns the score and the number of bigrams of each line of side `index`, which is 0 for the source."""
        bigrams, row = _bigrams(side, self._vocabularies[index].size)
        counts = np.bincount(row, minlength=len(side.lengths))
        sums = [np.bincount(row, table.log_ratios(bigrams), len(counts)) for table in self._tables[index]]
        return np.minimum(*sums) / np.sqrt(np.maximum(counts, 1)), counts

    def score(self, block: TextBlock) -> Scores:
        if not self._tables:
            return np.zeros(len(block), np.float32)
        sides = []
        for index, side in enumerate(word_ids(block, self._vocabularies)):
            scores, counts = self._side_scores(index, side)
            sides.append(np.where(counts < self.min_bigrams, self._sample_means[index], scores))
        return np.minimum(*sides).astype(np.float32)


def _bigrams(side: WordIds, boundary: int) -> tuple[Integers, Integers]:
    """Returns the bigrams [2, bigrams] of all lines and the index of the line of each bigram [bigrams].

    The id `boundary` stands before and after each line. Bigrams with a word of the id 0 (a rare word) are left out.
    """
    starts = np.cumsum(side.lengths) - side.lengths
    padded = np.insert(side.ids, np.concatenate((starts, starts + side.lengths)), boundary)
    row = np.repeat(np.arange(len(side.lengths)), side.lengths + 2)
    ends = np.cumsum(side.lengths + 2) - 1
    inside = np.ones(len(padded), np.bool_)
    inside[ends] = False
    first = np.flatnonzero(inside)
    bigrams = np.stack((padded[first], padded[first + 1]))
    known = (bigrams > 0).all(0)
    return bigrams[:, known], row[first][known]
