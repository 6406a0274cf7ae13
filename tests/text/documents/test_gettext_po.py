"""Catalogues of gettext: the translated entries, their marks, and text that stays unchanged."""

import logging
import os
import re
import shutil
import subprocess
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from standins import upper

from nmtkit.text.documents import ReadOptions, read_document
from nmtkit.text.documents.gettext_po import escaped, unescaped
from nmtkit.text.documents.plural_forms import Plurals, plural_rule

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
def test_untranslated_entries_are_translated_and_marked_fuzzy_and_nothing_else_changes(newline):
    found = translated((HEADER + DONE + NEW).replace("\n", newline))
    assert found == (HEADER + DONE + EXPECTED).replace("\n", newline)
    assert translated(found) == found


def test_translations_are_overwritten_if_asked():
    found = translated(HEADER + DONE, overwrite=True)
    assert found == HEADER + DONE.replace(
        'msgid "done"\nmsgstr "fertig"', '#, fuzzy\nmsgid "done"\nmsgstr "DONE"'
    ).replace('"fast"', '"ALMOST"')


def check_by_msgfmt(text: str) -> None:
    if shutil.which("msgfmt") is not None:
        checked = ["msgfmt", "--check-format", "--check-header", "--use-fuzzy", "-o", os.devnull, "-"]
        result = subprocess.run(checked, input=text.encode(), capture_output=True)
        assert result.returncode == 0, result.stderr.decode()


@pytest.mark.skipif(shutil.which("msgfmt") is None, reason="msgfmt is not installed")
def test_msgfmt_accepts_the_file():
    check_by_msgfmt(translated(HEADER + DONE + NEW))


PLURAL = '#, c-format\nmsgid "%d file"\nmsgid_plural "%d files"\nmsgstr[0] ""\nmsgstr[1] ""\n'
CHARSET = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n'
RUSSIAN = (
    "nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 && (n%100<12 || n%100>14) ? 1 : 2);"
)  # fmt: skip


@pytest.mark.parametrize(
    ("header", "language", "rule", "forms"),
    [
        (CHARSET + "\n", "ru", RUSSIAN, ["%d FILE", "%d FILES", "%d FILES"]),
        (CHARSET + "\n", "rus_Cyrl", RUSSIAN, ["%d FILE", "%d FILES", "%d FILES"]),
        (CHARSET + "\n", "ja", "nplurals=1; plural=(0);", ["%d FILES"]),
        (CHARSET + "\n", "fr", "nplurals=2; plural=(n > 1);", ["%d FILE", "%d FILES"]),
        (CHARSET + "\n", "pt-BR", "nplurals=2; plural=(n > 1);", ["%d FILE", "%d FILES"]),
        (CHARSET + "\n", "de", "nplurals=2; plural=(n != 1);", ["%d FILE", "%d FILES"]),
        (CHARSET + "\n", None, "nplurals=2; plural=(n != 1);", ["%d FILE", "%d FILES"]),
        ("", "de", "nplurals=2; plural=(n != 1);", ["%d FILE", "%d FILES"]),
        (CHARSET + '"Plural-Forms: nplurals=INTEGER; plural=EXPRESSION;\\n"\n"Language: \\n"\n\n', "ja",
         "nplurals=1; plural=(0);", ["%d FILES"]),
        (CHARSET.replace("\\n", "") + "\n", "ja", "nplurals=1; plural=(0);", ["%d FILES"]),
    ],
)  # fmt: skip
def test_a_header_without_plural_forms_gets_the_rule_of_the_target_language(header, language, rule, forms):
    found = translated(header + PLURAL, target_language=language)
    assert found.count("Plural-Forms") == found.count(f'"Plural-Forms: {rule}\\n"\n') == 1
    assert re.findall(r"msgstr\[\d\] \"(.*)\"", found) == forms
    check_by_msgfmt(found)
    assert translated(found, target_language=language) == found


