"""Filters that compare the two texts of a pair without a model."""

import re
import unicodedata
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.filters import FILTERS, Filter, FilterContext
from nmtkit.cleaning.scripts import script_counts
from nmtkit.cleaning.texts import (
    BLANK,
    CURRENCY,
    CURRENCY_SIGNS,
    DIGIT,
    LETTER,
    SEPARATOR,
    UPPER,
    Counts,
    Mask,
    Scores,
    Side,
    TextBlock,
)
from nmtkit.cleaning.words import pair_words
from nmtkit.config import Config, option
from nmtkit.data.corpora.dropping import contained
from nmtkit.data.corpora.pairs import pairs

_URL = re.compile(r"(?:https?://|www\.)[\w.-]+|[\w.+-]+@[\w-]+\.[\w.-]+", re.IGNORECASE)
_CURRENCIES = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥", "CNY": "¥", "INR": "₹", "RUB": "₽", "CHF": "CHF"}
_CURRENCY_CODE = re.compile(rf"(?:{'|'.join(_CURRENCIES)})\b")
_NUMBER = re.compile(r"\d+(?:[.,:'’\u00a0\u202f]\d+)*")
# A literal string of each pattern, and the pattern. The text is case-folded.
_BOILERPLATE = [(literal, re.compile(pattern)) for literal, pattern in (
    ("<", r"</?(?:div|span|script|style|td|tr|li|ul|nav|img|br|a href|input|form)\b[^>]*>"),
    ("javascript:", "javascript:"), ("function", r"function\s*\(\w*\)\s*\{"), ("©", "©"),
    ("(c)", r"\(c\)\s*(?:19|20)\d\d"), ("all rights reserved", r"all rights reserved\b"),
)]  # fmt: skip
_MENU = re.compile(r"[^|»›·•]{2,30}(?: [|»›·•] [^|»›·•]{2,30}){3,}")
# Random odd numbers. They give a different hash to each sequence of three words.
_SECOND, _THIRD = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _triples(codes: npt.NDArray[np.uint32], positions: Counts) -> Counts:
    """Returns a number for the three characters at each position, which is different for different characters."""
    first, second, third = (codes[positions + offset].astype(np.int64) for offset in range(3))
    return (first << 42) | (second << 21) | third


_CURRENCY_TRIPLES = [_triples(Side([code]).codes, np.zeros(1, np.int64))[0] for code in _CURRENCIES]


def _marked(rows: list[int], size: int) -> Scores:
    scores = np.zeros(size, np.float32)
    scores[rows] = 1
    return scores


@dataclass(frozen=True, kw_only=True)
class EmptyConfig(Config):
    min_characters: int = option(
        1, "drop pairs with fewer than N characters on a side; spaces do not count", min=1, max=1000
    )


@FILTERS.register("empty", EmptyConfig())
class Empty(Filter):
    """The number of characters of the shorter side, without spaces.

    A side without letters and digits counts as empty if the other side has at least 5 letters or digits.
    """

    unit = "characters"

    def __init__(self, config: EmptyConfig, context: FilterContext) -> None:
        super().__init__(config, context)
        self.lowest = config.min_characters

    def score(self, block: TextBlock) -> Scores:
        sides = [side.sums(side.kinds & BLANK == 0) for side in block.sides]
        words = [side.sums(side.kinds & LETTER) for side in block.sides]
        lost = (np.minimum(*words) == 0) & (np.maximum(*words) >= 5)
        return np.where(lost, 0, np.minimum(*sides)).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class LengthConfig(Config):
    max_characters: int = option(2000, "drop pairs with more than N characters on a side", min=10, max=1_000_000)


@FILTERS.register("length", LengthConfig())
class Length(Filter):
    """The number of characters of the longer side."""

    unit = "characters"

    def __init__(self, config: LengthConfig, context: FilterContext) -> None:
        super().__init__(config, context)
        self.highest = config.max_characters

    def score(self, block: TextBlock) -> Scores:
        return np.maximum(*(side.characters for side in block.sides)).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class LengthRatioConfig(Config):
    max_length_z: float = option(
        3.5,
        "drop pairs whose length ratio is more than X standard deviations from the median ratio of pairs of similar "
        "length",
        min=1,
        max=100,
    )


