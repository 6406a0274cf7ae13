"""The filters `script`, `language` and `swapped`, which identify the scripts and the languages of both sides."""

import sys
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.filters.interface import FILTERS, MIN_SAMPLE, Filter, FilterContext
from nmtkit.cleaning.filters.text_block import Counts, Scores, TextBlock, TextSide
from nmtkit.config import Config, option
from nmtkit.text.language_identification import BatchIdentifier, Identifier, columns_of, identifier

LID_SAMPLE = 10_000  # maximum number of pairs from which the languages of a corpus are found
RIVALS = 8  # the identifier always keeps this number of the most probable languages of each side
MIN_LETTERS = 12  # with fewer letters, the language of a line is not reliable
# First and last code point of the Unicode ranges of each script. Characters outside of these ranges are not counted.
SCRIPTS: dict[str, tuple[tuple[int, int], ...]] = {
    "Latin": ((0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x1E00, 0x1EFF), (0xFF21, 0xFF3A), (0xFF41, 0xFF5A)),
    "Greek": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "Cyrillic": ((0x400, 0x52F), (0x1C80, 0x1C8F), (0x2DE0, 0x2DFF), (0xA640, 0xA69F)),
    "Armenian": ((0x531, 0x58F),),
    "Hebrew": ((0x590, 0x5FF), (0xFB1D, 0xFB4F)),
    "Arabic": ((0x620, 0x65F), (0x66E, 0x6EF), (0x6FA, 0x6FF), (0x750, 0x77F), (0x8A0, 0x8FF), (0xFB50, 0xFDFF),
               (0xFE70, 0xFEFC)),
    "Syriac and Thaana": ((0x700, 0x74F), (0x780, 0x7BF)),
    "Devanagari": ((0x900, 0x963), (0x970, 0x97F)),
    "Bengali": ((0x980, 0x9E5), (0x9F0, 0x9FF)),
    "Gurmukhi": ((0xA00, 0xA65), (0xA70, 0xA7F)),
    "Gujarati": ((0xA80, 0xAE5), (0xAF0, 0xAFF)),
    "Odia": ((0xB00, 0xB65), (0xB70, 0xB7F)),
    "Tamil": ((0xB80, 0xBE5),),
    "Telugu": ((0xC00, 0xC65),),
    "Kannada": ((0xC80, 0xCE5),),
    "Malayalam": ((0xD00, 0xD65),),
    "Sinhala": ((0xD80, 0xDFF),),
    "Thai": ((0xE00, 0xE4F),),
    "Lao": ((0xE80, 0xECF),),
    "Tibetan": ((0xF00, 0xFFF),),
    "Burmese": ((0x1000, 0x103F), (0x1050, 0x109F)),
    "Georgian": ((0x10A0, 0x10FF), (0x1C90, 0x1CBF)),
    "Ethiopic": ((0x1200, 0x139F),),
    "Khmer": ((0x1780, 0x17DD),),
    "Mongolian": ((0x1820, 0x18AF),),
    "Kana": ((0x3041, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F)),
    "Hangul": ((0x1100, 0x11FF), (0x3130, 0x318F), (0xAC00, 0xD7AF)),
    "Han": ((0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF),
            (0x20000, 0x3FFFF)),
}  # fmt: skip


@cache
def _script_table() -> npt.NDArray[np.uint8]:
    """Returns the number of the script of each code point: its index in SCRIPTS plus 1, or 0 without a script."""
    table = np.zeros(sys.maxunicode + 1, np.uint8)
    for number, ranges in enumerate(SCRIPTS.values(), 1):
        for first, last in ranges:
            table[first : last + 1] = number
    table[[0xD7, 0xF7]] = 0  # × and ÷ are not letters
    return table


def script_counts(side: TextSide) -> Counts:
    """Returns the number of letters of each script in each line: [lines, scripts]."""
    numbers = _script_table().take(side.codes, mode="clip")
    present = numbers.tobytes()
    counts = np.zeros((len(side), len(SCRIPTS)), np.int64)
    for number in range(1, len(SCRIPTS) + 1):
        if number in present:
            counts[:, number - 1] = side.sums(numbers == number)
    return counts


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
    lowest_setting = "min_script"

    def fit(self, sample: TextBlock) -> None:
        totals = [script_counts(side).sum(0) for side in sample.sides]
        self._usual = [counts >= 0.05 * max(1, counts.sum()) for counts in totals]

    def score(self, block: TextBlock) -> Scores:
        shares = np.ones(len(block), np.float32)
        for side, usual in zip(block.sides, self._usual, strict=True):
            counts = script_counts(side)
            letters = counts.sum(1)
            share = counts[:, usual].sum(1) / np.maximum(letters, 1)
            shares = np.where(letters < 8, shares, np.minimum(shares, share))
        return shares.astype(np.float32)


