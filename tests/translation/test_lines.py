"""Lines that people write, translated with a model that knows sentences."""

import html
import logging
import re
import sys
import threading
from dataclasses import replace

import pytest
from builders import save_tiny_transformer, save_transformer, tiny_tokenizer
from work import operations

import nmtkit
from nmtkit.text.alignment import words
from nmtkit.text.glossary import Occurrence, Term
from nmtkit.text.sentences import sentences, splitter
from nmtkit.translation.options import TextOptions
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Hypothesis, Request
from nmtkit.translation.steps import joined, separator, terms_of_parts
from nmtkit.translation.translator import Translator

SHORT = {"max_len_a": 0.0, "max_len_b": 8}
LINES = [
    "the dog runs in {place} .",
    "",
    "{a} {b}",
    "two men 🙂 see http://example.org/x?y=1, %s",
    "two women sleep .",
    "Łódź runs {a}s and {a}",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny_transformer(tmp_path_factory.mktemp("model") / "tiny.pt", tiny_tokenizer(), sharpness=2.0)


def test_protected_text_comes_out_of_any_model(path):
    texts = nmtkit.load(path).translate(LINES, protect_spans=True, **SHORT)
    plain = nmtkit.load(path).translate(LINES, **SHORT)
    assert re.findall(r"\{.*?\}", texts[0]) == ["{place}"]
    assert texts[1:3] == ["", "{a} {b}"]
    assert [texts[3].count(text) for text in ("🙂", "http://example.org/x?y=1", "%s")] == [1, 1, 1]
    assert texts[4] == plain[4]
    assert [texts[5].count(text) for text in ("Łódź", "{a}s", "{a}")] == [1, 1, 2]


def test_the_rest_of_a_line_translates_as_it_does_without_what_was_cut_out(path):
    model = nmtkit.load(path)
    text = model.translate("the dog {x} runs .", protect=r"\{x\}", **SHORT)
    plain = model.translate("the dog runs .", **SHORT)
    assert "".join(text.replace("{x}", "").split()) == "".join(plain.split())


def test_every_hypothesis_holds_them_and_a_tag_is_no_part_of_the_text(path):
    translator = Translator.load(path)
    pipeline = translator.pipeline(SearchOptions(nbest=3, **SHORT), TextOptions(protect=("#[0-9]+",)), "!")
    windows = [[Request("a dog #12 runs")], [], [Request("two #3 #4 men")]]
    found = list(translator.run(windows, pipeline))
    assert [translation.source for translation in found] == ["a dog #12 runs", "two #3 #4 men"]
    assert [re.findall("#[0-9]+", output.text) for output in found[0].hypotheses] == [["#12"]] * 3
    assert [sorted(re.findall("#[0-9]+", output.text)) for output in found[1].hypotheses] == [["#3", "#4"]] * 3


def test_word_alignment_gives_words_of_both_texts(path):
    source = "the dog café runs in 日本 ."
    (output,) = nmtkit.load(path).translate(source, nbest=1, alignment="words", **SHORT).hypotheses
    targets = [(link[2], link[3]) for link in output.alignment]
    assert targets and set(targets) <= set(words(output.text))
    assert {(link[0], link[1]) for link in output.alignment} <= set(words(source))


def test_links_are_of_the_line_as_it_was(path):
    translator = Translator.load(path)
    pipeline = translator.pipeline(SearchOptions(**SHORT), TextOptions(protect=("#[0-9]+",)), links=True)
    line = "a dog #12 runs #3"
    (found,) = translator.stream([line], pipeline)
    (output,) = found.hypotheses
    texts = [(line[a:b], output.text[c:d]) for a, b, c, d in output.alignment]
    assert ("#12", "#12") in texts and ("#3", "#3") in texts
    assert {source for source, _ in texts} <= set(line.split())


def test_links_are_of_a_line_with_its_invisible_characters(path):
    translator = Translator.load(path)
    pipeline = translator.pipeline(SearchOptions(**SHORT), links=True)
    plain, odd = "a dog runs .", "a\u200b do\u00adg runs\u2060 \ufeff."
    found, expected = translator.stream([odd, plain], pipeline)
    assert found.source == odd and found.hypotheses[0].text == expected.hypotheses[0].text
    words = {"a": "a", "do\u00adg": "dog", "runs\u2060": "runs", ".": "."}
    links = [[words[odd[a:b]], c, d] for a, b, c, d in found.hypotheses[0].alignment]
    assert links == [[plain[a:b], c, d] for a, b, c, d in expected.hypotheses[0].alignment] != []


def test_markup_goes_around_words_with_invisible_characters(path):
    translator = Translator.load(path)
    pipeline = translator.pipeline(SearchOptions(**SHORT), TextOptions(markup="html"))
    plain, odd = "a <b>dog</b> runs .", "a <b>do\u00adg</b> runs\u200b ."
    found, expected = translator.stream([odd, plain], pipeline)
    assert found.hypotheses[0].text == expected.hypotheses[0].text


def test_a_check_of_all_lines_drops_its_own_warnings_and_no_others(path, caplog):
    """The warnings of other threads were lost too."""
    log = logging.getLogger("nmtkit")

    def windows():
        log.warning("of the check")
        thread = threading.Thread(target=log.warning, args=("of another thread",))
        thread.start()
        thread.join()
        yield [Request("a dog runs .", prefix="a")]

    Translator.load(path).pipeline(SearchOptions(**SHORT)).check_all(windows())
    log.warning("after the check")
    assert [record.getMessage() for record in caplog.records] == ["of another thread", "after the check"]


def test_settings_that_do_not_go_together_are_refused(path):
    with pytest.raises(ValueError, match="protect_spans changes"):
        nmtkit.load(path).translate("a dog", protect_spans=True, alignment="words", nbest=1)
    with pytest.raises(ValueError, match="not a regular expression"):
        nmtkit.load(path).translate("a dog", protect="(")


def test_a_line_with_markup_translates_as_the_plain_line_does(path):
    model = nmtkit.load(path)
    marked = "the <b>dog &amp; cat</b> run<br/> <i><a href='x'>in</a> the</i> park ."
    (text, plain) = (model.translate(line, **SHORT, **options) for line, options in
                     ((marked, {"markup": "html"}), ("the dog & cat run in the park .", {})))  # fmt: skip
    assert html.unescape(re.sub("<[^\x00-\x20>][^<>]*>", "", text)) == plain
    assert sorted(re.findall("</?(?:b|i|a|br)\\b[^<>]*>", text)) == sorted(re.findall("<[^<>]+>", marked))


def test_markup_and_protected_text_go_together(path):
    line = "<p>the <b>{x}</b> &lt;dog&gt; see <i>http://a.de/?x=1&amp;y=2</i></p>"
    text = nmtkit.load(path).translate(line, markup="html", protect_spans=True, **SHORT)
    assert sorted(re.findall("</?[pbi]>", text)) == sorted(re.findall("</?[pbi]>", line))
    assert text.count("{x}") == text.count("http://a.de/?x=1&amp;y=2") == 1


def test_a_line_in_capitals_translates_as_a_sentence_in_capitals(path):
    model = nmtkit.load(path)
    texts = model.translate(["THE DOG RUNS {x} .", "THE dog runs ."], truecase_caps=True, protect=r"\{x\}", **SHORT)
    plain = model.translate("The dog runs .", **SHORT)
    assert "".join(texts[0].replace("{x}", "").split()) == "".join("".join(map(str.upper, plain)).split())
    assert texts[0].count("{x}") == 1
    assert texts[1] == model.translate("THE dog runs .", **SHORT)


SENTENCES = "  the dog runs.  two men {x} sleep! \t THE CAT RUNS IN. "


def split_at_marks(language, text):
    assert language == "en"
    return re.findall(r"[^.!]*(?:[.!]\s*|$)", text)


def test_sentences_are_translated_by_themselves_and_white_space_stays(path, monkeypatch):
    monkeypatch.setattr("nmtkit.translation.steps.splitter", lambda: split_at_marks)
    model = nmtkit.load(path)
    texts = model.translate([SENTENCES, " \t", "a dog"], split_sentences="en", protect=r"\{x\}", **SHORT)
    parts = model.translate(["the dog runs.", "two men {x} sleep!", "THE CAT RUNS IN."], protect=r"\{x\}", **SHORT)
    assert texts[0] == "  {}  {} \t {} ".format(*parts)
    assert texts[1].strip() == "" and texts[2] == model.translate("a dog", **SHORT)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"split_sentences": "en"}, "All are equal. They are born free."),
        ({"truecase_caps": True}, "ALL ARE EQUAL"),
        ({"protect_spans": True, "replace_unknown": True}, "All are equal in http://a.de and ☃."),
        ({"markup": "html"}, "All <b>are equal</b> before"),
    ],
)
@pytest.mark.parametrize("longest", [1024, 5])
def test_text_options_leave_the_tags_of_a_line_alone(tmp_path, options, line, longest):
    if "split_sentences" in options:
        pytest.importorskip("sentencex")
    model = nmtkit.load(save_transformer(tmp_path / "model.pt", tags=["<formal>"]), max_source_len=longest)
    options = {**options, "max_len_a": 1.0, "max_len_b": 0, "nbest": 2}
    tagged = f"<formal> {line}"
    written, given = model.translate(tagged, **options), model.translate(line, source_tag="<formal>", **options)
    untagged = model.translate(line, **options)
    texts, expected, others = (
        [(each.text, each.score) for each in found.hypotheses] for found in (written, given, untagged)
    )
    assert texts == expected != others
    assert written.source == tagged
    moved = [
        [replace(link, source_start=link.source_start + 9, source_end=link.source_end + 9) for link in each.links]
        for each in given.hypotheses
    ]
    assert [each.links for each in written.hypotheses] == moved


