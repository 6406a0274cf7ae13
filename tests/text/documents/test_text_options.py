"""Each document format together with each treatment of text: protected spans, capitals, glossary.

A dictionary stands in for the model. The steps come from `nmtkit.translation`. Every expected file is written out.
"""

import html
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from standins import upper

from nmtkit.text.alignment import Link, words
from nmtkit.text.casing import capitals, in_capitals, sentence_case
from nmtkit.text.documents import ReadOptions, read_document
from nmtkit.text.glossary import Glossary, Term, term_results
from nmtkit.text.markup import marked
from nmtkit.text.protection import PATTERNS, compiled, protect, protected_spans

GERMAN = {"open": "öffne", "the": "die", "pump": "Pumpe", "stop": "halt", "now": "jetzt", "with": "mit",
          "min": "Minuten", "or": "oder"}  # fmt: skip
GLOSSARY = Glossary([Term("pump", ("Förderpumpe",))])


def model(text, terms):
    """Translates word by word; words of other languages and punctuation are copied."""
    chosen = {text[term.start : term.end]: term.term.targets[0] for term in terms}
    parts, links, length, end = [], [], 0, 0
    for start, stop in words(text):
        word = text[start:stop]
        target = chosen.get(word) or GERMAN.get(word.lower(), word)
        target = target[0].upper() + target[1:] if word[0].isupper() and target[0].islower() else target
        parts += [text[end:start], target]
        length += start - end
        links.append(Link(start, stop, length, length + len(target)))
        length, end = length + len(target), stop
    return "".join([*parts, text[end:]]), links


def translate(segment, known=lambda span: True):
    markup = marked(segment)
    spans = protected_spans(markup.text, compiled(PATTERNS))
    upper = in_capitals(protect(markup.text, spans, lambda span: False).text)
    protected = protect(markup.text, spans, known)
    text = sentence_case(protected.text) if upper else protected.text
    terms = [term for term in GLOSSARY.find(text, upper) if protected.is_whole(term.start, term.end)]
    target, links = model(text.strip(), terms)
    if upper:
        target, links = capitals(target, links)
    fixed = term_results(target, [term.term for term in terms], upper)[1]
    return markup.restore(*protected.restore(target, links, fixed))


TEXTS = {
    "protect": ("Open %(n)d <b>or</b> {name} in 5 min", "Öffne %(n)d <b>oder</b> {name} in 5 Minuten"),
    "capitals": ("STOP <b>THE PUMP</b> {name} NOW", "HALT <b>DIE FÖRDERPUMPE</b> {name} JETZT"),
    "glossary": ("Open the <b>pump</b> with {pump} (12 km)", "Öffne die <b>Förderpumpe</b> mit {pump} (12 km)"),
}

