"""Bigrams of words, and a language model of bigrams."""

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.word_ids import WordIds

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
DISCOUNT = 0.75  # count that each seen bigram gives to unseen bigrams


class BigramTable:
    """Probabilities of a word after another word, from the counts of `bigrams` [2, bigrams], two word ids below `size`.

    Seen bigrams give a part of their counts to unseen bigrams (absolute discounting, Ney et al. 1994).
    """

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
        unigrams = self._unigrams(second)
        unseen = np.where(self._first[first] > 0, DISCOUNT * self._followers[first] / occurrences, 1)
        ratios: Floats = np.log(np.maximum(counts - DISCOUNT, 0) / occurrences / unigrams + unseen)
        return ratios

    def log_probabilities(self, bigrams: Integers) -> Floats:
        """Returns log(p(second | first)) for each bigram, in nats."""
        log_probabilities: Floats = self.log_ratios(bigrams) + np.log(self._unigrams(bigrams[1]))
        return log_probabilities

    def _unigrams(self, words: Integers) -> Floats:
        """Returns p(word), with 0.5 added to each count."""
        probabilities: Floats = (self._second[words] + 0.5) / (self._total + 0.5 * self._size)
        return probabilities


def bigrams_of(side: WordIds, boundary: int) -> tuple[Integers, Integers]:
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
