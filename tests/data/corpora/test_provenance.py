"""The origin of a corpus stays with its pairs, through clean and preprocess, and is dropped when the files change."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from builders import write_corpus
from click.testing import CliRunner, Result

from nmtkit.cli import main
from nmtkit.data.corpora.provenance import origins, provenance_path, read_provenance, write_provenance

FACTS = {"source": "OPUS", "corpus": "Books", "version": "v1", "license": "CC0", "pairs": 40}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Returns the two files of a corpus with provenance, in the current folder."""
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("books"), 40, 1)
    paths = [Path("books.xx"), Path("books.yy")]
    write_provenance(paths, FACTS)
    return paths


PREPROCESS = "preprocess -s xx -t yy --validpref valid --destdir data-bin --vocab-size 300 --workers 1".split()  # noqa: SIM905


@pytest.mark.parametrize(
    ("paths", "name"),
    [
        (["a/train.en", "a/train.de"], "a/train.provenance.json"),
        (["a/train.en-de.en.gz", "a/train.en-de.de.gz"], "a/train.en-de.provenance.json"),
        (["crawl.tsv.gz", "crawl.tsv.gz"], "crawl.tsv.gz.provenance.json"),
        (["crawl.tsv"], "crawl.tsv.provenance.json"),
    ],
)
def test_the_file_is_named_like_the_corpus(paths: list[str], name: str) -> None:
    assert provenance_path([Path(path) for path in paths]) == Path(name)


def test_a_dataset_has_the_provenance_of_its_corpora(corpus: list[Path]) -> None:
    write_corpus(Path("valid"), 6, 2)
    shutil.copy("books.xx", "plain.xx")
    shutil.copy("books.yy", "plain.yy")
    result = call(*PREPROCESS, "--trainpref", "books,plain")
    assert result.exit_code == 0, result.stderr
    provenance = json.loads(Path("data-bin/manifest.json").read_text())["provenance"]
    assert list(provenance) == ["books"] and FACTS.items() <= provenance["books"].items()
    page = call("inspect", "data-bin", "--all").stdout
    assert "OPUS Books v1" in page


@pytest.mark.parametrize("output", ["clean", "clean.gz", "clean.tsv"])
def test_cleaned_text_has_the_provenance_of_its_sources(corpus: list[Path], output: str) -> None:
    write_corpus(Path("valid"), 6, 2)
    result = call("clean", "-s", "xx", "-t", "yy", "books", "--output", output, "--filters", "empty", "--workers", "1")
    assert result.exit_code == 0, result.stderr
    result = call(*PREPROCESS, "--trainpref", output.removesuffix(".gz"))
    assert result.exit_code == 0, result.stderr
    (facts,) = json.loads(Path("data-bin/manifest.json").read_text())["provenance"].values()
    assert facts["source"] == "nmtkit clean" and facts["read"] == 40 and facts["filters"] == ["empty"]
    assert FACTS.items() <= facts["corpora"]["books"].items()
    assert origins(facts) == ["OPUS Books v1"]


def test_shards_that_are_merged_have_the_provenance_of_their_sources(corpus: list[Path]) -> None:
    clean = ["clean", "-s", "xx", "-t", "yy", "books", "--filters", "empty", "--workers", "1"]
    assert call(*clean, "--output-dir", "shards").exit_code == 0
    assert call("merge", "shards", "--output", "merged").exit_code == 0
    facts = read_provenance([Path("merged.xx"), Path("merged.yy")])
    assert facts is not None and origins(facts) == ["OPUS Books v1"]


def test_text_without_provenance_replaces_the_provenance_of_older_text(corpus: list[Path]) -> None:
    clean = ["clean", "-s", "xx", "-t", "yy", "--output", "out", "--filters", "empty", "--workers", "1"]
    assert call(*clean, "books").exit_code == 0 and Path("out.provenance.json").exists()
    write_corpus(Path("mine"), 40, 3)
    assert call(*clean, "mine").exit_code == 0 and not Path("out.provenance.json").exists()


def test_facts_about_other_files_are_left_out_with_a_warning(
    corpus: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with corpus[0].open("a") as file:
        file.write("one more\n")
    assert read_provenance(corpus) is None and "books has changed" in caplog.text
    provenance_path(corpus).write_text("{")
    assert read_provenance(corpus) is None and "damaged" in caplog.text
    provenance_path(corpus).unlink()
    caplog.clear()
    assert read_provenance(corpus) is None and not caplog.text


def test_the_order_of_the_sides_does_not_matter(corpus: list[Path]) -> None:
    assert read_provenance(corpus[::-1]) is not None


def test_compressed_text_has_other_files(corpus: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    packed = []
    for path in corpus:
        packed.append(path.with_name(f"{path.name}.gz"))
        packed[-1].write_bytes(gzip.compress(path.read_bytes()))
    assert read_provenance(packed) is None and "changed" in caplog.text
