"""Words that both sides of a pair have, lines without these words, and rules that read words and characters."""

import random
import unicodedata

import numpy as np
import pytest

from nmtkit.cleaning.filters import FilterContext, Scores, TextBlock
from nmtkit.cleaning.filters.languages import own_words
from nmtkit.cleaning.filters.rules import Boilerplate, Copy, CopyConfig, Currencies, Repetition, RepetitionConfig
from nmtkit.cleaning.filters.text_block import TextSide
from nmtkit.cleaning.filters.word_statistics import StemVocabulary, stems, word_ids
from nmtkit.config import Config

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


def test_own_words_equal_sets_of_words() -> None:
    block = TextBlock(random_lines(1), random_lines(2))
    for row, lines in enumerate(zip(*(side.lines for side in block.sides), strict=True)):
        first, second = (set(line.split()) for line in lines)
        same = 2 * len(first & second) > max(len(first), len(second))
        removed = {word for word in first & second if not (same and word.islower())}
        for side, line in zip(own_words(block), lines, strict=True):
            kept = [word for word in line.split() if word not in removed]
            assert side.lines[row] == (" ".join(kept) if removed else line)


def test_own_words_keeps_common_words_in_lower_case_of_a_probable_copy() -> None:
    sources = ["Anna sees a red car", "the old car of Anna", "Anna  sees", ""]
    targets = ["Anna sieht ein Auto", "the old car Anna x", "nothing  here", ""]
    source, target = own_words(TextBlock(sources, targets))
    assert source.lines == ["sees a red car", "the old car of", "Anna  sees", ""]
    assert target.lines == ["sieht ein Auto", "the old car x", "nothing  here", ""]


@pytest.mark.parametrize("empty", [TextBlock([], []), TextBlock(["", " "], ["", "\t"])], ids=["no_pairs", "no_words"])
def test_a_block_may_have_no_words(empty: TextBlock) -> None:
    assert Copy(CopyConfig(), CONTEXT).score(empty).tolist() == [0] * len(empty)
    assert [side.lines for side in own_words(empty)] == [side.lines for side in empty.sides]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "\u0939\u093f\u0928\u094d\u0926\u0940 \u092e\u0947\u0902",
            ["\u0939\u093f\u0928\u094d\u0926\u0940", "\u092e\u0947\u0902"],
        ),  # Hindi
        (
            "\u0643\u0650\u062a\u064e\u0627\u0628 Cafe\u0301s",
            ["\u0643\u0650\u062a\u064e\u0627\u0628", "cafe\u0301s"],
        ),  # vocalised Arabic
        ("5kg a_b 日本7 \u0e01\u0e33", ["5", "kg", "a", "b", "日", "本", "7", "\u0e01", "\u0e33"]),
        ("\u1780\u179a", ["\u1780", "\u179a"]),  # Khmer
    ],
)
def test_combining_marks_belong_to_their_words(line: str, words: list[str]) -> None:
    assert stems(line) == words


def test_normalized_lines_keep_case_folded_letters_digits_and_marks() -> None:
    signs = [chr(code) for code in range(0x20, 0x11000) if not 0xD800 <= code < 0xE000]
    lines = ["".join(signs), "Straße 7!", "A-b c\u0301", "\0 Ü", "", "?! ?"]
    side = TextSide(lines)
    for line, normalized in zip(lines, side.normalized, strict=True):
        kept = [c for c in line.casefold() if c.isalnum() or (c > "\x7f" and unicodedata.category(c)[0] == "M")]
        assert normalized.removesuffix("\n") == ("".join(kept) or line)
    assert len(set(side.keys.tolist())) == len(lines)
    assert TextSide(["strasse7"]).keys[0] == side.keys[1]


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
    if len(words) < 8:
        return 0
    return 1 - len(set(triples)) / len(triples)


def test_copy_and_repetition_count_words() -> None:
    draw = random.Random(5)
    vocabulary = ["the", "car", "is", "red", "Anna", "OK", "and", "it", "goes", "7"]
    lines = [[" ".join(draw.choices(vocabulary, k=draw.randrange(3, 16))) for _ in range(200)] for _ in range(2)]
    words = [f"w{number}" for number in range(48)]
    lines[0].append(" ".join([*words, *words[:12]]))  # 80 % of the words are different, 17 % of the sequences repeat
    lines[1].append("the car")
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
    assert marks(Currencies(Config(), CONTEXT).score(TextBlock(sources, targets))) == [0, 4, 5, 6, 7, 8]


def test_boilerplate_does_not_continue_in_the_next_line() -> None:
    sources = ["a function", "(x) { is text", "Function (x) {", "(C)  2019", "the <B> key", "a <DIV class='x'> b", "x"]
    targets = [*["text"] * 6, "ALL RIGHTS RESERVED"]
    assert marks(Boilerplate(Config(), CONTEXT).score(TextBlock(sources, targets))) == [2, 3, 5, 6]


def test_the_words_of_a_long_line_take_bounded_memory() -> None:
    """Word alignment has a link for each pair of words: two lines of 100,000 words needed 80 GB."""
    block = TextBlock(["word " * 100_000], ["Wort " * 100_000])
    sides = word_ids(block, [StemVocabulary([["word"] * 10]), StemVocabulary([["wort"] * 10])])
    assert [side.lengths.tolist() for side in sides] == [[1000], [1000]]
