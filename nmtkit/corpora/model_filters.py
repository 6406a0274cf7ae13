"""Filters with a model: language identification, and word translation probabilities."""

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nmtkit.config import Config, option
from nmtkit.corpora.filters import FILTERS, Filter, FilterContext
from nmtkit.corpora.language_identification import BatchIdentifier, Identifier, columns_of, identifier
from nmtkit.corpora.noise import Error, noise
from nmtkit.corpora.texts import Scores, Side, TextBlock
from nmtkit.corpora.words import pair_words, without
from nmtkit.text.ibm_model1 import FLOOR, LexicalTable, word_probabilities

Floats = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int64]
# A word, a number, or a character of a language without spaces between words.
_WORD = re.compile(r"[\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\u0e00-\u0e7f]|[^\W\d_]+|\d+")
# Minimum number of occurrences of a word in the sample, about 5 in each half. Rarer words align by chance.
MIN_COUNT = 10
CALIBRATION = 10_000  # approximate number of pairs for the logistic regression
NOISE: tuple[Error, ...] = ("misaligned", "replaced", "appended", "joined")  # errors that word tables can detect
# Limits of the evidence of a word, as a natural logarithm: for halves of a line, and for the whole line. The second
# limit is low, so that a few certain words do not hide words without evidence.
MAX_EVIDENCE, MAX_MEAN_EVIDENCE = 12.0, 3.0
STEM = 6  # number of characters that represent a word, because a sample has few inflected forms of a word
# minimum number of pairs in a sample for statistics; maximum number of pairs to find the languages of a corpus
MIN_SAMPLE, LID_SAMPLE = 1000, 10_000
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


class Ids(NamedTuple):
    """Word ids of all lines, concatenated, and the number of words of each line."""

    ids: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    def rows(self, rows: npt.NDArray[np.int64]) -> "Ids":
        starts = np.cumsum(self.lengths) - self.lengths
        lengths = self.lengths[rows]
        first = np.cumsum(lengths) - lengths
        index = np.repeat(starts[rows] - first, lengths) + np.arange(int(lengths.sum()))
        return Ids(self.ids[index], lengths)

    def known(self) -> npt.NDArray[np.int64]:
        """Returns the number of words of each line that are in the vocabulary."""
        row = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return np.bincount(row[self.ids > 0], minlength=len(self.lengths))


def stems(line: str) -> list[str]:
    return [word[:STEM] for word in _WORD.findall(line.casefold())]


def stems_of(block: TextBlock) -> tuple[list[list[str]], list[list[str]]]:
    """Returns the stems of each line of both sides. Several filters share the result."""
    if "stems" not in block.shared:
        block.shared["stems"] = tuple([stems(line) for line in side.lines] for side in block.sides)
    lines: tuple[list[list[str]], list[list[str]]] = block.shared["stems"]
    return lines


class Vocabulary:
    """Numbers the words that occur at least 10 times in a sample. All other words have the id 0."""

    def __init__(self, lines: list[list[str]]) -> None:
        counts: dict[str, int] = {}
        for line in lines:
            for word in line:
                counts[word] = counts.get(word, 0) + 1
        self._ids = {word: index for index, word in enumerate((w for w in counts if counts[w] >= MIN_COUNT), 1)}
        self.size = len(self._ids) + 1

    def encode(self, lines: list[list[str]]) -> Ids:
        get = self._ids.get
        ids = [get(word, 0) for line in lines for word in line]
        return Ids(np.array(ids, np.int64), np.array([len(line) for line in lines], np.int64))


@dataclass(frozen=True, kw_only=True)
class AlignmentConfig(Config):
    min_alignment: float = option(
        0.15, "drop pairs if the probability that the sides are translations of each other, computed from their words, "
        "is below X", min=0, max=1,
    )  # fmt: skip
    alignment_iterations: int = option(4, "iterations of IBM model 1 on the sample", min=1, max=50)


