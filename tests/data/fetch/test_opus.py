"""`nmtkit fetch opus:…` against a local server with the API of OPUS: names, files, provenance, and every fault."""

import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from file_server import Fault, FileServer, body, cut, file_server, moses_zip, stall, status

from nmtkit.cli import main
from nmtkit.data.corpora.provenance import read_provenance
from nmtkit.data.fetch import downloads, opus
from nmtkit.data.fetch.fetching import size
from nmtkit.data.fetch.opus import API_VARIABLE

ENGLISH = "".join(f"Line number {number} of the book .\n" for number in range(2000))
GERMAN = "".join(f"Zeile Nummer {number} des Buches .\n" for number in range(2000))
LICENSE = "The books are in the public domain.\n"


def books(source: str | bytes = ENGLISH, target: str | bytes = GERMAN, codes: tuple[str, str] = ("en", "de")) -> bytes:
    stem = "Books." + "-".join(sorted(codes))
    return moses_zip({
        "README": "a corpus", "LICENSE": LICENSE, f"{stem}.{codes[0]}": source, f"{stem}.{codes[1]}": target,
        f"{stem}.ids": "book\tbook\t1\t1\n",
    })  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FileServer]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(downloads, "time", SimpleNamespace(sleep=lambda _: None))  # not of other threads
    with file_server() as state:
        monkeypatch.setenv(API_VARIABLE, f"{state.url}/opusapi/")
        state.add_corpus("Books", "v1", ("en", "de"), books(), pairs=2000)
        state.add_corpus("TED2020", "v1", ("en", "de"), books("Hi .\n", "Hallo .\n"), pairs=1)
        yield state


ARCHIVE = "/OPUS-Books/v1/moses/de-en.txt.zip"


def fetch(*arguments: str, languages: str = "en-de") -> Result:
    source, target = languages.split("-", 1)
    return CliRunner().invoke(main, ["fetch", *arguments, "-s", source, "-t", target])


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


def archives(server: FileServer) -> list[str]:
    return [path for path, _ in server.requests if path.endswith(".zip")]


BOOKS = ["data/Books.en-de.de", "data/Books.en-de.en", "data/Books.en-de.provenance.json"]


def test_a_corpus_is_two_files_of_lines_and_its_provenance(server: FileServer) -> None:
    result = fetch("opus:Books", "-o", "data")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "data/Books.en-de\n" and files() == BOOKS
    assert Path("data/Books.en-de.en").read_text() == ENGLISH and Path("data/Books.en-de.de").read_text() == GERMAN
    facts = json.loads(Path(BOOKS[2]).read_text())
    archive = server.files[ARCHIVE]
    expected = {
        "name": "opus:Books", "source": "OPUS", "corpus": "Books", "version": "v1", "url": server.url + ARCHIVE,
        "sha256": hashlib.sha256(archive).hexdigest(), "bytes": len(archive), "pairs": 2000,
        "license": LICENSE.strip(), "languages": ["en", "de"], "opus_languages": ["en", "de"], "max_lines": None,
    }  # fmt: skip
    assert expected.items() <= facts.items() and facts["fetched"].endswith("+00:00")
    described = {each["name"]: (each["bytes"], each["sha256"]) for each in facts["files"]}
    for path in map(Path, BOOKS[:2]):
        assert described[path.name] == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    assert "2,000 pairs of OPUS Books v1" in result.stderr and "public domain" in result.stderr
    assert "nmtkit clean -s en -t de data/Books.en-de --output data/clean" in result.stderr


def test_a_complete_corpus_is_not_downloaded_again(server: FileServer) -> None:
    fetch("opus:Books", "-o", "data")
    before = len(server.requests)
    result = fetch("opus:Books", "-o", "data")
    assert result.exit_code == 0 and result.stdout == "data/Books.en-de\n"
    assert len(server.requests) == before  # not even the API is asked


def test_both_orders_of_the_languages(server: FileServer) -> None:
    assert fetch("opus:Books", languages="de-en").exit_code == 0
    assert Path("Books.de-en.de").read_text() == GERMAN and Path("Books.de-en.en").read_text() == ENGLISH


