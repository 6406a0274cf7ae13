"""Filters that check the two texts of a pair with rules, without a model."""

import re
import unicodedata
from abc import abstractmethod
from dataclasses import dataclass
from itertools import chain, product

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.filters.interface import FILTERS, Filter, FilterContext
from nmtkit.cleaning.filters.numbers import ascii_digits, digits_of, other_numbers, readings
from nmtkit.cleaning.filters.text_block import Scores, TextBlock
from nmtkit.config import Config, option
from nmtkit.data.corpora.dropping import contained

_URL = re.compile(r"(?:https?://|www\.)[\w.-]+|[\w.+-]{1,64}+@[\w-]+\.[\w.-]+", re.IGNORECASE)
_CURRENCIES = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥", "CNY": "¥", "INR": "₹", "RUB": "₽", "CHF": "CHF"}
_CURRENCY = re.compile(rf"[$€£¥₹₽₩₺₴₪฿]|(?:{'|'.join(_CURRENCIES)})\b")
_DIGIT = re.compile(r"\d")
# A string that every match contains, and the pattern, for case-folded text. Searching for the string first is faster.
_BOILERPLATE = [(literal, re.compile(pattern)) for literal, pattern in (
    ("<", r"</?(?:div|span|script|style|td|tr|li|ul|nav|img|br|a href|input|form)\b[^>]{0,1000}+>"),
    ("javascript:", "javascript:"), ("function", r"function\s*\(\w*\)\s*\{"), ("©", "©"),
    ("(c)", r"\(c\)\s*(?:19|20)\d\d"), ("all rights reserved", r"all rights reserved\b"),
)]  # fmt: skip
_SEPARATORS = "|»›·•"  # characters between the items of a menu
_MENU = re.compile(r"[^|»›·•]{2,30}(?: [|»›·•] [^|»›·•]{2,30}){3,}")


class YesNoFilter(Filter):
    """Gives the score 1 to a pair that `matches`, and 0 to all other pairs. Drops pairs with the score 1."""

    highest = 0.5

    @abstractmethod
    def matches(self, source: str, target: str) -> bool:
        """Returns whether the pair is bad."""

    def score(self, block: TextBlock) -> Scores:
        source, target = (side.lines for side in block.sides)
        return np.fromiter(map(self.matches, source, target), np.float32, len(block))


class DisjointFilter(YesNoFilter):
    """Drops a pair if both sides have items of a kind, such as addresses, and no item is on both sides."""

    @abstractmethod
    def found(self, line: str) -> set[str]:
        """Returns the items of a line."""

    def matches(self, source: str, target: str) -> bool:
        first = self.found(source)
        second = self.found(target) if first else first
        return bool(second) and first.isdisjoint(second)


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
    lowest_setting = "min_characters"

    def score(self, block: TextBlock) -> Scores:
        sides = [side.characters - side.sums((side.codes == ord(" ")) | (side.codes == 0xA0)) for side in block.sides]
        words = [side.sums(side.is_letter) for side in block.sides]
        lost = (np.minimum(*words) == 0) & (np.maximum(*words) >= 5)
        return np.where(lost, 0, np.minimum(*sides)).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class LengthConfig(Config):
    max_characters: int = option(2000, "drop pairs with more than N characters on a side", min=10, max=1_000_000)


@FILTERS.register("length", LengthConfig())
class Length(Filter):
    """The number of characters of the longer side."""

    unit = "characters"
    highest_setting = "max_characters"

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
        0.75, "drop pairs if more than this share of the lower-case words is on both sides", above=0, max=1
    )


@FILTERS.register("copy", CopyConfig())
class Copy(Filter):
    """The share of the lower-case words that are on both sides.

    The share is relative to the side with more lower-case words. The share is 0 if fewer than 3 lower-case words, or
    fewer than half of the words of the shorter side, are on both sides, because names and codes can be the same in both
    languages.

    If the two sides differ at most in case, spaces and punctuation, the share is also 1 in two cases:

    - The source has at least 4 words. Also, either no word has letter case, or more than a third of the words with
      letter case are in lower case.
    - The source has fewer than 4 words, but more than 20 characters. At least one character is not ASCII.
    """

    unit = "share of words"
    highest_setting = "max_copied"

    def score(self, block: TextBlock) -> Scores:
        scores = np.zeros(len(block), np.float32)
        common = np.array([len(words) for words in block.words.common], np.int64)
        for row in np.flatnonzero((common > 2) & (2 * common >= block.words.distinct.min(0))).tolist():
            lower = sum(map(str.islower, block.words.common[row]))
            if lower > 2:
                others = (sum(map(str.islower, set(side.lines[row].split()))) for side in block.sides)
                scores[row] = lower / max(others)
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


