"""What must not be translated comes out as it went in, whatever a model makes of the rest."""

import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmtkit.text.alignment import Link, words
from nmtkit.text.protection import PATTERNS, compiled, occurrences, protect, protected_spans

BUILT_IN = compiled(PATTERNS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("See https://x.org/a?b=1, or (http://y.de/z_(1)).", ["https://x.org/a?b=1", "http://y.de/z_(1"]),
        ("Ask joe.doe+x@mail.example.com or @joe.", ["joe.doe+x@mail.example.com", "@joe"]),
        ("Go to example.org/path now, not to e.g. this.", ["example.org/path"]),
        ("Hello {name}, {{count}} new, ${total}, {0:>10.2f}", ["{name}", "{{count}}", "${total}", "{0:>10.2f}"]),
        ("%s of %(count)d in %1$s: %.2f at 100 % done, 50% sold", ["%s", "%(count)d", "%1$s", "%.2f", "100 %", "50%"]),
        ("It is 12 km, 3.5 kg, 1,000.5 m², 5 minutes, $5.50 away", ["12 km", "3.5 kg", "1,000.5 m²", "$5.50"]),
        ("Ping 10.0.0.1:80, PATH is $HOME, %APPDATA%", ["10.0.0.1:80", "$HOME", "%APPDATA%"]),
        ("Two dogs run in 2024; it is 5 o'clock.", []),
    ],
)  # fmt: skip
def test_spans_that_are_found(text, expected):
    assert [text[start:end] for start, end in protected_spans(text, BUILT_IN)] == expected


def test_the_same_text_elsewhere_is_protected_too():
    assert protected_spans("x ab x b", compiled(["(?<=a)b"])) == [(3, 4), (7, 8)]


def test_patterns_that_cannot_be_used_are_refused():
    with pytest.raises(ValueError, match="not a regular expression"):
        compiled(["("])
    with pytest.raises(ValueError, match="empty text"):
        compiled(["x*"])


def word_by_word(source: str, target: str) -> list[Link]:
    return [Link(*one, *other) for one, other in zip(words(source), words(target), strict=False)]


def test_what_is_fixed_gives_way_to_no_span():
    source, target = "the {x} dog", "der Hund"
    protected = protect(source, protected_spans(source, BUILT_IN), lambda span: True)
    links = [Link(0, 3, 0, 3), Link(4, 7, 4, 8), Link(8, 11, 4, 8)]
    assert protected.restore(target, links)[0] == "der {x}"
    assert sorted(protected.restore(target, links, [(4, 8)])[0].split()) == ["Hund", "der", "{x}"]
    assert [protected.is_whole(*span) for span in ((0, 3), (2, 5), (4, 7), (8, 11))] == [True, False, False, True]
    cut = protect(source, protected_spans(source, BUILT_IN), lambda span: False)
    assert cut.text == "the dog" and not cut.is_whole(0, 7) and cut.is_whole(4, 7)


@pytest.mark.parametrize(
    ("source", "text", "target", "expected"),
    [
        ("A man sees {x} there.", "A man sees there.", "Ein Mann sieht dort.", "Ein Mann sieht {x} dort."),
        ("{x} runs.", "runs.", "rennt.", "{x} rennt."),
        ("He sees {x}.", "He sees.", "Er sieht.", "Er sieht {x}."),
        ("He ({x}) sees {y}s!", "He () sees!", "Er () sieht!", "Er {x} () sieht {y}s!"),
        ("He runs. {x}", "He runs. ", "Er rennt.", "Er rennt. {x}"),
        ("He {x} {y} runs", "He runs", "Er rennt", "Er {x} {y} rennt"),
    ],
)
def test_an_unknown_span_is_put_back_beside_the_word_it_followed(source, text, target, expected):
    protected = protect(source, protected_spans(source, BUILT_IN), lambda span: False)
    assert protected.text == text
    assert protected.restore(target, word_by_word(text, target))[0] == expected


def test_a_known_span_stays_and_is_repaired_where_the_translation_changed_it():
    source = "He ran 12 km today."
    protected = protect(source, protected_spans(source, BUILT_IN), lambda span: True)
    assert protected.text == source
    for target, expected in {
        "Er lief 12 km heute.": "Er lief 12 km heute.",
        "Er lief zwölf Kilometer heute.": "Er lief 12 km heute.",
        "Er lief 12 km 12 km heute.": "Er lief 12 km heute.",
        "Er lief.": "Er lief 12 km.",
    }.items():
        assert protected.restore(target, word_by_word(source, target))[0] == expected


def test_a_sentence_of_spans_alone_is_copied():
    source = "({x}): %s!"
    protected = protect(source, protected_spans(source, BUILT_IN), lambda span: False)
    assert not protected.plain
    assert protected.restore("Unsinn", [])[0] == source


FRAGMENTS = [
    "dog",
    "Hund",
    " ",
    " ",
    ".",
    ",",
    "(",
    ")",
    "{a}",
    "{b}",
    "{",
    "}",
    "%s",
    "s",
    "12",
    " km",
    "1",
    "日本",
    "é",
    "\u0301",
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@settings(max_examples=600, deadline=None)
@given(TEXTS, TEXTS, st.randoms(use_true_random=False), st.booleans())
def test_every_span_is_in_the_output_exactly_as_often_as_in_the_source(source, target, draw, known):
    spans = protected_spans(source, BUILT_IN)
    protected = protect(source, spans, lambda span: known and span != "{b}")
    links = random_links(protected.text, target, draw)
    result, moved = protected.restore(target, links)
    for string in {source[start:end] for start, end in spans}:
        strings = {source[start:end] for start, end in spans}
        assert counts(result, strings)[string] == counts(source, strings)[string]
    for link in moved:
        assert 0 <= link.source_start < link.source_end <= len(source)
        assert 0 <= link.target_start < link.target_end <= len(result)


def counts(text: str, strings: set[str]) -> Counter[str]:
    return Counter(text[start:end] for start, end in occurrences(text, strings))


def random_links(source: str, target: str, draw: random.Random) -> list[Link]:
    sources = words(source)
    return [Link(*draw.choice(sources), *word) for word in words(target) if sources and draw.random() < 0.8]


def test_none_of_a_thousand_placeholders_is_lost():
    draw = random.Random(1)
    for number in range(1000):
        tokens = ["ein", "Hund", "läuft", "durch", "den", "Park", "."]
        source = " ".join([*tokens[: (at := draw.randrange(7))], f"{{name_{number}}}", *tokens[at:]])
        protected = protect(source, protected_spans(source, BUILT_IN), lambda span: False)
        target = " ".join(draw.choices(tokens, k=draw.randrange(9)))
        result, _ = protected.restore(target, random_links(protected.text, target, draw))
        assert re.findall(r"\{.*?\}", result) == [f"{{name_{number}}}"]


def test_the_time_for_a_line_grows_as_its_length_does():
    """Each of these took minutes with patterns that begin anywhere and read on to the end."""
    for unit in ("a.", "a-", "1.", " 000", "a@", "{", "%(a", "www.", "http://", "$", "(a.a", "{a}", "{a} "):
        text = unit * (100_000 // len(unit))
        spans = protected_spans(text, BUILT_IN)
        protected = protect(text, spans, lambda span: False)
        assert all(start < end for start, end in spans)
        assert len(protected.text) + sum(end - start for start, end in protected.spans) <= len(text)
