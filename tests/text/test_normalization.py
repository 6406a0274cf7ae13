"""NFC takes linear time on any text."""

import random
import re
import unicodedata

import pytest
from work import operations

from nmtkit.text.normalization import MAX_MARKS, normalized


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("e\u0301te\u0301", "été"),
        ("a\u0323\u0301", "ạ\u0301"),
        ("a\u0301\u0323", "ạ\u0301"),
        ("\u1112\u1161\u11ab\u1100\u116e\u11a8", "한국"),
        ("Å ﬁ ½", "Å ﬁ ½"),
        ("x" + "\u0301" * 30, "x" + "\u0301" * 30),
        ("x" + "\u0301" * 31, "x" + "\u0301" * 30 + "\u034f\u0301"),
        ("é" + "\u0316" * 30, "é" + "\u0316" * 29 + "\u034f\u0316"),
        ("x" + "\u0301\U00010a0d" * 16, "x" + "\U00010a0d" * 15 + "\u0301" * 15 + "\u034f\U00010a0d\u0301"),
        ("\U0001f600" * 40, "\U0001f600" * 40),
        ("\u0344" * 16, "\u0308\u0301" * 15 + "\u034f\u0308\u0301"),
    ],
)
def test_nfc_with_a_separator_in_runs_of_more_than_30_marks(text, expected):
    if "\u0316" in expected:  # NFC moves the mark below before the acute, which stays a separate mark
        expected = unicodedata.normalize("NFC", expected)
    assert normalized(text) == expected
    assert normalized(expected) == expected


def test_all_characters_are_normalized_as_by_unicodedata():
    text = "".join(char for char in map(chr, range(0x80, 0x30000)) if unicodedata.category(char)[0] != "M")
    assert normalized(text) == unicodedata.normalize("NFC", text)
    draw = random.Random(1)
    for _ in range(200):
        text = "".join(draw.choice("aeo \u0301\u0323\u0308\u0345\u0f71\u0f72") for _ in range(12))
        assert normalized(text) == unicodedata.normalize("NFC", text)


def test_the_work_grows_linearly_with_a_run_of_combining_marks():
    """`unicodedata` sorts each run in quadratic time, so the runs in its result must be short."""
    short, long = ("a" + "\u0301\u0323\u0f71" * count for count in (1_000, 4_000))
    normalized(short)
    assert operations(lambda: normalized(long)) < 5 * operations(lambda: normalized(short))
    assert max(len(run) for run in re.findall("[\u0301\u0323\u0f71]+", normalized(long))) <= MAX_MARKS
