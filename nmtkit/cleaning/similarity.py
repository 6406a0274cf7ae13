"""Finds similar pairs by MinHash and locality-sensitive hashing, with the package rensa (extra `nmtkit[data]`).

Broder 1997, "On the resemblance and containment of documents". The similarity of two texts is the Jaccard index of
their sets of character 5-grams, estimated from 128 hash values.
"""

import mmap
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nmtkit.config.extras import imported
from nmtkit.data.corpora.dropping import RowNumbers

NGRAM = 5  # characters
HASHES, SEED = 128, 1
RECALL = 0.85  # minimum probability that the index finds two texts whose similarity is exactly the limit
CHUNK = 512  # number of texts that are added to the index at once


def rensa() -> Any:
    """Imports rensa, which finds similar texts (MinHash). Raises ImportError, with the command that installs rensa."""
    return imported("rensa", need="--duplicate-similarity needs pip install 'nmtkit[data]'")


class SimilarTexts:
    """Collects texts in the file `path`. `find` searches for similar texts. Raises ImportError if rensa is missing.

    The memory holds only the hash values of distinct texts, and the position of each text.
    """

    def __init__(self, path: Path, similarity: float) -> None:
        self._index = rensa().RMinHashDeduplicator(similarity, HASHES, True, bands(similarity), SEED)
        self._path = path
        self._file = path.open("wb")
        self._lengths: array[int] = array("q")

    def add(self, texts: Sequence[str]) -> None:
        lines = [text.encode() + b"\n" for text in texts]
        self._file.write(b"".join(lines))
        self._lengths.extend(len(line) for line in lines)

    def find(self, order: RowNumbers) -> RowNumbers:
        """Returns the indexes of the texts that do not stay, in ascending order.

        `order` has the indexes of all texts, the best text first. A text stays if it is not similar to a better text
        that stays.
        """
        self._file.close()
        if not len(order):
            return order
        ends = np.cumsum(self._lengths)
        stays = np.ones(len(order), np.bool_)
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for start in range(0, len(order), CHUNK):
                rows = order[start : start + CHUNK]
                texts = (data[ends[row] - self._lengths[row] : ends[row] - 1].decode() for row in rows.tolist())
                named = [(str(row), ngrams(text)) for row, text in zip(rows.tolist(), texts, strict=True)]
                stays[rows] = self._index.add_pairs(named)
        return np.flatnonzero(~stays)


def bands(similarity: float) -> int:
    """Returns into how many bands the hash values of a text are divided. Fewer bands mean fewer comparisons.

    The index compares two texts if they have a band in which all hash values are equal. The result is the smallest
    number of 8, 16, 32 and 64 that is good enough: the index then compares two texts of this similarity with a
    probability of at least RECALL. If no number is good enough, each hash value is a band.
    """
    counts = (count for count in (8, 16, 32, 64) if 1 - (1 - similarity ** (HASHES // count)) ** count >= RECALL)
    return next(counts, HASHES)


def ngrams(text: str) -> list[str]:
    """Returns the distinct character 5-grams of a text, or the whole text if it has fewer than 5 characters."""
    return list({text[start : start + NGRAM] for start in range(max(1, len(text) - NGRAM + 1))})
