"""Glossaries: their files, and the positions of their terms in texts."""

import logging
import random
import re

import pytest
from builders import tiny_tokenizer
from work import operations

from nmtkit.text.glossary import Glossary, Term, TermResult, load, positions, term_results, without
from nmtkit.translation.pipeline import required_terms
from nmtkit.translation.search.text_automaton import TextAutomaton


def glossary(*sources):
    return Glossary([Term(source, (source.upper(),)) for source in sources])


def found(sources, text, capitals=False):
    return [
        (text[match.start : match.end], match.term.source) for match in glossary(*sources).find(text, capitals=capitals)
    ]


@pytest.mark.parametrize(
    ("sources", "text", "matches"),
    [
        (["fire", "fire alarm"], "a fire alarm and a fire", ["fire alarm", "fire"]),
        (["fire alarm", "alarm clock"], "a fire alarm clock", ["fire alarm"]),
        (["pump"], "pumps, pumping; pump-driven pump's (pump)", ["pump", "pump", "pump"]),
        (["eau"], "de l'eau, un bateau", ["eau"]),
        (["C++", "C"], "C++ and C", ["C++", "C"]),
        (["fire alarm"], "a fire \t alarm", ["fire \t alarm"]),
        (["火災", "火災報知器"], "この火災報知器と火災", ["火災報知器", "火災"]),
        (["pump"], "日本pump製", ["pump"]),
        (["pump"], "", []),
        (["किताब"], "किताब किताबें", ["किताब"]),
    ],
)
def test_terms_are_whole_words_and_the_longest_comes_first(sources, text, matches):
    assert [match for match, _ in found(sources, text)] == matches


def test_a_small_term_matches_a_capital_where_a_sentence_begins_and_nowhere_else():
    assert (
        found(["fire alarm"], "Fire alarm! “Fire alarm” the Fire alarm: Fire alarm. FIRE alarm")
        == [("Fire alarm", "fire alarm")] * 3
    )
    assert found(["iPhone", "Pump"], "IPhone pump") == []
    assert found(["Fire", "fire alarm"], "Fire alarm") == [("Fire alarm", "fire alarm")]
    assert found(["ACME pump"], "Press the acme PUMP", capitals=True) == [("acme PUMP", "ACME pump")]


def test_thousands_of_terms_are_found_where_a_regular_expression_finds_them():
    draw = random.Random(1)
    words = ["".join(draw.choice("abc") for _ in range(draw.randint(1, 3))) for _ in range(30)]
    terms = sorted({" ".join(draw.choice(words) for _ in range(draw.randint(1, 3))) for _ in range(3000)})
    pattern = re.compile("\\b(?:" + "|".join(sorted(terms, key=len, reverse=True)) + ")\\b")
    terms_of = glossary(*terms)
    for _ in range(50):
        text = " ".join(draw.choice(words) for _ in range(20))
        assert [(match.start, match.end) for match in terms_of.find(text)] == [m.span() for m in pattern.finditer(text)]


def test_a_target_stands_as_whole_words_and_with_a_capital():
    assert positions("Der Hund, der Hunde Hund", "Hund", False) == [(4, 8), (20, 24)]
    assert positions("Alter Hund, alter Hund", "alter Hund", False) == [(0, 10), (12, 22)]
    assert positions("ALTER STRASSE", "straße", True) == [(6, 13)]
    assert positions("IPhone iPhone", "iPhone", False) == [(7, 13)]
    assert positions("この火災報知器は", "火災報知器", False) == [(2, 7)]


@pytest.mark.parametrize(
    ("text", "term", "whole"),
    [
        ("Mit C++.", "C++", True), ("Mit C++en.", "C++", False), ("C++", "C++", True), ("(C++)", "C++", True),
        ("C++-Code", "C++", True), ("C++11", "C++", True), ("C++を使う", "C++", True), ("xC++", "C++", False),
        ("C#, .NET", ".NET", True), ("ASP.NET", ".NET", False), ("bei 5°C", "°C", True), ("50%", "%", True),
        ("50%ig", "%", True), ("Acme®", "®", True), ("mit Dr. Hund", "Dr.", True), ("Dr.Hund", "Dr.", False),
        ("Mann.", ".", True),
    ],
)  # fmt: skip
def test_a_sign_at_the_edge_of_a_term_belongs_to_the_word_of_a_letter(text, term, whole):
    tokenizer = tiny_tokenizer()
    assert bool(positions(text, term, False)) == whole
    assert bool(Glossary([Term(term, (term,))]).find(text)) == whole
    automaton = TextAutomaton([required_terms(tokenizer)((term,))], ordered=False)
    assert automaton.holds(tokenizer.encode_target([text]).ids[:-1].tolist()) == whole


def test_every_occurrence_in_the_translation_counts_once():
    dog, animal = Term("dog", ("Hund", "Hundes")), Term("old dog", ("alter Hund",))
    assert [result.found for result in term_results("alter Hund", [dog, animal])[0]] == ["Hund", None]
    results, spans = term_results("Hundes, alter Hund", [dog, animal])
    assert results == [TermResult("dog", dog.targets, "Hundes"), TermResult("old dog", animal.targets, "alter Hund")]
    assert sorted(spans) == [(0, 6), (8, 18)]
    results, _ = term_results("Hund", [dog, dog])
    assert sorted(str(result.found) for result in results) == ["Hund", "None"]


def test_a_target_that_holds_a_protected_text_is_left_out_but_not_one_that_holds_its_letters():
    assert without(["Kapazität", "IT-Abteilung", "15 mal", "5 m"], ["IT", "5 m"]) == ("Kapazität", "15 mal")


def test_a_term_that_stands_a_thousand_times_is_counted_in_linear_time():
    def work(count):
        return operations(lambda: term_results("Hund " * count, [Term("dog", ("Hund", "Hunde"))] * count))

    assert work(800) < 6 * work(200) + 10_000


def test_a_file_with_alternatives_repeated_terms_and_a_byte_order_mark(tmp_path, caplog):
    path = tmp_path / "terms.tsv"
    path.write_bytes("\ufefffire  alarm\tFeuermelder| Brandmelder \r\n\ndog\tHund\ndog\tHund\ndog\tKöter\n".encode())
    with caplog.at_level(logging.WARNING, "nmtkit"):
        terms = load(path).terms
    assert terms == [Term("fire alarm", ("Feuermelder", "Brandmelder")), Term("dog", ("Hund", "Köter"))]
    assert f"{path}:5: 'dog'" in caplog.text and "alternatives" in caplog.text
    assert load(path) is load(path)
    path.write_text("cat\tKatze\n")
    assert load(path).terms == [Term("cat", ("Katze",))]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"dog\tHund\ncat Katze\n", r":2: no tab"),
        (b"dog\tHund\tnoun\n", r":1: 2 tabs; each line must"),
        (b"dog\t\n", r":1: a target term"),
        (b"dog\tHund|\n", r":1: a target term"),
        (b"\tHund\n", r":1: the source term"),
        (b"dog\tHund\ncat\tK\xe4tzchen\n", r":2: byte 6 is not UTF-8"),
        (b"\n", r"holds no terms"),
    ],
)
def test_a_line_that_is_not_a_term_is_refused_with_its_number(tmp_path, contents, message):
    path = tmp_path / "terms.tsv"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*" + message):
        load(path)