@pytest.mark.parametrize(
    ("asked", "found"),
    [("en-pt-BR", "pt_BR"), ("en-pt_BR", "pt_BR"), ("eng-por_BR", "pt_BR"), ("en-zh", "zh_CN"), ("en-GB-pt_BR", None)],
)
def test_languages_with_and_without_regions(server: FileServer, asked: str, found: str | None) -> None:
    for code in ("pt_BR", "zh_CN"):
        server.add_corpus("Films", "v3", ("en", code), books("Yes .\n", "Sim .\n", ("en", code)))
    source, _, target = asked.partition("-") if found else ("en-GB", "-", "pt_BR")
    result = CliRunner().invoke(main, ["fetch", "opus:Films", "-s", source, "-t", target])
    assert result.exit_code == 0, result.stderr
    assert Path(f"Films.{source}-{target}.{target}").read_text() == "Sim .\n"
    facts = read_provenance([Path(f"Films.{source}-{target}.{code}") for code in (source, target)])
    assert facts is not None and facts["opus_languages"] == ["en", found or "pt_BR"]


def test_versions_are_chosen_by_name(server: FileServer) -> None:
    server.add_corpus("Books", "v0", ("en", "de"), books("Old .\n", "Alt .\n"), latest=False)
    assert fetch("opus:Books/v0").stdout == "Books-v0.en-de\n"
    assert Path("Books-v0.en-de.en").read_text() == "Old .\n"
    result = fetch("opus:Books/v7")
    assert result.exit_code == 2 and "v7" in result.stderr and "v0, v1" in result.stderr


def test_several_corpora_in_a_call(server: FileServer) -> None:
    assert fetch("opus:Books", "opus:TED2020", "-o", "data").stdout == "data/Books.en-de\ndata/TED2020.en-de\n"


def test_the_list_of_corpora_has_sizes_and_the_largest_first(server: FileServer) -> None:
    server.add_corpus("Films", "v3", ("en", "de_AT"), books())
    result = fetch("opus:")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [(row[0], row[1]) for row in rows] == [("opus:Books/v1", "2,000"), ("opus:TED2020/v1", "1")]
    assert "KB" in rows[0] and "de_AT" in result.stderr
    assert not files()


def test_only_the_first_lines_are_written(server: FileServer) -> None:
    assert fetch("opus:Books", "--max-lines", "3").exit_code == 0
    assert Path("Books.en-de.en").read_text() == "".join(ENGLISH.splitlines(keepends=True)[:3])
    again = fetch("opus:Books")
    assert again.exit_code == 2 and "max_lines 3" in again.stderr and "--overwrite" in again.stderr
    assert fetch("opus:Books", "--overwrite").exit_code == 0
    assert Path("Books.en-de.en").read_text() == ENGLISH


def test_compressed_files(server: FileServer) -> None:
    assert fetch("opus:Books", "--compress", "gz").exit_code == 0
    assert files() == ["Books.en-de.de.gz", "Books.en-de.en.gz", "Books.en-de.provenance.json"]
    assert fetch("opus:Books", "--compress", "gz").exit_code == 0 and len(archives(server)) == 1
    for flags in ([], ["--compress", "xz"], ["--overwrite"]):  # a prefix must not name two files
        result = fetch("opus:Books", *flags)
        assert result.exit_code == 2 and "Books.en-de.en.gz" in result.stderr, result.stderr


def test_files_of_the_user_are_not_replaced(server: FileServer) -> None:
    Path("Books.en-de.de").write_text("mine\n")
    result = fetch("opus:Books")
    assert result.exit_code == 2 and "Books.en-de.de" in result.stderr and "--overwrite" in result.stderr
    assert Path("Books.en-de.de").read_text() == "mine\n" and files() == ["Books.en-de.de"]


