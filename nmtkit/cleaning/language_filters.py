"""The filters `language` and `swapped`, which identify the languages of both sides."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.filters import FILTERS, MIN_SAMPLE, Filter, FilterContext
from nmtkit.cleaning.texts import Scores, Side, TextBlock
from nmtkit.cleaning.words import pair_words, without
from nmtkit.config import Config, option
from nmtkit.text.language_identification import BatchIdentifier, Identifier, columns_of, identifier

LID_SAMPLE = 10_000  # maximum number of pairs to find the languages of a corpus
RIVALS = 8  # the identifier always keeps this number of the most probable languages of each side
MIN_LETTERS = 12  # with fewer letters, the language of a line is not reliable


class Languages(NamedTuple):
    """Arrays [lines] for one side: probabilities of languages, computed without the words that both sides share."""

    own: Scores  # probability of the language of this side
    opposite: Scores  # probability of the language of the opposite side
    rival: Scores  # highest probability of a language other than the language of this side
    letters: npt.NDArray[np.int64]  # number of letters of each line


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
    kept: set[str] = set()
    for side, code in zip(sample.sides, (context.source_lang, context.target_lang), strict=True):
        kept.update(full.languages[index] for index in columns_of(full.languages, code))
        probabilities = full.probabilities([side.lines[row] for row in rows])
        kept.update(full.languages[index] for index in np.unique(probabilities[probabilities.max(1) > 0.3].argmax(1)))
        kept.update(full.languages[index] for index in np.argsort(-probabilities.sum(0))[:RIVALS])
    context.shared["identifier"] = full.restricted(kept)


def own_words(block: TextBlock) -> tuple[Side, Side]:
    """Returns the lines of both sides without the words that both sides of a pair have, such as names.

    If both sides have more than half of their words in common, the pair may be a copy. Words in lower case then stay.
    """
    pairs = pair_words(block)
    same = 2 * pairs.common > np.maximum(*(words.distinct for words in pairs.sides))
    lines = (
        without(side, words, words.common & ~(words.lower & same[words.rows]))
        for side, words in zip(block.sides, pairs.sides, strict=True)
    )
    source, target = map(Side, lines)
    return source, target


def languages_of(block: TextBlock, context: FilterContext) -> list[Languages]:
    """Returns the probabilities for both sides. Several filters share the result."""
    if "languages" not in block.shared:
        model = identifier_of(context)
        result = []
        codes = (context.source_lang, context.target_lang)
        for side, own, other in zip(own_words(block), codes, reversed(codes), strict=True):
            probabilities = model.probabilities(side.lines)
            own_columns, other_columns = columns_of(model.languages, own), columns_of(model.languages, other)
            own_share, other_share = probabilities[:, own_columns].sum(1), probabilities[:, other_columns].sum(1)
            probabilities[:, own_columns] = 0
            result.append(Languages(own_share, other_share, probabilities.max(1, initial=0), _letters(side)))
        block.shared["languages"] = result
    languages: list[Languages] = block.shared["languages"]
    return languages


def _letters(side: Side) -> npt.NDArray[np.int64]:
    codes = side.codes
    return side.sums((codes > 0xBF) | ((codes | 32) - ord("a") < 26))


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
class Language(Filter):
    """The probability of the language of a side minus the highest probability of another language.

    The smaller difference of the two sides counts. The difference of a side with fewer than 12 letters, or in a
    language that the model does not know, is 1.
    """

    unit = "difference of probabilities"

    def __init__(self, config: LanguageConfig, context: FilterContext) -> None:
        super().__init__(config, context)
        self.lowest = config.min_language

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


@dataclass(frozen=True, kw_only=True)
class SwappedConfig(Config):
    pass


@FILTERS.register("swapped", SwappedConfig())
class Swapped(Filter):
    """The smaller of two probabilities: target language on the source side, and source language on the target side."""

    unit = "probability"
    highest = 0.3

    def fit(self, sample: TextBlock) -> None:
        fit_identifier(sample, self.context)

    def score(self, block: TextBlock) -> Scores:
        source, target = languages_of(block, self.context)
        return np.minimum(source.opposite, target.opposite)
