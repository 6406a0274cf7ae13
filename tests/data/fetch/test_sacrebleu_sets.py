"""Published test sets: downloads from a local server, and the same lines and scores as the command of sacreBLEU."""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import save_tiny_transformer, tiny_tokenizer
from click.testing import CliRunner, Result
from file_server import FileServer, body, cut, file_server, status
from sacrebleu import utils
from sacrebleu.dataset import DATASETS

from nmtkit.cli import main
from nmtkit.data.fetch.downloads import HttpClient, HttpConfig
from nmtkit.data.fetch.sacrebleu_sets import pair_of_languages, read_sets

SOURCES = ["A dog .", "Two  cats sit .", "Rain &amp; snow .", "The end ."]
REFERENCES = ["Ein Hund .", "Zwei Katzen sitzen .", "Regen &amp; Schnee .", "Das Ende ."]
OTHERS = ["Ein Hund !", "Da sitzen zwei Katzen .", "Es regnet .", "Schluss ."]
ORIGINS = ["en", "en", "de", "de"]  # original language of each document, which has one line


def sgm(lines: list[str]) -> bytes:
    documents = "".join(
        f'<doc sysid="ref" docid="d{number}" genre="news" origlang="{origin}">\n<p>\n'
        f'<seg id="{number}">{line}</seg>\n</p>\n</doc>\n'
        for number, (origin, line) in enumerate(zip(ORIGINS, lines, strict=True))
    )
    return f'<srcset setid="x" srclang="any">\n{documents}</srcset>\n'.encode()


