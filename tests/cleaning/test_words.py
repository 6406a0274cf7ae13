"""Words that both sides of a pair have, and lines without these words: equal to `str.split` and sets."""

import random

import numpy as np
import pytest

from nmtkit.cleaning import words as words_module
from nmtkit.cleaning.filters import FilterContext
from nmtkit.cleaning.language_filters import own_words
from nmtkit.cleaning.rules import (
    Boilerplate,
    BoilerplateConfig,
    Copy,
    CopyConfig,
    Currencies,
    CurrenciesConfig,
    Repetition,
    RepetitionConfig,
)
from nmtkit.cleaning.texts import Scores, Side, TextBlock
from nmtkit.cleaning.words import pair_words, without

CONTEXT = FilterContext("en", "de")
WORDS = ["a", "b", "ab", "ba", "A", "Ab", "\u01c5", "ß", "ſ", "ª", "7", "7a", "—", "🙂", "e\u0301", "日本", "\u200b"]
SPACES = [" ", "  ", "\t", "\xa0", "\u2028", "\x1c", "\r", "\u3000"]


def random_lines(seed: int) -> list[str]:
    draw = random.Random(seed)
    lines = ["", " ", "\u2003", "a", " a ", "a a", "A  b\tA"]
    for _ in range(300):
        words = [draw.choice(WORDS) for _ in range(draw.choice((0, 1, 2, 5, 12)))]
        lines.append("".join(word + draw.choice(SPACES) for word in words)[: draw.choice((-1, 99))])
    return lines


BLOCK = TextBlock(random_lines(1), random_lines(2))


@pytest.mark.parametrize("part", [1 << 16, 100, 1])
def test_words_and_common_words_equal_split_and_sets(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words_module, "PART", part)
    BLOCK.shared.clear()
    found = pair_words(BLOCK)
    for row, lines in enumerate(zip(*(side.lines for side in BLOCK.sides), strict=True)):
        sets = [set(line.split()) for line in lines]
        assert found.common[row] == len(sets[0] & sets[1])
        assert found.common_lower[row] == sum(map(str.islower, sets[0] & sets[1]))
        for side, words, line, distinct in zip(BLOCK.sides, found.sides, lines, sets, strict=True):
            indexes = np.flatnonzero(words.rows == row).tolist()
            texts = [side.text[words.starts[index] : words.ends[index]] for index in indexes]
            assert texts == line.split()
            assert words.lower[indexes].tolist() == [word.islower() for word in texts]
            assert words.common[indexes].tolist() == [word in sets[0] & sets[1] for word in texts]
            counts = words.total[row], words.distinct[row], words.distinct_lower[row]
            assert counts == (len(texts), len(distinct), sum(map(str.islower, distinct)))


def test_only_lines_that_lose_words_get_single_spaces() -> None:
    found = pair_words(BLOCK)
    for side, words in zip(BLOCK.sides, found.sides, strict=True):
        draw = np.random.default_rng(1)
        removed = (draw.random(len(words.rows)) < 0.4) & (words.rows % 3 > 0)
        for row, line in enumerate(without(side, words, removed)):
            mask = removed[words.rows == row]
            kept = " ".join(word for word, gone in zip(side.lines[row].split(), mask, strict=True) if not gone)
            assert line == (kept if mask.any() else side.lines[row])
        assert without(side, words, np.zeros(len(words.rows), np.bool_)) == side.lines


def test_own_words_keeps_common_words_in_lower_case_of_a_probable_copy() -> None:
    sources = ["Anna sees a red car", "the old car of Anna", "Anna  sees", ""]
    targets = ["Anna sieht ein Auto", "the old car Anna x", "nothing  here", ""]
    source, target = own_words(TextBlock(sources, targets))
    assert source.lines == ["sees a red car", "the old car of", "Anna  sees", ""]
    assert target.lines == ["sieht ein Auto", "the old car x", "nothing  here", ""]


@pytest.mark.parametrize("empty", [TextBlock([], []), TextBlock(["", " "], ["", "\t"])], ids=["no_pairs", "no_words"])
def test_a_block_may_have_no_words(empty: TextBlock) -> None:
    assert pair_words(empty).common.tolist() == [0] * len(empty)
    assert [side.lines for side in own_words(empty)] == [side.lines for side in empty.sides]


def test_folded_lines_equal_casefold() -> None:
    signs = [chr(code) for code in range(0x20, 0x11000) if not 0xD800 <= code < 0xE000]
    single = [sign for sign in signs if len(sign.casefold()) == 1]
    for line in ("".join(single), "".join(signs), "Straße", "\0 Ü", "A"):
        assert list(Side(["É", line]).folded.lines) == ["é", line.casefold()]


def copied(source: str, target: str) -> float:
    words = [set(line.split()) for line in (source, target)]
    common = words[0] & words[1]
    lower = [sum(map(str.islower, each)) for each in (common, *words)]
    if len(common) < 3 or 2 * len(common) < min(map(len, words)) or min(lower) < 3:
        return 0
    return lower[0] / max(lower[1:])


def repeated(line: str) -> float:
    words = line.split()
    triples = [tuple(words[start : start + 3]) for start in range(len(words) - 2)]
    if len(words) < 8 or len(set(words)) >= 0.8 * len(words):
        return 0
    return 1 - len(set(triples)) / len(triples)


def test_copy_and_repetition_count_words() -> None:
    draw = random.Random(5)
    vocabulary = ["the", "car", "is", "red", "Anna", "OK", "and", "it", "goes", "7"]
    lines = [[" ".join(draw.choices(vocabulary, k=draw.randrange(3, 16))) for _ in range(200)] for _ in range(2)]
    block = TextBlock(*lines)
    np.testing.assert_allclose(Copy(CopyConfig(), CONTEXT).score(block), list(map(copied, *lines)), rtol=1e-6)
    expected = [max(map(repeated, pair)) for pair in zip(*lines, strict=True)]
    np.testing.assert_allclose(Repetition(RepetitionConfig(), CONTEXT).score(block), expected, rtol=1e-6)
    assert len(set(expected)) > 5


def marks(scores: Scores) -> list[int]:
    return np.flatnonzero(scores).tolist()


def test_currency_codes_end_at_the_end_of_a_word() -> None:
    sources = ["5 USD", "5 USD", "5 USDX", "5 usd", "XUSD", "GBPUSD", "CHF", "5 €", "USD EUR"]
    targets = ["5 EUR.", "5 US$", "5 EUR", "5 EUR", "EUR", "5 £", "RUB", "INR!", "5 ¥"]
    assert marks(Currencies(CurrenciesConfig(), CONTEXT).score(TextBlock(sources, targets))) == [0, 4, 5, 6, 7, 8]


def test_boilerplate_does_not_continue_in_the_next_line() -> None:
    sources = ["a function", "(x) { is text", "Function (x) {", "(C)  2019", "the <B> key", "a <DIV class='x'> b", "x"]
    targets = [*["text"] * 6, "ALL RIGHTS RESERVED"]
    assert marks(Boilerplate(BoilerplateConfig(), CONTEXT).score(TextBlock(sources, targets))) == [2, 3, 5, 6]