class LanguageProbabilities(NamedTuple):
    """Arrays [lines] for one side: probabilities of languages, computed without the words that both sides share."""

    own: Scores  # probability of the language of this side
    opposite: Scores  # probability of the language of the opposite side
    rival: Scores  # highest probability of a language other than the language of this side
    letters: Counts  # number of letters of each line


def identifier_of(context: FilterContext) -> Identifier:
    model: Identifier = context.shared.get("identifier") or identifier(context.lid_model)
    return model


def fit_identifier(sample: TextBlock, context: FilterContext) -> None:
    """Restricts the identifier to the languages of the corpus and the languages that the identifier finds in a sample.

    Other languages are rare or missing in the corpus. They would only take time and cause errors.
    """
    if "identifier" in context.shared:
        return
    full = context.shared["identifier"] = identifier(context.lid_model)
    if not isinstance(full, BatchIdentifier) or len(sample) < MIN_SAMPLE:
        return
    rows = np.linspace(0, len(sample) - 1, min(len(sample), LID_SAMPLE)).astype(np.int64).tolist()
    kept: set[int] = set()
    for side, code in zip(sample.sides, (context.source_lang, context.target_lang), strict=True):
        probabilities = full.probabilities([side.lines[row] for row in rows])
        sure = probabilities[probabilities.max(1) > 0.3].argmax(1)
        kept.update(
            columns_of(full.languages, code), sure.tolist(), np.argsort(-probabilities.sum(0))[:RIVALS].tolist()
        )
    context.shared["identifier"] = full.restricted({full.languages[index] for index in kept})


def own_words(block: TextBlock) -> tuple[TextSide, TextSide]:
    """Returns the lines of both sides without the words that both sides of a pair have, such as names.

    If both sides have more than half of their words in common, the pair may be a copy. Words in lower case then stay.
    """
    longest = block.words.distinct.max(0).tolist()
    results: tuple[list[str], list[str]] = [], []
    for row, (removed, distinct) in enumerate(zip(block.words.common, longest, strict=True)):
        if 2 * len(removed) > distinct:
            removed = {word for word in removed if not word.islower()}
        for side, result in zip(block.sides, results, strict=True):
            line = side.lines[row]
            result.append(" ".join([word for word in line.split() if word not in removed]) if removed else line)
    return TextSide(results[0]), TextSide(results[1])


def languages_of(block: TextBlock, context: FilterContext) -> list[LanguageProbabilities]:
    """Returns the probabilities for both sides. Several filters share the result."""
    if "languages" not in block.shared:
        model = identifier_of(context)
        result = []
        codes = (context.source_lang, context.target_lang)
        for side, own, other in zip(own_words(block), codes, reversed(codes), strict=True):
            probabilities = model.probabilities(side.lines)
            own_columns = columns_of(model.languages, own)
            # if the model does not tell the languages apart, such as pt-BR and pt-PT, `opposite` is 0
            other_columns = [column for column in columns_of(model.languages, other) if column not in own_columns]
            own_share, other_share = probabilities[:, own_columns].sum(1), probabilities[:, other_columns].sum(1)
            probabilities[:, own_columns] = 0
            rival = probabilities.max(1, initial=0)
            letters = side.sums((side.codes > 0xBF) | ((side.codes | 32) - ord("a") < 26))
            result.append(LanguageProbabilities(own_share, other_share, rival, letters))
        block.shared["languages"] = result
    languages: list[LanguageProbabilities] = block.shared["languages"]
    return languages


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(Config):
    min_language: float = option(
        -0.4,
        "drop pairs if p - q is below X on a side; p is the probability of the language of this side, q is the highest "
        "probability of another language",
        min=-1,
        max=1,
    )


@FILTERS.register("language", LanguageConfig())
class ExpectedLanguage(Filter):
    """The probability of the language of a side minus the highest probability of another language.

    The smaller difference of the two sides counts. The difference of a side with fewer than 12 letters, or in a
    language that the model does not know, is 1.
    """

    unit = "difference of probabilities"
    lowest_setting = "min_language"

    def fit(self, sample: TextBlock) -> None:
        fit_identifier(sample, self.context)

    def score(self, block: TextBlock) -> Scores:
        known = identifier_of(self.context).languages
        scores = np.ones(len(block), np.float32)
        codes = (self.context.source_lang, self.context.target_lang)
        for code, found in zip(codes, languages_of(block, self.context), strict=True):
            if columns_of(known, code):
                margins = np.where(found.letters < MIN_LETTERS, 1, found.own - found.rival)
                scores = np.minimum(scores, margins)
        return scores.astype(np.float32)


@FILTERS.register("swapped", Config())
class Swapped(Filter):
    """The smaller of two probabilities: target language on the source side, and source language on the target side.

    The score is 0 for languages that the model does not tell apart, such as pt-BR and pt-PT.
    """

    unit = "probability"
    highest = 0.3

    def fit(self, sample: TextBlock) -> None:
        fit_identifier(sample, self.context)

    def score(self, block: TextBlock) -> Scores:
        source, target = languages_of(block, self.context)
        return np.minimum(source.opposite, target.opposite)
