"""Placeholders of the formats of gettext: msgfmt accepts every output."""

import os
import random
import shutil
import subprocess

import pytest

from nmtkit.text.documents import ReadOptions, read_document
from nmtkit.text.documents.placeholders import in_order, placeholders
from nmtkit.text.patterns import PATTERNS
from nmtkit.text.protection import compiled, protected_spans

# format -> texts
TEXTS = {
    "c": ["Copied %<PRIu64> bytes: %m", "100 %% of %d, %5.2f and %-10s", "%1$s of %2$s", "% d of %*d"],
    "python": ["%(name)s has %(n)d at 100%%", "%s of %.2f"],
    "python-brace": ["Hi {0:{1}} and {name!r} {{x}}", "{} of {:>10}"],
    "ruby": ["%<name>d of %{total}, 50%%", "%-10<name>s"],
    "objc": ["%1$@ of %2$lld", "%@ left"],
    "php": ["Page %1$s of %2$d"],
    "java": ["It''s {0,number,#.#} of {1}", "'{'0} {0}"],
    "java-printf": ["%1$tY and %2$,d"],
    "csharp": ["Open {0,10:N2} {{x}}"],
    "perl-brace": ["Hi {name}"],
    "sh": ["Use $HOME or ${X} now"],
    "qt": ["File %1 of %L2"],
    "boost": ["Open %1% now"],
    "lisp": ["Hello ~A and ~S~%"],
    "tcl": ["Open %1$s"],
    "gcc-internal": ["%qs is %<const%> of %qE"],
    "javascript": ["%s of %d"],
    "lua": ["%s of %d"],
}
HEADER = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\nPlural-Forms: nplurals=2; plural=n!=1;\\n"\n\n'


def catalogue() -> str:
    entries = []
    for format, texts in TEXTS.items():
        entries += [f'#, {format}-format\nmsgid "{text} {format}"\nmsgstr ""\n' for text in texts]
        entries.append(f'#, {format}-format\nmsgid "One {texts[0]} {format}"\nmsgid_plural "All {texts[0]} {format}"\n'
                       'msgstr[0] ""\nmsgstr[1] ""\n')  # fmt: skip
    return HEADER + "\n".join(entries)


def check(text: str) -> None:
    command = ["msgfmt", "--check-format", "--check-header", "--use-fuzzy", "-o", os.devnull, "-"]
    result = subprocess.run(command, input=text.encode(), capture_output=True)
    assert result.returncode == 0, result.stderr.decode()


@pytest.mark.skipif(shutil.which("msgfmt") is None, reason="msgfmt is not installed")
@pytest.mark.parametrize("seed", range(10))
def test_msgfmt_accepts_the_output_of_a_translator_that_damages_placeholders(seed):
    draw = random.Random(seed)

    def damaged(segment: str) -> str:
        """Changes the text at a random position, exchanges its words, or adds signs that begin a placeholder."""
        words = segment.split(" ")
        index = draw.choice([index for index, word in enumerate(words) if "<g" not in word])  # a code is never damaged
        match draw.randrange(6):
            case 0:
                draw.shuffle(words)
            case 1:
                words.pop(index)
            case 2:
                words.insert(index, draw.choice(["%", "% d", "%s", "{x}", "{", "$Y", "~", "l'a"]))
            case 3:
                words[index] = words[index].upper()
        return " ".join(words)

    source = catalogue()
    check(source)
    document = read_document(source.encode(), "po", "x.po", ReadOptions("de"))
    text = document.render([damaged(segment) for segment in document.segments])
    check(text)
    assert text.count("fuzzy") > len(TEXTS)  # most entries are translated


@pytest.mark.parametrize("format", ["c", "python", "python-brace", "ruby", "objc", "php", "perl-brace", "sh", "boost"])
def test_every_placeholder_of_a_usual_format_is_protected(format):
    patterns = compiled(PATTERNS)
    assert any(placeholders(text, [format]) for text in TEXTS[format])
    for text in TEXTS[format]:
        for placeholder in placeholders(text, [format]):
            spans = [text[span.start : span.end] for span in protected_spans(text, patterns)]
            assert any(placeholder in span for span in spans) or " " in placeholder or "*" in placeholder, placeholder


@pytest.mark.parametrize(
    ("source", "target", "format", "expected"),
    [
        ("%s of %d", "%d von %s", "c", "%2$d von %1$s"),
        ("%<PRIu64> of %s: %m", "%s von %<PRIu64>: %m", "c", "%2$s von %1$<PRIu64>: %m"),
        ("%s at 50%%", "%s zu 50 Prozent", "c", "%s zu 50 Prozent"),
        ("%s percent", "%s %", "c", None),
        ("%s percent", "%s %", "no-format", "%s %"),
        ("{a}", "{b}", "python-brace", None),
        ("the {0}", "l'{0}", "java", None),
        ("the {0}", "l''{0}", "java", "l''{0}"),
        ("%<a>d of %{b}", "%{b} von %<a>d", "ruby", "%{b} von %<a>d"),
        ("%s has %d files%n", "%d Dateien in %s%n", "java-printf", "%2$d Dateien in %1$s%n"),
    ],
)
def test_a_translation_takes_the_arguments_of_its_source(source, target, format, expected):
    assert in_order(source, target, [format]) == expected


def test_flags_with_hyphens_are_formats_and_flags_that_deny_a_format_are_not():
    for flag, accepted in (("python-brace-format", False), ("no-python-brace-format", True), ("c++-format", True)):
        text = f'#, {flag}\nmsgid "the {{a}}"\nmsgstr ""\n'
        document = read_document(text.encode(), "po", "x.po", ReadOptions())
        assert ('msgstr "die {b}"' in document.render(["die {b}"])) is accepted


@pytest.mark.skipif(shutil.which("msgfmt") is None, reason="msgfmt is not installed")
def test_a_template_gets_a_valid_header():
    header = 'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=CHARSET\\n"\n'
    text = f'{header}"Plural-Forms: nplurals=INTEGER; plural=EXPRESSION;\\n"\n\nmsgid "Open"\nmsgstr ""\n'
    document = read_document(text.encode(), "po", "x.pot", ReadOptions("pl"))
    found = document.encoded(document.render(["Otwórz"])).decode()
    check(found)
    assert "nplurals=4" in found or "nplurals=3" in found


def test_an_indented_line_of_flags_gets_a_flag():
    document = read_document(b'  #, c-format\n  msgid "a"\n  msgstr ""\n', "po", "x.po", ReadOptions("de"))
    assert document.render(["b"]) == '  #, fuzzy, c-format\n  msgid "a"\n  msgstr "b"\n'


def test_an_empty_line_of_flags_gets_one_flag():
    document = read_document(b'#,\nmsgid "a"\nmsgstr ""\n', "po", "x.po", ReadOptions("de"))
    assert document.render(["b"]).startswith("#, fuzzy\n")


def test_a_number_of_a_plural_form_may_have_spaces_around_it():
    text = HEADER + 'msgid "a %d"\nmsgid_plural "b %d"\nmsgstr [0] ""\nmsgstr[ 1 ] ""\n'
    document = read_document(text.encode(), "po", "x.po", ReadOptions("de"))
    assert 'msgstr[0] "A %d"\nmsgstr[1] "B %d"' in document.render(["A %d", "B %d"])
