"""The filter `word_order`, which drops pairs if the order of the words of a side is unusual in the corpus."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.filters.interface import FILTERS, MIN_SAMPLE, Filter
from nmtkit.cleaning.filters.text_block import Counts, Scores, TextBlock
from nmtkit.cleaning.filters.word_statistics import BigramTable, bigrams_of, fit_vocabularies, word_ids
from nmtkit.config import Config, option
from nmtkit.text.encoded import Encoded


@dataclass(frozen=True, kw_only=True)
class WordOrderConfig(Config):
    min_word_order: float = option(
        -2.0,
        "drop pairs if the score of a side is below X: the sum of log(p(word | previous word) / p(word)) over its n "
        "bigrams, divided by √n; the probabilities come from the corpus",
    )


@FILTERS.register("word_order", WordOrderConfig())
class WordOrder(Filter):
    """The sum of log(p(word | previous word) / p(word)) over the n bigrams of a line, divided by √n, in nats.

    A line whose words follow each other by chance has a score near or below 0. The division by √n gives long lines the
    scale of short lines, because the standard deviation of a sum of n independent numbers grows with √n.

    The side with the lower score counts. Each half of the sample makes a table of bigrams for each side. The table that
    gives the lower score counts, because a table overrates the lines from which it was made. Bigrams with a rare word
    are left out. A line with fewer than 4 remaining bigrams has the mean score of the sample. All pairs have the score
    0 if the sample is small.
    """

    unit = "log ratio / √bigrams"
    in_probability = True
    lowest_setting = "min_word_order"
    min_bigrams = 4
    _tables: Sequence[list[BigramTable]] = ()  # [sides, halves of the sample]

    def fit(self, sample: TextBlock) -> None:
        if len(sample) < MIN_SAMPLE:
            return
        self._vocabularies = fit_vocabularies(sample, self.context)
        sides = word_ids(sample, self._vocabularies)
        rows = np.arange(len(sample))
        self._tables = [
            [BigramTable(side.rows(half), vocabulary.size) for half in (rows[::2], rows[1::2])]
            for side, vocabulary in zip(sides, self._vocabularies, strict=True)
        ]
        self._sample_means = []  # mean score of each side
        for index, side in enumerate(sides):
            scores, counts = self._side_scores(index, side)
            long_enough = scores[counts >= self.min_bigrams]
            self._sample_means.append(float(long_enough.mean()) if len(long_enough) else 0.0)

    def _side_scores(self, index: int, side: Encoded) -> tuple[npt.NDArray[np.float64], Counts]:
        """Returns the score and the number of bigrams of each line of side `index`, which is 0 for the source."""
        bigrams, row = bigrams_of(side, self._vocabularies[index].size)
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
