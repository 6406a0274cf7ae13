"""The text of web pages is translated, and the rest stays unchanged."""

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from standins import plain, upper
from work import operations

from nmtkit.text.alignment import Link, words
from nmtkit.text.documents import ReadOptions, read_document
from nmtkit.text.documents.web import tokens
from nmtkit.text.markup import marked

PAGE = """<!DOCTYPE html>
<html lang=en><head><meta charset="utf-8"><title>A page &amp; more</title>
<meta name=description content="What it is"><script>if (a < b) { x = "<p>no</p>" }</script><style>p > a {}</style></head>
<body><!-- a comment: <p>no</p> -->
<h1 title="Hello there">Hello <b class='x>y'>big</b> world</h1>
<p>Use <code>ls -l</code> to list <img src="a>b.png" alt='The "image"'> files&nbsp;now.<br>The next one<br>goes on.
<p class="notranslate">Not this
<p>A <a href="x?a=1&b=2" title=Link>one</a>, 12 &lt; 13 <svg><g><style>x{}</style><title>no</title></g></svg> and <span translate=no>Foo <i>Bar</i></span> done.</p>
<pre>int main() <b>x</b></pre><textarea placeholder="Type here">no</textarea><input type=submit value=Send><input value=no>
<p>2020 &copy;</p>
<ul><li>One<li translate=no>Two<li>Three</ul> a < b tail
</body></html>
"""  # noqa: E501

TRANSLATED = PAGE
for old, new in (
    ("A page &amp; more", "A PAGE &amp; MORE"), ('"What it is"', '"WHAT IT IS"'), ('"Hello there"', '"HELLO THERE"'),
    (">Hello <", ">HELLO <"), (">big</b> world", ">BIG</b> WORLD"), (">Use <", ">USE <"), ("to list <", "TO LIST <"),
    ('The "image"', 'THE "IMAGE"'), ("files&nbsp;now", "FILES&#160;NOW"),
    ("The next one<br>goes", "THE NEXT ONE<br> GOES"),
    ("GOES on.", "GOES ON."), ("<p>A <a", "<p>A <a"), ("title=Link>one", 'title="LINK">ONE'),
    ("</svg> and", "</svg> AND"),
    ("> done.", "> DONE."), ('"Type here"', '"TYPE HERE"'), ("value=Send", 'value="SEND"'), ("<li>One", "<li>ONE"),
    ("Three</ul> a < b tail", "THREE</ul> A &lt; B TAIL"),
):  # fmt: skip
    TRANSLATED = TRANSLATED.replace(old, new)


def translated(page: str, language: str | None = None) -> str:
    document = read_document(page.encode(), "html", "page.html", ReadOptions(language))
    return document.encoded(document.render([upper(segment) for segment in document.segments])).decode()


def test_text_and_shown_attributes_are_translated_and_nothing_else_changes():
    assert translated(PAGE) == TRANSLATED
    assert translated(PAGE.replace("\n", "\r\n")) == TRANSLATED.replace("\n", "\r\n")


def test_codes_within_a_sentence_are_parts_of_it():
    assert read_document(PAGE.encode(), "html", "page.html").segments[2:4] == [
        "Use <g1/>to list <g3/>files\u00a0now.",
        "The next one<g1/> goes on.",
    ]


def test_a_code_that_shows_keeps_its_spaces_where_it_comes_to_stand_elsewhere():
    document = read_document(b"<p>Use <code>ls</code> to <b>list</b> files.</p>", "html", "page.html")
    moved = document.render(["Um Dateien<g1/> zu <g3>listen</g3>, nutze<g1/>".replace("<g1/>", "", 1)])
    assert moved == "<p>Um Dateien zu <b>listen</b>, nutze <code>ls</code></p>"
    assert document.render(["<g1/>listet <g3>x</g3>"]) == "<p><code>ls</code> listet <b>x</b></p>"


