"""Sentences of a paragraph, and failures of the package that finds them."""

import logging

import pytest

from nmtkit.text import sentences as module
from nmtkit.text.sentences import has_several, sentences, splitter


class Panic(BaseException):
    """Stands in for the exception that PyO3 raises for a panic."""


@pytest.fixture(autouse=True)
def _warnings_start_anew():
    module._warn_once.cache_clear()


def failing(error):
    def split(language, text):
        raise error

    return split


def test_a_panic_of_the_splitter_leaves_the_text_unsplit_and_is_told_once(caplog):
    with caplog.at_level(logging.WARNING, "nmtkit"):
        assert sentences("  One. Two. ", "en", failing(Panic("end byte index 2"))) == [(2, 11)]
        assert sentences("Three.", "en", failing(Panic("end byte index 9"))) == [(0, 6)]
    (message,) = caplog.messages
    assert "(Panic)" in message


def test_a_plural_message_is_not_split():
    text = "{n, plural, one {It is. One.} other {They are. Many.}}"
    assert sentences(text, "en", lambda language, text: text.split(" ")) == [(0, 54)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_not_a_failure_of_the_splitter(error):
    with pytest.raises(error):
        sentences("One.", "en", failing(error()))


def test_text_that_the_splitter_loses_is_kept(caplog):
    with caplog.at_level(logging.WARNING, "nmtkit"):
        assert sentences("One.  Two.", "en", lambda language, text: ["One.", "Two."]) == [(0, 10)]
    assert "all of a text" in caplog.text


def test_sentencex_does_not_stop_the_program_at_an_initial_before_a_no_break_space():
    pytest.importorskip("sentencex")
    assert sentences("B\u00a0.", "en", splitter()) == [(0, 3)]
    assert sentences("Dr. Smith slept. B\u00a0. He left.", "en", splitter())[0][0] == 0


@pytest.mark.parametrize(
    ("line", "several"),
    [
        ("The dog ran. It slept.", True),
        ("The dog <b>ran.</b> <i>It</i> slept.", True),
        ("He met J. Smith.", False),
        ("犬が走る。猫が寝る。", True),
        ("One sentence of 3.5 parts", False),
    ],
)
def test_lines_that_look_like_several_sentences(line, several):
    assert has_several(line) == several


@pytest.mark.parametrize("code", ["de", "de-DE", "de_DE", "deu_Latn", "deu", "DE"])
def test_a_code_with_a_region_or_a_script_has_the_rules_of_its_language(code):
    pytest.importorskip("sentencex")
    text = "Am 3. Oktober kam er. Er blieb."
    assert [text[start:end] for start, end in sentences(text, code, splitter())] == [text[:21], text[22:]]