@FILTERS.register("alignment", AlignmentConfig())
class Alignment(Filter):
    """The probability that the sides are translations of each other, from IBM model 1 in both directions.

    Each half of the sample trains a table for each direction. The features of a pair are the lengths and, for each
    direction, `line_features`. The lower feature of the two tables counts, because a table gives a high feature even to
    a wrong pair if the pair was in its training data. A logistic regression over the features separates the pairs of
    the sample from wrong pairs. A wrong pair has the target of a different pair of similar length, or a target with
    `noise`. The probability is set to 1 for pairs with fewer than 3 known words on a side, for pairs with a side of
    mostly unknown words, and for all pairs if the sample is small.
    """

    unit = "probability"
    min_words = 3

    def __init__(self, config: AlignmentConfig, context: FilterContext) -> None:
        super().__init__(config, context)
        self.lowest = config.min_alignment
        self._tables: list[list[LexicalTable]] = []  # [directions, halves of the sample]

    def fit(self, sample: TextBlock) -> None:
        if len(sample) < MIN_SAMPLE:
            return
        lines = stems_of(sample)
        self._vocabularies = [Vocabulary(side) for side in lines]
        source, target = (vocabulary.encode(side) for vocabulary, side in zip(self._vocabularies, lines, strict=True))
        sizes = self._vocabularies[0].size, self._vocabularies[1].size
        rows = np.arange(len(sample))
        halves, iterations = (rows[::2], rows[1::2]), self.config.alignment_iterations
        self._tables = [
            [LexicalTable.train(first.rows(half), second.rows(half), *vocabulary_sizes, iterations) for half in halves]
            for first, second, vocabulary_sizes in ((source, target, sizes), (target, source, sizes[::-1]))
        ]
        some = rows[:: max(1, len(rows) // CALIBRATION)]
        order = some[np.lexsort((some, source.lengths[some], target.lengths[some]))]  # neighbours have similar lengths
        good = self._features(source.rows(order), target.rows(order))
        wrong = noise([sample.sides[1].lines[row] for row in order.tolist()], 1, NOISE)
        wrong_targets = target.rows(np.roll(order, 7)), self._vocabularies[1].encode([stems(line) for line in wrong])
        bad = [self._features(source.rows(order), each) for each in wrong_targets]
        features = np.concatenate((good, *bad))
        self._mean, self._scale = features.mean(0), features.std(0) + 1e-6
        labels = (np.arange(len(features)) < len(good)).astype(np.float64)
        self._weights = logistic_regression((features - self._mean) / self._scale, labels)

    def _features(self, source: Ids, target: Ids) -> Floats:
        columns = [np.log1p(source.lengths), np.log1p(target.lengths)]
        for tables, first, second in zip(self._tables, (source, target), (target, source), strict=True):
            probabilities = word_probabilities(tables, first, second)
            columns += [*np.min([line_features(each, first.lengths, second.lengths) for each in probabilities], 0)]
        return np.column_stack(columns)

    def score(self, block: TextBlock) -> Scores:
        if not self._tables:
            return np.ones(len(block), np.float32)
        sides = [
            vocabulary.encode(lines) for vocabulary, lines in zip(self._vocabularies, stems_of(block), strict=True)
        ]
        features = (self._features(*sides) - self._mean) / self._scale
        scores = 1 / (1 + np.exp(-(features @ self._weights[1:] + self._weights[0])))
        for side in sides:
            known = side.known()
            scores[(known < self.min_words) | (2 * known < side.lengths)] = 1
        return scores.astype(np.float32)


def line_features(probabilities: Floats, source_lengths: Lengths, lengths: Lengths) -> Floats:
    """Returns three features of each line from the probabilities of its words: [3, lines].

    `probabilities` [2, words] has the mean probability of each word given each source word and NULL, and the
    probability given NULL. The evidence of a word is -log(posterior probability that the word is aligned to NULL),
    limited to 0 … 12. The features are the mean log probability of the words, the mean evidence of the words with a
    limit of 3, and the mean evidence of the half of the line that has the lower mean. The last feature is low if half
    of a line has no source.
    """
    means, nulls = np.maximum(probabilities, FLOOR)
    line = np.repeat(np.arange(len(lengths)), lengths)
    evidence = np.clip(np.log(means / nulls * (source_lengths + 1)[line]), 0, MAX_EVIDENCE)
    counts = np.column_stack((lengths // 2, lengths - lengths // 2))  # words of both halves
    position = np.arange(len(line)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    sums_of_halves = np.bincount(2 * line + (position >= counts[line, 0]), evidence, counts.size).reshape(-1, 2)
    halves = sums_of_halves / np.maximum(counts, 1)
    sums = [
        np.bincount(line, values, len(lengths)) for values in (np.log(means), np.minimum(evidence, MAX_MEAN_EVIDENCE))
    ]
    lower = np.where(lengths < 2, halves[:, 1], halves.min(1))
    return np.array([*(sums / np.maximum(lengths, 1)), lower])


def logistic_regression(features: Floats, labels: Floats, ridge: float = 1.0, iterations: int = 25) -> Floats:
    """Returns the intercept and the weights that maximise the likelihood minus a ridge penalty, by Newton's method."""
    inputs = np.column_stack((np.ones(len(features)), features))
    weights = np.zeros(inputs.shape[1])
    penalty = np.full(len(weights), ridge)
    penalty[0] = 1e-6
    for _ in range(iterations):
        predicted = 1 / (1 + np.exp(-np.clip(inputs @ weights, -30, 30)))
        gradient = inputs.T @ (labels - predicted) - penalty * weights
        hessian = (inputs * (predicted * (1 - predicted))[:, None]).T @ inputs + np.diag(penalty)
        step = np.linalg.solve(hessian, gradient)
        weights += step
        if np.abs(step).max() < 1e-8:
            break
    return weights