def test_a_later_command_resumes_an_interrupted_download(server: FileServer) -> None:
    server.faults[ARCHIVE] = [cut(5000), *[cut(0)] * 4]
    result = fetch("opus:Books", "-o", "data", "--attempts", "2")
    assert result.exit_code == 2 and "resumes" in result.stderr.splitlines()[-1]
    assert all(path.startswith("data/.") for path in files())
    server.faults.clear()
    assert fetch("opus:Books", "-o", "data").exit_code == 0 and files() == BOOKS
    assert server.requests[-1][1]["Range"] == "bytes=5000-"
    assert Path("data/Books.en-de.de").read_text() == GERMAN


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "languages", "facts"),
    [
        (["opus:books"], "en-de", ["'books'", "'Books'"]),
        (["opus:ted2020"], "en-de", ["'TED2020'"]),
        (["opus:Books"], "en-fi", ["en-fi", "de"]),
        (["opus:Books"], "fi-en", ["'fi'", "de, en"]),
        (["opus:"], "fi-en", ["'fi'"]),
        (["Books"], "en-de", ["opus:", "hf:", "sacrebleu:"]),
        (["opsu:Books"], "en-de", ["opus"]),
        (["opus:../x"], "en-de", ["opus:CORPUS"]),
        (["opus:Books/../x"], "en-de", ["opus:CORPUS"]),
        (["opus:Books"], "en-../x", ["--target-lang"]),
        (["opus:Books"], "en-en", ["--source-lang", "--target-lang"]),
        (["opus:Books", "opus:Books"], "en-de", ["Books.en-de"]),
        (["opus:", "opus:Books"], "en-de", ["opus:"]),
        (["opus:", "--overwrite"], "en-de", ["--overwrite"]),
        (["opus:", "-o", "data"], "en-de", ["--output"]),
        (["opus:Books", "--columns", "1,2"], "en-de", ["--columns"]),
        (["opus:Books", "--max-lines", "0"], "en-de", ["--max-lines"]),
        (["hf:"], "en-de", ["hf:"]),
        (["hf:a b"], "en-de", ["'a b'"]),
        (["sacrebleu:wmt14/ful"], "en-de", ["wmt14/full"]),
        (["sacrebleu:wmt14/full"], "en-fi", ["en-fi", "en-de"]),
    ],
)
def test_a_wrong_name_is_one_line_and_leaves_nothing(
    server: FileServer, names: list[str], languages: str, facts: list[str]
) -> None:
    result = fetch(*names, languages=languages)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1 and not result.stdout
    assert all(fact in result.stderr for fact in facts), result.stderr
    assert not files()


# --- faults -----------------------------------------------------------------------------------------------------------


def encrypted() -> bytes:
    data = bytearray(books())
    for marker, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        position = data.find(marker)
        while position >= 0:
            data[position + offset] |= 1
            position = data.find(marker, position + 4)
    return bytes(data)


def with_damaged_text() -> bytes:
    data = bytearray(books())
    middle = data.find(b"Books.de-en.de") + 200
    data[middle : middle + 50] = bytes(50)
    return bytes(data)


CONTENTS = {
    "a page": (b"<html>Sorry</html>", "ZIP"),
    "truncated": (books()[:-3000], "ZIP"),
    "damaged": (with_damaged_text(), "damaged"),
    "encrypted": (encrypted(), "crypt"),
    "other languages": (books(codes=("en", "fr")), "*.de"),
    "unequal sides": (books(target=GERMAN + "mehr\n"), "2,001"),
    "not UTF-8": (books(target=GERMAN[:300].encode() + b"\xff\n"), ":11: byte"),
    "empty": (books("", ""), "no pairs"),
    "bomb": (b"", "200,001,000"),
}


@pytest.mark.parametrize("content", CONTENTS)
def test_an_archive_with_wrong_contents_is_one_line_and_leaves_nothing(server: FileServer, content: str) -> None:
    server.files[ARCHIVE], fact = CONTENTS[content]
    if content == "bomb":  # 0.3 s, not for each worker that collects the tests
        server.files[ARCHIVE] = books(b"a" * 200_000_000, b"a" * 1000)
    result = fetch("opus:Books", "-o", "data")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    assert fact in result.stderr and f"{server.url}{ARCHIVE}" in result.stderr
    assert not files()


def test_names_in_an_archive_are_not_paths(server: FileServer, tmp_path: Path) -> None:
    stem = "../../../../../escaped.de-en"
    server.files[ARCHIVE] = moses_zip({f"{stem}.en": ENGLISH, f"{stem}.de": GERMAN, "/absolute": "x"})
    assert fetch("opus:Books", "-o", "data").exit_code == 0
    assert files() == BOOKS and not list(tmp_path.parent.rglob("escaped*"))


@pytest.mark.parametrize(
    ("faults", "flags", "fact"),
    [
        ([status(404)], [], "404"),
        ([status(500)] * 2, ["--attempts", "2"], "500"),
        ([status(429, Retry_After="1")] * 2, ["--attempts", "2"], "429"),
        ([stall(0)], ["--attempts", "1", "--request-timeout", "0.2"], "no data"),
        ([], ["--max-download", "0.000001"], "--max-download"),
    ],
)
def test_a_broken_download_is_one_line_and_leaves_nothing(
    server: FileServer, faults: list[Fault], flags: list[str], fact: str
) -> None:
    server.faults[ARCHIVE] = list(faults)
    result = fetch("opus:Books", "-o", "data", "--quiet", *flags)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    assert fact in result.stderr and not files()


