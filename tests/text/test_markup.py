"""Markup follows the words. It is never lost, doubled or crossed, for any alignment."""

import html
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from work import operations

from nmtkit.text.alignment import Link, words
from nmtkit.text.markup import MAX_TAGS, marked

TAG = re.compile(r"<!--.*?-->|</?[a-z]+(?: [a-z]+='[^']*')?/?>")

NAMES = ["b", "i", "a", "em"]


def word_by_word(source: str, target: str) -> list[Link]:
    return [Link(*one, *other) for one, other in zip(words(source), words(target), strict=False)]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("A <b>big</b> dog", "Ein großer Hund", "Ein <b>großer</b> Hund"),
        ('<a x="?a&amp;b=>">A <i>big</i> dog</a>', "Ein großer Hund", '<a x="?a&amp;b=>">Ein <i>großer</i> Hund</a>'),
        ("A dog<br/> runs<img src=y>", "Ein Hund rennt", "Ein Hund<br/> rennt<img src=y>"),
        ("<b>Cats &amp; dogs</b> run", "Katzen & Hunde rennen", "<b>Katzen &amp; Hunde</b> rennen"),
        ("A <b>big <i>dog</b> runs</i>", "Ein großer Hund rennt", "Ein <b>großer <i>Hund</b> rennt</i>"),
        ("<!-- note -->A dog", "Ein Hund", "<!-- note -->Ein Hund"),
        ("1 < 2 and 3 > 2", "1 < 2 und 3 > 2", "1 &lt; 2 und 3 &gt; 2"),
        ("<br><b></b>", "Unsinn", "<br><b></b>"),
    ],
)  # fmt: skip
def test_tags_go_with_the_words_they_stand_around(source, target, expected):
    line = marked(source)
    assert line.restore(target, word_by_word(line.text, target)) == expected


def test_tags_follow_words_that_change_places():
    line = marked("he has <b>seen</b> the <i>dog</i>")
    target = "er hat den Hund gesehen"
    pairs = {0: 0, 1: 1, 2: 3, 3: 4, 4: 2}  # target word -> source word
    links = [Link(*words(line.text)[s], *words(target)[t]) for t, s in pairs.items()]
    assert line.restore(target, links) == "er hat den <i>Hund</i> <b>gesehen</b>"


def test_an_element_to_which_no_word_attends_surrounds_the_nearest_word():
    line = marked('he lives in <a href="x">the city</a> now')
    target = "er lebt jetzt in der Stadt"
    pairs = {0: 0, 1: 1, 2: 5, 3: 2}  # target word -> source word
    links = [Link(*words(line.text)[s], *words(target)[t]) for t, s in pairs.items()]
    assert line.restore(target, links) == 'er lebt jetzt in <a href="x">der</a> Stadt'


def random_markup(draw: random.Random, tokens: list[str], depth: int = 0) -> str:
    """Well-formed markup around the tokens, with void elements and comments between them."""
    parts = []
    index = 0
    while index < len(tokens):
        kind = draw.random()
        if kind < 0.15 and depth < 4:
            end = draw.randint(index, len(tokens))
            name = draw.choice(NAMES)
            parts.append(f"<{name} id='{draw.random()}'>{random_markup(draw, tokens[index:end], depth + 1)}</{name}>")
            index = end
        elif kind < 0.25:
            parts.append(draw.choice(["<br/>", "<img src='a>b'>", "<!-- <b> -->"]))
        else:
            parts.append(html.escape(tokens[index], quote=False))
            index += 1
    return " ".join(parts)


TOKENS = st.lists(st.sampled_from(["dog", "Hund", "&", "<", "日本", ".", ",", "it's", "("]), max_size=9)


@settings(max_examples=150, deadline=None)
@given(TOKENS, TOKENS, st.integers(0, 10**6))
def test_no_tag_is_lost_doubled_or_crossed(tokens, others, seed):
    draw = random.Random(seed)
    source, target = random_markup(draw, tokens), " ".join(others)
    line = marked(source)
    sources = words(line.text)
    links = [Link(*draw.choice(sources), *word) for word in words(target) if sources and draw.random() < 0.8]
    result = line.restore(target, links)
    assert sorted(TAG.findall(result)) == sorted(TAG.findall(source))
    open_names = []
    for tag in TAG.findall(result):
        if tag.startswith("</"):
            assert open_names.pop() == tag[2:-1]
        elif not tag.startswith(("<!", "<br", "<img")):
            open_names.append(re.match(r"<(\w+)", tag)[1])
    assert not open_names
    if any(char.isalnum() for char in line.text):
        assert html.unescape(TAG.sub("", result)) == target
    else:
        assert result == source


def test_tags_beyond_the_limit_keep_their_order_and_follow_their_words():
    source = "".join(f"<b>word{number}</b> " for number in range(MAX_TAGS))
    line = marked(source + "<i>last</i>.")
    target = " ".join(f"Wort{number}" for number in range(MAX_TAGS)) + " zuletzt."
    found = line.restore(target, word_by_word(line.text, target))
    assert found == "".join(f"<b>Wort{number}</b> " for number in range(MAX_TAGS)) + "<i>zuletzt</i>."


NESTED = {
    "nested": ("<b>" * 20_000 + "A dog" + "</b>" * 20_000, "<b>" * 20_000 + "Ein Hund" + "</b>" * 20_000),
    "unclosed": ("<b>" * 20_000 + "A dog", "<b>" * 20_000 + "Ein Hund"),
    "stray": ("A dog" + "</i>" * 20_000, "Ein Hund" + "</i>" * 20_000),
    "other names": ("<b>" * 20_000 + "A dog" + "</i>" * 20_000, "<b>" * 20_000 + "Ein Hund" + "</i>" * 20_000),
}


@pytest.mark.parametrize("name", NESTED)
def test_twenty_thousand_nested_tags_are_put_back(name):
    """1,500 nested tags once exceeded the recursion limit."""
    source, expected = NESTED[name]
    line = marked(source)
    assert line.text == "A dog"
    assert line.restore("Ein Hund", word_by_word("A dog", "Ein Hund")) == expected


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["<b>x ", "<b>", "</b>x ", "x</b><b>", "<!--", "<a '", '<a x="', "<a ='\">", "<",
                                  "<b", "<!", "<br>x ", "&amp;", "<a =\"'<a ='\"", "<b>x</b> "])  # fmt: skip
def test_the_work_grows_linearly_with_the_line(unit):
    def work(length: int) -> int:
        source = "word " + unit * (length // len(unit))
        target = "wort " * (length // 8)

        def run() -> None:
            line = marked(source)
            line.restore(target, word_by_word(line.text, target))

        return operations(run)

    assert work(8_000) < 6 * work(2_000) + 10_000
    marked("word " + unit * (60_000 // len(unit)))


def test_a_stray_end_tag_and_an_unclosed_one_are_kept():
    line = marked("a </b> dog <i> runs")
    assert sorted(TAG.findall(line.restore("ein Hund rennt", []))) == ["</b>", "<i>"]


def test_a_character_reference_of_any_length_is_read_as_by_a_browser():
    """A number of 5,000 digits raised ValueError, which names a setting of Python."""
    for digits, character in {"9" * 5000: "\ufffd", "0" * 5000 + "65": "A", "0" * 9: "\ufffd", "00000065": "A"}.items():
        assert marked(f"A <b>dog</b> &#{digits}; &amp;").text == f"A dog {character} &"
    assert marked("&#x" + "f" * 5000 + ";&#55296;&#1114112").text == "\ufffd" * 3
