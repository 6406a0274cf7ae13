"""The words of a block of pairs, and which words the two sides of a pair have in common, for all pairs at once."""

from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.texts import CODE_POINTS, LOWER, SPACE, UPPER, Counts, Keys, Mask, Side, TextBlock

PART = 1 << 16  # words are hashed in parts of about this many characters, which fit into the CPU cache
BASE = 0x9E3779B97F4A7C15  # an odd number, which has an inverse modulo 2^64
ROW = np.uint64(0xD6E8FEB86659FD93)


class Words(NamedTuple):
    """The words of one side: the characters between white space, as in `str.split`."""

    rows: Counts  # [words] index of the line of each word
    starts: Counts  # [words] position of the first character in the text of the side
    ends: Counts  # [words] position after the last character
    hashes: Keys  # [words] equal for equal words of a pair
    lower: Mask  # [words] `str.islower` of each word
    common: Mask  # [words] whether the opposite side of the pair has the same word
    total: Counts  # [lines] number of words
    distinct: Counts  # [lines] number of different words
    distinct_lower: Counts  # [lines] number of different words in lower case


class PairWords(NamedTuple):
    """The words of both sides, and the number of different words that both sides of each pair have [pairs]."""

    sides: tuple[Words, Words]
    common: Counts
    common_lower: Counts


def pair_words(block: TextBlock) -> PairWords:
    """Returns the words of all pairs. Several filters share the result.

    Words are compared by hashes of 64 bits. Two different words of a pair have the same hash with a probability of
    less than 1e-15.
    """
    if "words" not in block.shared:
        block.shared["words"] = _pair_words(block)
    words: PairWords = block.shared["words"]
    return words


def _pair_words(block: TextBlock) -> PairWords:
    spans = [_spans(side) for side in block.sides]
    rows = [np.repeat(np.arange(len(block)), each.total) for each in spans]
    hashes = np.concatenate([each.hashes for each in spans])
    row = np.concatenate(rows)
    hashes += row.astype(np.uint64) * ROW  # equal words of different pairs have different hashes
    lower = np.concatenate([each.lower for each in spans])
    order = np.argsort(hashes)
    # The beginnings of the groups of equal words of a pair.
    first = np.flatnonzero(np.diff(hashes[order], prepend=~hashes[order[:1]]))
    sides = np.where(order < len(spans[0].starts), 1, 2).astype(np.uint8)  # bits
    sides = np.bitwise_or.reduceat(sides, first) if len(first) else sides
    common = np.empty(len(order), np.bool_)
    common[order] = np.repeat(sides == 3, np.diff(first, append=len(order)))
    kinds = row[order[first]] * 8 + lower[order[first]] * 4 + sides
    counts = np.bincount(kinds, minlength=8 * len(block)).reshape(-1, 2, 4)  # pairs, lower, sides
    distinct, distinct_lower = counts.sum(1), counts[:, 1]
    hashes_of, common_of = (np.split(each, [len(spans[0].starts)]) for each in (hashes, common))
    source, target = (
        Words(rows[side], spans[side].starts, spans[side].ends, hashes_of[side], spans[side].lower, common_of[side],
              spans[side].total,
              distinct[:, side + 1] + distinct[:, 3], distinct_lower[:, side + 1] + distinct_lower[:, 3])
        for side in (0, 1)
    )  # fmt: skip
    return PairWords((source, target), distinct[:, 3], distinct_lower[:, 3])


class Spans(NamedTuple):
    """The words of one side: positions, hashes, cases (`lower`), and the number of words of each line (`total`)."""

    starts: Counts
    ends: Counts
    hashes: Keys
    lower: Mask
    total: Counts


def _spans(side: Side) -> Spans:
    kinds = side.kinds
    space = kinds & SPACE != 0
    before = np.append(True, space)[:-1]
    starts, ends = np.flatnonzero(~space & before), np.flatnonzero(space & ~before)
    total = np.diff(np.searchsorted(starts, side.ends), prepend=0)
    if not len(starts):
        return Spans(starts, ends, np.empty(0, np.uint64), np.empty(0, np.bool_), total)
    signs = np.bitwise_or.reduceat(kinds, starts)
    hashes = np.concatenate([
        _hashes(side.codes[starts[first] : ends[last - 1]], starts[first:last] - starts[first])
        for first, last in pairwise(np.unique(np.searchsorted(starts, [*range(0, len(kinds), PART), len(kinds)])))
    ])  # fmt: skip
    return Spans(starts, ends, hashes, signs & (LOWER | UPPER) == LOWER, total)


def _hashes(codes: npt.NDArray[np.uint32], starts: Counts) -> Keys:
    """Returns a hash of each word: the sum of number * BASE ** position modulo 2^64 over the characters of the word."""
    powers, inverses = _powers(max(2 * PART, 1 << len(codes).bit_length()))
    values = _numbers().take(codes, mode="clip")
    values *= powers[: len(values)]
    return np.add.reduceat(values, starts) * inverses[starts]


@cache
def _numbers() -> Keys:
    """Returns a random number for each code point, and 0 for white space."""
    numbers = np.random.default_rng(20_240_229).integers(0, 1 << 64, CODE_POINTS, np.uint64)
    numbers[[code for code in range(1 << 14) if chr(code).isspace()]] = 0
    return numbers


@cache
def _powers(size: int) -> tuple[Keys, Keys]:
    """Returns the first powers of `BASE` and of its inverse modulo 2^64."""
    base = np.array([[BASE], [pow(BASE, -1, 1 << 64)]], np.uint64)
    powers = np.cumprod(np.column_stack((np.ones(2, np.uint64), np.repeat(base, size, 1))), 1, dtype=np.uint64)
    return powers[0], powers[1]


def without(side: Side, words: Words, removed: Mask) -> list[str]:
    """Returns the lines of a side without the words of the mask `removed`.

    In a changed line, one space separates the words.
    """
    affected = np.bincount(words.rows[removed], minlength=len(side)) > 0
    if not affected.any():
        return list(side.lines)
    codes = side.codes.copy()
    changed = affected[words.rows]  # words of changed lines
    lengths = np.diff(words.starts, append=len(codes))
    kept = np.concatenate((np.ones(int(words.starts[0]), np.bool_), np.repeat(~removed, lengths)))
    kept &= side.kinds & SPACE == 0
    kept |= np.repeat(~affected, side.characters + 1)
    spaced = np.flatnonzero(changed & ~removed)
    kept[words.ends[spaced]] = True
    last = np.append(words.rows[spaced][1:] != words.rows[spaced][:-1], True)[: len(spaced)]
    codes[words.ends[spaced]] = np.where(last, ord("\n"), ord(" "))
    emptied = affected & (np.bincount(words.rows[spaced], minlength=len(side)) == 0)
    kept[side.ends[emptied] - 1] = True
    return codes[kept].tobytes().decode("utf-32-le").split("\n")[:-1]