@pytest.mark.parametrize(
    ("faults", "fact"),
    [
        ([body(b"<html>We are moving</html>")], "We are moving"),
        ([body(b"[]")], "not the API"),
        ([body(b'{"corpora": [{"corpus": "Books"}]}')], "expected fields"),
        ([status(404)], "404"),
        ([status(503)], "503"),
    ],
)
def test_a_broken_api_is_one_line_and_leaves_nothing(server: FileServer, faults: list[Fault], fact: str) -> None:
    server.faults["/opusapi/"] = list(faults)
    result = fetch("opus:Books", "-o", "data", "--attempts", "1")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    assert fact in result.stderr and not files()


def test_texts_of_a_server_do_not_control_the_terminal(server: FileServer) -> None:
    escape = "\x1b[2J\x1b]0;title\x07"
    server.corpora[0]["corpus"] = f"Books{escape}"
    server.files["/OPUS-TED2020/v1/moses/de-en.txt.zip"] = moses_zip({
        "T.de-en.en": "a\n", "T.de-en.de": "b\n", "LICENSE": f"CC0 {escape}"
    })  # fmt: skip
    for arguments in (["opus:"], ["opus:TED2020"], ["opus:Bookz"]):
        result = fetch(*arguments)
        assert "\x1b" not in result.output and "\x07" not in result.output


def test_addresses_of_the_api_are_not_files_of_this_machine(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "secret.zip").write_bytes(books())
    server.corpora[0]["url"] = (tmp_path / "secret.zip").as_uri()
    result = fetch("opus:Books", "-o", "data")
    assert result.exit_code == 2 and "file:" in result.stderr and files() == ["secret.zip"]


def test_without_a_network_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(API_VARIABLE, "http://nmtkit.invalid/opusapi/")
    result = fetch("opus:Books")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1 and "network" in result.stderr
    assert not files()


def test_a_full_disk_leaves_nothing(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(opus.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 50_000}))
        result = fetch("opus:Books", "-o", "data")
        assert result.exit_code == 2 and "free space" in result.stderr and not files()

    def full(self: object, text: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nmtkit.data.corpora.writer.CorpusWriter.write", full)
    result = fetch("opus:Books", "-o", "data")
    assert result.exit_code == 2 and "No space left" in result.stderr and not files()


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [10, 50], ids=["the download", "the text"])
def test_a_real_limit_of_the_size_of_files(server: FileServer, blocks: int) -> None:
    """The operating system ends the write, as on a full disk: `ulimit -f` counts blocks of 1024 bytes."""
    assert len(server.files[ARCHIVE]) > 10_240 and len(GERMAN) > 51_200 > len(server.files[ARCHIVE])
    line = f'ulimit -f {blocks}; "{sys.executable}" -m nmtkit fetch opus:Books -s en -t de -o data'
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    assert "File too large" in result.stderr and "data/" in result.stderr and not files()


def test_an_interruption_by_the_user_keeps_only_the_part_to_resume(server: FileServer) -> None:
    def interrupt(handler: object, data: bytes) -> None:
        handler.send_file(data, cut=4000)  # type: ignore[attr-defined]

    server.faults[ARCHIVE] = [interrupt]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(downloads, "time", SimpleNamespace(sleep=lambda _: (_ for _ in ()).throw(KeyboardInterrupt())))
        assert fetch("opus:Books").exit_code == 130
    assert files() == [".Books.en-de.zip.part", ".Books.en-de.zip.part.json"]
    assert os.path.getsize(".Books.en-de.zip.part") == 4000
    assert fetch("opus:Books").exit_code == 0
    assert len(files()) == 3


def test_a_zip_of_another_compression_is_named(server: FileServer) -> None:
    data = bytearray(server.files[ARCHIVE])
    with zipfile.ZipFile(io.BytesIO(bytes(data))) as archive:
        offsets = [info.header_offset for info in archive.infolist()]
    position = data.find(b"PK\x01\x02")
    while position >= 0:
        data[position + 10] = 99  # the method of the central directory
        position = data.find(b"PK\x01\x02", position + 4)
    for offset in offsets:
        data[offset + 8] = 99
    server.files[ARCHIVE] = bytes(data)
    result = fetch("opus:Books")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1 and "ZIP" in result.stderr


@pytest.mark.parametrize(
    ("kilobytes", "text"), [(0, "0 B"), (976, "999 KB"), (976_300, "1 GB"), (3_000_000, "3.07 GB"), (10**9, "1.02 TB")]
)
def test_sizes_have_no_exponent(kilobytes: int, text: str) -> None:
    assert size(kilobytes) == text