@pytest.mark.parametrize("alignment", ["hard", "soft"])
@pytest.mark.parametrize("longest", [1024, 3])
def test_no_term_of_a_glossary_is_in_a_tag(tmp_path, alignment, longest):
    (tmp_path / "terms.tsv").write_text("formal\tright\nequal\tfree\n")
    model = nmtkit.load(save_transformer(tmp_path / "model.pt", tags=["<formal>"]), max_source_len=longest)
    options = {"glossary": tmp_path / "terms.tsv", "nbest": 2, "alignment": alignment, **SHORT}
    written = model.translate("<formal> All are equal", **options)
    assert written.hypotheses == model.translate("All are equal", source_tag="<formal>", **options).hypotheses
    assert [term.source for term in written.hypotheses[0].terms] == ["equal"]


def test_the_utility_of_a_line_is_the_mean_of_its_sentences(path, monkeypatch):
    monkeypatch.setattr("nmtkit.translation.steps.splitter", lambda: split_at_marks)
    options = {"mbr": "chrf", "nbest": 4, **SHORT}
    model = nmtkit.load(path)
    sentences = ["the dog runs.", "two men sleep!"]
    parts = [[found.utility for found in each.hypotheses] for each in model.translate(sentences, **options)]
    whole = model.translate(" ".join(sentences), split_sentences="en", **options).hypotheses
    assert [found.utility for found in whole] == pytest.approx([sum(both) / 2 for both in zip(*parts, strict=True)])
    with_empty = model.translate("the dog runs. \u200b.", split_sentences="en", **options).hypotheses
    assert all(found.utility is not None for found in with_empty)


