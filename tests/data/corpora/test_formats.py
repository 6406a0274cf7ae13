"""Every format keeps every text, and errors name the file, the line and a solution."""

import bz2
import gzip
import json
import lzma
import re
import sys
import tracemalloc
import zipfile
from datetime import date
from pathlib import Path

import pytest
import zstandard

from nmtkit.data.corpora.corpus import Pairs, locate
from nmtkit.data.corpora.pairs import pairs
from nmtkit.data.corpora.writer import CorpusWriter

HOSTILE = [
    ("plain", "schlicht"),
    ("line\u2028separator \x85 and \x0b", "para\u2029graph \x1c"),
    ("carriage\rreturn inside", "\rat the start"),
    ('"quotes" and \'more\' "', '„Anführung" \\n \\t \\'),
    ("a\ttab", "\tzwei\t\tTabs"),
    ("emoji 👩‍👩‍👧‍👦 🇮🇹", "🤷🏽‍♂️"),
    ("שלום עולם \u202bright to left\u202c", "مرحبا بالعالم"),
    ("<seg>&amp; <b>&lt;", "]]> <!-- & -->"),
    ("  spaces  ", "\u3000\xa0"),
    ("", "empty source"),
    ("long " * 4000, "lang " * 4000),
    ("\ufeffa mark that does not begin the file", "e\u0301 is not é"),
    ("en\tde", "en"),
    ("last", "letzte"),
]
SPACED = str.maketrans("\t", " ")  # a .tsv cannot hold a tab
VALID_XML = str.maketrans(dict.fromkeys("\x0b\x1c", " "))


def read(name: str | Path, *languages: str, columns: tuple[str, str] | None = None) -> list[tuple[str, str]]:
    source, target = languages or ("en", "de")
    return [
        pair
        for part in pairs(locate(str(name), source, target, columns), 4)
        for pair in zip(part.sources, part.targets, strict=True)
    ]


@pytest.mark.parametrize("name", ["c", "c.gz", "c.tsv", "c.tsv.gz", "c.tsv.bz2", "c.tsv.xz", "c.tsv.zst", "c.tmx",
                                  "c.tmx.zst", "c.jsonl", "c.jsonl.xz", "c.parquet", "c.zip"])  # fmt: skip
def test_hostile_text_comes_back(name: str, tmp_path: Path) -> None:
    with CorpusWriter(str(tmp_path / name), ("en", "de")) as writer:
        for start in range(0, len(HOSTILE), 5):
            sources, targets = zip(*HOSTILE[start : start + 5], strict=True)
            writer.write(Pairs(list(sources), list(targets), [{}] * len(sources)))
    table = SPACED if ".tsv" in name else VALID_XML if ".tmx" in name else {}
    expected = [(source.translate(table), target.translate(table)) for source, target in HOSTILE]
    assert read(tmp_path / name.removesuffix(".gz") if name == "c.gz" else tmp_path / name) == expected


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress),
     (".zst", zstandard.ZstdCompressor().compress), (".GZ", gzip.compress), (".ZST", zstandard.compress)],
    ids=["gz", "bz2", "xz", "zst", "GZ", "ZST"],
)  # fmt: skip
def test_other_programs_and_nmtkit_compress_alike(suffix: str, compress: object, tmp_path: Path) -> None:
    (tmp_path / f"c.tsv{suffix}").write_bytes(compress("a\tä\nb\tö".encode()))  # type: ignore[operator]
    assert read(tmp_path / f"c.tsv{suffix}") == [("a", "ä"), ("b", "ö")]


def test_a_suffix_in_capitals_compresses_too(tmp_path: Path) -> None:
    for name in ("c.tsv.GZ", "c.GZ"):
        with CorpusWriter(str(tmp_path / name), ("en", "de")) as writer:
            writer.write(Pairs(["a"], ["ä"], [{}]))
        for path in writer.paths:
            assert path.suffix == ".GZ" and len(gzip.decompress(path.read_bytes())) > 1


