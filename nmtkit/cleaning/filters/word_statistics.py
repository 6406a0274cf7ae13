"""Converts words to integers, and estimates a bigram language model, for filters that learn from words of the sample.

Most inflected forms of a word are rare in a sample, so the first 6 characters of a word ("stem") represent the word.
"""

import re

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.filters.interface import FilterContext
from nmtkit.cleaning.filters.text_block import Counts, TextBlock
from nmtkit.scoring.lengths import MARKS
from nmtkit.text.alignment import UNSPACED_LETTERS
from nmtkit.text.encoded import Encoded

# A character of a language without spaces between words, a word with its combining marks, or a number.
_WORD = re.compile(rf"[{UNSPACED_LETTERS}]|[^\W\d_{UNSPACED_LETTERS}]+(?:[{MARKS}]+[^\W\d_{UNSPACED_LETTERS}]*)*|\d+")
STEM = 6  # characters
MAX_WORDS = 1000  # the memory of word alignment grows with the product of the lengths of both sides
# Minimum number of occurrences of a stem in the sample. Rarer stems align by chance, because each table of the filter
# `alignment` learns from half of the sample.
MIN_COUNT = 10
DISCOUNT = 0.75  # count that each seen bigram gives to unseen bigrams


def stems(line: str) -> list[str]:
    """Returns the stem of each of the first 1,000 words of a line: the first 6 characters of the case-folded word.

    Numbers are words too. Each character of a script without spaces, such as Chinese, Japanese or Thai, is a word.
    """
    return [word[:STEM] for word in _WORD.findall(line.casefold())[:MAX_WORDS]]


class StemVocabulary:
    """Gives ids from 1 to the stems that occur at least 10 times in `lines`. All other stems have the id 0.

    `size` is the largest id plus 1.
    """

    def __init__(self, lines: list[list[str]]) -> None:
        counts: dict[str, int] = {}
        for line in lines:
            for stem in line:
                counts[stem] = counts.get(stem, 0) + 1
        frequent = (stem for stem, count in counts.items() if count >= MIN_COUNT)
        self._ids = {stem: index for index, stem in enumerate(frequent, 1)}
        self.size = len(self._ids) + 1

    def encode(self, lines: list[list[str]]) -> Encoded:
        """Returns the ids of the stems of all lines. `lines` has a list of stems for each line; rare stems get 0."""
        get = self._ids.get
        ids = [get(stem, 0) for line in lines for stem in line]
        return Encoded(np.array(ids, np.int64), np.array([len(line) for line in lines], np.int64))


def stems_of(block: TextBlock) -> list[list[list[str]]]:
    """Returns the stems of a block: [sides][lines][words].

    The block keeps the stems, because computing stems takes more time than looking up their ids.
    """
    if "stems" not in block.shared:
        block.shared["stems"] = [[stems(line) for line in side.lines] for side in block.sides]
    lines: list[list[list[str]]] = block.shared["stems"]
    return lines


def fit_vocabularies(sample: TextBlock, context: FilterContext) -> list[StemVocabulary]:
    """Returns the source vocabulary and the target vocabulary of a run of `clean`.

    The first filter that calls the function makes the vocabularies from its sample and stores them in `context.shared`.
    Later filters get the same vocabularies.
    """
    if "vocabularies" not in context.shared:
        context.shared["vocabularies"] = [StemVocabulary(lines) for lines in stems_of(sample)]
    made: list[StemVocabulary] = context.shared["vocabularies"]
    return made


def word_ids(block: TextBlock, vocabularies: list[StemVocabulary]) -> list[Encoded]:
    """Returns the word ids of the source lines and of the target lines of a block.

    `vocabularies` is the result of `fit_vocabularies`. The ids are stored in `block.shared`, so that the filters
    `alignment` and `word_order` look up each word once.
    """
    if "word ids" not in block.shared:
        sides = zip(vocabularies, stems_of(block), strict=True)
        block.shared["word ids"] = [vocabulary.encode(lines) for vocabulary, lines in sides]
    ids: list[Encoded] = block.shared["word ids"]
    return ids


class BigramTable:
    """Probabilities of a word given the previous word, from the lines of `side`. For `boundary`, see `bigrams_of`.

    Seen bigrams give a part of their counts to unseen bigrams (absolute discounting, Ney et al. 1994).
    """

    def __init__(self, side: Encoded, boundary: int) -> None:
        bigrams, _ = bigrams_of(side, boundary)
        first, second = bigrams
        size = boundary + 1
        self._size, self._total = size, bigrams.shape[1]
        self._keys, self._counts = np.unique(first * size + second, return_counts=True)
        self._first, self._second = (np.bincount(words, minlength=size) for words in bigrams)
        self._followers = np.bincount(self._keys // size, minlength=size)

    def log_ratios(self, bigrams: Counts) -> npt.NDArray[np.float64]:
        """Returns log(p(second | first) / p(second)) for each bigram, in nats."""
        first, second = bigrams
        keys = first * self._size + second
        entries = np.searchsorted(self._keys, keys)
        known = np.append(self._keys, -1)[entries] == keys
        counts = np.where(known, np.append(self._counts, 0)[entries], 0)
        occurrences = np.maximum(self._first[first], 1)
        unigrams = self._unigrams(second)
        unseen = np.where(self._first[first] > 0, DISCOUNT * self._followers[first] / occurrences, 1)
        ratios: npt.NDArray[np.float64] = np.log(np.maximum(counts - DISCOUNT, 0) / occurrences / unigrams + unseen)
        return ratios

    def log_probabilities(self, bigrams: Counts) -> npt.NDArray[np.float64]:
        """Returns log(p(second | first)) for each bigram, in nats."""
        log_probabilities: npt.NDArray[np.float64] = self.log_ratios(bigrams) + np.log(self._unigrams(bigrams[1]))
        return log_probabilities

    def _unigrams(self, words: Counts) -> npt.NDArray[np.float64]:
        """Returns p(word), with 0.5 added to each count."""
        probabilities: npt.NDArray[np.float64] = (self._second[words] + 0.5) / (self._total + 0.5 * self._size)
        return probabilities


def known_words(side: Encoded) -> Counts:
    """Returns the number of words of each line that are not rare."""
    return np.bincount(side.sentence_of_id[side.ids > 0], minlength=len(side.lengths))


def bigrams_of(side: Encoded, boundary: int) -> tuple[Counts, Counts]:
    """Returns the bigrams [2, bigrams] of all lines and the index of the line of each bigram [bigrams].

    The id `boundary` stands before and after each line. Bigrams with the id 0 (a rare word) are left out.
    """
    padded = np.insert(side.ids, np.concatenate((side.starts, side.starts + side.lengths)), boundary)
    row = np.repeat(np.arange(len(side.lengths)), side.lengths + 2)
    ends = np.cumsum(side.lengths + 2) - 1
    inside = np.ones(len(padded), np.bool_)
    inside[ends] = False
    first = np.flatnonzero(inside)
    bigrams = np.stack((padded[first], padded[first + 1]))
    known = (bigrams > 0).all(0)
    return bigrams[:, known], row[first][known]