def test_tags_may_go_over_sentences(path, monkeypatch):
    monkeypatch.setattr("nmtkit.translation.steps.splitter", lambda: split_at_marks)
    line = "<i>the <b>dog runs. two</b> men</i> sleep."
    (found,) = nmtkit.load(path).translate(line, nbest=1, split_sentences="en", markup="html", **SHORT).hypotheses
    assert sorted(re.findall("</?[bi]>", found.text)) == ["</b>", "</i>", "<b>", "<i>"]
    parts = nmtkit.load(path).translate(["the dog runs.", "two men sleep."], nbest=1, **SHORT)
    assert found.log_probability == pytest.approx(sum(part.hypotheses[0].log_probability for part in parts))


def test_sentences_as_sentencex_cuts_them(path):
    pytest.importorskip("sentencex")
    text = "  Dr. Smith went home.  He slept! \t Did he?"
    found = sentences(text, "en", splitter())
    assert [text[start:end] for start, end in found] == ["Dr. Smith went home.", "He slept!", "Did he?"]


def test_a_language_that_is_none_and_a_missing_package_are_told(path, monkeypatch):
    with pytest.raises(ValueError, match="not a language code"):
        TextOptions(split_sentences="English please")
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with pytest.raises(ImportError, match=r"nmtkit\[text\]"):
        splitter()


