"""Catalogues of gettext: which entries are translated, how they are marked, and that nothing else changes."""

import re
import shutil
import subprocess

import pytest
from document_standins import upper
from hypothesis import given, settings
from hypothesis import strategies as st

from nmtkit.documents import ReadOptions, read_document
from nmtkit.documents.gettext_po import escaped, unescaped

HEADER = """# Some words.
#, fuzzy
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\\n"
"Plural-Forms: nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 && (n%100<12 || n%100>14) ? 1 : 2);\\n"

"""
DONE = """msgid "done"
msgstr "fertig"

#, fuzzy, c-format
msgid "almost"
msgstr "fast"

#~ msgid "gone"
#~ msgstr "weg"

"""
NEW = r"""#. extracted
#: a.c:12
#, c-format
msgid "File %d not found.\n"
msgstr ""

#| msgid "old"
msgctxt "menu"
msgid "Open \"the\" <b>file</b> &amp; go"
msgstr ""

#, c-format
msgid "%d file"
msgid_plural "%d files"
msgstr[0] ""
msgstr[1] ""

msgid "One file"
msgid_plural "%d files"
msgstr[0] ""
msgstr[1] ""
msgstr[2] ""

msgid ""
"This is a long paragraph of text that\n"
"goes over several lines, and\n"
"ends here.\n"
"\n"
"  2 %\n"
msgstr ""
"""
EXPECTED = r"""#. extracted
#: a.c:12
#, fuzzy, c-format
msgid "File %d not found.\n"
msgstr "FILE %d NOT FOUND.\n"

#, fuzzy
#| msgid "old"
msgctxt "menu"
msgid "Open \"the\" <b>file</b> &amp; go"
msgstr "OPEN \"THE\" <b>FILE</b> &amp; GO"

#, fuzzy, c-format
msgid "%d file"
msgid_plural "%d files"
msgstr[0] "%d FILE"
msgstr[1] "%d FILES"
msgstr[2] "%d FILES"

#, fuzzy
msgid "One file"
msgid_plural "%d files"
msgstr[0] "%d FILES"
msgstr[1] "%d FILES"
msgstr[2] "%d FILES"

#, fuzzy
msgid ""
"This is a long paragraph of text that\n"
"goes over several lines, and\n"
"ends here.\n"
"\n"
"  2 %\n"
msgstr ""
"THIS IS A LONG PARAGRAPH OF\n"
"TEXT THAT GOES OVER SEVERAL LINES,\n"
"AND ENDS HERE.\n"
"\n"
"  2 %\n"
"""


def loud(segment: str) -> str:
    return upper(segment).replace("%D", "%d").replace("%S", "%s")


def translated(text: str, **options) -> str:
    document = read_document(text.encode(), "po", "app.po", ReadOptions(**options))
    return document.encoded(document.render([loud(segment) for segment in document.segments])).decode()


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_what_is_not_translated_is_and_marked_fuzzy_and_nothing_else_changes(newline):
    found = translated((HEADER + DONE + NEW).replace("\n", newline))
    assert found == (HEADER + DONE + EXPECTED).replace("\n", newline)
    assert translated(found) == found


def test_what_is_translated_is_translated_anew_where_that_is_asked_for():
    found = translated(HEADER + DONE, overwrite=True)
    assert found == HEADER + DONE.replace(
        'msgid "done"\nmsgstr "fertig"', '#, fuzzy\nmsgid "done"\nmsgstr "DONE"'
    ).replace('"fast"', '"ALMOST"')


def test_gettexts_own_checker_takes_what_comes_out(tmp_path):
    if shutil.which("msgfmt") is None:
        pytest.skip("msgfmt is not installed")
    (tmp_path / "out.po").write_text(translated(HEADER + DONE + NEW), encoding="utf-8")
    checked = ["msgfmt", "--check-format", "--use-fuzzy", "-o", str(tmp_path / "out.mo"), str(tmp_path / "out.po")]
    result = subprocess.run(checked, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("nplurals=1; plural=0;", ["FILES"]),
        ("nplurals=2; plural=n != 1;", ["FILE", "FILES"]),
        ("nplurals=2; plural=n > 1;", ["FILE", "FILES"]),
        ("nplurals=6; plural=(n==0 ? 0 : n==1 ? 1 : n==2 ? 2 : n%100>=3 && n%100<=10 ? 3 : n%100>=11 ? 4 : 5);",
         ["FILES", "FILE", "FILES", "FILES", "FILES", "FILES"]),
        ("nplurals=INTEGER; plural=EXPRESSION;", ["FILE", "FILES"]),
        ("nplurals=9999999; plural=n;", ["FILE", "FILES"]),
        ("nplurals=2; plural=__import__('os');", ["FILE", "FILES"]),
        (f"nplurals=2; plural={'(' * 400};", ["FILE", "FILES"]),
    ],
)  # fmt: skip
def test_forms_are_as_many_as_the_language_has(rule, expected):
    header = f'msgid ""\nmsgstr "Plural-Forms: {rule}\\n"\n\n'
    found = translated(header + 'msgid "File"\nmsgid_plural "Files"\nmsgstr[0] ""\nmsgstr[1] ""\n')
    assert re.findall(r"msgstr\[(\d)\] \"(.*)\"", found) == [(str(n), text) for n, text in enumerate(expected)]


