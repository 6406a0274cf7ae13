"""`nmtkit generate` on documents, as a user types it."""

import gzip
from pathlib import Path

import pytest
from builders import save_tiny_transformer, tiny_tokenizer
from click.testing import CliRunner, Result

from nmtkit.cli import main
from nmtkit.data import checkpoint_file

# The parts of each document: markup stays unchanged, and the texts between the markup are translated.
WHOLE = {
    "page.html": (
        '<!DOCTYPE html>\n<html lang="en"><title>', "the dog", '</title>\n<p title="', "a cat", '">', "a ", "<b>",
        "dog", "</b>", " runs .", "<script>a < b</script>\n",
    ),
    "film.srt": (
        "1\r\n00:00:01,000 --> 00:00:02,000\r\n<i>", "a dog runs in",
        "</i>\r\n\r\n2\r\n00:00:02,100 --> 00:00:03,000\r\n<i>", "the park .", "</i>\r\n",
    ),
    "film.vtt": ("WEBVTT\n\nNOTE a dog\n\n00:01.000 --> 00:02.000 line:0\n<v Mary>", "two men\nin the park .", "\n"),
    "app.po": (
        '#, c-format\nmsgid "a dog %s"\nmsgstr "', "", '"\n\nmsgid "the cat"\nmsgstr "die Katze"\n\n#~ msgid "a"\n'
        '#~ msgstr "b"\n',
    ),
    "app.xlf": (
        '<xliff version="1.2"><file source-language="en"><body><trans-unit id="1"><source>a <g id="1">dog</g></source>',
        "", '</trans-unit><trans-unit id="2"><source>a cat</source><target>eine Katze</target></trans-unit></body>'
        "</file></xliff>",
    ),
}  # fmt: skip
MARKED = {
    "app.po": [("#, c", "#, fuzzy, c"), ('msgstr ""', 'msgstr "')],
    "app.xlf": [("</source>", '</source><target state="needs-review-translation" state-qualifier="mt-suggestion">')],
}
FORMATS = {"html": "html", "srt": "srt", "vtt": "vtt", "po": "po", "xlf": "xliff"}
PAGE = "".join(WHOLE["page.html"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("documents")
    save_tiny_transformer(path / "model.pt", tiny_tokenizer(), decoder_layers=1)
    for name, parts in WHOLE.items():
        (path / name).write_bytes("".join(parts).encode())
    return path


def run(folder: Path, *arguments: object, text: bytes | None = None) -> Result:
    search = ["--max-len-a", "0", "--max-len-b", "6", "--keep-loops"]  # a random model writes loops
    command = ["generate", "--device", "cpu", *search, "--path", folder / "model.pt"]
    return CliRunner().invoke(main, [str(part) for part in (*command, *arguments)], input=text)


@pytest.mark.parametrize("name", WHOLE)
def test_a_document_goes_in_and_comes_out(folder, name):
    result = run(folder, "--input", folder / name, "--output", folder / f"out.{name}")
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert f"{name} is read as {FORMATS[name.split('.')[1]]};" in result.stderr
    found = (folder / f"out.{name}").read_bytes().decode()
    stays = list(WHOLE[name][::2])
    for old, new in MARKED.get(name, []):
        stays[0] = stays[0].replace(old, new, 1)
    place = 0
    for part in stays:
        assert part in found[place:], found
        place = found.index(part, place) + len(part)
    assert found != "".join(WHOLE[name])


def test_a_document_from_a_pipe_equals_one_from_a_file(folder):
    file = run(folder, "--input", folder / "page.html")
    pipe = run(folder, "--input-format", "html", text=PAGE.encode())
    assert pipe.exit_code == 0 and pipe.stderr == ""
    assert pipe.stdout == file.stdout != PAGE


@pytest.mark.parametrize("name", ["page.html", "app.xlf"])
def test_a_document_in_another_language_than_the_models_gets_a_warning(folder, name):
    contents = checkpoint_file.read(folder / "model.pt")
    contents["run"] = {**contents.get("run", {}), "languages": ["it", "de"]}
    checkpoint_file.save(folder / "italian.pt", contents)
    words = ["generate", "--device", "cpu", "--max-len-a", 0, "--max-len-b", 6, "--path", folder / "italian.pt"]
    result = CliRunner().invoke(main, [str(word) for word in (*words, "--input", folder / name)])
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert f"{name} names" in said and "'en', not 'it'" in said


def test_several_sentences_in_a_segment_are_warned_of(folder):
    page = b"<p>the <i>dog</i>. <b>Two</b> men.</p><p>A dog. a cat</p><p>One by J. Smith.</p>"
    result = run(folder, "--input-format", "html", text=page)
    assert result.stderr.startswith("warning: 1 of 3 segments")
    assert "--split-sentences" in result.stderr
    assert run(folder, "--input-format", "html", text=PAGE.encode()).stderr == ""


def test_its_lines_are_translated_where_text_is_asked_for(folder):
    result = run(folder, "--input", folder / "page.html", "--input-format", "text")
    assert result.stdout.count("\n") == PAGE.count("\n") and result.stderr == ""


def test_a_format_without_a_reader_is_told_and_a_binary_file_is_refused(folder):
    (folder / "texts.json").write_text('{"a": "the dog"}\n')
    result = run(folder, "--input", folder / "texts.json")
    assert result.exit_code == 0
    assert "texts.json looks like JSON" in result.stderr.replace("\n", " ")
    assert run(folder, "--input", folder / "texts.json", "--input-format", "text").stderr == ""
    (folder / "paper.pdf").write_bytes(b"%PDF-1.7\n%\xe2\xe3\n")
    (folder / "site.html").write_bytes(b"PK\x03\x04" + bytes(40))
    for name, kind in (("paper.pdf", "a PDF file"), ("site.html", "a ZIP archive")):
        result = run(folder, "--input", folder / name)
        assert result.exit_code == 2 and f"{name} is {kind}, not" in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("srt", "1\n00:00:01,000 --> 00:00:02,000\nA dog.\n"),
        ("vtt", "WEBVTT\n\n00:01.000 --> 00:02.000\nA dog.\n"),
        ("po", '# A comment\nmsgid "a dog"\nmsgstr ""\n'),
        ("html", "<p>A dog.</p>\n"),
        ("xliff", '<?xml version="1.0"?>\n<xliff version="1.2"></xliff>\n'),
    ],
)
def test_standard_input_and_packed_files_that_look_like_a_document_get_a_notice_with_the_flag(folder, format, text):
    (folder / "packed.en.gz").write_bytes(gzip.compress(text.encode()))
    for arguments, stdin in (((), text.encode()), (("--input", folder / "packed.en.gz"), None)):
        result = run(folder, *arguments, text=stdin)
        assert result.exit_code == 0 and result.stdout.count("\n") == text.count("\n")
        assert f"looks like {format}" in result.stderr and f"--input-format {format}" in result.stderr
        assert run(folder, *arguments, "--input-format", "text", text=stdin).stderr == ""