@pytest.mark.parametrize(
    ("page", "language", "expected"),
    [
        ("<html lang='en'>", "de", '<html lang="de">'),
        ("<!doctype html><HTML>", "deu_Latn", '<!doctype html><HTML lang="deu-Latn">'),
        ("<html lang=de dir=ltr>", "de", "<html lang=de dir=ltr>"),
        ('<html lang="en" xml:lang="en">', "ar", '<html dir="rtl" lang="ar" xml:lang="ar">'),
        ("<html lang dir='rtl'>", "fr", '<html lang="fr" dir="ltr">'),
        ("<p>Text", "de", "<p>TEXT"),
    ],
)
def test_the_page_declares_its_new_language_and_direction(page, language, expected):
    assert translated(page, language) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("\ufeff<p>Grün</p>".encode(), "\ufeff<p>Łódź</p>".encode()),
        ("<p>Grün</p>".encode("utf-16"), "<p>Łódź</p>".encode("utf-16")),
        ("<p>Grün</p>".encode("utf-32"), "<p>Łódź</p>".encode("utf-32")),
        (b"<meta charset=iso-8859-1><p>Gr\xfcn", b"<meta charset=iso-8859-1><p>&#321;\xf3d&#378;"),
        (b"<p>Gr\xfcn \x93x\x94", b"<p>&#321;\xf3d&#378;"),
        (b"<?xml version='1.0' encoding='iso-8859-2'?><p>Gr\xfcn</p>",
         b"<?xml version='1.0' encoding='iso-8859-2'?><p>\xa3\xf3d\xbc</p>"),
    ],
)  # fmt: skip
def test_the_encoding_is_kept_and_missing_characters_become_numbers(data, expected):
    document = read_document(data, "html", "page.html")
    assert document.encoded(document.render(document.segments)) == data
    assert "Grün" in document.segments[0]
    assert document.encoded(document.render(["Łódź"])) == expected


@pytest.mark.parametrize("name", ["zlib_codec", "utf-7", "unicode_escape", "idna", "none-such", "rot13"])
def test_an_encoding_that_is_not_for_text_is_refused(name):
    with pytest.raises(ValueError, match=r"page\.html: .*encoding"):
        read_document(f"<meta charset={name}><p>x".encode(), "html", "page.html")


def test_a_page_that_is_not_in_its_declared_encoding_is_refused_with_its_line():
    with pytest.raises(ValueError, match=r"page\.html: line 2: byte 0xfc"):
        read_document(b"<meta charset=utf-8>\n<p>Gr\xfcn", "html", "page.html")


def test_xhtml_closes_scripts_and_elements_within_their_tag():
    page = '<?xml version="1.0"?>\n<html><script src="a.js"/><title>One</title><p>Two <a id="x"/>three</p></html>'
    assert translated(page).endswith('<title>ONE</title><p>TWO <a id="x"/>THREE</p></html>')


def test_php_stays_as_it_is():
    page = "<p>One <?php if ($a > 1) echo '<b>no</b>' ?> two <?= $x->y ?>.</p><?xml-model a='>'?>"
    assert translated(page) == page.replace("One", "ONE").replace("two", "TWO")


@pytest.mark.parametrize(
    ("page", "segments"),
    [
        ("<p>The <x-badge>new</x-badge> model", ["The <g1>new</g1> model"]),
        ("<p>It is <output>5</output> or <meter>6</meter> today", ["It is <g1>5</g1> or <g5>6</g5> today"]),
        ("<p>Tick <label for=a>this box</label> now", ["Tick <g1>this box</g1> now"]),
        ("<p>Press <button>OK</button> to go", ["Press <g1>OK</g1> to go"]),
        ("<label>Yes</label> | <label>No</label>", ["Yes", "No"]),
        ("<button>Yes</button><button>No</button>", ["Yes", "No"]),
        ("<a href=a>Yes</a> | <a href=b>No</a>", ["Yes", "No"]),
        ("<p>See <a href=a>this</a> <a href=b>one</a>", ["See <g1>this</g1> <g5>one</g5>"]),
        ("<p>See <a name=x>this", ["See <g1/>this"]),
        ("<x-list><x-item>One</x-item> <x-item>Two</x-item></x-list>", ["One", "Two"]),
        ("<x-card><p>One</p>Two</x-card>Three", ["One", "Two", "Three"]),
        ("<x-a>One <x-b>two</x-b><x-b>three</x-b></x-a>", ["One <g1>two</g1><g4>three</g4>"]),
        ("<p>See <my-icon name=a /> here", ["See <g1/>here"]),
        ("<p>See <picture><source src=a><img src=b></picture> here", ["See <g1><g2/><g3/></g1>here"]),
        ("<label>One</i></label><b><label>Two</b></label>", ["One", "Two"]),
    ],
)
def test_custom_elements_and_labels_are_inline_if_text_stands_beside_them(page, segments):
    found = read_document(page.encode(), "html", "page.html")
    assert [re.sub(r"(?<=>) (?=here)", "", segment) for segment in found.segments] == segments
    assert found.render(found.segments) == page


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("<p <p>one</p>", "<p <p>ONE</p>"),  # the tag is <p <p>, as in a browser
        ("<div<b a=<>one</code two<b>", "<div<b a=<>ONE</code two<b>"),
        ('<img <="x" title=one>two', '<img <="x" title="ONE">TWO'),
        ('<p <title="no" title="two">one', '<p <title="no" title="TWO">ONE'),
        ("<p>one <b title='two>three</p><p>four</p>", "<p>ONE <b title='two>THREE</p><p>FOUR</p>"),
        ("one </b", "ONE </b"),
        ("one < two <3 three", "ONE &lt; TWO &lt;3 THREE"),
    ],
)
def test_a_less_than_sign_in_a_tag_and_a_tag_without_an_end_are_read_as_by_a_browser(page, expected):
    assert translated(page) == expected


