import unicodedata

import pytest

from nmtkit.cleaning.mending import Mender

CASES = {
    "encoding": ("SchÃ¶ne GrÃ¼ÃŸe", "Schöne Grüße"),
    "quotes": ("theyâ€™re here", "they’re here"),
    "entities": ("Tom &amp; Jerry&#39;s &quot;show&quot;", 'Tom & Jerry\'s "show"'),
    "escaped entities": ("Tom &amp;amp; Jerry", "Tom & Jerry"),
    "tags stay escaped": ("a &lt;b&gt; c", "a &lt;b&gt; c"),
    "zero width": ("\ufeffinvisible\u200b space\u00ad", "invisible space"),
    "joiners stay": ("👩\u200d👩\u200d👧 می\u200cخواهم", "👩\u200d👩\u200d👧 می\u200cخواهم"),
    "spaces": (" two  spaces\tand\u2028lines ", "two spaces and lines"),
    "no-break spaces stay": ("Was\u00a0? 10\u202f000", "Was\u00a0? 10\u202f000"),
    "control characters": ("a\x07b\x85c\rd", "ab c d"),
    "normalization": ("e\u0301te\u0301", "été"),
    "accents are not mended": ("Ärger über Äpfel, ça va, naïve Ångström", "Ärger über Äpfel, ça va, naïve Ångström"),
    "an entity of a line feed stays": ("a&#10;b", "a&#10;b"),
}


@pytest.mark.parametrize("case", CASES)
def test_lines_are_mended(case: str) -> None:
    broken, mended = CASES[case]
    mender = Mender()
    assert mender(["before", broken, "", "after"]) == ["before", mended, "", "after"]
    assert sum(mender.counts.values()) >= (broken != mended)
    assert (sum(mender.counts.values()) > 0) == (broken != mended)


def test_mending_twice_changes_nothing_more() -> None:
    first = Mender()([broken for broken, _ in CASES.values()])
    mender = Mender()
    assert mender(first) == first
    assert set(mender.counts.values()) == {0}


# Each line alone, without a combining accent nearby, must reach the normalization.
@pytest.mark.parametrize(
    "line",
    [
        "a&#769;",
        "\u212b",
        "\u1112\u1161\u11ab",
        "\u09c7\u09be",
        "\u0340",
        "\U0001d15e",
        "\U000110a5\U000110ba",
        "\u0958",
    ],
    ids=["entity", "singleton", "hangul", "bengali", "tone_mark", "music", "above_the_plane", "excluded"],
)
def test_every_line_gets_its_normal_form(line: str) -> None:
    assert Mender()(["x", line]) == ["x", unicodedata.normalize("NFC", line.replace("&#769;", "\u0301"))]
