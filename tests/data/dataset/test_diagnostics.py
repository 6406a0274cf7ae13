"""Preprocess warns once of each kind of fault in the training text, and only of real faults."""

import logging
from pathlib import Path
from typing import Any

import pytest
from parallel_text import parallel_lines, write_pair

from nmtkit.data.corpora import blocks
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.preprocess import preprocess
from nmtkit.demo.run import read_corpus, write_corpus
from nmtkit.text import language_identification

SOURCE, TARGET = parallel_lines(3000)


def warnings(
    folder: Path, source: list[str], target: list[str], caplog: pytest.LogCaptureFixture, **settings: Any
) -> list[str]:
    """Returns the warnings of a preprocess."""
    caplog.clear()
    defaults = {"source_lang": "en", "target_lang": "de", "vocab_size": 340, "workers": 1, "overwrite": True}
    train = write_pair(folder, "train", source, target)
    preprocess(PreprocessConfig(**defaults | {"train": (train,), "destdir": folder / "data"} | settings))
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("model_type", ["bpe", "unigram", "char", "word"])
def test_healthy_text_has_no_warning(model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    size = 40 if model_type == "word" else 320
    settings: dict[str, Any] = {"model_type": model_type, "vocab_size": size}
    assert warnings(tmp_path, SOURCE, TARGET, caplog, **settings) == []
    again = {"tokenizer_from": (tmp_path / "data",), "destdir": tmp_path / "again"}
    assert warnings(tmp_path, SOURCE[:1000], TARGET[:1000], caplog, **again) == []


def test_the_corpus_of_the_demo_has_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_corpus({"train": read_corpus()["train"][:3000]}, tmp_path)
    config = PreprocessConfig(
        source_lang="en",
        target_lang="de",
        train=(str(tmp_path / "train"),),
        destdir=tmp_path / "data",
        vocab_size=600,
        workers=1,
    )
    preprocess(config)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_shifted_lines_are_told_with_the_line_they_begin_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (warning,) = warnings(tmp_path, SOURCE[1:], TARGET[:-1], caplog)
    assert "a correlation of 0.0" in warning or "a correlation of -0.0" in warning
    assert "from about line" not in warning
    monkeypatch.setattr(blocks, "BLOCK_LINES", 500)
    shifted = TARGET[:1600] + TARGET[1601:] + TARGET[1600:1601]
    (warning,) = warnings(tmp_path, SOURCE, shifted, caplog)
    assert "line 1,501" in warning


def test_equal_sides_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings(tmp_path, SOURCE, [*SOURCE[:300], *TARGET[300:]], caplog)
    assert warning.startswith("10.")
    assert "have equal sides" in warning


@pytest.mark.slow
def test_text_that_the_tokenizer_does_not_know_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings(tmp_path, SOURCE, TARGET, caplog, separate_vocab=True, vocab_size=310) == []
    known = {"tokenizer_from": (tmp_path / "data",), "destdir": tmp_path / "again"}
    upper = [
        line.translate({ord(c): ord(c) - ord("a") + ord("а") for c in map(chr, range(97, 123))}) for line in TARGET
    ]
    found = warnings(tmp_path, SOURCE, upper, caplog, **known)
    assert len(found) == 2
    assert "unknown or single bytes" in found[0]
    assert "a target word has" in found[1]
    found = warnings(tmp_path, TARGET, SOURCE, caplog, **known)
    assert any("exchanged?" in warning for warning in found)
    model = {"tokenizer_from": (tmp_path / "data" / "tokenizer" / "source.model",), "destdir": tmp_path / "again"}
    found = warnings(tmp_path, SOURCE, [f"{line} {line} {line}".title() for line in TARGET], caplog, **model)
    assert not any("a source word" in warning for warning in found)
    replaced = warnings(tmp_path, SOURCE, upper, caplog, tokenizer_from=(tmp_path / "data",))
    assert any("a target word has" in warning for warning in replaced)


@pytest.mark.slow
def test_sides_in_each_others_language_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> object:
        raise ImportError("py3langid")

    monkeypatch.setattr(language_identification, "_model", missing)
    valid = {"valid": (write_pair(tmp_path, "valid", SOURCE[:200], TARGET[:200]),)}
    rows = slice(200, None)
    assert warnings(tmp_path, SOURCE[rows], TARGET[rows], caplog, **valid) == []
    (warning,) = warnings(tmp_path, TARGET[rows], SOURCE[rows], caplog, **valid)
    assert f"{tmp_path / 'train'}.en are exchanged" in warning
    assert "test sets is -0.9" in warning or "test sets is -1.0" in warning
    # without other text, each part of the lines is compared with the rest
    monkeypatch.setattr(blocks, "BLOCK_LINES", 500)
    mixed = [
        [*one[:1000], *other[1000:1500], *one[1500:]] for one, other in ((SOURCE, TARGET), (TARGET, SOURCE))
    ]  # fmt: skip
    (warning,) = warnings(tmp_path, *mixed, caplog)
    assert "first near line 1,001" in warning
    assert "all training text" in warning
    # the corpora are compared with each other
    other = write_pair(tmp_path, "other", SOURCE, TARGET)
    wrong = write_pair(tmp_path, "wrong", TARGET[:1000], SOURCE[:1000])
    found = warnings(tmp_path, SOURCE, TARGET, caplog, train=(other, wrong))
    assert [it for it in found if "are exchanged" in it] == found and len(found) == 1
    assert f"{tmp_path / 'wrong'}.en are" in found[0]


def test_sides_of_one_language_are_not_told_from_each_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = [line for line in SOURCE if len(line.split()) > 3]
    other = [" ".join(line.split()[::-1]) for line in source]
    valid = {"valid": (write_pair(tmp_path, "valid", other[:300], source[:300]),)}
    assert warnings(tmp_path, source[300:], other[300:], caplog, **valid) == []