@pytest.mark.parametrize("name", ["c.parquet", "c.tsv.zst"])
def test_a_missing_package_is_noticed_before_the_first_pair(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("pyarrow", "zstandard"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError), CorpusWriter(str(tmp_path / name), ("en", "de")):
        pytest.fail("the writer was opened")


@pytest.mark.parametrize(
    ("heading", "columns", "expected"),
    [
        ("", None, ("1", "2")),
        ("de\tscore\ten_GB\n", None, ("3", "1")),
        ("deu_Latn\tscore\teng_Latn\n", None, ("3", "1")),
        ("tgt\tscore\tsrc\n", None, ("3", "1")),
        ("", ("3", "1"), ("3", "1")),
        ("x\ty\tz\n", ("z", "y"), ("3", "2")),
        ("en\tscore\tde\n", ("1", "3"), ("1", "3")),
    ],
    ids=["two columns", "codes", "codes of nllb", "words", "numbers", "names", "numbers with a heading"],
)
def test_columns_of_a_tsv(
    heading: str, columns: tuple[str, str] | None, expected: tuple[str, str], tmp_path: Path
) -> None:
    row = "1\t2" if not heading and columns is None else "1\t2\t3"
    (tmp_path / "c.tsv").write_text(heading + row + "\n")
    assert read(tmp_path / "c.tsv", columns=columns) == [expected]


def test_other_columns_are_kept(tmp_path: Path) -> None:
    (tmp_path / "c.tsv").write_text("score\ten\tde\n0.5\ta\tä\n0.25\tb\tö\n")
    (part,) = pairs(locate(str(tmp_path / "c.tsv"), "en", "de"))
    assert part.extras == [{"score": "0.5"}, {"score": "0.25"}]
    for name in ("o.tsv", "o.jsonl", "o.tmx", "o.parquet"):
        with CorpusWriter(str(tmp_path / name), ("en", "de")) as writer:
            writer.write(part)
        (again,) = pairs(locate(str(tmp_path / name), "en", "de"))
        assert again == part, name
    assert (tmp_path / "o.tsv").read_text() == "en\tde\tscore\na\tä\t0.5\nb\tö\t0.25\n"


@pytest.mark.parametrize("value", [b"bytes", date(2026, 11, 30), [date(2026, 11, 30)]])
def test_a_column_that_json_cannot_hold_is_named(value: object, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"o\.jsonl: .*'made'"),
        CorpusWriter(str(tmp_path / "o.jsonl"), ("en", "de")) as writer,
    ):
        writer.write(Pairs(["a", "b"], ["c", "d"], [{"score": 1}, {"score": 2, "made": value}]))
    assert not (tmp_path / "o.jsonl").exists()


