"""Edits of a translation keep words apart."""

import pytest

from nmtkit.text.edits import Edit, edited


@pytest.mark.parametrize(
    ("edits", "result"),
    [
        ([Edit(2, 4, "", None), Edit(4, 6, "", None)], "a b"),
        ([Edit(2, 4, "", None), Edit(4, 6, "7", (0, 1))], "a 7 b"),
        ([Edit(2, 4, "", None)], "a-5 b"),
        ([Edit(0, 2, "", None)], "%s-5 b"),
    ],
)
def test_words_stay_apart_where_two_edits_meet(edits: list[Edit], result: str) -> None:
    """The second edit took the space that the first edit had removed for a space before itself: `ab`."""
    assert edited("a %s-5 b", edits, [])[0] == result