MARKUP = st.sampled_from(
    ["<p>", "</p>", "<b>", "</b>", "<i class='a>b'>", "</i>", "<br>", "<br/>", "<div>", "</div>", "<code>", "</code>",
     "<span translate=no>", "</span>", "<span translate='yes'>", "<!-- c<p> -->", "<script>", "</script>", "<pre>",
     "</pre>", "<img alt='Two words' src=x>", "<a title=", "<", ">", "&", "&amp;", "&lt;b>", "&#x41;", "&nbsp;", "'",
     "<li>", "<ul>", "</ul>", '"', "<textarea>", "</textarea>", "<title>", "</title>", "<svg>", "</svg>",
     "<!DOCTYPE html>", "<![CDATA[", "]]>", "<?x", "-->", "<!--", "=", "/>", "\r\n", "\n", "  ",
     "<label>", "</label>", "<button>", "</button>", "<x-a>", "</x-a>", "<x-b/>", "{{ a }}", "{% b %}", "<% c %>",
     "ß", "ﬁ", "Ÿ", "中文", "🙂"]
)  # fmt: skip
PAGES = st.lists(st.one_of(MARKUP, st.sampled_from(["one ", "Two. ", "three", "4 "]))).map("".join)


@settings(max_examples=100, deadline=None)
@given(PAGES)
def test_a_page_whose_translation_says_the_same_stays_byte_for_byte(page):
    document = read_document(page.encode(), "html", "page.html")
    assert document.render(document.segments) == page


@settings(max_examples=100, deadline=None)
@given(PAGES)
def test_tags_are_neither_lost_nor_doubled(page):
    document = read_document(page.encode(), "html", "page.html")
    found = document.render([upper(segment) for segment in document.segments])
    names = [Counter((token.role, token.name) for token in tokens(text) if token.name) for text in (page, found)]
    assert names[0] == names[1]


BLOCKS = st.sampled_from(["<p>{}</p>", "<div><b>{}</b></div>", "<h1 title='{}'>{}</h1>", "<li>{}<br>{}",
                          "{} <i>{}</i> {}", "<td>{}<td>{}", "<a href='x'><div>{}</div>{}</a>"])  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(BLOCKS, max_size=12))
def test_every_word_is_translated_exactly_once(blocks):
    page = "".join(blocks)
    for number in range(page.count("{}")):
        page = page.replace("{}", f"Q{number}x", 1)
    document = read_document(page.encode(), "html", "page.html")
    text = "".join(plain(segment) for segment in document.segments)
    assert sorted(re.findall(r"Q\d+x", text)) == sorted(re.findall(r"Q\d+x", page))


