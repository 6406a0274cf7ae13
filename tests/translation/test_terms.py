"""Translations with a glossary contain the terms as whole words, together with all other options of text."""

import re

import pytest
from builders import save_tiny_transformer, tiny_tokenizer
from click.testing import CliRunner

import nmtkit
from nmtkit.cli import main
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.translation.pipeline import required_terms
from nmtkit.translation.search.text_automaton import TextAutomaton

SHORT = {"max_len_a": 0.0, "max_len_b": 8}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny_transformer(tmp_path_factory.mktemp("model") / "tiny.pt", tiny_tokenizer(), sharpness=2.0)


@pytest.fixture
def terms(tmp_path):
    path = tmp_path / "terms.tsv"
    path.write_text("dog\tHund|Köter\nthe park\tstreet\ncat\tcat\ntwo men\tmen in|women in\nstreet\t🙂 {x}\n")
    return path


def words_of(text):
    return re.findall(r"\w+", text)


def test_every_hypothesis_holds_every_term_as_often_as_the_line_has_it(path, terms):
    lines = ["the dog runs in the park .", "a dog and a dog", "", "Two men sleep !", "a women runs", "cat cat cat ."]
    found = nmtkit.load(path).translate(lines, nbest=4, glossary=terms, **SHORT)
    plain = nmtkit.load(path).translate(lines, **SHORT)
    for translation in found:
        for output in translation.hypotheses:
            assert all(result.found in result.targets for result in output.terms)
            words = words_of(output.text)
            text = " ".join(words)
            counts = [
                words.count("Hund") + words.count("Köter"),
                words.count("street"),
                sum(text.count(form) for form in ("men in", "Men in")),
                words.count("cat") + words.count("Cat"),
            ]
            wanted = [len(re.findall(term, translation.source)) for term in ("dog", "the park", "[tT]wo men", "cat")]
            assert all(count >= number for count, number in zip(counts, wanted, strict=True)), output.text
    assert [[result.source for result in translation.hypotheses[0].terms] for translation in found] == [
        ["dog", "the park"], ["dog", "dog"], [], ["two men"], [], ["cat"] * 3]  # fmt: skip
    assert found[4].text == plain[4] and found[2].text == ""


def test_a_line_translates_alike_alone_and_beside_lines_with_terms(path, terms):
    lines = ["the dog runs .", "two women sleep in the park !", "the cat", "a street ."]
    model = nmtkit.load(path)
    assert [model.translate(line, glossary=terms, **SHORT) for line in lines] == model.translate(
        lines, glossary=terms, **SHORT
    )


def test_terms_go_with_markup_capitals_sentences_and_protected_text(path, terms, monkeypatch):
    monkeypatch.setattr(
        "nmtkit.translation.steps.splitter", lambda: lambda language, text: re.findall(r"[^.!]*(?:[.!]\s*|$)", text)
    )
    line = "<b>the <i>dog</i> runs</b> {dog} . THE DOG SLEEPS ! @dog street {x} ."
    options = {"markup": "html", "truecase_caps": True, "protect_spans": True, "split_sentences": "en"}
    (output,) = nmtkit.load(path).translate(line, nbest=1, glossary=terms, **options, **SHORT).hypotheses
    assert [(result.source, result.found in ("Hund", "Köter")) for result in output.terms] == [
        ("dog", True), ("dog", True), ("street", False)]  # fmt: skip
    text = re.sub("<[^<>]+>", "", output.text)
    assert [text.count(span) for span in ("{dog}", "@dog", "{x}")] == [1, 1, 1]
    assert "HUND" in text or "KÖTER" in text
    assert sorted(re.findall("<[^<>]+>", output.text)) == ["</b>", "</i>", "<b>", "<i>"]


def test_a_long_line_has_each_term_in_the_part_where_it_stands(path, terms):
    line = " ".join(["the dog runs ."] * 2 + ["a cat sleeps ."] * 3)
    model = nmtkit.load(path, max_source_len=8)
    (output,) = model.translate(line, nbest=1, glossary=terms, **SHORT).hypotheses
    assert [result.found for result in output.terms if result.source == "cat"] == ["cat"] * 3
    words = words_of(output.text)
    last = max(index for index, word in enumerate(words) if word in ("Hund", "Köter"))
    assert "cat" in words[last:] and words.count("cat") >= 3


def test_a_term_counts_as_a_whole_word_however_it_is_spelt():
    tokenizer = tiny_tokenizer()
    dog = required_terms(tokenizer)(("dog",))
    assert dog.whole_words and required_terms(tokenizer)(("dog",)) is dog
    assert [each.text for each in dog.alternatives] == ["dog", "Dog"]
    pieces = tokenizer.target_pieces(range(tokenizer.target_size))
    letters = [pieces.index(f"<0x{byte:02X}>") for byte in b"dog"]
    automaton = TextAutomaton([dog], ordered=False)
    for text, found in [("a dog", True), ("(dog.", True), ("adog", False), ("dogs", False), ("dogü", False)]:
        ids = tokenizer.encode_target([text]).ids[:-1].tolist()
        assert automaton.holds(ids) == found
    assert automaton.holds(letters) and not automaton.holds([*letters, letters[0]])


def test_what_the_vocabulary_cannot_spell_is_left_out():
    pieces = ["<unk>", "<s>", "</s>", "\u2581dog", "\u2581Dog", "\u2581run"]
    tokenizer = Tokenizer(train_model(["dog Dog run"], 6, "word"))
    assert sorted(tokenizer.target_pieces(range(tokenizer.target_size))) == sorted(pieces)
    assert required_terms(tokenizer)(("runs",)).alternatives == ()
    assert required_terms(tokenizer)(("runs", "dog")) == required_terms(tokenizer)(("dog",))


@pytest.mark.parametrize("option", [{"sampling": True}, {"diverse_groups": 2}, {"no_repeat_ngram": 3}])
def test_a_search_that_cannot_require_terms_is_refused(path, terms, option):
    with pytest.raises(ValueError, match="--glossary and --"):
        nmtkit.load(path).translate("a dog", glossary=terms, **option)


def test_generate_reports_hits_and_misses(path, terms, tmp_path):
    text, report = tmp_path / "text", tmp_path / "report.tsv"
    text.write_text("a dog\nwomen\nthe street {x} cat\n")
    command = ["generate", "--path", str(path), "--input", str(text), "--glossary", str(terms), "--protect-spans"]
    result = CliRunner().invoke(main, [*command, "--glossary-report", str(report), "--max-len-b", "8"])
    assert result.exit_code == 0, result.output
    rows = [line.split("\t") for line in report.read_text().splitlines()]
    assert rows[0] == ["line", "result", "term", "targets", "found"]
    assert [row[:4] for row in rows[1:]] == [
        ["1", "hit", "dog", "Hund|Köter"], ["3", "miss", "street", "🙂 {x}"], ["3", "hit", "cat", "cat"]]  # fmt: skip
    assert rows[1][4] in ("Hund", "Köter") and rows[2][4] == ""
    assert "3 terms in 2 of" in result.stderr
    result = CliRunner().invoke(main, [*command, "--sampling"])
    assert "--glossary and --sampling" in result.stderr
    result = CliRunner().invoke(main, [*command[:-3], "--glossary-report", str(report)])
    assert "--glossary-report does nothing" in result.stderr