@FILTERS.register("length_ratio", LengthRatioConfig())
class LengthRatio(Filter):
    """The distance of log((target + 5) / (source + 5)) from its median, in standard deviations.

    Lengths are in characters. The standard deviation is computed from the quartiles of the sample, because noise hardly
    changes quartiles. Each class of source lengths and each class of target lengths has a median and a standard
    deviation. A pair has a distance in both classes, and the larger distance counts. Both classes are needed: a
    truncated target is unusually short for its source, but usual among pairs with the same target length, because many
    of these pairs are truncated.
    """

    unit = "standard deviations"
    classes = 12

    def __init__(self, config: LengthRatioConfig, context: FilterContext) -> None:
        super().__init__(config, context)
        self.lowest, self.highest = -config.max_length_z, config.max_length_z
        self._curves: list[npt.NDArray[np.float64]] = []  # for each side: length, median and deviation of each class

    def fit(self, sample: TextBlock) -> None:
        if len(sample) < 20:
            return
        lengths = [np.log(side.characters + 5.0) for side in sample.sides]
        ratios = lengths[1] - lengths[0]
        for each in lengths:
            order = np.argsort(each, kind="stable")
            parts = np.array_split(order, min(self.classes, max(1, len(order) // 100)))
            quartiles = np.array([np.percentile(ratios[part], (25, 50, 75)) for part in parts])
            # A normal distribution has 1.349 standard deviations between its quartiles.
            deviations = np.maximum((quartiles[:, 2] - quartiles[:, 0]) / 1.349, 0.08)
            self._curves.append(np.array([[np.median(each[part]) for part in parts], quartiles[:, 1], deviations]))

    def score(self, block: TextBlock) -> Scores:
        lengths = [np.log(side.characters + 5.0) for side in block.sides]
        result = np.zeros(len(block))
        for each, (x, medians, deviations) in zip(lengths, self._curves, strict=False):
            distance = (lengths[1] - lengths[0] - np.interp(each, x, medians)) / np.interp(each, x, deviations)
            result = np.where(np.abs(distance) > np.abs(result), distance, result)
        return result.astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class CopyConfig(Config):
    max_copied: float = option(
        0.75, "drop pairs if more than this share of the lower-case words is on both sides", above=0,
        max=1,
    )  # fmt: skip


@FILTERS.register("copy", CopyConfig())
class Copy(Filter):
    """The share of the lower-case words that are on both sides.

    The share is relative to the side with more lower-case words. The share is 0 if fewer than 3 lower-case words, or
    fewer than half of the words of the shorter side, are on both sides. Names and codes can be the same in both
    languages.

    Two equal sides can have the share 1 for other reasons. With at least 4 words, their share is 1 if more than a third
    of the words that have letter case are in lower case, or if no word has letter case. With fewer words, their share
    is 1 if a side has more than 20 characters and a character that is not ASCII.
    """

    unit = "share of words"

    def __init__(self, config: CopyConfig, context: FilterContext) -> None:
        super().__init__(config, context)
        self.highest = config.max_copied

    def score(self, block: TextBlock) -> Scores:
        pairs = pair_words(block)
        distinct = [words.distinct for words in pairs.sides]
        lower = [words.distinct_lower for words in pairs.sides]
        counts = (pairs.common > 2) & (2 * pairs.common >= np.minimum(*distinct))
        counts &= np.minimum(pairs.common_lower, np.minimum(*lower)) > 2
        scores = np.where(counts, pairs.common_lower / np.maximum(1, np.maximum(*lower)), 0).astype(np.float32)
        equal = block.sides[0].keys == block.sides[1].keys
        for row in np.flatnonzero(equal).tolist():
            line = block.sides[0].lines[row]
            words = line.split()
            if len(words) > 3:
                with_case = [word for word in words if word.lower() != word.upper()]
                if 3 * sum(map(str.islower, with_case)) > len(with_case) or not with_case:
                    scores[row] = 1
            elif len(line) > 20 and not line.isascii():
                scores[row] = 1
        return scores


@dataclass(frozen=True, kw_only=True)
class ScriptConfig(Config):
    min_script: float = option(
        0.5, "drop pairs if less than this share of the letters of a side is in the usual scripts of this side", min=0,
        max=1,
    )  # fmt: skip


@FILTERS.register("script", ScriptConfig())
class Script(Filter):
    """The share of the letters of a side in the usual scripts of this side. The smaller share of both sides counts.

    A script is usual if it has at least 5 % of the letters of this side in the sample. The share of a line with fewer
    than 8 letters is 1, because names and units are often in another script.
    """

    unit = "share of letters"

    def __init__(self, config: ScriptConfig, context: FilterContext) -> None:
        super().__init__(config, context)
        self.lowest = config.min_script
        self._usual: list[Mask] = []

    def fit(self, sample: TextBlock) -> None:
        for side in sample.sides:
            totals = script_counts(side).sum(0)
            self._usual.append(totals >= 0.05 * max(1, totals.sum()))

    def score(self, block: TextBlock) -> Scores:
        shares = np.ones(len(block), np.float32)
        for side, usual in zip(block.sides, self._usual, strict=True):
            counts = script_counts(side)
            letters = counts.sum(1)
            share = counts[:, usual].sum(1) / np.maximum(letters, 1)
            shares = np.where(letters < 8, shares, np.minimum(shares, share))
        return shares.astype(np.float32)


def _contradict(first: frozenset[str], second: frozenset[str]) -> bool:
    """Returns whether each set has an element that the other set lacks."""
    return bool(first - second) and bool(second - first)


@dataclass(frozen=True, kw_only=True)
class NumbersConfig(Config):
    pass


@FILTERS.register("numbers", NumbersConfig())
class Numbers(Filter):
    """1 if each side has a number that the other side lacks, otherwise 0.

    Therefore, a side may have a word in place of a number. Separators, leading zeros and trailing zeros do not count,
    so that "1,000.50" equals "1.000,5". Different forms of a decade ("1980s", "80er") or an hour ("3 pm", "15") are
    equal.
    """

    highest = 0.5

    def score(self, block: TextBlock) -> Scores:
        rows = []
        for row in np.flatnonzero(block.sides[0].has(DIGIT) & block.sides[1].has(DIGIT)).tolist():
            numbers = [_NUMBER.findall(side.lines[row]) for side in block.sides]
            if numbers[0] == numbers[1]:
                continue
            first, second = (set(map(_digits, each)) for each in numbers)
            if self._differ(first, second, block, row):
                rows.append(row)
        return _marked(rows, len(block))

    @staticmethod
    def _differ(first: set[str], second: set[str], block: TextBlock, row: int) -> bool:
        if not _contradict(frozenset(first), frozenset(second)):
            return False
        runs = [re.findall(r"\d+", unicodedata.normalize("NFKC", side.lines[row])) for side in block.sides]
        if sorted(runs[0]) == sorted(runs[1]) or "".join(runs[0]) == "".join(runs[1]):
            return False
        left, right = first - second, second - first
        return not all(any(_alike(a, b) for b in right) for a in left)


def _digits(number: str) -> str:
    """Returns the digits of a number as ASCII, without separators and without zeros at both ends."""
    digits = "".join(filter(str.isdecimal, number))
    if not digits.isascii():
        digits = "".join(str(unicodedata.decimal(digit)) for digit in digits)
    return digits.strip("0") or "0"


def _alike(first: str, second: str) -> bool:
    if (len(first) == 4 and first.endswith(second)) or (len(second) == 4 and second.endswith(first)):
        return True  # 1985 and 85
    if {len(first), len(second)} == {3, 1} and (first.endswith(second) or second.endswith(first)):
        return True  # 1980 and 80, whose zeros at the end were removed: 198 and 8
    values = sorted((int(first), int(second)))
    return values[1] <= 24 and values[1] - values[0] == 12


@dataclass(frozen=True, kw_only=True)
class UrlsConfig(Config):
    pass


@FILTERS.register("urls", UrlsConfig())
class Urls(Filter):
    """1 if both sides have web or e-mail addresses and no host or address is the same, otherwise 0."""

    highest = 0.5

    def score(self, block: TextBlock) -> Scores:
        first, second = (side.rows_with("//", "www.", "@") for side in block.sides)
        rows = []
        for row in sorted(set(first) & set(second)):
            hosts = [set(map(_host, _URL.findall(side.lines[row]))) for side in block.sides]
            if all(hosts) and not hosts[0] & hosts[1]:
                rows.append(row)
        return _marked(rows, len(block))


def _host(address: str) -> str:
    return re.sub(r"^(?:https?://)?(?:www\.)?", "", address.lower()).rstrip(".-")


@dataclass(frozen=True, kw_only=True)
class CurrenciesConfig(Config):
    pass


@FILTERS.register("currencies", CurrenciesConfig())
class Currencies(Filter):
    """1 if both sides have currencies and no currency is the same, otherwise 0."""

    highest = 0.5

    def score(self, block: TextBlock) -> Scores:
        first, second = (self._currencies(side) for side in block.sides)
        return _marked([row for row in first.keys() & second.keys() if not first[row] & second[row]], len(block))

    @staticmethod
    def _currencies(side: Side) -> dict[int, set[str]]:
        result: dict[int, set[str]] = {}
        for row in np.flatnonzero(side.has(CURRENCY)).tolist():
            result[row] = {sign for sign in CURRENCY_SIGNS if sign in side.lines[row]}
        upper = side.kinds & UPPER != 0
        first = np.flatnonzero(upper[:-2] & upper[1:-1] & upper[2:])  # positions of three upper-case letters
        for row in np.unique(side.rows_of(first[np.isin(_triples(side.codes, first), _CURRENCY_TRIPLES)])).tolist():
            for code in _CURRENCY_CODE.findall(side.lines[row]):
                result.setdefault(row, set()).add(_CURRENCIES[code])
        return result


@dataclass(frozen=True, kw_only=True)
class RepetitionConfig(Config):
    max_repetition: float = option(
        0.2, "drop pairs if more than this share of the three-word sequences of a side repeats an earlier sequence",
        min=0, max=1,
    )  # fmt: skip


@FILTERS.register("repetition", RepetitionConfig())
class Repetition(Filter):
    """The share of the three-word sequences of a side that repeat an earlier sequence.

    The larger share of the two sides counts. The share of a line with fewer than 8 words is 0.
    """

    unit = "share of sequences"

    def __init__(self, config: RepetitionConfig, context: FilterContext) -> None:
        super().__init__(config, context)
        self.highest = config.max_repetition

    def score(self, block: TextBlock) -> Scores:
        scores = np.zeros(len(block), np.float32)
        for words in pair_words(block).sides:
            long = (words.total >= 8) & (words.distinct < 0.8 * words.total)
            rows, hashes = words.rows, words.hashes
            first = np.flatnonzero(long[rows[:-2]] & (rows[:-2] == rows[2:]))  # words that begin a sequence
            sequences = hashes[first] + hashes[first + 1] * _SECOND + hashes[first + 2] * _THIRD
            distinct = np.bincount(rows[first[np.unique(sequences, return_index=True)[1]]], minlength=len(block))
            shares = 1 - distinct / np.maximum(words.total - 2, 1)
            scores = np.maximum(scores, np.where(long, shares, 0)).astype(np.float32)
        return scores


@dataclass(frozen=True, kw_only=True)
class BoilerplateConfig(Config):
    pass


@FILTERS.register("boilerplate", BoilerplateConfig())
class Boilerplate(Filter):
    """1 if a side has HTML tags of page layout, JavaScript, a copyright notice or a menu of at least four items."""

    highest = 0.5

    def score(self, block: TextBlock) -> Scores:
        rows: list[int] = []
        for side in block.sides:
            folded = side.folded
            for literal, pattern in _BOILERPLATE:
                rows += [row for row in folded.rows_with(literal) if pattern.search(folded.lines[row])]
            many = np.flatnonzero(side.sums(side.kinds & SEPARATOR) >= 3 * SEPARATOR)
            rows += [row for row in many.tolist() if _MENU.search(side.lines[row])]
        return _marked(rows, len(block))


@dataclass(frozen=True, kw_only=True)
class OverlapConfig(Config):
    pass


@FILTERS.register("overlap", OverlapConfig())
class Overlap(Filter):
    """1 if a corpus of --exclude has the source of the pair as a source, or the target as a target, otherwise 0.

    The comparison ignores case, spaces and punctuation. A line of up to 10 characters counts only if the corpora have
    both sides of the pair.
    """

    highest = 0.5

    def __init__(self, config: OverlapConfig, context: FilterContext) -> None:
        super().__init__(config, context)
        keys: list[list[np.ndarray]] = [[np.empty(0, np.uint64)], [np.empty(0, np.uint64)]]
        for corpus in context.exclude:
            for part in pairs(corpus):
                for index, lines in enumerate((part.sources, part.targets)):
                    keys[index].append(Side(lines).keys)
        self._keys = [np.unique(np.concatenate(part)) for part in keys]

    def score(self, block: TextBlock) -> Scores:
        if not len(self._keys[0]):
            return np.zeros(len(block), np.float32)
        excluded = [contained(side.keys, keys) for side, keys in zip(block.sides, self._keys, strict=True)]
        long = [side.characters > 10 for side in block.sides]
        return ((excluded[0] & excluded[1]) | (excluded[0] & long[0]) | (excluded[1] & long[1])).astype(np.float32)