def test_text_is_what_an_independent_parser_of_html5_finds():
    html5lib = pytest.importorskip("html5lib")
    page = PAGE.replace(" a < b tail", "")  # the parser reads a<b like us; the texts are compared word by word
    tree = html5lib.parse(translated(page), namespaceHTMLElements=False)
    for name in ("title", "h1", "b", "li"):
        texts = ["".join(node.itertext()).strip() for node in tree.iter(name) if node.get("translate") != "no"]
        assert [text for text in texts if text not in ("x",)] == [text.upper() for text in texts if text not in ("x",)]
    assert "".join(next(tree.iter("script")).itertext()) == 'if (a < b) { x = "<p>no</p>" }'


@pytest.mark.slow
@pytest.mark.parametrize("part", [" <b>x", " x<code>y</code>", " x<!-- c -->", " <i>x</i>"])
def test_a_segment_with_thousands_of_codes_is_put_back(part):
    page = f"x{part * 5000} x"
    document = read_document(page.encode(), "html", "page.html")
    (segment,) = document.segments
    line = marked(segment)
    target = line.text.upper()
    links = [Link(*span, *span) for span in words(target)]
    found = document.render([line.restore(target, links)])
    assert found == page.replace("x", "X")


@pytest.mark.parametrize(
    ("source", "translation", "expected"),
    [
        ("See <code>a</code>. One", "Siehe <g1/>Eins", "Siehe <code>a</code> Eins"),
        ("<code>a</code>: one", "Eins<g0/>", "Eins <code>a</code>"),
        ("One (<code>a</code>)", "Eins<g1/>zwei", "Eins <code>a</code> zwei"),
        ("Use <code>a</code><code>b</code>.", "<g1/>nutze<g2/>", "<code>a</code> nutze <code>b</code>"),
        ("使用<code>a</code>函数", "Use<g1/>function", "Use <code>a</code> function"),
        ("使用<code>a</code>函数", "函数<g1/>使用", "函数<code>a</code>使用"),
        ("One <code>b</code>s", "Ein <g1/>s", "Ein <code>b</code>s"),
        ("One<br>and two", "Eins<g1/> und zwei", "Eins<br> und zwei"),
        ("One<img>two", "Eins <g1/> zwei", "Eins<img>zwei"),
        ("See <code>a</code>, <b>one</b>", "Siehe <g1/><g3>eins</g3>", "Siehe <code>a</code> <b>eins</b>"),
    ],
)
def test_a_space_separates_an_inline_code_from_a_word(source, translation, expected):
    document = read_document(f"<p>{source}</p>".encode(), "html", "page.html")
    assert document.render([translation]) == f"<p>{expected}</p>"


@pytest.mark.parametrize(
    "opening",
    ['<pre translate="yes">', '<p style="color: red; white-space:pre-wrap">', "<div style='white-space: pre'><p>"],
)
def test_preserved_lines_are_translated_line_by_line(opening):
    page = f"{opening}One man.\n  Two <b>men</b>\nand a dog.</p>\n<p>x"
    assert read_document(page.encode(), "html", "page.html").segments[:3] == [
        "One man.", "Two <g1>men</g1>", "and a dog."]  # fmt: skip
    assert translated(page).startswith(f"{opening}ONE MAN.\n  TWO <b>MEN</b>\nAND A DOG.</p>")
    assert len(read_document(b"<p>One man.\nTwo men.</p>", "html", "page.html").segments) == 1


def test_words_on_both_sides_of_a_code_are_two_words_to_the_model():
    document = read_document(b"<p>One<img src=a>two <code>x</code>s</p>", "html", "page.html")
    assert document.segments == ["One <g1/>two <g3/>s"]
    assert translated("<p>One<img src=a>two</p>") == "<p>ONE<img src=a>TWO</p>"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Use <code>a</code> (see below) now.", "USE <code>a</code> (SEE BELOW) NOW."),
        ("Use <code>a</code> “here”.", "USE <code>a</code> “HERE”."),
        ("Use <code>a</code> - or not.", "USE <code>a</code> - OR NOT."),
        ("Use <code>a</code>, then <code>b</code>.", "USE <code>a</code>, THEN <code>b</code>."),
        ("Use (<code>a</code>) or <code>b</code>s.", "USE (<code>a</code>) OR <code>b</code>S."),
        ("x <code>a</code> <code>b</code> <i>see</i> y", "X <code>a</code> <code>b</code> <i>SEE</i> Y"),
        ("Use <code>a</code><code>b</code> now", "USE <code>a</code><code>b</code> NOW"),
        ("<img src=a> (one)", "<img src=a> (ONE)"),
    ],
)
def test_spaces_around_inline_codes_stay(source, expected):
    assert translated(f"<p>{source}</p>") == f"<p>{expected}</p>"