@FILTERS.register("numbers", Config())
class ContradictingNumbers(YesNoFilter):
    """1 if each side has a number that the other side lacks, otherwise 0.

    So a pair is kept if only one side writes numbers as words. Separators, leading and trailing zeros do not
    count, so that "1,000.50" equals "1.000,5". Digits of all scripts, groups ("12 345"), units ("1万5千", "2 crore 50
    lakh") and years of eras ("平成30年") are read. Different forms of a decade ("1980s", "80er") or an hour ("3 pm",
    "15") are equal.
    """

    def matches(self, source: str, target: str) -> bool:
        if not (_DIGIT.search(source) and _DIGIT.search(target)):
            return False
        first, second = digits_of(source), digits_of(target)
        if first <= second or second <= first:
            return False
        runs = [re.findall(r"\d+", ascii_digits(unicodedata.normalize("NFKC", line))) for line in (source, target)]
        if sorted(runs[0]) == sorted(runs[1]) or "".join(runs[0]) == "".join(runs[1]):
            return False
        absent = [missing(one, other) for one, other in ((source, target), (target, source))]
        written: dict[str, set[str]] = {}  # digits without zeros at the ends -> numbers with last zeros: "2" -> {"20"}
        for run in chain(*runs):
            written.setdefault(run.strip("0"), set()).add(run.lstrip("0"))
        left, right = ([written.get(number, {number}) for number in side] for side in absent)
        alike = (any(_alike(a, b) for others in right for a, b in product(these, others)) for these in left)
        return bool(left and right) and not all(alike)


def missing(line: str, other: str) -> set[str]:
    """Returns the numbers of `line` that `other` does not contain.

    A number can have several readings (numbers.py). A number is missing only if `other` has none of its readings.
    """
    known = other_numbers(other).union(*(reading for options in readings(other) for reading in options))
    absent = (options[0] for options in readings(line) if not any(reading <= known for reading in options))
    return set().union(*(reading - known for reading in absent))


def _alike(first: str, second: str) -> bool:
    if (len(first) == 4 and first.endswith(second)) or (len(second) == 4 and second.endswith(first)):
        return True  # 1985 and 85
    if max(len(first), len(second)) > 4:
        return False  # `int` refuses more than 4,300 digits
    values = sorted((int(first), int(second)))
    if values[1] - values[0] == 543 and len(first) == len(second) == 4:
        return True  # a year of the Thai calendar
    return values[1] <= 24 and values[1] - values[0] == 12


@FILTERS.register("urls", Config())
class Urls(DisjointFilter):
    """1 if both sides have web or e-mail addresses and no host or address is the same, otherwise 0."""

    def found(self, line: str) -> set[str]:
        if not ("//" in line or "www." in line or "@" in line):
            return set()
        addresses = map(str.lower, _URL.findall(line))
        return {re.sub(r"^(?:https?://)?(?:www\.)?", "", address).rstrip(".-") for address in addresses}


@FILTERS.register("currencies", Config())
class Currencies(DisjointFilter):
    """1 if both sides have currencies and no currency is the same, otherwise 0."""

    def found(self, line: str) -> set[str]:
        return {_CURRENCIES.get(each, each) for each in _CURRENCY.findall(line)}


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
    highest_setting = "max_repetition"

    def score(self, block: TextBlock) -> Scores:
        scores = np.zeros(len(block), np.float32)
        for side, total, distinct in zip(block.sides, block.words.total, block.words.distinct, strict=True):
            # shorter lines have the share 0; lines with at most 2 repeated words repeat no sequence
            for row in np.flatnonzero((total >= 8) & (total - distinct > 2)).tolist():
                words = side.lines[row].split()
                sequences = list(zip(words, words[1:], words[2:], strict=False))
                scores[row] = max(scores[row], 1 - len(set(sequences)) / len(sequences))
        return scores


@FILTERS.register("boilerplate", Config())
class Boilerplate(YesNoFilter):
    """1 if a side has HTML tags of page layout, JavaScript, a copyright notice or a menu of at least four items."""

    def matches(self, source: str, target: str) -> bool:
        return _is_boilerplate(source) or _is_boilerplate(target)


def _is_boilerplate(line: str) -> bool:
    folded = line.casefold()
    for literal, pattern in _BOILERPLATE:
        if literal in folded and pattern.search(folded):
            return True
    return sum(map(line.count, _SEPARATORS)) >= 3 and _MENU.search(line) is not None


@FILTERS.register("overlap", Config())
class Overlap(Filter):
    """1 if a corpus of --exclude has the source of the pair as a source, or the target as a target, otherwise 0.

    The comparison ignores case, spaces and punctuation. A line of up to 10 characters counts only if the corpora have
    both sides of the pair.
    """

    highest = 0.5

    def __init__(self, config: Config, context: FilterContext) -> None:
        super().__init__(config, context)
        parts = (TextBlock(part.sources, part.targets).keys for part in context.pairs(context.exclude))
        keys = np.concatenate([np.empty((0, 2), np.uint64), *parts])
        self._keys = [np.unique(column) for column in keys.T]

    def score(self, block: TextBlock) -> Scores:
        if not len(self._keys[0]):
            return np.zeros(len(block), np.float32)
        excluded = [contained(side.keys, keys) for side, keys in zip(block.sides, self._keys, strict=True)]
        long = [side.characters > 10 for side in block.sides]
        return ((excluded[0] & excluded[1]) | (excluded[0] & long[0]) | (excluded[1] & long[1])).astype(np.float32)
