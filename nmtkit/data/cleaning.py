"""Which training pairs are dropped, and why. A pair is counted under the first reason of `REASONS` that holds."""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

LONG_LINE = "over-long line"
NUL = "NUL byte"
CONTROL = "control character"
EMPTY = "empty side"
EQUAL = "source equals target"
SHORT = "too few pieces"
LONG = "too many pieces"
RATIO = "length ratio"
LEAKED = "also in valid or test"
DUPLICATE = "duplicate pair"
REASONS = (LONG_LINE, NUL, CONTROL, EMPTY, EQUAL, SHORT, LONG, RATIO, LEAKED, DUPLICATE)

EXAMPLES = 5  # dropped pairs shown for each reason
EXAMPLE_CHARACTERS = 200

# C0 but for tab, line feed and carriage return; delete; C1 as UTF-8
_CONTROL = re.compile(rb"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]")

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What makes a training pair one to drop. Pieces are counted without eos and tag."""

    min_len: int = 1
    max_len: int = 256
    max_ratio: float = 9.0
    max_line_bytes: int = 16_384
    drop_control: bool = False
    drop_equal: bool = False
    drop_leaked: bool = False
    drop_duplicates: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.min_len <= self.max_len:
            raise ValueError(f"--min-len {self.min_len} and --max-len {self.max_len} leave no pair")
        if self.max_ratio < 1:
            raise ValueError(f"--max-ratio {self.max_ratio} is less than 1; it is the longer side over the shorter")
        if self.max_line_bytes < 1:
            raise ValueError(f"--max-line-bytes {self.max_line_bytes} leaves no pair")

    def drops(self, reason: str) -> bool:
        """Whether pairs with this reason are dropped, or only counted."""
        return {
            CONTROL: self.drop_control,
            EQUAL: self.drop_equal,
            LEAKED: self.drop_leaked,
            DUPLICATE: self.drop_duplicates,
        }.get(reason, True)


@dataclass(frozen=True)
class Example:
    """A pair that was dropped, or would be if that were asked for; text is cut at EXAMPLE_CHARACTERS."""

    place: str  # file:line
    source: str
    target: str


@dataclass
class Findings:
    """How many pairs each reason holds for, and the first of them."""

    dropped: dict[str, int] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)  # that stay, as nobody asked to drop them
    examples: dict[str, list[Example]] = field(default_factory=dict)

    def add(self, other: "Findings") -> None:
        """Adds what was found further on in the text."""
        for mine, theirs in ((self.dropped, other.dropped), (self.counted, other.counted)):
            for reason, count in theirs.items():
                mine[reason] = mine.get(reason, 0) + count
        for reason, examples in other.examples.items():
            self.examples[reason] = (self.examples.get(reason, []) + examples)[:EXAMPLES]


class LineBytes:
    """The lines of one side of a block, as bytes, each with its \\n."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")) + 1
        self.starts = np.concatenate((np.zeros(1, np.int64), self.ends[:-1]))

    def line(self, row: int) -> bytes:
        return self.text[self.starts[row] : self.ends[row] - 1]

    def rows_of(self, positions: list[int]) -> npt.NDArray[np.int64]:
        """The lines these bytes are in."""
        return np.searchsorted(self.ends, np.array(positions, np.int64), side="right")

    def with_nul(self) -> Mask:
        mask = np.zeros(len(self.ends), np.bool_)
        if b"\0" in self.text:
            mask[self.rows_of([match.start() for match in re.finditer(b"\0", self.text)])] = True
        return mask

    def with_control(self) -> Mask:
        mask = np.zeros(len(self.ends), np.bool_)
        low = np.count_nonzero(np.frombuffer(self.text, np.uint8) < 0x20)
        if low > len(self.ends) or b"\x7f" in self.text or b"\xc2" in self.text:  # else there is nothing to search for
            mask[self.rows_of([match.start() for match in _CONTROL.finditer(self.text)])] = True
        return mask


def text_masks(source: LineBytes, target: LineBytes, rules: Rules) -> dict[str, Mask]:
    """Reasons that can be told from the text: reason -> the lines it holds for."""
    sizes = source.ends - source.starts - 1, target.ends - target.starts - 1
    equal = sizes[0] == sizes[1]
    for row in np.flatnonzero(equal).tolist():
        equal[row] = source.line(row) == target.line(row)
    return {
        LONG_LINE: np.maximum(*sizes) > rules.max_line_bytes,
        NUL: source.with_nul() | target.with_nul(),
        CONTROL: source.with_control() | target.with_control(),
        EQUAL: equal,
    }


def piece_masks(source_lengths: npt.NDArray[Any], target_lengths: npt.NDArray[Any], rules: Rules) -> dict[str, Mask]:
    """Reasons that can be told from the number of pieces, eos included in `source_lengths` and `target_lengths`."""
    shorter, longer = np.minimum(source_lengths, target_lengths) - 1, np.maximum(source_lengths, target_lengths) - 1
    return {
        EMPTY: shorter == 0,
        SHORT: shorter < rules.min_len,
        LONG: longer > rules.max_len,
        RATIO: longer > rules.max_ratio * shorter,
    }


def first_reasons(masks: dict[str, Mask], rules: Rules) -> tuple[Mask, dict[str, npt.NDArray[np.int64]]]:
    """Which rows stay, and for each reason the rows it is the first to hold for."""
    open_rows = ~np.zeros_like(next(iter(masks.values())))
    keep = open_rows.copy()
    rows = {}
    for reason in REASONS:
        if reason in masks:
            here = masks[reason] & keep
            if here.any():
                rows[reason] = np.flatnonzero(here)
                if rules.drops(reason):
                    keep &= ~here
    return keep, rows