@pytest.mark.slow
def test_twenty_thousand_nested_elements_are_translated():
    page = "<p>" + "<b>" * 20_000 + "one <i>two</i>" + "</b>" * 20_000 + "</p>"
    assert translated(page) == page.replace("one", "ONE").replace("two", "TWO")


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit", ["<b>x ", "<a ='\">", "<a =\"'<a ='\"", "<!--", "<p x=1 ", "<code>y</code> ", "<br>x "]
)
def test_the_work_grows_linearly_with_the_page(unit):
    def work(length: int) -> int:
        page = (unit * (length // len(unit))).encode()
        return operations(lambda: render(page))

    def render(page: bytes) -> None:
        document = read_document(page, "html", "page.html")
        document.render([upper(segment) for segment in document.segments])

    assert work(16_000) < 6 * work(4_000) + 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    ["<!--" * 10_000, "<a '" * 10_000, '<a x="' * 8_000, "<" * 40_000, "<b>" * 12_000, "</i>" * 12_000,
     "<b>" * 6_000 + "</i>" * 6_000, "<b>x" * 6_000, "<code>" * 6_000, "&" * 40_000, "<p " + "a " * 16_000,
     "<p " + "= " * 16_000, "<svg>" * 8_000, "<script>" * 4_000, "<br>a" * 8_000, "<![CDATA[" * 6_000,
     "<x-a>" * 12_000, "<x-a>b" * 6_000, "<label>b</label>" * 6_000, "<?php " * 8_000, "{{ a }}b" * 6_000,
     "{{ '" * 9_000,
     "<x-a>" * 6_000 + "b" + "</x-a>" * 6_000, "{n,plural,one{" * 4_000, "<p title='{{ a }}{% b %}c'>" * 3_000,
     "@if (x) {" * 5_000, "<% a" * 9_000, "%<a>" * 9_000],
    ids=lambda text: text[:8],
)  # fmt: skip
def test_hostile_pages_come_back_unchanged_in_linear_time(
    attack,
):  # a quadratic algorithm took hours for some of these pages
    document = read_document(attack.encode(), "html", "page.html")
    assert document.render(document.segments) == attack


@pytest.mark.parametrize(
    ("label", "codec", "text"),
    [("shift_jis", "cp932", "①社"), ("x-sjis", "cp932", "犬"),
     ("windows-874", "cp874", "หมา"), ("euc-kr", "cp949", "똠"),
     ("ks_c_5601-1987", "cp949", "개"), ("tis-620", "cp874", "หมา…"), ("gb2312", "gb18030", "€龘"),
     ("iso-8859-1", "cp1252", "“a”"), ("unicode-1-1-utf-8", "utf-8", "ä"), ("macintosh", "mac-roman", "ä")],
)  # fmt: skip
def test_names_of_encodings_mean_the_same_as_in_browsers(label, codec, text):
    page = f"<meta charset={label}><p>{text}".encode(codec)
    document = read_document(page, "html", "a.html")
    assert document.segments == [text] and document.encoded(document.render(document.segments)) == page


@pytest.mark.parametrize(("label", "codec", "text"), [("cp950", "big5hkscs", "中"), ("dos-720", "cp720", "ع")])
def test_encodings_that_browsers_do_not_know_are_read(label, codec, text):
    page = f"<meta charset={label}><p>{text}".encode(codec)
    document = read_document(page, "html", "a.html")
    assert document.segments == [text] and document.encoded(document.render(document.segments)) == page


def test_a_page_in_another_source_language_gets_a_warning(caplog):
    for html, language, count in (("html lang=en", "it", 1), ("html lang=en-GB", "en", 0), ("html", "it", 0)):
        caplog.clear()
        options = ReadOptions("de", source_language=language)
        page = read_document(f"<{html}><p>Word</p></html>".encode(), "html", "page.html", options)
        page.render(page.segments)
        assert ["source language 'en'" in each.getMessage() for each in caplog.records] == [True] * count
