"""Decides which training pairs `preprocess` drops, and counts the pairs for each reason of `REASONS`."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.data.corpora.dropping import EXAMPLES, Mask, PairExample, ReasonCounts, first_reasons
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.parallel_corpora import ParallelCorpus

LONG_LINE = "over-long line"
NUL = "NUL byte"
CONTROL = "control character"
EMPTY = "empty side"
EQUAL = "source equals target"
SHORT = "too few pieces"
LONG = "too many pieces"
RATIO = "length ratio"
OVERLAP = "also in valid or test"
DUPLICATE = "duplicate pair"
REASONS = (LONG_LINE, NUL, CONTROL, EMPTY, EQUAL, SHORT, LONG, RATIO, OVERLAP, DUPLICATE)

_NUL = re.compile(b"\0")
# control characters: C0 (except NUL, tab, line feed and carriage return), DEL (0x7f), and C1 in UTF-8
_CONTROL = re.compile(rb"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]")


def drops(reason: str, config: PreprocessConfig) -> bool:
    """Returns True if pairs with this reason are dropped, False if they are only counted."""
    optional = {
        CONTROL: config.drop_control,
        EQUAL: config.drop_equal,
        OVERLAP: config.drop_overlap,
        DUPLICATE: config.drop_duplicates,
    }
    return optional.get(reason, True)


def in_order(counts: dict[str, int]) -> dict[str, int]:
    """Returns the nonzero counts, in the order of `REASONS`."""
    return {reason: counts[reason] for reason in REASONS if counts.get(reason)}


class LineBytes:
    """The lines of one side of a block, as bytes. Every line ends in \\n."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")) + 1
        self.starts = np.concatenate((np.zeros(1, np.int64), self.ends[:-1]))

    def line(self, row: int) -> bytes:
        return self.text[self.starts[row] : self.ends[row] - 1]

    def matches(self, pattern: re.Pattern[bytes]) -> Mask:
        """Returns a mask of the lines that contain a match of `pattern`. A match must not contain a line feed."""
        mask = np.zeros(len(self.ends), np.bool_)
        positions = np.array([match.start() for match in pattern.finditer(self.text)], np.int64)
        mask[np.searchsorted(self.ends, positions, side="right")] = True
        return mask

    def with_control(self) -> Mask:
        low = np.count_nonzero(np.frombuffer(self.text, np.uint8) < 0x20)
        if low <= len(self.ends) and b"\x7f" not in self.text and b"\xc2" not in self.text:
            # here, every byte below 0x20 is a line feed, so the slow search is not needed
            return np.zeros(len(self.ends), np.bool_)
        return self.matches(_CONTROL)


def text_masks(source: LineBytes, target: LineBytes, config: PreprocessConfig) -> dict[str, Mask]:
    """Returns a mask of lines for each reason that depends on the text."""
    sizes = source.ends - source.starts - 1, target.ends - target.starts - 1
    equal = sizes[0] == sizes[1]
    for row in np.flatnonzero(equal).tolist():
        equal[row] = source.line(row) == target.line(row)
    return {
        LONG_LINE: np.maximum(*sizes) > config.max_line_bytes,
        NUL: source.matches(_NUL) | target.matches(_NUL),
        CONTROL: source.with_control() | target.with_control(),
        EQUAL: equal,
    }


def piece_masks(
    source_lengths: npt.NDArray[Any], target_lengths: npt.NDArray[Any], config: PreprocessConfig
) -> dict[str, Mask]:
    """Returns a mask of lines for each reason that depends on the number of pieces.

    The lengths count eos. The limits in `config` do not count eos.
    """
    shorter, longer = np.minimum(source_lengths, target_lengths) - 1, np.maximum(source_lengths, target_lengths) - 1
    return {
        EMPTY: shorter == 0,
        SHORT: shorter < config.min_len,
        LONG: longer > config.max_len,
        RATIO: longer > config.max_ratio * shorter,
    }


def kept_pairs(
    masks: dict[str, Mask], lines: Sequence[LineBytes], first_line: int, corpus: ParallelCorpus,
    config: PreprocessConfig,
) -> tuple[Mask, ReasonCounts]:  # fmt: skip
    """Returns a mask [pairs] of the pairs to keep, and counts by reason.

    The mask [pairs] of a reason is true for the pairs to which the reason applies. Reasons are applied in the order of
    `REASONS`. A pair is counted under every reason that applies, up to and including the first reason that drops the
    pair. `lines` are the two sides.

    Raises ValueError if `config.strict` is true and a pair would be dropped. The message names the first such pair.
    """
    ordered = [reason for reason in REASONS if reason in masks]
    nothing = np.zeros_like(masks[ordered[0]])
    first = first_reasons([masks[reason] if drops(reason, config) else nothing for reason in ordered], len(nothing))
    keep = first < 0
    if config.strict and not keep.all():
        row = int(np.argmin(keep))
        raise ValueError(_strict_error(corpus, first_line + row, ordered[first[row]]))
    counts = ReasonCounts()
    for index, reason in enumerate(ordered):
        matching = np.flatnonzero(masks[reason] & (keep | (first >= index)))
        if len(matching):
            examples = [
                PairExample.of(f"{corpus.names[0]}:{first_line + row}", *(side.line(row) for side in lines))
                for row in matching[:EXAMPLES].tolist()
            ]
            counts.count(reason, len(matching), examples, drops=drops(reason, config))
    return keep, counts


def over_long_pair(sizes: Sequence[int], line: int, corpus: ParallelCorpus, config: PreprocessConfig) -> ReasonCounts:
    """Returns the counts of a single pair that is too long to be read. `sizes` are the bytes of both sides.

    Raises ValueError if `config.strict` is true.
    """
    if config.strict:
        raise ValueError(_strict_error(corpus, line, LONG_LINE))
    source, target = (f"({size:,} bytes)" for size in sizes)
    counts = ReasonCounts()
    counts.count(LONG_LINE, 1, [PairExample(f"{corpus.names[0]}:{line}", source, target)], drops=True)
    return counts


def _strict_error(corpus: ParallelCorpus, line: int, reason: str) -> str:
    return f"{corpus.position(line)}: {reason}; --strict does not allow pairs to be dropped"
