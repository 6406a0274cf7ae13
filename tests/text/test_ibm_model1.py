import random
from collections import defaultdict

import numpy as np
import pytest

from nmtkit.text import ibm_model1
from nmtkit.text.encoded import Encoded
from nmtkit.text.ibm_model1 import FLOOR, LexicalTable, word_probabilities


def flat(sentences: list[list[int]]) -> Encoded:
    ids = [word for sentence in sentences for word in sentence]
    return Encoded(np.array(ids, np.uint16), np.array([len(sentence) for sentence in sentences], np.int64))


def reference_table(
    pairs: list[tuple[list[int], list[int]]], null: int, iterations: int
) -> dict[tuple[int, int], float]:
    """Runs EM by the formulas of the paper, word by word, in float64."""
    table = {(e, f): 1.0 for source, target in pairs for e in [null, *source] for f in target}
    for _ in range(iterations):
        counts: dict[tuple[int, int], float] = defaultdict(float)
        totals: dict[int, float] = defaultdict(float)
        for source, target in pairs:
            for f in target:
                sum_of_row = sum(table[e, f] for e in [null, *source])
                for e in [null, *source]:
                    counts[e, f] += table[e, f] / sum_of_row
                    totals[e] += table[e, f] / sum_of_row
        table = {(e, f): count / totals[e] for (e, f), count in counts.items()}
    return table


def random_pairs(number: int, sources: int, targets: int) -> list[tuple[list[int], list[int]]]:
    """Returns pairs with repeated words, empty sentences on each side, and one pair of two empty sentences."""
    draw = random.Random(3)
    pairs = [
        (
            [draw.randrange(sources) for _ in range(draw.randrange(8))],
            [draw.randrange(targets) for _ in range(draw.randrange(6))],
        )
        for _ in range(number)
    ]
    return [*pairs, ([], []), ([1, 1], []), ([], [2, 2])]


def trained(pairs: list[tuple[list[int], list[int]]], sources: int, targets: int, iterations: int) -> LexicalTable:
    return LexicalTable.train(
        flat([source for source, _ in pairs]), flat([target for _, target in pairs]), sources, targets, iterations
    )


@pytest.mark.parametrize("kept", [1 << 28, 300, 0], ids=["all_kept", "some_kept", "none_kept"])
@pytest.mark.parametrize("block", [1 << 20, 50, 1], ids=["one_block", "small_blocks", "block_per_pair"])
def test_probabilities_equal_em_word_by_word(monkeypatch: pytest.MonkeyPatch, block: int, kept: int) -> None:
    monkeypatch.setattr(ibm_model1, "BLOCK_LINKS", block)
    monkeypatch.setattr(ibm_model1, "KEPT_LINKS", kept)
    pairs = random_pairs(60, 11, 9)
    table = trained(pairs, 11, 9, 4)
    expected = reference_table(pairs, 11, 4)
    assert table.keys.tolist() == sorted(e * 9 + f for e, f in expected)
    computed = {(key // 9, key % 9): p for key, p in zip(table.keys.tolist(), table.probabilities, strict=True)}
    assert computed == pytest.approx(expected, rel=1e-12)


def test_words_that_occur_together_find_each_other() -> None:
    # "das haus", "das buch", "ein buch" of Koehn 2010, figure 4.4: the house (0 1), the book (0 2), a book (3 2)
    table = trained([([0, 1], [0, 1]), ([0, 2], [0, 2]), ([3, 2], [3, 2])], 4, 4, 60)
    sources, targets, probabilities = table.best(1)
    assert list(zip(sources.tolist(), targets.tolist(), strict=True))[:4] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert (probabilities[:4] > 0.9).all()


def test_best_lists_the_most_probable_targets_of_each_source() -> None:
    pairs = random_pairs(40, 7, 8)
    table = trained(pairs, 7, 8, 3)
    expected = []
    reference = reference_table(pairs, 7, 3)
    for e in range(8):  # 7 is NULL
        row = sorted(((-p, f) for (source, f), p in reference.items() if source == e))
        expected += [(e, f, -p) for p, f in row[:3]]
    rows = list(zip(*(column.tolist() for column in table.best(3)), strict=True))
    assert [row[:1] for row in rows] == [row[:1] for row in expected]
    assert [row[2] for row in rows] == pytest.approx([row[2] for row in expected])


def test_each_table_gives_the_probabilities_of_each_word_given_the_line_and_given_null(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ibm_model1, "BLOCK_LINKS", 40)
    pairs, others = random_pairs(40, 7, 8), random_pairs(50, 7, 8)[30:]
    halves = pairs[::2], pairs[1::2]
    expected = []
    for half in halves:
        reference = reference_table(half, 7, 3)
        words = [([reference.get((e, f), FLOOR) for e in [7, *source]]) for source, target in others for f in target]
        expected.append([[sum(word) / len(word) for word in words], [word[0] for word in words]])
    tables = [trained(half, 7, 8, 3) for half in halves]
    found = word_probabilities(tables, flat([source for source, _ in others]), flat([target for _, target in others]))
    np.testing.assert_allclose(found, expected)


def test_without_pairs_the_table_is_empty() -> None:
    table = trained([], 3, 3, 2)
    assert len(table.keys) == 0 and [len(column) for column in table.best(4)] == [0, 0, 0]
    assert word_probabilities([table], flat([]), flat([])).shape == (1, 2, 0)
    assert word_probabilities([table], flat([[1]]), flat([[2, 0]])).tolist() == [[[FLOOR] * 2] * 2]


@pytest.mark.parametrize(
    "source, target, message",
    [
        ([[1]], [[1], [2]], "1 source .*2 target"),
        ([[3]], [[1]], "source ids .*0 to 2, .*3 to 3"),
        ([[1]], [[4]], "target ids .*0 to 3, .*4 to 4"),
    ],
    ids=["sentences", "source_id", "target_id"],
)
def test_wrong_pairs_are_rejected(source: list[list[int]], target: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LexicalTable.train(flat(source), flat(target), 3, 4)


def test_wrong_lengths_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"up to 3, .*2 ids"):
        LexicalTable.train(flat([[1]]), Encoded(np.array([1, 2], np.uint16), np.array([3], np.int64)), 3, 4)