@pytest.mark.parametrize(("count", "text"), [(1, "1 text"), (2, "2 texts")])
def test_replaced_characters_are_counted(
    count: int, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CorpusWriter(str(tmp_path / "o.tsv"), ("en", "de")) as writer:
        writer.write(Pairs(["a\tb"] * count, ["c"] * count, [{}] * count))
    assert caplog.messages[-1].endswith(f" {text}")


def test_columns_that_have_no_place_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CorpusWriter(str(tmp_path / "o"), ("en", "de")) as writer:
        writer.write(Pairs(["a"], ["b"], [{"score": 1}]))
    assert "o.en cannot contain" in caplog.text


@pytest.mark.parametrize("name", ["o", "o.zip"])
def test_columns_of_a_later_corpus_that_have_no_place_are_reported(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The columns of the first pairs alone were named."""
    with CorpusWriter(str(tmp_path / name), ("en", "de")) as writer:
        writer.write(Pairs(["a"], ["b"], [{}]))
        writer.write(Pairs(["c"], ["d"], [{"url": "x"}]))
    assert "the columns url" in caplog.text


TMX = """<?xml version="1.0"?><!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header srclang="en-GB" datatype="xml"/><body>
<tu tuid="1"><prop type="score">0.5</prop><tuv xml:lang="de-AT"><seg>Ein <bpt i="1">&lt;b></bpt><hi>fetter</hi>
Hut<ept i="1">&lt;/b></ept></seg></tuv><tuv xml:lang="EN-gb"><seg>A <ph>{0}</ph>bold hat</seg></tuv></tu>
<tu><tuv lang="fr"><seg>rien</seg></tuv><tuv lang="en-GB"><seg>nothing</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>x</seg></tuv><tuv xml:lang="fr"><seg>y</seg></tuv><tuv xml:lang="de"><seg>z</seg></tuv></tu>
</body></tmx>"""


def test_a_placeholder_between_two_words_is_a_space(tmp_path: Path) -> None:
    unit = "<tu><tuv xml:lang='en'><seg>{}</seg></tuv><tuv xml:lang='de'><seg>x</seg></tuv></tu>"
    texts = ["one<ph>lb</ph>two", "<ph/>one <ph/> two<ph/>.", "un<bpt i='1'/>able<ept i='1'/>"]
    body = "".join(map(unit.format, texts))
    (tmp_path / "c.tmx").write_text(f"<tmx version='1.4'><header/><body>{body}</body></tmx>")
    assert [source for source, _ in read(tmp_path / "c.tmx")] == ["one two", "one  two.", "unable"]


def test_tmx_of_several_languages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "c.tmx").write_text(TMX)
    assert read(tmp_path / "c.tmx") == [("A bold hat", "Ein fetter Hut"), ("x", "z")]
    assert "skipped 1 unit" in caplog.text
    assert "line breaks inside 1" in caplog.text
    with pytest.raises(ValueError, match=r"en and it; .*de-AT, EN-gb, fr, en-GB, en, de"):
        read(tmp_path / "c.tmx", "en", "it")
    (tmp_path / "d.tmx").write_text(TMX[:-20])
    with pytest.raises(ValueError, match=r"d\.tmx:6: "):
        read(tmp_path / "d.tmx")


@pytest.mark.slow
def test_a_large_tmx_needs_little_memory(tmp_path: Path) -> None:
    unit = f'<tu><tuv xml:lang="en"><seg>{"x" * 500}</seg></tuv><tuv xml:lang="de"><seg>y</seg></tuv></tu>\n'
    (tmp_path / "c.tmx").write_text(f"<tmx><header/><body>{unit * 20_000}</body></tmx>")
    tracemalloc.start()
    assert sum(map(len, pairs(locate(str(tmp_path / "c.tmx"), "en", "de"), 100))) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 << 20  # the file has 11 MB


def test_jsonl_of_several_shapes(tmp_path: Path) -> None:
    records = [
        {"en": "a", "de": "b"},
        {"id": 3, "translation": {"de": "d", "en": "c"}},
        {"source": "e", "target": "f\ng"},
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read(tmp_path / "c.jsonl") == [("a", "b"), ("c", "d"), ("e", "f g")]


def test_folders_of_datasets(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "dataset" / "train"
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-00002.arrow" for number in range(2)]
    for number, name in enumerate(names):
        table = arrow.table({"translation": [{"de": f"d{number}", "en": f"e{number}"}]})
        with arrow.OSFile(str(folder / name), "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (tmp_path / "dataset/dataset_dict.json").write_text('{"splits": ["train"]}')
    assert read(folder) == [("e0", "d0"), ("e1", "d1")]
    with pytest.raises(ValueError, match=r"splits.*dataset/train"):
        read(tmp_path / "dataset")


@pytest.mark.parametrize("name", ["dataset_dict.json", "state.json"])
@pytest.mark.parametrize(
    "text", ["{}", "[", "[]", '{"splits": 3, "_data_files": [{}]}', '{"_data_files": [{"filename": 1}]}']
)
def test_a_damaged_file_of_a_dataset_is_named(name: str, text: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / name))):
        read(tmp_path)


def test_zip_of_opus(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        for name, text in (("README", "Books"), ("LICENSE", ""), ("Books.de-en.de", "\ufeffb\r\nd\n"),
                           ("Books.de-en.en", "a\nc"), ("Books.de-en.ids", "1\n2\n")):  # fmt: skip
            archive.writestr(name, text)
    assert read(tmp_path / "c.zip") == [("a", "b"), ("c", "d")]
    with pytest.raises(ValueError, match=r"\*\.en and \*\.fr; .*README, LICENSE, Books\.de-en\.de"):
        read(tmp_path / "c.zip", "en", "fr")


def test_translations_in_po_and_xliff(tmp_path: Path) -> None:
    (tmp_path / "c.po").write_text(
        'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\nmsgid "Open"\nmsgstr "Öffnen"\n\n'
        '#, fuzzy\nmsgid "Old"\nmsgstr "Falsch"\n\nmsgid "New"\nmsgstr ""\n\n'
        'msgid "%d file"\nmsgid_plural "%d files"\nmsgstr[0] "%d Datei"\nmsgstr[1] "%d\\nDateien"\n'
    )
    assert read(tmp_path / "c.po") == [("Open", "Öffnen"), ("%d file", "%d Datei"), ("%d files", "%d Dateien")]
    (tmp_path / "c.xlf").write_text(
        '<xliff version="1.2"><file source-language="en" target-language="de"><body>'
        '<trans-unit id="1"><source>A <g id="1">red</g> hat</source><target>Ein <g id="1">roter</g> Hut</target>'
        '</trans-unit><trans-unit id="2"><source>New</source></trans-unit></body></file></xliff>'
    )
    assert read(tmp_path / "c.xlf") == [("A red hat", "Ein roter Hut")]


@pytest.mark.parametrize("name", ["c.tsv", "c.tmx", "c.jsonl", "c.parquet", "c.zip", "c"])
def test_an_error_leaves_no_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), CorpusWriter(str(tmp_path / name), ("en", "de")) as writer:
        writer.write(Pairs(["a"], ["b"], [{}]))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ({"val.tsv": "a\tb\n"}, "val", r"val\.en .*/val\.tsv\?"),
        ({"train.tsv": "a\tb\n"}, "val.tsv", r"^no such file: .*/val\.tsv$"),
        ({"val.tsv.gz": "a\tb\n"}, "val.tsv", r"did you mean .*/val\.tsv\.gz\?"),
        ({"val.en": "a\n", "val.de": "b\n"}, "val.en", r"prefix .*/val, without \.en"),
        ({"val.en": "a\n", "val.it": "b\n"}, "val", r"/val\.de .*en, it"),
        ({"val.en": "a\n", "val.de": "b\nc\n"}, "val", r"val\.en has 1 .*val\.de has 2"),
        ({"val.tsv": "a\tb\tc\n"}, "val.tsv", r"3 columns .*--columns"),
        ({"val.tsv": "a\tb\nc\td\te\n"}, "val.tsv", r"val\.tsv:2: .*3 columns, .*2"),
        ({"val.tsv": "a\n"}, "val.tsv", "no tab"),
        ({"val.jsonl": "{}\n"}, "val.jsonl", r"val\.jsonl:1: .*en and de"),
        ({"val.jsonl": '{"en": "a", "de": 3}\n'}, "val.jsonl", "'de' is not"),
        ({"val.jsonl": '{"en": "\\ud800", "de": "b"}\n'}, "val.jsonl", "surrogate pair"),
        ({"val.jsonl": "text\n"}, "val.jsonl", r"val\.jsonl:1: .*not JSON"),
        ({"val.jsonl": "[" * 200_000}, "val.jsonl", r"val\.jsonl:1: .*not JSON"),
        ({"val.tmx": '<?xml version="1.0" encoding="foo"?><tmx/>'}, "val.tmx", r"val\.tmx: .*foo"),
        ({"val.tmx": '<?xml version="1.0" encoding="utf-7"?><tmx/>'}, "val.tmx", r"val\.tmx: "),
        ({"val.zip": "text\n"}, "val.zip", "not a ZIP archive"),
        ({"val.parquet": "text\n"}, "val.parquet", "not Parquet"),
        ({}, "nowhere/val", "/nowhere does not exist"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 12 else None,
)
def test_errors_say_what_to_do(files: dict[str, str], name: str, message: str, tmp_path: Path) -> None:
    for file, text in files.items():
        data = text.encode()
        (tmp_path / file).write_bytes(gzip.compress(data) if file.endswith(".gz") else data)
    with pytest.raises((ValueError, OSError), match=message):
        read(tmp_path / name)


def test_two_sides_in_one_language_are_both_written_or_refused(tmp_path: Path) -> None:
    for name in ("c", "c.gz", "c.jsonl", "c.parquet", "c.zip", "c.tmx"):
        with pytest.raises(ValueError, match=r"\.tsv"):
            CorpusWriter(str(tmp_path / name), ("en", "en"))
    with CorpusWriter(str(tmp_path / "c.tsv"), ("en", "en")) as writer:
        writer.write(Pairs(["he go"], ["he goes"], [{}]))
    assert (tmp_path / "c.tsv").read_text().splitlines()[1] == "he go\the goes"
    for columns in (None, ("1", "2")):
        (part,) = pairs(locate(str(tmp_path / "c.tsv"), "en", "en", columns))
        assert (part.sources, part.targets) == (["he go"], ["he goes"])


@pytest.mark.parametrize("name", ["c", "c.tsv", "c.jsonl", "c.parquet", "c.zip", "c.tmx"])
def test_sides_may_have_names_that_are_no_codes(name: str, tmp_path: Path) -> None:
    with CorpusWriter(str(tmp_path / name), ("noisy", "clean")) as writer:
        writer.write(Pairs(["he go"], ["he goes"], [{}]))
    assert read(tmp_path / name, "noisy", "clean") == [("he go", "he goes")]


def test_one_file_or_column_is_not_the_text_of_two_languages(tmp_path: Path) -> None:
    (tmp_path / "c.en").write_text("a\n")
    with pytest.raises(ValueError, match=r"en-GB and en-US .*c\.en"):
        locate(str(tmp_path / "c"), "en-GB", "en-US")
    assert locate(str(tmp_path / "c"), "en", "en").source == tmp_path / "c.en"  # monolingual text
    for name, text in (("c.tsv", "en\tde\na\tb\n"), ("c.jsonl", '{"en": "a", "de": "b"}\n')):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match="column 'en'; give --columns"):
            list(pairs(locate(str(tmp_path / name), "en-GB", "en-US")))
        (part,) = pairs(locate(str(tmp_path / name), "en", "en"))  # monolingual text
        assert part.sources == part.targets == ["a"]


def test_unequal_sides_of_a_zip_name_both_counts(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("c.en", "x\n" * 3000)
        archive.writestr("c.de", "y\n" * 1999)
    with pytest.raises(ValueError, match=r"c\.en has 3,000 .*c\.de has 1,999"):
        read(tmp_path / "c.zip")


@pytest.mark.slow
def test_a_translation_memory_is_read_in_little_memory(tmp_path: Path) -> None:
    unit = ('<tu><tuv xml:lang="en"><seg>The {0} old dogs run through the park.</seg></tuv>'
            '<tuv xml:lang="it"><seg>I {0} vecchi cani corrono nel parco.</seg></tuv></tu>\n')  # fmt: skip
    text = '<tmx version="1.4"><header/><body>\n' + "".join(unit.format(n) for n in range(20_000)) + "</body></tmx>\n"
    (tmp_path / "c.tmx").write_text(text)
    assert len(text) > 2_900_000
    del text
    tracemalloc.start()
    count = sum(len(part) for part in pairs(locate(str(tmp_path / "c.tmx"), "en", "it"), 256))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000
    assert peak < 1_000_000


def test_a_zip_without_texts_names_no_language_that_is_not_given(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("README", "a")
    with pytest.raises(ValueError, match=r"\*\.CODE"):
        list(pairs(locate(str(tmp_path / "c.zip"), None, None), 10))


@pytest.mark.parametrize("name", ["c.jsonl", "c.parquet", "c.tsv", "c.tmx"])
def test_a_column_with_the_name_of_a_language_does_not_replace_its_text(name: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="'de'"),
        CorpusWriter(str(tmp_path / name), ("en", "de")) as writer,
    ):
        writer.write(Pairs(["a"], ["b"], [{"de": "other"}]))
    assert not (tmp_path / name).exists()


def test_a_table_keeps_its_columns_if_it_begins_with_an_empty_part(tmp_path: Path) -> None:
    """`clean --dropped x.parquet` lost the column `reason` if no pair of the first block was dropped."""
    pytest.importorskip("pyarrow")
    with CorpusWriter(str(tmp_path / "c.parquet"), ("en", "de")) as writer:
        writer.write(Pairs([], [], []))
        writer.write(Pairs(["a"], ["b"], [{"reason": "length"}]))
    (part,) = pairs(locate(str(tmp_path / "c.parquet"), "en", "de"), 10)
    assert list(part.extras) == [{"reason": "length"}]


def test_a_catalogue_in_other_languages_gets_a_warning_as_a_corpus(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A French catalogue became Italian training text without a message."""
    file = '<file source-language="en" target-language="fr"><unit/><trans-unit><source>a</source><target>b</target>'
    (tmp_path / "a.xlf").write_text(f'<xliff version="1.2">{file}</trans-unit></file></xliff>')
    for language, count in (("it", 1), ("fr", 0)):
        caplog.clear()
        assert read(tmp_path / "a.xlf", "en", language) == [("a", "b")]
        assert ["target language 'fr', not 'it'" in each.getMessage() for each in caplog.records] == [True] * count
