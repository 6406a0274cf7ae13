"""preprocess and score warn of text in a wrong language, and have no warning for good text."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.preprocess import preprocess
from nmtkit.demo.run import read_corpus
from nmtkit.text import language_identification
from nmtkit.text.language_identification import different_languages, exchanged

pytest.importorskip("py3langid")

PAIRS = read_corpus()["train"][:300]
EN, DE = ([pair[side] for pair in PAIRS] for side in (0, 1))


def written(folder: Path, name: str, source: Sequence[str], target: Sequence[str], codes: str = "en de") -> str:
    for code, lines in zip(codes.split(), (source, target), strict=True):
        (folder / f"{name}.{code}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(folder / name)


def warnings(folder: Path, caplog: pytest.LogCaptureFixture, **settings: object) -> list[str]:
    caplog.clear()
    defaults = {"source_lang": "en", "target_lang": "de", "vocab_size": 340, "workers": 1, "overwrite": True}
    preprocess(PreprocessConfig(**defaults | {"destdir": folder / "data"} | settings))  # type: ignore[arg-type]
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_exchanged_corpus_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = written(tmp_path, "good", EN, DE), written(tmp_path, "bad", DE, EN)
    assert warnings(tmp_path, caplog, train=(good,), valid=(good,)) == []
    (said,) = [text for text in warnings(tmp_path, caplog, train=(bad,)) if "language" in text]
    assert f"{bad}.en and {bad}.de" in said and "en and de" in said
    said = " ".join(warnings(tmp_path, caplog, train=(good,), valid=(bad,)))
    assert f"{bad}.en" in said and f"{good}.en" not in said


def test_an_exchanged_container_and_corpus_file_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "bad.tsv"
    path.write_text("".join(f"{de}\t{en}\n" for en, de in zip(EN, DE, strict=True)), encoding="utf-8")
    assert any(str(path) in text and "exchanged" in text for text in warnings(tmp_path, caplog, train=(str(path),)))
    written(tmp_path, "three", DE, EN)
    (tmp_path / "three.it").write_text("un due tre\n" * len(EN))
    (tmp_path / "corpora.toml").write_text(
        '[[corpus]]\nlanguages = ["en", "de", "it"]\ntrain = "' + str(tmp_path / "three") + '"\n'
    )
    settings = {"source_lang": None, "target_lang": None, "corpora": tmp_path / "corpora.toml"}
    said = [text for text in warnings(tmp_path, caplog, **settings) if "exchanged" in text]
    assert len(said) == 1 and "three.en" in said[0] and "three.de" in said[0] and "three.it" not in said[0]


def test_text_is_not_judged_without_a_basis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exchanged(DE, EN, ("en", "de")) is not None
    assert exchanged(EN, DE, ("en", "de")) is None
    assert exchanged(DE, EN, ("xx", "de")) is None  # an unknown language
    assert exchanged(DE[:10], EN[:10], ("en", "de")) is None  # few lines
    assert exchanged(["1", "OK"] * 50, ["2", "Ja"] * 50, ("en", "de")) is None  # few letters
    assert exchanged(EN, EN, ("en", "de")) is None and exchanged(DE, DE, ("en", "de")) is None
    assert exchanged([*EN[:150], *DE[150:]], [*DE[:150], *EN[150:]], ("en", "de")) is None
    assert different_languages(EN, DE) == ("en", "de")
    assert different_languages(EN, EN[::-1]) is None and different_languages(EN[:10], DE[:10]) is None

    def missing() -> object:
        raise ImportError

    monkeypatch.setattr(language_identification, "_model", missing)
    assert exchanged(DE, EN, ("en", "de")) is None and different_languages(EN, DE) is None


@pytest.mark.slow
def test_score_names_a_system_in_another_language(tmp_path: Path) -> None:
    written(tmp_path, "test", EN, DE)
    (tmp_path / "poor.de").write_text("".join(f"{line}\n" for line in [*DE[1:], DE[0]]), encoding="utf-8")
    english, good, poor = (str(tmp_path / name) for name in ("test.en", "test.de", "poor.de"))
    for systems, named in (([english], True), ([good], False), ([poor], False), ([good, english], True)):
        words = [word for system in systems for word in ("--sys", system)]
        result = CliRunner().invoke(main, ["score", *words, "--ref", good])
        assert result.exit_code == 0, result.output
        said = result.stderr.replace("\n", "")
        assert (f"{english} seems to be in the language en" in said) == named
        assert named or "language" not in said