def tar(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return file.getvalue()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Serves the sets wmt14/full (one reference) and wmt20/tworefs, and makes an empty folder of sacreBLEU."""
    home = tmp_path / "sacrebleu"
    monkeypatch.setattr(utils, "SACREBLEU_DIR", str(home))
    monkeypatch.setenv("SACREBLEU", str(home))
    with file_server() as state:
        for name, second in (("wmt14/full", None), ("wmt20/tworefs", sgm(OTHERS))):
            dataset = DATASETS[name]
            files = dict(zip(dataset.langpairs["en-de"], [sgm(SOURCES), sgm(REFERENCES), second], strict=False))
            archive = tar({path: data for path, data in files.items() if data is not None})
            path = f"/{name.replace('/', '-')}.tgz"
            state.files[path] = archive
            monkeypatch.setattr(dataset, "data", [state.url + path])
            monkeypatch.setattr(dataset, "md5", [hashlib.md5(archive).hexdigest()])
            monkeypatch.setattr(dataset, "_outdir", str(home / name))
            monkeypatch.setattr(dataset, "_rawdir", str(home / name / "raw"))
        yield state


def call(command: str, *arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [command, *map(str, arguments)], input=stdin)


def sacrebleu_command(home: Path, *arguments: str, stdin: str) -> str:
    """Returns the output of the command of sacreBLEU, whose cache has the sets already."""
    environment = {**os.environ, "SACREBLEU": str(home), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "sacrebleu", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, check=True, text=True, env=environment).stdout


HYPOTHESES = "Ein Hund .\nZwei Katzen stehen .\nEs regnet .\nEnde .\n"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (["wmt14/full"], ["-t", "wmt14/full"]),
        (["wmt20/tworefs"], ["-t", "wmt20/tworefs"]),
        (["wmt14/full", "--origlang", "de"], ["-t", "wmt14/full", "--origlang", "de"]),
        (["wmt14/full", "--origlang", "non-de"], ["-t", "wmt14/full", "--origlang", "non-de"]),
        (["wmt14/full", "--confidence"], ["-t", "wmt14/full", "--confidence"]),
    ],
)
def test_scores_and_signatures_are_those_of_the_command_sacrebleu(
    server: FileServer, tmp_path: Path, ours: list[str], theirs: list[str]
) -> None:
    result = call("score", "--test-set", *ours, "-l", "en-de", "--format", "json", stdin=HYPOTHESES)
    assert result.exit_code == 0, result.output
    expected = json.loads(
        sacrebleu_command(
            tmp_path / "sacrebleu", *theirs, "-l", "en-de", "-m", "bleu", "chrf", "ter", "-w", "4", stdin=HYPOTHESES
        )
    )
    scores = json.loads(result.stdout)
    assert [(each["name"], round(each["score"], 4), each["signature"]) for each in scores] == [
        (each["name"], each["score"], each["signature"]) for each in expected
    ]
    assert all(each["test_set"].startswith(f"{ours[0]} en-de") for each in scores)


def test_the_texts_are_cleaned_like_those_of_sacrebleu(server: FileServer, tmp_path: Path) -> None:
    texts = read_sets(["wmt20/tworefs"], "en-de")
    echo = sacrebleu_command(tmp_path / "sacrebleu", "-t", "wmt20/tworefs", "-l", "en-de", "--echo", "src", stdin="")
    assert texts.sources == echo.splitlines() and texts.sources[1] == "Two cats sit ."
    assert texts.references == [REFERENCES, OTHERS]


def xml() -> bytes:
    """Returns a set in the format of WMT since 2021: one file with source and the references of translators A and B."""
    documents = []
    for number, (origin, source, first, second) in enumerate(zip(ORIGINS, SOURCES, REFERENCES, OTHERS, strict=True)):
        segments = {("src", "en", ""): source, ("ref", "de", ' translator="A"'): first}
        segments[("ref", "de", ' translator="B"')] = second
        texts = [
            f'<{kind} lang="{language}"{translator}><p><seg id="1">{text}</seg></p></{kind}>'
            for (kind, language, translator), text in segments.items()
        ]
        documents.append(f'<doc origlang="{origin}" id="d{number}">{"".join(texts)}</doc>')
    return f'<dataset id="x">{"".join(documents)}</dataset>'.encode()


@pytest.mark.parametrize("name", ["wmt21", "wmt21/AB"])
@pytest.mark.parametrize("flags", [[], ["--origlang", "de"]])
def test_sets_in_xml_have_the_references_and_parts_of_sacrebleu(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, flags: list[str]
) -> None:
    dataset, home = DATASETS[name], tmp_path / "sacrebleu"
    server.files["/x.tgz"] = tar({dataset.langpairs["en-de"][0]: xml()})
    monkeypatch.setattr(dataset, "data", [f"{server.url}/x.tgz"])
    monkeypatch.setattr(dataset, "md5", [hashlib.md5(server.files["/x.tgz"]).hexdigest()])
    monkeypatch.setattr(dataset, "_outdir", str(home / name))
    monkeypatch.setattr(dataset, "_rawdir", str(home / name / "raw"))
    ours = call("score", "--test-set", name, "-l", "en-de", *flags, "--format", "json", stdin=HYPOTHESES)
    assert ours.exit_code == 0, ours.stderr
    raw = home / name / "raw"
    (raw / f"{name.replace('/', '_')}.test.tgz").write_bytes(b"sacreBLEU looks for the name of its own address")
    theirs = sacrebleu_command(
        home, "-t", name, "-l", "en-de", *flags, "-m", "bleu", "chrf", "ter", "-w", "4", stdin=HYPOTHESES
    )
    scores = [(each["name"], round(each["score"], 4), each["signature"]) for each in json.loads(ours.stdout)]
    assert scores == [(each["name"], each["score"], each["signature"]) for each in json.loads(theirs)]
    assert f"nrefs:{1 + (name == 'wmt21/AB')}" in scores[0][2]


def test_a_set_is_downloaded_once(server: FileServer) -> None:
    for _ in range(2):
        assert call("score", "--test-set", "wmt14/full", "-l", "en-de", stdin=HYPOTHESES).exit_code == 0
    assert [path for path, _ in server.requests] == ["/wmt14-full.tgz"]


def test_several_sets_are_scored_as_one_text(server: FileServer, tmp_path: Path) -> None:
    dataset = DATASETS["wmt14/full"]
    twice = read_sets(["wmt14/full"], "en-de")
    assert twice.downloads == tuple(dataset.data)
    result = call("score", "--test-set", "wmt14/full,wmt20/tworefs", "-l", "en-de", stdin=HYPOTHESES * 2)
    assert result.exit_code == 2 and "1 references, but wmt20/tworefs has 2" in result.stderr


def test_the_text_of_score_names_the_set(server: FileServer) -> None:
    result = call("score", "--test-set", "wmt14/full", "-l", "en-de", "--origlang", "en", stdin=HYPOTHESES)
    assert result.stdout.splitlines()[-1].split(maxsplit=1) == ["references", "wmt14/full en-de, origlang en"]


def test_several_systems_are_compared_on_a_set(server: FileServer, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(HYPOTHESES, encoding="utf-8")
    systems = ["--sys", tmp_path / "a", "--sys", tmp_path / "b"]
    result = call("score", *systems, "--test-set", "wmt14/full", "-l", "en-de", "--format", "json")
    assert json.loads(result.stdout)["test_set"] == "wmt14/full en-de"


def test_systems_are_shown_side_by_side_on_a_set(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("a", HYPOTHESES), ("b", HYPOTHESES.replace("Ende", "Schluss"))):
        Path(name).write_text(text, encoding="utf-8")
    compare = ["compare", "--sys", "a", "--sys", "b", "--samples", "50"]
    result = call(*compare, "--test-set", "wmt14/full", "-l", "en-de")
    assert result.exit_code == 0 and "Zwei Katzen sitzen" in Path("comparison.html").read_text(), result.stderr
    refused = call(*compare, "--test-set", "wmt14/full", "-l", "en-de", "--ref", "a")
    assert refused.exit_code == 2 and "--test-set" in refused.stderr and "--ref" in refused.stderr
    assert call(*compare, "--ref", "a", "-l", "en-de").exit_code == 2


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (["--test-set", "wmt14/ful", "-l", "en-de"], ["'wmt14/ful'", "wmt14/full"]),
        (["--test-set", "wmt14/full", "-l", "en-dee"], ["'en-dee'", "en-de"]),
        (["--test-set", "wmt14/full"], ["--language-pair", "cs-en, en-cs"]),
        (["--test-set", "wmt14/full,wmt14/full", "-l", "en-de"], ["once"]),
        (["--test-set", "wmt14/full", "-l", "en-de", "--ref", "x.de"], ["--test-set", "--ref"]),
        (["--test-set", "wmt14/full", "-l", "en-de", "--data", "x"], ["--test-set", "--data"]),
        (["--test-set", "wmt14/full", "-l", "en-de", "--src", "x"], ["--test-set", "--src"]),
        (["--test-set", "wmt14/full", "-l", "en-de", "-t", "de"], ["--test-set", "--target-lang"]),
        (["--test-set", "wmt14/full", "-l", "en-de", "--path", "x.pt"], ["--path", "--test-set"]),
        (["--ref", "x.de", "-l", "en-de"], ["--language-pair", "--test-set"]),
        (["--ref", "x.de", "--origlang", "en"], ["--origlang", "--test-set"]),
        (["--test-set", "wmt14/full", "-l", "en-de", "--origlang", "fi"], ["--origlang fi"]),
        (["--test-set", "wmt14/full", "-l", "en-de", "--subset", "news"], ["--subset news"]),
        ([], ["--ref", "--data", "--test-set"]),
    ],
)
def test_wrong_names_and_flags_in_conflict(
    server: FileServer, flags: list[str], facts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x", "x.de", "x.pt"):
        Path(name).touch()
    result = call("score", *flags, stdin=HYPOTHESES)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert all(fact in result.stderr for fact in facts), result.stderr


def test_too_few_translations_are_an_error_also_for_a_part_of_the_set(server: FileServer) -> None:
    result = call("score", "--test-set", "wmt14/full", "-l", "en-de", "--origlang", "en", stdin="a\nb\n")
    assert result.exit_code == 2 and "2" in result.stderr and "4" in result.stderr


FAULTS = {
    "404": ([status(404)], "404"),
    "500": ([status(500)] * 9, "500"),
    "other file": ([body(b"maintenance")], "MD5"),
    "cut": ([cut(30)] + [cut(0)] * 9, "ended"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_download_is_one_line_and_the_next_command_succeeds(
    server: FileServer, tmp_path: Path, fault: str
) -> None:
    faults, fact = FAULTS[fault]
    server.faults["/wmt14-full.tgz"] = list(faults)
    client = HttpClient(HttpConfig(attempts=3), lambda _: None)
    with pytest.raises((OSError, ValueError), match=fact) as error:
        read_sets(["wmt14/full"], "en-de", client)
    assert "\n" not in str(error.value)
    kept = [path for path in (tmp_path / "sacrebleu").rglob("*") if path.is_file() and path.name != ".nmtkit.lock"]
    assert bool(kept) == (fault == "cut")  # the received part, to resume
    server.faults.clear()
    assert read_sets(["wmt14/full"], "en-de", client).references == [REFERENCES]


@pytest.mark.parametrize("content", ["a page", "a tar without the files", "a truncated tar"])
def test_an_archive_with_wrong_contents_is_named(server: FileServer, content: str, monkeypatch, tmp_path: Path) -> None:
    archive = server.files["/wmt14-full.tgz"]
    data = {
        "a page": b"<html>",
        "a tar without the files": tar({"../../escaped": b"x"}),
        "a truncated tar": archive[:-99],
    }
    server.files["/wmt14-full.tgz"] = data[content]
    monkeypatch.setattr(DATASETS["wmt14/full"], "md5", [hashlib.md5(data[content]).hexdigest()])
    with pytest.raises((ValueError, OSError), match=r"wmt14.full"):
        read_sets(["wmt14/full"], "en-de")
    assert not list(tmp_path.parent.rglob("escaped")) and not list((tmp_path / "sacrebleu").rglob("*.tgz"))


def test_a_reference_that_is_too_long_is_named_with_its_lines(server: FileServer) -> None:
    read_sets(["wmt20/tworefs"], "en-de")
    dataset = DATASETS["wmt20/tworefs"]
    with open(dataset.get_reference_files("en-de")[1], "a") as file:
        file.write("zu viel\n")
    with pytest.raises(ValueError, match=f"{len(SOURCES)} lines.* {len(SOURCES) + 1};"):
        read_sets(["wmt20/tworefs"], "en-de")


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 3], ids=["the download", "the files"])
def test_a_full_disk_leaves_nothing(server: FileServer, tmp_path: Path, blocks: int, monkeypatch) -> None:
    lines = [f"Line {number} ." + "x" * 400 for number in range(4)]  # compress well
    archive = tar({path: sgm(lines) + b" " * 4000 for path in DATASETS["wmt14/full"].langpairs["en-de"]})
    assert len(archive) < 1024 * 3
    path = tmp_path / "redirected"
    path.mkdir()
    (path / "sitecustomize.py").write_text(
        "from sacrebleu.dataset import DATASETS\n"
        f"DATASETS['wmt14/full'].data = ['{server.url}/wmt14-full.tgz']\n"
        f"DATASETS['wmt14/full'].md5 = ['{hashlib.md5(archive).hexdigest()}']\n"
    )
    server.files["/wmt14-full.tgz"] = archive if blocks == 3 else archive + os.urandom(4000)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]))
    line = f'ulimit -f {blocks}; "{sys.executable}" -m nmtkit score --test-set wmt14/full -l en-de'
    result = subprocess.run(["bash", "-c", line], input=HYPOTHESES, capture_output=True, text=True)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    assert "File too large" in result.stderr and "wmt14/full" in result.stderr
    left = [path for path in (tmp_path / "sacrebleu").rglob("*") if path.is_file() and path.name != ".nmtkit.lock"]
    assert not left


def test_texts_of_a_copied_folder_of_sacrebleu_need_no_archive(server: FileServer, tmp_path: Path) -> None:
    before = read_sets(["wmt14/full"], "en-de")
    shutil.rmtree(tmp_path / "sacrebleu" / "wmt14" / "full" / "raw")
    (tmp_path / "sacrebleu" / "wmt14" / "full").chmod(0o555)
    server.files.clear()
    assert read_sets(["wmt14/full"], "en-de") == before
    assert len(server.requests) == 1


def test_a_damaged_archive_that_sacrebleu_left_is_replaced(server: FileServer, tmp_path: Path) -> None:
    raw = tmp_path / "sacrebleu" / "wmt14" / "full" / "raw"
    raw.mkdir(parents=True)
    (raw / "wmt14_full.wmt14-full.tgz").write_bytes(b"half")
    assert read_sets(["wmt14/full"], "en-de").references == [REFERENCES]


def test_a_zip_of_a_set_does_not_write_outside_its_folder(server: FileServer, tmp_path: Path, monkeypatch) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("../../../escaped", "x")
    server.files["/x.zip"] = file.getvalue()
    dataset = DATASETS["wmt14/full"]
    monkeypatch.setattr(dataset, "data", [f"{server.url}/x.zip"])
    monkeypatch.setattr(dataset, "md5", [hashlib.md5(file.getvalue()).hexdigest()])
    with pytest.raises((ValueError, OSError), match=r"wmt14.full"):
        read_sets(["wmt14/full"], "en-de")
    assert not [
        path
        for path in tmp_path.rglob("escaped")
        if tmp_path / "sacrebleu" / "wmt14" / "full" / "raw" not in path.parents
    ]


@pytest.mark.parametrize(
    ("languages", "pair"), [(("en", "de"), "en-de"), (("eng_Latn", "deu_Latn"), "en-de"), (("xx", "de"), "xx-de")]
)
def test_the_languages_of_a_model_are_a_pair_of_the_set(languages: tuple[str, str], pair: str) -> None:
    assert pair_of_languages(["wmt14/full"], *languages) == pair


# --- generate ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_transformer(tmp_path_factory.mktemp("model") / "tiny.pt", tiny_tokenizer())


@pytest.mark.slow
def test_generate_translates_the_source_of_a_set(server: FileServer, model: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.en"
    lines.write_text("".join(line + "\n" for line in read_sets(["wmt14/full"], "en-de").sources), encoding="utf-8")
    flags = ["--path", model, "--max-len-b", "4", "--engine", "torch"]
    by_name = call("generate", *flags, "--test-set", "wmt14/full", "-l", "en-de")
    by_file = call("generate", *flags, "--input", lines)
    assert by_name.exit_code == by_file.exit_code == 0, by_name.stderr
    assert by_name.stdout == by_file.stdout and len(by_name.stdout.splitlines()) == 4
    several = call("generate", *flags, "--test-set", "wmt14/full,wmt20/tworefs", "-l", "en-de")
    assert several.stdout == by_file.stdout * 2
    sharded = [*flags, "--test-set", "wmt14/full", "-l", "en-de", "--output-dir", tmp_path / "shards"]
    assert call("generate", *sharded).exit_code == 0
    merged = call("merge", tmp_path / "shards", "--output", tmp_path / "merged.de")
    assert merged.exit_code == 0 and (tmp_path / "merged.de").read_text(encoding="utf-8") == by_file.stdout


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (["--test-set", "wmt14/ful", "-l", "en-de"], ["wmt14/full"]),
        (["--test-set", "wmt14/full"], ["--language-pair"]),  # the model does not know its languages
        (["--test-set", "wmt14/full", "--source-lang", "en", "--target-lang", "dee"], ["en-dee", "en-de"]),
        (["--test-set", "wmt14/full", "-l", "en-de", "--input", __file__], ["--test-set", "--input"]),
        (["--test-set", "wmt14/full", "-l", "en-de", "--input-format", "html"], ["--test-set", "--input-format"]),
        ([str(Path(__file__).parent), "--test-set", "wmt14/full", "-l", "en-de"], ["--test-set", "DATA"]),
        (["-l", "en-de"], ["--language-pair", "--test-set"]),
    ],
)
def test_wrong_names_and_flags_of_generate(server: FileServer, model: Path, flags: list[str], facts: list[str]) -> None:
    result = call("generate", "--path", model, *flags, stdin="")
    assert result.exit_code == 2 and not re.search(r"Traceback", result.stderr)
    assert all(fact in result.stderr for fact in facts), result.stderr


# --- fetch ------------------------------------------------------------------------------------------------------------


def test_a_set_becomes_a_corpus_with_all_references(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("fetch", "sacrebleu:wmt20/tworefs", "-s", "en", "-t", "de", "-o", "data")
    assert result.exit_code == 0 and result.stdout == "data/wmt20-tworefs.en-de\n", result.stderr
    sides = {
        code: Path(f"data/wmt20-tworefs.en-de.{code}").read_text().splitlines() for code in ("en", "de", "ref2.de")
    }
    assert sides == {"en": read_sets(["wmt20/tworefs"], "en-de").sources, "de": REFERENCES, "ref2.de": OTHERS}
    facts = json.loads(Path("data/wmt20-tworefs.en-de.provenance.json").read_text())
    assert facts["corpus"] == "wmt20/tworefs" and facts["references"] == ["data/wmt20-tworefs.en-de.ref2.de"]
    flags = [flag for name in ("de", "ref2.de") for flag in ("--ref", f"data/wmt20-tworefs.en-de.{name}")]
    by_files = json.loads(call("score", *flags, "--format", "json", stdin=HYPOTHESES).stdout)
    by_name = json.loads(
        call("score", "--test-set", "wmt20/tworefs", "-l", "en-de", "--format", "json", stdin=HYPOTHESES).stdout
    )
    assert [each["score"] for each in by_files] == [each["score"] for each in by_name]


def test_references_have_the_lines_of_the_corpus_and_are_not_replaced(server: FileServer, tmp_path: Path) -> None:
    flags = ["sacrebleu:wmt20/tworefs", "-s", "en", "-t", "de", "-o", str(tmp_path), "--max-lines", "1"]
    reference = tmp_path / "wmt20-tworefs.en-de.ref2.de"
    reference.write_text("of the user\n")
    result = call("fetch", *flags)
    assert result.exit_code == 2 and str(reference) in result.stderr and "--overwrite" in result.stderr
    assert reference.read_text() == "of the user\n" and not list(tmp_path.glob("*.en-de.de"))
    assert call("fetch", *flags, "--overwrite").exit_code == 0
    assert reference.read_text().splitlines() == OTHERS[:1]
    reference.unlink()
    result = call("fetch", *flags)
    assert result.exit_code == 2 and str(reference) in result.stderr


def test_all_references_are_compressed(server: FileServer, tmp_path: Path) -> None:
    result = call("fetch", "sacrebleu:wmt20/tworefs", "-s", "en", "-t", "de", "-o", str(tmp_path), "--compress", "gz")
    assert result.exit_code == 0, result.stderr
    for code, lines in (("de", REFERENCES), ("ref2.de", OTHERS)):
        with gzip.open(tmp_path / f"wmt20-tworefs.en-de.{code}.gz", "rt", encoding="utf-8") as file:
            assert file.read().splitlines() == lines


def test_the_list_has_the_sets_of_both_languages() -> None:
    result = call("fetch", "sacrebleu:", "-s", "eng_Latn", "-t", "de")
    names = [line.split()[0].removeprefix("sacrebleu:") for line in result.stdout.splitlines()]
    assert names == [name for name, each in DATASETS.items() if "en-de" in each.langpairs]
