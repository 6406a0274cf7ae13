"""The filter `word_order` against bigram probabilities computed one by one, and on text whose words are shuffled."""

import math
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from nmtkit.cleaning.filters import FilterContext, TextBlock
from nmtkit.cleaning.filters.word_order import WordOrder, WordOrderConfig
from nmtkit.demo.run import read_corpus

PAIRS = read_corpus()["train"][:3000]


def fitted(sources: list[str], targets: list[str]) -> WordOrder:
    word_order = WordOrder(WordOrderConfig(), FilterContext("en", "de"))
    word_order.fit(TextBlock(sources, targets))
    return word_order


def columns(pairs: list[tuple[str, str]]) -> tuple[list[str], list[str]]:
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def expected_score(line: list[str], half: list[list[str]]) -> float:
    """Returns the sum of log(p(word | previous word) / p(word)) / √bigrams, with absolute discounting of 0.75."""
    counts: Counter[tuple[str, str]] = Counter(bigram for each in half for bigram in pairwise(each))
    ratios = []
    for first, second in pairwise(line):
        before = sum(count for bigram, count in counts.items() if bigram[0] == first)
        followers = sum(bigram[0] == first for bigram in counts)
        alone = (sum(count for bigram, count in counts.items() if bigram[1] == second) + 0.5) / (
            counts.total() + 0.5 * 10
        )
        seen = max(counts[first, second] - 0.75, 0) / before if before else 0
        ratios.append(math.log((seen + (0.75 * followers / before if before else 1) * alone) / alone))
    return sum(ratios) / math.sqrt(len(ratios))


def test_scores_equal_bigram_probabilities_computed_one_by_one() -> None:
    generator = random.Random(3)
    words = "abcdefgh"
    sides = [[" ".join(generator.choices(words, range(1, 9), k=generator.randint(3, 9))) for _ in range(1200)]
             for _ in range(2)]  # fmt: skip
    word_order = fitted(*sides)
    split = [[["<", *line.split(), ">"] for line in side] for side in sides]
    rows = [0, 1, 2, 3, 700, 1199]
    found = word_order.score(TextBlock(*([side[row] for row in rows] for side in sides)))
    for row, score in zip(rows, found.tolist(), strict=True):
        expected = min(expected_score(side[row], side[half::2]) for side in split for half in (0, 1))
        assert score == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_shuffled_words_on_either_side_are_dropped_and_the_sample_is_kept() -> None:
    generator = random.Random(1)
    sources, targets = columns(PAIRS)
    word_order = fitted(sources, targets)

    def shuffled(line: str) -> str:
        words = line.split()
        return " ".join(generator.sample(words, len(words)))

    def dropped(block: TextBlock) -> float:
        return float(word_order.drops(word_order.score(block)).mean())

    assert dropped(TextBlock(sources, targets)) < 0.01
    assert dropped(TextBlock(sources, [shuffled(line) for line in targets])) > 0.5
    assert dropped(TextBlock([shuffled(line) for line in sources], targets)) > 0.5


def test_lines_without_known_bigrams_are_kept_and_a_small_sample_gives_zeros() -> None:
    word_order = fitted(*columns(PAIRS))
    odd = ["", "Ok", "Zwölf", "これは日本語の文です。", "xyzzy plugh " * 9, "...", "1 2 3"]
    scores = word_order.score(TextBlock(odd, odd))
    assert np.isfinite(scores).all() and not word_order.drops(scores).any()
    assert not fitted(*columns(PAIRS[:500])).score(TextBlock(odd, odd)).any()
    words = [f"word{number % 50}" for number in range(2000)]  # no line has a bigram of two words
    assert not fitted(words, words).score(TextBlock(words, words)).any()
