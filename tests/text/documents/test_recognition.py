"""Files that are not text are refused, and a message names formats without a reader."""

import gzip
import io
import tarfile
import zipfile

import pytest

from nmtkit.text.documents import FORMATS, ReadOptions, check_text, format_of, notice, read_document


def archive(*names):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for name in names:
            file.writestr(name, "<p>text</p>")
    return data.getvalue()


def tar():
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as file:
        file.addfile(tarfile.TarInfo("a.html"))
    return data.getvalue()


BINARY = [
    (archive("a.html"), "a ZIP archive"),
    (archive("[Content_Types].xml", "word/document.xml"), "an office document or an e-book"),
    (archive("mimetype"), "an office document or an e-book"),
    (tar(), "a tar archive"),
    (gzip.compress(b"<p>text</p>", mtime=0), "a gzip file"),
    (b"%PDF-1.7\n%\xe2\xe3", "a PDF file"),
    (rb"{\rtf1\ansi text}", "an RTF file"),
    (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "an image"),
    (b"\0\0\0\x20ftypisom", "an audio or video file"),
    (b"\x7fELF\2\1\1\0", "a binary file"),
    (b"<p>text\0</p>", "a binary file"),
]


@pytest.mark.parametrize(("data", "kind"), BINARY)
@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_is_not_text_is_refused_in_every_format(format, data, kind):
    with pytest.raises(ValueError, match=f"^x.html is {kind}, not"):
        read_document(data, format, "x.html")


@pytest.mark.parametrize(
    "data",
    [
        "<p>Grün</p>".encode(),
        "\ufeffGrün".encode(),
        "Grün".encode("utf-16"),
        "Grün".encode("utf-32"),
        b"",
        b"ID3 tags",
        b"PK is a name",
        b"OggS",
        b"GIF8 and {x}",
        b"\xfc",
    ],
)
def test_text_is_not_refused(data):
    check_text(data, "x")


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.json", b'{"key": "Hello"}', "JSON"),
        ("a.txt", b'[\n  {"key": 1}]', "JSON"),
        ("a.md", b"# Title\n", "Markdown"),
        ("a.md.gz", b"\x1f\x8b\x08", "Markdown"),
        ("a.TEX", b"\\section{x}", "LaTeX"),
        ("a.txt", b"<?xml version='1.0'?><a/>", "XML"),
        ("a.txt", b"\xef\xbb\xbf<!DOCTYPE html><p>x", "html, but is read"),
        ("a.txt", b"WEBVTT\n\n00:01.000", "vtt, but is read"),
        ("a.txt", b"1\r\n00:00:01,000 --> 00:00:02,000\r\nx", "srt, but is read"),
        ("a.txt", b"# c\n#, fuzzy\nmsgid \"\"\n", "po, but is read"),
        ("a.txt", b"<?xml version='1.0'?>\n<xliff version='1.2'>", "xliff, but is read"),
        ("a.txt", b"-00:00:01.000 -> 00:00:02.000\nx", "srt, but is read"),
        ("a.txt", b"00:00:01 --> 00:00:02\nx", "srt, but is read"),
        ("a.txt", b'msgctxt "a"\nmsgid "b"\n', "po, but is read"),
        ("a.txt", b"<!-- x -->\n<div class=a>\n", "html, but is read"),
        ("a.txt", b"<?php get_header(); ?>\n", "html, but is read"),
        ("a.php", b"Hello <?= $a ?>\n", "html, but is read"),
        ("a.html.erb", b"Hello\n", "html, but is read"),
        ("a.txt", b"<!DOCTYPE xliff><xliff version='1.2'>", "xliff, but is read"),
        ("a.txt", "WEBVTT\n".encode("utf-16"), "vtt, but is read"),
        ("a.txt", b"[Script Info]\nTitle: x", "ASS"),
        ("a.txt", b"<p-value> is small\n", None),
        ("a.txt", b"12:30 - lunch\n", None),
        ("a.txt", b"1. One --> two\n", None),
        ("a.txt", b"[one] {two}\n", None),
        ("a.txt", b"{name} is here\n", None),
        ("a.en", b"1 dog\n", None),
        ("a.en", b"<b>one</b> line\n", None),
        ("train.en.gz", b"\x1f\x8b\x08", None),
    ],
)  # fmt: skip
def test_a_file_that_looks_like_another_format_gets_a_notice(name, data, expected):
    found = notice(data, name)
    assert found is None if expected is None else found.startswith(f"{name} looks like {expected}")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("a.html", "<p title='{0}'>Dog {0}</p>"),
        ("a.vtt", "WEBVTT\n\n00:01.000 --> 00:02.000\nDog {0}\n"),
        ("a.po", 'msgid "<b>Dog</b> {0}"\nmsgstr ""\n'),
        (
            "a.xlf",
            '<xliff version="1.2"><file source-language="en" target-language="de" datatype="html" original="x"><body>'
            '<trans-unit id="1"><source>Dog &lt;b&gt;x&lt;/b&gt; &amp;{1}</source></trans-unit></body></file></xliff>',
        ),
    ],
)
def test_a_character_reference_of_any_length_is_one_character(name, file):
    digits = f"#{'9' * 5000};"
    document = read_document(file.format(f"&{digits}", digits).encode(), format_of(name), name, ReadOptions("de"))
    assert any("\ufffd" in segment for segment in document.segments)