@pytest.mark.parametrize(("header", "language", "expected"), [
    ('"Language: \\n"\n', "pt-BR", '"Language: pt_BR\\n"\n'),
    ('"X-Source-Language: \\n"\n"Language-Team: \\n"\n"Language:\\n"\n', "de",
     '"X-Source-Language: \\n"\n"Language-Team: \\n"\n"Language: de\\n"\n'),
    ('"MIME-Version: 1.0\\nLanguage: \\n"\n', "de", '"MIME-Version: 1.0\\nLanguage: de\\n"\n'),
    ('"Language: fr\\n"\n', "de", '"Language: fr\\n"\n'),
    ('"Language: \\n"\n', None, '"Language: \\n"\n'),
])  # fmt: skip
def test_an_empty_language_of_the_header_becomes_the_target_language(header, language, expected):
    entry = '\n#, fuzzy\nmsgid "File"\nmsgstr "FILE"\n'
    assert translated(CHARSET + header + entry.replace('"FILE"', '""'), target_language=language) == (
        CHARSET + expected + entry
    )


def test_a_file_without_plurals_keeps_its_header():
    found = translated(CHARSET + '\nmsgid "File"\nmsgstr ""\n', target_language="ru")
    assert found == CHARSET + '\n#, fuzzy\nmsgid "File"\nmsgstr "FILE"\n'


# CLDR, the numbers of plural samples: the categories of each language, in the order of the forms.
@pytest.mark.parametrize(
    ("language", "samples"),
    [
        ("ar", [0, 1, 2, 3, 11, 100]),
        ("cs", [1, 2, 5]),
        ("cy", [0, 1, 2, 3, 6, 4]),
        ("ga", [1, 2, 3, 7, 11]),
        ("gd", [1, 2, 3, 20]),
        ("he", [1, 2, 3]),
        ("is", [21, 11]),
        ("lt", [21, 2, 11]),
        ("lv", [21, 2, 0]),
        ("mt", [1, 2, 3, 11, 20]),
        ("prg", [10, 21, 2]),
        ("pl", [1, 22, 12]),
        ("ro", [1, 19, 20]),
        ("ru", [21, 22, 12]),
        ("sl", [101, 2, 3, 5]),
        ("tr", [1, 2]),
        ("zh", [1]),
    ],
)
def test_the_rules_of_plurals_are_valid_and_order_the_forms(language, samples):
    plurals = Plurals("Plural-Forms: " + plural_rule(language))
    assert plurals.count == len(samples)
    assert [form for number in samples for form in plurals.numbers if number in plurals.numbers[form]] == list(
        range(len(samples))
    )


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
def test_an_entry_has_the_plural_forms_of_the_header(rule, expected):
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


def test_python_placeholders_in_another_order_leave_the_entry_untranslated(caplog):
    text = '#, python-format\nmsgid "%s has %d, 100 %%"\nmsgstr ""\n'
    document = read_document(text.encode(), "po", "app.po")
    with caplog.at_level(logging.WARNING, "nmtkit"):
        assert document.render(["%d hat %s, 100 %%"]) == text
    assert "untranslated entries: 1;" in caplog.text
    assert 'msgstr "%s hat %d"' in document.render(["%s hat %d"])
    named = '#, python-format\nmsgid "%(a)s has %(b)d"\nmsgstr ""\n'
    assert 'msgstr "%(b)d hat %(a)s"' in read_document(named.encode(), "po", "a.po").render(["%(b)d hat %(a)s"])


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("php-format", "%2$d: %1$s"),
        ("objc-format", "%2$d: %1$s"),
        ("no-c-format", "%d: %s"),
        ("python-brace-format", "%d: %s"),
    ],
)
def test_formats_that_number_their_placeholders(format, expected):
    text = f'#, {format}\nmsgid "%s is %d"\nmsgstr ""\n'
    found = read_document(text.encode(), "po", "app.po").render(["%d: %s"])
    assert f'msgstr "{expected}"' in found
    check_by_msgfmt(CHARSET + "\n" + found)


