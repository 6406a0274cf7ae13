"""Texts with tags of any XML format, and rules for tags that a client gives."""

import re
import sys
from typing import Any

import pytest

from nmtkit.text.documents import ReadOptions, TaggedText, TagRules, WebPage
from nmtkit.text.documents.encoding import Encoding


def read(text: str, structure: bool = True, **tags: str) -> TaggedText:
    rules = TagRules(**{name: frozenset(names.split()) for name, names in tags.items()})
    return TaggedText(text, ReadOptions(tags=rules), structure)


def plain(segments: list[str]) -> list[str]:
    """Returns the segments without the tags that stand for codes."""
    return [re.sub(r"<[^>]*>", "", segment) for segment in segments]


MIXED = "<doc><title>A title</title><p>One <b>bold</b> word.</p><p>Two.</p><img/></doc>"


@pytest.mark.parametrize(
    ("text", "settings", "segments"),
    [
        (MIXED, {}, ["A title", "One bold word.", "Two."]),
        (MIXED, {"splitting": "b"}, ["A title", "One", "bold", "word.", "Two."]),
        (MIXED, {"inline": "p title"}, ["A titleOne bold word.Two."]),
        (MIXED, {"structure": False}, ["A titleOne bold word.Two."]),
        (MIXED, {"structure": False, "splitting": "p"}, ["A title", "One bold word.", "Two."]),
        (MIXED, {"untranslated": "title b"}, ["One word.", "Two."]),
        ("no tags", {}, ["no tags"]),
        ("a <x/> b", {}, ["a b"]),
        ("a &lt;b&gt; &amp; c", {}, ["a &lt;b&gt; &amp; c"]),
        ("<A>one</A><a>two</a>", {}, ["one", "two"]),
        ("<source>one</source><link>two</link>", {}, ["one", "two"]),
        ("<!-- c --><?pi x?><p>one</p>", {}, ["one"]),
        ("<p>1</p><p>…</p>", {}, []),
        ("<p>open <b>never closed</p> rest", {}, ["open never closed rest"]),
    ],
)
def test_sentences_end_at_tags_of_the_structure(text: str, settings: dict[str, Any], segments: list[str]) -> None:
    document = read(text, **settings)
    assert [" ".join(segment.split()) for segment in plain(document.segments)] == segments
    assert document.render(document.segments) == text


def test_translations_keep_all_tags_and_escapes() -> None:
    document = read(MIXED.replace("Two.", "Two &amp; 1 &lt; 2."))
    new = [segment.replace("One", "Ein").replace("Two", "Zwei") for segment in document.segments]
    assert document.render(new) == (
        "<doc><title>A title</title><p>Ein <b>bold</b> word.</p><p>Zwei &amp; 1 &lt; 2.</p><img/></doc>"
    )


def test_an_untranslated_element_is_one_code_with_everything_in_it() -> None:
    text = "<p>Press <key id='1'>the <b>red</b> key</key> now, <key>x</key>.</p>"
    document = read(text, untranslated="key")
    (segment,) = document.segments
    assert plain([segment]) == ["Press now, ."] and "red" not in segment
    assert document.render([segment.replace("Press", "Drück")]) == text.replace("Press", "Drück")


@pytest.mark.parametrize("text", ["<a>x" * 2000, "<a>x</a>" * 1000, "a<b>" * 2000, "</a>" * 2000, "<" * 5000])
def test_work_grows_linearly(text: str) -> None:
    def calls(text: str) -> int:
        counted = 0

        def count(*_: object) -> None:
            nonlocal counted
            counted += 1

        sys.setprofile(count)
        try:
            document = read(text, untranslated="z")
            document.render(document.segments)
        finally:
            sys.setprofile(None)
        return counted

    assert calls(text) < 4.1 * calls(text[: len(text) // 4])


@pytest.mark.parametrize(
    ("rules", "segments"),
    [
        (TagRules(), ["See", "the code", "now."]),
        (TagRules(untranslated=frozenset({"x"})), ["See now."]),
        (TagRules(inline=frozenset({"x"})), ["See the code now."]),
        (TagRules(splitting=frozenset({"b"})), ["See", "the", "code", "now."]),
    ],
)
def test_rules_of_a_client_apply_to_web_pages(rules: TagRules, segments: list[str]) -> None:
    text = "<p>See <x>the <b>code</b></x> now.</p>"
    page = WebPage(text, Encoding(), ReadOptions(tags=rules))
    assert plain(page.segments) == segments
    assert page.render(page.segments) == text