def test_sentences_of_a_script_without_spaces_get_spaces_between_their_translations(path, monkeypatch):
    """A sentence with 。 ends without white space. Its translation gets a space if the target language has spaces."""
    split = lambda language, text: re.findall("[^。]*(?:。|$)", text)  # noqa: E731
    monkeypatch.setattr("nmtkit.translation.steps.splitter", lambda: split)
    model = nmtkit.load(path)
    first, second = model.translate(["the dog runs。", "two men sleep。"], **SHORT)
    text = model.translate("the dog runs。two men sleep。", split_sentences="zh", **SHORT)
    assert text == f"{first} {second}"


@pytest.mark.parametrize(
    ("left", "right", "between"),
    [("Eins.", "Zwei.", " "), ("你好。", "再见。", ""), ("一", "GPT 是", ""), ("", "Zwei", ""), ("Eins. ", "Zwei", ""),
     ("{a}。", "Ein Hund.", " "), ("한국어.", "다음.", " "), ("こんにちは。", "さようなら。", "")],
)  # fmt: skip
def test_a_separator_follows_the_script_of_the_translations(left, right, between):
    assert separator(left, right) == between


def test_parts_without_letters_are_joined_in_linear_time():
    """A line of 4,000 sentences of dots took 88 s, because each part looked for a letter in the whole line."""

    def work(count: int) -> int:
        return operations(
            lambda: joined([Hypothesis([], 0.0, 0.0, text="." * 50)] * count, [None] * count, [0] * count)
        )

    assert work(400) < 6 * work(100)


def test_terms_find_their_part_in_linear_time():
    def work(count: int) -> int:
        terms = [Occurrence(3 * index, 3 * index + 1, Term("a", ("b",))) for index in range(count)]
        return operations(lambda: terms_of_parts(terms, range(1, 3 * count + 1), [3 * count]))

    assert work(400) < 6 * work(100)


def test_words_are_linked_in_every_part_of_a_line_that_is_too_long(path):
    line = "the dog runs . " * 6 + "two men"
    translation = nmtkit.load(path, max_source_len=6).translate(line, nbest=1, alignment="words", **SHORT)
    (output,) = translation.hypotheses
    assert all(line[a:b] in line.split() and output.text[c:d] for a, b, c, d in output.alignment)
    assert {a for a, *_ in output.alignment} & set(range(60, len(line)))
    assert [c for *_, c, _ in output.alignment] == sorted(c for *_, c, _ in output.alignment)


def test_links_of_a_line_that_is_cut_off_do_not_depend_on_spaces_before_it(path):
    model, line = nmtkit.load(path, max_source_len=4, long_lines="cut"), "the dog runs in the park ."
    plain, moved = (
        model.translate(spaces + line, nbest=1, alignment="words", **SHORT).hypotheses[0] for spaces in ("", "   ")
    )
    assert moved.text == plain.text
    assert moved.alignment == [[a + 3, b + 3, c, d] for a, b, c, d in plain.alignment] != []


def test_a_prefix_of_a_line_whose_sentences_are_translated_is_refused(path):
    request = nmtkit.Request("the dog runs. two men", prefix="two")
    with pytest.raises(ValueError, match=r"line 1: split_sentences .*prefix"):
        nmtkit.load(path).translate(request, split_sentences="en")