def test_a_width_from_an_argument_cannot_be_numbered():
    text = '#, c-format\nmsgid "%*d of %s"\nmsgstr ""\n'
    assert read_document(text.encode(), "po", "app.po").render(["%s: %*d"]) == text


def test_a_visible_tag_keeps_its_spaces():
    assert 'msgstr "USE <file> (OR -) NOW"' in translated('msgid "Use <file> (or -) now"\nmsgstr ""\n')


def test_the_charset_of_the_header_is_the_encoding_of_the_file():
    text = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=ISO-8859-1\\n"\n\nmsgid "Grün"\nmsgstr ""\n'
    document = read_document(text.encode("latin-1"), "po", "app.po")
    assert document.encoded(document.render(["Blé"])).decode("latin-1").count("Blé") == 1
    found = document.encoded(document.render(["Łódź"])).decode()  # Latin-1 lacks this character
    assert "charset=UTF-8" in found and 'msgid "Grün"\nmsgstr "Łódź"' in found


def test_a_template_becomes_utf_8():
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
        ("hello\n", r"app\.po: line 1: 'hello'"),
        ('msgid "a"\n\nmsgid "b"\nmsgstr ""\n', "line 1: .*has no msgstr"),
        ('msgstr "a"\n', "line 1: .*has no msgid"),
        ('msgid "a"\nmsgstr "x\n', "line 2: 'msgstr \"x'"),
        ('msgid "a"\nmsgid_plural "b"\nmsgstr ""\n', "either msgstr, or msgid_plural"),
        ('msgid "a"\nmsgstr ""\nmsgstr ""\n', "line 3: .*second msgstr"),
        ('msgid "a"\rmsgstr ""\rmsgstr ""\r', "line 3: .*second msgstr"),
        ('"a"\n', "line 1: .*string"),
    ],
)
def test_a_file_that_is_not_a_catalogue_is_refused_with_its_line(text, message):
    with pytest.raises(ValueError, match=message):
        read_document(text.encode(), "po", "app.po")


@pytest.mark.slow
@given(st.text(st.characters(codec="utf-8")))
def test_strings_are_escaped_as_in_c(text):
    assert unescaped(escaped(text)) == text
    assert "\n" not in escaped(text) and re.fullmatch(r'(?:[^"\\]|\\.)*', escaped(text), re.DOTALL)


