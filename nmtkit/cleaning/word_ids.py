"""Words of lines as integers, for the filters that learn statistics of words from the sample.

A sample has few inflected forms of a word, so the first 6 characters represent a word ("stem").
"""

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.filters import FilterContext
from nmtkit.cleaning.texts import TextBlock

Integers = npt.NDArray[np.int64]
# A word, a number, or a character of a language without spaces between words.
_WORD = re.compile(r"[\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\u0e00-\u0e7f]|[^\W\d_]+|\d+")
STEM = 6  # characters
# Minimum number of occurrences of a stem in the sample, about 5 in each half. Rarer stems align by chance.
MIN_COUNT = 10


class WordIds(NamedTuple):
    """Ids of the words of all lines, concatenated, and the number of words of each line. Rare words have the id 0."""

    ids: Integers
    lengths: Integers

    def rows(self, rows: Integers) -> "WordIds":
        """Returns the lines with the indices `rows`, in this order."""
        starts = np.cumsum(self.lengths) - self.lengths
        lengths = self.lengths[rows]
        first = np.cumsum(lengths) - lengths
        index = np.repeat(starts[rows] - first, lengths) + np.arange(int(lengths.sum()))
        return WordIds(self.ids[index], lengths)

    def known(self) -> Integers:
        """Returns the number of words of each line that are not rare."""
        row = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return np.bincount(row[self.ids > 0], minlength=len(self.lengths))


def stems(line: str) -> list[str]:
    """Returns the stem of each word of a line. The stem is the first 6 characters of the case-folded word.

    Numbers are words too. Each Chinese, Japanese or Thai character is a word.
    """
    return [word[:STEM] for word in _WORD.findall(line.casefold())]


class Vocabulary:
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

    def encode(self, lines: list[list[str]]) -> WordIds:
        """Returns the ids of the stems of all lines. `lines` has a list of stems for each line; rare stems get 0."""
        get = self._ids.get
        ids = [get(stem, 0) for line in lines for stem in line]
        return WordIds(np.array(ids, np.int64), np.array([len(line) for line in lines], np.int64))


def stems_of(block: TextBlock) -> list[list[list[str]]]:
    """Returns the stems of a block: [sides][lines][words].

    The block keeps the stems, because computing stems takes more time than looking up their ids.
    """
    if "stems" not in block.shared:
        block.shared["stems"] = [[stems(line) for line in side.lines] for side in block.sides]
    lines: list[list[list[str]]] = block.shared["stems"]
    return lines


def fit_vocabularies(sample: TextBlock, context: FilterContext) -> list[Vocabulary]:
    """Returns the source vocabulary and the target vocabulary of a run of `clean`.

    The first filter that calls the function makes the vocabularies from its sample and stores them in `context.shared`.
    Later filters get the same vocabularies.
    """
    if "vocabularies" not in context.shared:
        context.shared["vocabularies"] = [Vocabulary(lines) for lines in stems_of(sample)]
    made: list[Vocabulary] = context.shared["vocabularies"]
    return made


def word_ids(block: TextBlock, vocabularies: list[Vocabulary]) -> list[WordIds]:
    """Returns the word ids of the source lines and of the target lines of a block.

    `vocabularies` is the result of `fit_vocabularies`. The ids are stored in `block.shared`, so that the filters
    `alignment` and `word_order` look up each word once.
    """
    if "word ids" not in block.shared:
        sides = zip(vocabularies, stems_of(block), strict=True)
        block.shared["word ids"] = [vocabulary.encode(lines) for vocabulary, lines in sides]
    ids: list[WordIds] = block.shared["word ids"]
    return ids
