"""IBM model 1: translation probabilities of words, learned from sentence pairs without word alignments.

Brown et al. 1993, "The Mathematics of Statistical Machine Translation", section 4.1. Words are integers, such as the
ids of pieces. Only pairs of words that occur together in some sentence pair have an entry, so the size of the table
grows with the text and not with the product of the vocabulary sizes. For the other direction, exchange source and
target.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nmtkit.jobs import progress
from nmtkit.text.encoded import Encoded, ranges, starts_of

BLOCK_LINKS = 1 << 20  # number of links in a block; several arrays of this length are in memory
# number of links whose `IndexedLinks` stay in memory (4 bytes for each link); each iteration computes the others
KEPT_LINKS = 1 << 28
ITERATIONS = 5  # iterations of the EM algorithm, after a first pass that collects the entries of the table
FLOOR = 1e-7  # probability of a pair of words without an entry

LinkKeys = npt.NDArray[np.int64]

# A link connects a target word with a source word of its sentence pair, or with the NULL word. The key of a link is
# source * targets + target, where `source` and `target` are ids, and `targets` is the size of the target vocabulary.


class BlockLinks(NamedTuple):
    """The links of consecutive sentence pairs."""

    first: int  # index of the first pair
    last: int  # index of the last pair + 1
    keys: LinkKeys  # keys of all links, grouped by target word; the first link of a target word is the link with NULL
    starts: LinkKeys  # index of the first link of each target word
    widths: LinkKeys  # number of links of each target word


class IndexedLinks(NamedTuple):
    """The links of consecutive sentence pairs, and the indices of their entries in the table."""

    last: int  # index of the last pair + 1
    entries: npt.NDArray[np.int32]  # indices of the table entries that the links use, ascending, each once
    position: npt.NDArray[np.int32]  # index in `entries` of the entry of each link
    starts: LinkKeys  # index of the first link of each target word
    widths: LinkKeys  # number of links of each target word


def blocks(source: Encoded, target: Encoded, targets: int, null: int, first: int = 0) -> Iterator[BlockLinks]:
    """Yields the links of the pairs from pair `first` on, in blocks of about `BLOCK_LINKS` links.

    Blocks without target words are left out. `targets` is the size of the target vocabulary, and `null` the id of NULL.
    """
    widths, lengths = source.lengths + 1, target.lengths
    ends = np.cumsum(widths * lengths)
    source_ends, target_ends = np.cumsum(widths - 1), np.cumsum(lengths)
    while first < len(ends):
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + BLOCK_LINKS, side="right")))
        width, length = widths[first:last], lengths[first:last]
        starts = starts_of(width)
        bounds = [(int(each[first - 1]) if first else 0, int(each[last - 1])) for each in (source_ends, target_ends)]
        ids = source.ids[slice(*bounds[0])].astype(np.int64)
        words = np.insert(ids, starts - np.arange(len(starts)), null) * targets
        of_target = np.repeat(width, length)
        keys = words[ranges(np.repeat(starts, length), of_target)]
        keys += np.repeat(target.ids[slice(*bounds[1])].astype(np.int64), of_target)
        if len(keys):
            yield BlockLinks(first, last, keys, starts_of(of_target), of_target)
        first = last


@dataclass(frozen=True, eq=False)
class LexicalTable:
    """Translation probabilities p(target word | source word), and p(target word | NULL)."""

    sources: int  # size of the source vocabulary; the id `sources` is the NULL word
    targets: int
    keys: LinkKeys  # [entries], ascending: source * targets + target
    probabilities: npt.NDArray[np.float64]  # [entries]

    @staticmethod
    def train(
        source: Encoded, target: Encoded, sources: int, targets: int, iterations: int = ITERATIONS
    ) -> "LexicalTable":
        """Trains a table by maximum likelihood. The EM algorithm starts from uniform probabilities.

        `sources` and `targets` are the sizes of the vocabularies. Raises ValueError if the number of sentences differs,
        if the lengths do not add up to the number of ids, or if an id is outside its vocabulary.
        """
        check(source, target, sources, targets)
        keys = np.empty(0, np.int64)
        pending: list[LinkKeys] = []
        for block in blocks(source, target, targets, sources):
            progress.advance(block.last - block.first)
            pending.append(_distinct(np.sort(block.keys)))
            if sum(map(len, pending)) > max(len(keys), BLOCK_LINKS):
                keys, pending = _distinct(np.sort(np.concatenate([keys, *pending]))), []
        keys = _distinct(np.sort(np.concatenate([keys, *pending])))
        word = keys // max(targets, 1)
        probabilities = np.ones(len(keys))
        kept: list[IndexedLinks] = []
        for _ in range(iterations):
            counts, first = np.zeros(len(keys)), 0
            for links in _indexed(keys, source, target, targets, sources, kept):
                share = probabilities[links.entries][links.position]
                share /= np.repeat(np.add.reduceat(share, links.starts), links.widths)
                counts[links.entries] += np.bincount(links.position, share)
                progress.advance(links.last - first)
                first = links.last
            probabilities = counts / np.bincount(word, counts)[word]
        return LexicalTable(sources, targets, keys, probabilities)

    def best(self, k: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.float64]]:
        """Returns the `k` most probable target words of each source word: source ids, target ids and probabilities.

        The NULL word has the source id `sources`. Entries are sorted by source id, then by descending probability, then
        by target id.
        """
        words, others = np.divmod(self.keys, max(self.targets, 1))
        first = np.searchsorted(words, words)  # `words` is ascending, before and after the sort
        rows = np.lexsort((-self.probabilities, words))[np.arange(len(words)) - first < k]
        return words[rows], others[rows], self.probabilities[rows]

    def of_keys(self, keys: LinkKeys) -> npt.NDArray[np.float64]:
        """Returns the probability of each key, or `FLOOR` for a key without an entry."""
        if not len(self.keys):
            return np.full(len(keys), FLOOR)
        entry = np.searchsorted(self.keys, keys)
        has_entry = self.keys.take(entry, mode="clip") == keys
        return np.where(has_entry, self.probabilities.take(entry, mode="clip"), FLOOR)


def word_probabilities(tables: Sequence[LexicalTable], source: Encoded, target: Encoded) -> npt.NDArray[np.float64]:
    """Computes two probabilities of each word of the target sentences, with each table.

    Returns an array [tables, 2, target words], where the words of all target sentences are concatenated. The first
    probability is p(word | source sentence): the mean of p(word | source word) over the words of the source sentence
    and NULL. The second probability is p(word | NULL). A pair of words that is not in a table has the probability
    `FLOOR`. All tables must have the same vocabularies. Raises ValueError like `check`.
    """
    sources, targets = tables[0].sources, tables[0].targets
    check(source, target, sources, targets)
    parts = [np.empty((len(tables), 2, 0))]
    for block in blocks(source, target, targets, sources):
        distinct, index = _distinct_with_index(block.keys)
        probabilities = [table.of_keys(distinct)[index] for table in tables]
        # The first link of each target word is its link with NULL.
        parts.append(np.array([(np.add.reduceat(p, block.starts) / block.widths, p[block.starts])
                               for p in probabilities]))  # fmt: skip
    return np.concatenate(parts, 2)


def check(source: Encoded, target: Encoded, sources: int, targets: int) -> None:
    """Raises ValueError unless both sides have the same number of sentences, and all ids are in the vocabularies.

    The lengths of the sentences of a side must add up to the number of ids. `sources` and `targets` are the sizes of
    the vocabularies.
    """
    if len(source.lengths) != len(target.lengths):
        raise ValueError(
            f"{len(source.lengths):,} source sentences and {len(target.lengths):,} target sentences are not pairs"
        )
    for name, side, size in (("source", source, sources), ("target", target, targets)):
        if int(side.lengths.sum()) != len(side.ids):
            raise ValueError(f"the {name} lengths add up to {int(side.lengths.sum()):,}, not to {len(side.ids):,} ids")
        for start in range(0, len(side.ids), BLOCK_LINKS):
            part = side.ids[start : start + BLOCK_LINKS]
            if int(part.min()) < 0 or int(part.max()) >= size:
                raise ValueError(f"{name} ids must be from 0 to {size - 1:,}, not {part.min()} to {part.max()}")


def _distinct(ordered: LinkKeys) -> LinkKeys:
    """Returns the distinct numbers of an ascending array.

    `np.unique` of NumPy 2.4 was 9 times as slow as this function with `np.sort`.
    """
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def _distinct_with_index(keys: LinkKeys) -> tuple[LinkKeys, npt.NDArray[np.int32]]:
    """Returns the distinct numbers of an array, ascending, and the index of each element among these numbers."""
    bits = len(keys).bit_length()
    packed = np.sort(keys << bits | np.arange(len(keys)))  # number and position are packed into 64 bits
    ordered = packed >> bits
    new = np.append(True, ordered[1:] != ordered[:-1])
    index = np.empty(len(keys), np.int32)
    index[packed & (1 << bits) - 1] = np.cumsum(new) - 1
    return ordered[new], index


def _indexed(
    keys: LinkKeys, source: Encoded, target: Encoded, targets: int, null: int, kept: list[IndexedLinks]
) -> Iterator[IndexedLinks]:
    """Yields all links with their entries, in blocks. Appends the first blocks to `kept`, for the next iteration."""
    yield from kept
    number = sum(len(links.position) for links in kept)
    for block in blocks(source, target, targets, null, kept[-1].last if kept else 0):
        distinct, index = _distinct_with_index(block.keys)
        entries = np.searchsorted(keys, distinct).astype(np.int32)
        number += len(index)
        links = IndexedLinks(block.last, entries, index, block.starts, block.widths)
        if number <= KEPT_LINKS:
            kept.append(links)
        yield links