TEXTS = st.lists(st.sampled_from(["one", " ", "\n", "Two.", "%s", "<b>", "</b>", '"', "\\",
                                   "\t", "& ", "{x}", "é", "3"]),
                 min_size=1, max_size=10).map("".join)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
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
    ("unit", "count"), [("<b>", 20_000), ("a\\n", 10_000), ("<a '", 10_000), ("\\", 20_000), ("a ", 20_000)]
)
def test_hostile_strings_are_read_in_linear_time(unit, count):
    def seconds(count):
        start = time.process_time()
        document = read_document(f'msgid "{unit * count}x"\nmsgstr ""\n'.encode(), "po", "app.po")
        document.render([upper(segment) for segment in document.segments])
        return time.process_time() - start

    # a quadratic time grows sixteenfold; another process on the same core can slow down one of two measurements
    assert any(seconds(count) < max(8 * seconds(count // 4), 0.1) for _ in range(5))


@pytest.mark.parametrize(
    ("codec", "octal"), [("utf-8", r"Caf\303\251"), ("iso-8859-1", r"Caf\351"), ("utf-8", r"Caf\xc3\xa9")]
)
def test_octal_and_hexadecimal_escapes_are_bytes_of_the_encoding(codec, octal):
    header = f'msgid ""\nmsgstr "Content-Type: text/plain; charset={codec}\\n"\n\n'
    document = read_document(f'{header}msgid "{octal}"\nmsgstr ""\n'.encode(), "po", "app.po")
    assert document.segments == ["Café"]


def test_several_strings_and_a_comment_on_a_line_are_read_as_by_gettext():
    text = 'msgid "one" " two" # note\nmsgstr "" # empty\n'
    document = read_document(text.encode(), "po", "app.po")
    assert document.segments == ["one two"]
    assert document.render(["eins zwei"]) == '#, fuzzy\nmsgid "one" " two" # note\nmsgstr "eins zwei" # empty\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('#, fuzzy\n#~ msgid "x"\n#~ msgstr "y"\nmsgid "a"\nmsgstr ""\n', '#~ msgstr "y"\n#, fuzzy\nmsgid "a"'),
        ('#, c-format\n#, fuzzy\nmsgid "a"\nmsgstr ""\n', '#, c-format\n#, fuzzy\nmsgid "a"'),
        ('#, fuzzy\n#, c-format\nmsgid "a"\nmsgstr ""\n', '#, fuzzy\n#, c-format\nmsgid "a"'),
    ],
)
def test_flags_belong_to_their_entry_and_may_take_several_lines(before, after):
    assert after in translated(before)


def test_the_flag_of_the_first_entry_stays_with_it_if_a_header_is_added():
    found = translated('msgid "%d file"\nmsgid_plural "%d files"\nmsgstr[0] ""\nmsgstr[1] ""\n')
    assert found.startswith('msgid ""\nmsgstr ""\n') and '\n#, fuzzy\nmsgid "%d file"' in found


def test_two_lines_of_flags_are_one_list_for_readers_of_pairs():
    text = '#, c-format\n#, fuzzy\nmsgid "a"\nmsgstr "b"\n\n#, fuzzy\n#, c-format\nmsgid "c"\nmsgstr "d"\n'
    assert list(read_document(text.encode(), "po", "app.po").pairs()) == []


@pytest.mark.parametrize(
    ("languages", "forms"),
    [
        ("ja yue yue_Hant wo wol_Latn su sah dz ig ibo_Latn", [200 * [0]]),
        ("pt por_Latn pt_BR nso ht", [[0, 0] + 198 * [1]]),
        ("pt_PT pt-PT de", [[1, 0] + 198 * [1]]),
        ("se iu", [[2, 0, 1] + 197 * [2]]),
    ],
)
def test_plural_rules_are_the_rules_of_unicode_cldr(languages, forms):
    for language in languages.split():
        plurals = Plurals("Plural-Forms: " + plural_rule(language))
        expected = {form: {n for n in range(200) if forms[0][n] == form} for form in set(forms[0])}
        assert {form: numbers - {200} for form, numbers in plurals.numbers.items()} == expected


def test_a_catalogue_for_another_target_language_gets_a_warning(caplog):
    catalogue = CHARSET + '"Language-Team: de\\n"\n"Language: fr_FR\\n"\n\nmsgid "File"\nmsgstr ""\n'
    for language, count in (("de", 1), ("fr", 0), (None, 0)):
        caplog.clear()
        read_document(catalogue.encode(), "po", "a.po", ReadOptions(language))
        assert ["'fr_FR'" in each.getMessage() for each in caplog.records] == [True] * count


def test_a_catalogue_of_another_source_language_gets_a_warning(caplog):
    for named, language, count in (("en_US", "it", 1), ("en_US", "en", 0), ("C", "it", 0), ("en_US", None, 0)):
        catalogue = CHARSET + f'"X-Source-Language: {named}\\n"\n\nmsgid "File"\nmsgstr ""\n'
        caplog.clear()
        read_document(catalogue.encode(), "po", "a.po", ReadOptions("de", source_language=language))
        assert [f"source language {named!r}" in each.getMessage() for each in caplog.records] == [True] * count


def test_plural_forms_in_any_order_are_paired_by_their_index():
    text = 'msgid "a dog"\nmsgid_plural "dogs"\nmsgstr[1] "Hunde"\nmsgstr[0] "ein Hund"\n'
    assert list(read_document(text.encode(), "po", "a.po").pairs()) == [("a dog", "ein Hund"), ("dogs", "Hunde")]
