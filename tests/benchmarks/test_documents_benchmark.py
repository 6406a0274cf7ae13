"""The benchmark of documents finds documents in folders and in the tests of other programs, and judges the outputs."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PAGE = "<p>Hello <b>big</b> world</p>"
FILM = "1\n00:00:01,000 --> 00:00:02,000\nHello world\n"
CATALOGUE = '#, c-format\nmsgid "Open %d files"\nmsgstr ""\n'


@pytest.fixture
def documents(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import documents

    yield documents
    del sys.modules["documents"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "page.html").write_text(PAGE)
    (tmp_path / "tests1.dat").write_text(f"#data\n{PAGE}x\n#errors\nnone\n\n#data\n<i>A\n#errors\n")
    (tmp_path / "a.test").write_text(json.dumps({"tests": [{"input": "<u>B"}, {"input": ["no"]}]}))
    (tmp_path / "test_film.py").write_text(
        f"FILM = {FILM!r}\nBYTES = {CATALOGUE.encode()!r}\nTEXT = 'no document at all'\n"
    )
    (tmp_path / "broken.vtt").write_text("no subtitles")
    return tmp_path


def test_documents_of_files_and_literals_are_found_and_judged(documents, folder):
    reports = []
    totals = documents.run([folder], reports.append)
    assert reports == []
    counts = {format: (each["documents"], each["segments"], each["refused"]) for format, each in totals.items()}
    assert counts == {"html": (4, 5, 0), "srt": (1, 1, 0), "vtt": (1, 0, 1), "po": (1, 1, 0), "xliff": (0, 0, 0)}


def test_a_lost_entry_is_reported(documents, monkeypatch):
    monkeypatch.setitem(documents.READERS, "srt", [("lines", "json", bytes.splitlines)])
    source = documents.Source("film", "srt", FILM.encode())
    (difference,) = documents.judge(source, FILM.replace("1\n", "").encode(), False, documents.Counter())
    assert difference.startswith("lines")


def test_translators_link_words_with_their_sources(documents):
    for translate in documents.TRANSLATORS.values():
        text, positions = translate("Open the files now.")
        assert len(text) == len(positions) and text != "Open the files now."
    assert documents.reversed_words("ab cd")[0] == "pq no"