@pytest.mark.parametrize("name", ["app.po", "app.xlf"])
def test_a_compressed_catalogue_is_refused(folder, name):
    """Only the sources of its translated entries were translated, without a message."""
    packed = folder / f"{name}.gz"
    packed.write_bytes(gzip.compress((folder / name).read_bytes()))
    for more in ((), ("--output-dir", folder / "shards")):
        result = run(folder, "--input", packed, *more)
        assert result.exit_code == 2 and "compressed document" in " ".join(result.stderr.split()), result.output
    lines = run(folder, "--input", packed, "--input-format", "text")
    assert lines.exit_code == 0 and lines.stdout.count("\n") == len((folder / name).read_text().splitlines())


def test_standard_input_that_is_not_text_is_refused(folder):
    result = run(folder, text=gzip.compress(b"a dog"))
    assert result.exit_code == 2 and "standard input is a gzip file" in result.stderr.replace("\n", " ")


def test_text_goes_to_a_file_too(folder):
    lines = "a dog runs .\n\nthe cat\n"
    assert run(folder, "--output", folder / "text.de", text=lines.encode()).stdout == ""
    assert (folder / "text.de").read_text() == run(folder, text=lines.encode()).stdout


def test_a_catalogue_can_be_translated_anew(folder):
    result = run(folder, "--input", folder / "app.po", "--overwrite-translations")
    assert "die Katze" not in result.stdout and result.stdout.count("fuzzy") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "page.html", "--format", "jsonl"], "--format jsonl and"),
        (["--input", "page.html", "--input", "film.srt"], "and several --input"),
        (["--input", "page.html", "--prefix", "page.html"], "and --prefix cannot"),
        (["--input", "page.html", "--markup", "html"], "and --markup cannot"),
        (["--input", "page.html", "--overwrite-translations"], "without a catalogue"),
        (["--input", "app.po", "--input-format", "srt"], "app.po: "),
        (["--input", "none.html"], "none.html"),
    ],
)
def test_what_does_not_go_together_is_refused_and_nothing_is_written(folder, arguments, message):
    output = folder / "refused"
    named = [folder / argument if "." in argument else argument for argument in arguments]
    result = run(folder, *named, "--output", output)
    assert result.exit_code == 2 and message in result.stderr.replace("\n", " ")
    assert not output.exists() and not list(folder.glob(".refused*"))
