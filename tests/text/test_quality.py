"""Estimates of the quality of a translation equal values computed by hand."""

import math

import pytest

from nmtkit.text.quality import assess


def test_the_figures_equal_their_definitions():
    quality = assess("A man sees the Eiffel tower.", "Ein Mann sieht man Eiffel {x} 12.", [-0.1, -0.3, -2.0], (7, 6))
    assert quality.mean_probability == quality.score == pytest.approx(math.exp(-2.4 / 3))
    assert quality.min_probability == pytest.approx(math.exp(-2.0))
    assert quality.length_ratio == pytest.approx(6 / 7)
    assert quality.copied == pytest.approx(2 / 6)  # man and Eiffel, of Ein Mann sieht man Eiffel x
    assert quality.flags == []


@pytest.mark.parametrize(
    ("source", "target", "probability", "pieces", "flags"),
    [
        ("a b", "c d", 0.29, (2, 2), ["uncertain"]),
        ("a b", "c", 0.9, (8, 3), ["too_short"]),
        ("a b", "c", 0.9, (4, 1), []),
        ("a b", "c", 0.9, (3, 7), ["too_long"]),
        ("the dog runs 12", "The dog runs 12", 0.9, (5, 5), ["copied"]),
        ("Anna Maria", "Anna Maria", 0.9, (5, 5), []),
        ("the dog runs", "the dog runs", 0.2, (2, 9), ["uncertain", "too_long", "copied"]),
    ],
)
def test_flags_and_the_score_that_they_halve(source, target, probability, pieces, flags):
    quality = assess(source, target, [math.log(probability)] * 4, pieces)
    assert quality.flags == flags
    assert quality.score == pytest.approx(probability * 0.5 ** len(set(flags) - {"uncertain"}))


def test_protected_text_does_not_count_as_copied():
    text = "see the url www.a.de now"
    assert "copied" in assess(text, text, [-0.1], (5, 5)).flags
    assert assess(text, "siehe www.a.de jetzt", [-0.1], (5, 5), ["www.a.de"]).copied == 0
    assert assess("", "", [], (0, 0)).score == 1
    assert assess("a b", "", [-math.inf], (5, 0)).score == 0
