"""Lines in capitals."""

import pytest

from nmtkit.text.alignment import Link, words
from nmtkit.text.casing import capitals, in_capitals, sentence_case


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("STOP! NO ENTRY 24H", True),
        ("ÄRGER IM PARK", True),
        ("NATO", False),
        ("NATO and EU", False),
        ("A B", False),
        ("12 34", False),
        ("日本 日本 日本", False),
    ],
)
def test_lines_in_capitals(text, expected):
    assert in_capitals(text) == expected


def test_sentence_case_keeps_every_place():
    text = '"ÄRGER İN PARK 12!"'
    assert sentence_case(text) == '"Ärger İn park 12!"'
    assert len(sentence_case(text)) == len(text)


def test_a_greek_word_ends_in_its_final_sigma():
    assert sentence_case("ΟΔΟΣ ΑΘΗΝΑΣ 5") == "Οδος αθηνας 5"
    assert sentence_case("İZMİR ΟΔΟΣ") == "İzmİr οδοσ"  # the small i with a dot is two characters


def test_digraphs_with_a_titlecase_letter():
    assert sentence_case("ǄUNGLA ǇUDI") == "Ǆungla ǉudi"
    assert capitals("ǅungla", [])[0] == "ǄUNGLA"
    assert not in_capitals("ǅUNGLA ǈUDI pet")


def test_links_follow_a_letter_that_becomes_two():
    text = "Große Straße, gut"
    upper, links = capitals(text, [Link(0, 1, *word) for word in words(text)])
    assert upper == text.upper() == "GROSSE STRASSE, GUT"
    assert [upper[link.target_start : link.target_end] for link in links] == ["GROSSE", "STRASSE", ",", "GUT"]
