"""Similar texts by MinHash: the share of common 5-grams decides, and the best text stays."""

import random
from pathlib import Path

import numpy as np
import pytest

from nmtkit.cleaning.similarity import SimilarTexts, bands

pytest.importorskip("rensa")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def text_of(generator: random.Random, length: int = 204) -> str:
    return "".join(generator.choice(LETTERS) for _ in range(length))


def found(folder: Path, texts: list[str], similarity: float, order: list[int] | None = None) -> list[int]:
    """Returns the indexes of the dropped texts. The texts come in two parts."""
    similar = SimilarTexts(folder / "texts", similarity)
    similar.add(texts[:3])
    similar.add(texts[3:])
    return similar.find(np.array(order if order is not None else range(len(texts)))).tolist()


def test_texts_above_the_similarity_are_found_and_others_are_not(tmp_path: Path) -> None:
    """A text of 204 letters has 200 5-grams. Other last n letters change n of them: Jaccard (200 - n) / (200 + n)."""
    generator = random.Random(1)
    pairs = []
    for changed in (10, 50):  # Jaccard 0.905 and 0.6
        for _ in range(100):
            text = text_of(generator)
            pairs.append((text, text[:-changed] + text_of(generator, changed)))
    texts = [side for pair in pairs for side in pair]
    dropped = found(tmp_path, texts, 0.8)
    assert len([row for row in dropped if row < 200]) >= 97 and [row for row in dropped if row >= 200] == []
    assert all(row % 2 for row in dropped)  # the first of two equal texts stays
    assert found(tmp_path, texts, 0.8) == dropped


def test_the_best_text_stays_and_a_dropped_text_drops_no_other(tmp_path: Path) -> None:
    generator = random.Random(2)
    first = text_of(generator)
    second = first[:-20] + text_of(generator, 20)  # Jaccard 0.82 with the first text
    third = second[20:] + text_of(generator, 20)  # Jaccard 0.82 with the second text, 0.65 with the first text
    texts = [first, second, third, text_of(generator), "", "", "abc", "abd", "abc"]
    assert found(tmp_path, texts, 0.7) == [1, 5, 8]
    assert found(tmp_path, texts, 0.7, order=[1, 0, 2, 3, 5, 4, 6, 7, 8]) == [0, 2, 4, 8]
    assert found(tmp_path, [], 0.7) == []


@pytest.mark.parametrize("similarity", [0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
def test_bands_find_most_texts_with_exactly_the_searched_similarity(similarity: float) -> None:
    """Two texts share a hash value with probability s, and all values of a band with s^rows."""
    count = bands(similarity)
    rows = 128 // count
    missed = (1 - similarity**rows) ** count
    assert rows * count == 128 and missed <= 0.15
    assert count == 8 or (1 - similarity ** (2 * rows)) ** (count // 2) > 0.15  # fewer bands miss too many