def test_conversions_of_c_in_another_order_are_numbered():
    text = '#, c-format\nmsgid "%s has %d of %s, 100 %%"\nmsgstr ""\n'
    document = read_document(text.encode(), "po", "app.po")
    assert 'msgstr "%2$d hat %1$s von %3$s, 100 %%"' in document.render(["%d hat %s von %s, 100 %%"])
    assert 'msgstr "%s: %d von %s"' in document.render(["%s: %d von %s"])
    plain = read_document(text.replace("#, c-format\n", "").encode(), "po", "app.po")
    assert 'msgstr "%d hat %s von %s"' in plain.render(["%d hat %s von %s"])


def test_the_charset_of_the_header_is_that_of_the_file():
    text = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=ISO-8859-1\\n"\n\nmsgid "Grün"\nmsgstr ""\n'
    document = read_document(text.encode("latin-1"), "po", "app.po")
    assert document.encoded(document.render(["Blé"])).decode("latin-1").count("Blé") == 1
    found = document.encoded(document.render(["Łódź"])).decode()  # which Latin-1 has not
    assert "charset=UTF-8" in found and 'msgid "Grün"\nmsgstr "Łódź"' in found


def test_a_template_says_that_it_is_utf_8():
    found = translated('msgid ""\nmsgstr "Content-Type: text/plain; charset=CHARSET\\n"\n\nmsgid "é"\nmsgstr ""\n')
    assert "charset=UTF-8" in found and '"É"' in found


def test_long_strings_are_wrapped_unless_the_file_does_not():
    long = "word " * 30 + "end."
    wrapped = translated(
        'msgid ""\n' + "".join(f'"{long[at : at + 75]}"\n' for at in range(0, len(long), 75)) + 'msgstr ""\n'
    )
    lines = wrapped.split('msgstr ""\n')[1].splitlines()
    assert len(lines) == 3 and max(map(len, lines)) < 80
    assert "".join(line[1:-1] for line in lines) == long.upper()
    assert translated(f'msgid "{long}"\nmsgstr ""\n').endswith(f'msgstr "{long.upper()}"\n')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", r"app\.po: line 1: 'hello' is neither a comment nor a keyword"),
        ('msgid "a"\n\nmsgid "b"\nmsgstr ""\n', "line 1: an entry without msgstr"),
        ('msgstr "a"\n', "line 1: an entry without msgid"),
        ('msgid "a"\nmsgstr "x\n', "line 2: 'msgstr \"x' is neither"),
        ('msgid "a"\nmsgid_plural "b"\nmsgstr ""\n', "either msgstr, or msgid_plural"),
        ('msgid "a"\nmsgstr ""\nmsgstr ""\n', "line 3: a second msgstr"),
        ('"a"\n', "line 1: a string without"),
    ],
)
def test_what_is_no_catalogue_is_refused_with_its_line(text, message):
    with pytest.raises(ValueError, match=message):
        read_document(text.encode(), "po", "app.po")


@given(st.text(st.characters(codec="utf-8")))
def test_strings_are_escaped_as_in_c(text):
    assert unescaped(escaped(text)) == text
    assert "\n" not in escaped(text) and re.fullmatch(r'(?:[^"\\]|\\.)*', escaped(text), re.DOTALL)


TEXTS = st.lists(st.sampled_from(["one", " ", "\n", "Two.", "%s", "<b>", "</b>", '"', "\\",
                                   "\t", "& ", "{x}", "é", "3"]),
                 min_size=1, max_size=10).map("".join)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4, unique=True))
def test_any_text_goes_from_msgid_to_msgstr(texts):
    polib = pytest.importorskip("polib")
    text = HEADER + "\n".join(f'msgid "{escaped(text)}"\nmsgstr ""\n' for text in texts)
    document = read_document(text.encode(), "po", "app.po")
    found = document.render(document.segments)
    entries = list(polib.pofile(found))
    assert [entry.msgid for entry in entries] == texts
    for entry in entries:
        assert entry.msgstr == "" or entry.msgstr.split() == entry.msgid.split()
        assert (entry.msgstr != "") == entry.fuzzy == any(map(str.isalpha, re.sub(r"<b>|</b>", "", entry.msgid)))
        assert [entry.msgstr[:1] == "\n", entry.msgstr[-1:] == "\n"] == (
            [entry.msgid[:1] == "\n", entry.msgid[-1:] == "\n"] if entry.msgstr else [False, False]
        )


@pytest.mark.parametrize(
    "attack", ["<b>" * 10_000 + "x", "a\\n" * 10_000, "<a '" * 10_000, "\\" * 20_000, "a " * 20_000]
)
def test_hostile_strings_are_read_soon(attack):
    document = read_document(f'msgid "{attack}"\nmsgstr ""\n'.encode(), "po", "app.po")
    document.render([upper(segment) for segment in document.segments])