FORMATS = {
    "html": ("<p>SOURCE</p>", "<p>TARGET</p>"),
    "srt": ("1\n00:00:01,000 --> 00:00:02,000\nSOURCE\n", "1\n00:00:01,000 --> 00:00:02,000\nTARGET\n"),
    "vtt": ("WEBVTT\n\n00:01.000 --> 00:02.000\nSOURCE\n", "WEBVTT\n\n00:01.000 --> 00:02.000\nTARGET\n"),
    "po": ('#, c-format\nmsgid "SOURCE"\nmsgstr ""\n', '#, fuzzy, c-format\nmsgid "SOURCE"\nmsgstr "TARGET"\n'),
    "xliff": (
        '<xliff version="2.0"><file><unit><segment><source>SOURCE</source></segment></unit></file></xliff>',
        '<xliff version="2.0"><file><unit><segment state="translated" subState="nmtkit:mt"><source>SOURCE</source>'
        "<target>TARGET</target></segment></unit></file></xliff>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("option", TEXTS)
def test_every_treatment_of_text_works_in_every_format(option, format, known):
    source, target = TEXTS[option]
    if format == "xliff":  # inline elements, and escaped HTML below
        source, target = (text.replace("<b>", '<pc id="1">').replace("</b>", "</pc>") for text in (source, target))
    before, after = (template.replace("SOURCE", source).replace("TARGET", target) for template in FORMATS[format])
    document = read_document(before.encode(), format, "x", ReadOptions())
    found = document.render([translate(segment, lambda span: known) for segment in document.segments])
    assert found == (
        after if known else after.replace("5 Minuten", "5 min")
    )  # markup that was cut out returns unchanged


@pytest.mark.parametrize("option", TEXTS)
def test_escaped_html_of_xliff_goes_together_with_every_treatment(option):
    source, target = (re.sub("<(/?b)>", r"&lt;\1&gt;", text) for text in TEXTS[option])
    before, after = (template.replace("SOURCE", source).replace("TARGET", target) for template in FORMATS["xliff"])
    document = read_document(before.encode(), "xliff", "x", ReadOptions())
    assert document.render([translate(segment) for segment in document.segments]) == after


@pytest.mark.parametrize("format", FORMATS)
def test_a_plural_message_stays_whole_in_every_format(format):
    message = "Open {n, plural, one {the pump. Now} other {# pumps}} now"
    before = FORMATS[format][0].replace("SOURCE", message)
    document = read_document(before.encode(), format, "x", ReadOptions())
    found = document.render([translate(segment) for segment in document.segments])
    assert found.count(message) == before.count(message) + (format in ("po", "xliff"))


ICU = "Hi {n, plural, one {<b>the pump</b>. Now} other {# pumps}} now"


@pytest.mark.parametrize("message", [ICU, ICU.replace(" ", "\\n"), ICU.replace(". ", ".\\n")])
def test_a_plural_message_with_tags_or_over_several_lines_stays_whole(message):
    document = read_document(f'msgid "{message}"\nmsgstr ""\n'.encode(), "po", "x", ReadOptions())
    found = document.render([translate(segment) for segment in document.segments])
    assert found.count(message) in (1, 2)  # in the msgid, and perhaps copied into the msgstr
    assert "oder" not in found and "Pumpe" not in found and "jetzt" not in found


PLACEHOLDERS = [
    "{name}",
    "%s",
    "%(n)d",
    "%{n}",
    "%&lt;n&gt;d",
    "{{ a.b }}",
    "$HOME",
    "%1$@",
    "%%",
    "http://a.b/c",
    "{0:{1}}",
    "%m",
]
WORDS = ["open", "the", "pump", "Stop", "now", ",", ".", "(", ")"]
CODES = ["<br/>", "<b>", "</b>", "<i>", "</i>", "<x/>", "<!-- a b -->"]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(PLACEHOLDERS * 2 + WORDS + CODES * 2), st.booleans()), min_size=1, max_size=10),
    st.booleans(),
)
def test_no_tag_is_in_a_placeholder_and_none_is_lost_in_any_line(parts, known):
    source = ""
    for part, space in parts:
        glued = not source or source[-1] in " >" or part in CODES  # a placeholder beside a word is another placeholder
        source += " " * (space or not glued) + part
    found = translate(source, lambda span: known)
    assert sorted(re.findall("<[^<>]*>", found)) == sorted(re.findall("<[^<>]*>", source))
    for placeholder in PLACEHOLDERS:
        assert found.count(placeholder) == source.count(placeholder), (source, found)


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("{name}<br/>{street}", "{name}<br/>{street}"),
        ("Open {name}<br/>{street}", "Öffne {name}<br/>{street}"),
        ("<b>{name}</b><br/>{street} now", "<b>{name}</b><br/>{street} jetzt"),
        ("%s<br/>%d the pump", "%s<br/>%d die Förderpumpe"),
        ("the pump http://a.b/c<br/>%&lt;n&gt;d", "die Förderpumpe http://a.b/c<br/>%&lt;n&gt;d"),
        ("stop {a}<x/>{b}, or %(n)s<img src='y'/>.", "halt {a}<x/>{b}, oder %(n)s<img src='y'/>."),
    ],
)
def test_a_tag_never_stands_inside_a_placeholder(source, target, known):
    assert translate(source, lambda span: known) == target


@pytest.mark.parametrize("space", ["\u00a0", "\u202f", "\u3000"])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("x.po", 'msgid ""\n"One~dog~runs to the cat, and\\n"\n"the other~dog runs.\\n"\nmsgstr ""\n'),
        ("x.srt", "1\n00:00:01,000 --> 00:00:02,000\nOne~dog~runs to the cat, and\nthe other~dog runs.\n"),
        ("x.vtt", "WEBVTT\n\n00:01.000 --> 00:02.000\nOne~dog~runs to the cat, and\nthe other~dog runs.\n"),
        ("x.xlf", '<xliff version="1.2"><file><trans-unit xml:space="preserve"><source>One~dog~runs to the cat, and\n'
         "the other~dog runs.</source></trans-unit></file></xliff>"),
        ("x.html", "<p>One~dog~runs to the cat, and<br>the other~dog runs.</p>"),
    ],
)  # fmt: skip
def test_no_break_spaces_do_not_break_where_a_translation_is_divided_into_lines(name, file, space):
    text = file.replace("~", space)
    document = read_document(text.encode(), name.partition(".")[2].replace("xlf", "xliff"), name)
    written = html.unescape(document.render([upper(segment) for segment in document.segments]))
    assert written.count(f"ONE{space}DOG{space}RUNS") == 1 and written.count(f"OTHER{space}DOG") == 1
