"""Flags of `nmtkit preprocess` that are refused."""

import dataclasses
import zipfile
from pathlib import Path

import pytest
from preprocess_command import contents, refused

from nmtkit.config import flag_of
from nmtkit.data.dataset.config import PreprocessConfig


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("no corpus is given", []),
        ("largest possible size is", ["--trainpref=train", "--vocab-size", "20000"]),
        ("no such file", ["--trainpref=train", "--tokenizer-from", "absent.model"]),
        ("not a SentencePiece model", ["--trainpref=train", "--tokenizer-from", "train.xx"]),
        ("not a checkpoint", ["--trainpref=train", "--tokenizer-from", "archive.zip"]),
        (
            "--weights needs a number for each corpus of --trainpref (1), but has 2",
            ["--trainpref=train", "--weights", "1,2"],
        ),
        ("--weights is 0.0; it must be above 0", ["--trainpref=train", "--weights", "0"]),
        ("--weights 0.001 leaves none of the 300 pairs", ["--trainpref=train", "--vocab-size=320", "--weights=0.001"]),
        (
            "every training corpus has a --tag, and the valid sets have none; give --valid-tag",
            ["--trainpref=train", "--validpref=valid,valid", "--tag", "<2yy>"],
        ),
        (
            "every training corpus has a --tag, and the test sets have none; give --test-tag",
            ["--trainpref=train", "--validpref=valid", "--testpref=test", "--tag", "<2yy>", "--valid-tag", "<2yy>"],
        ),
        ("give one of them", ["--trainpref=train", "--weights", "2", "--temperature", "5"]),
        ("--tag needs an item for each corpus (1), but has 2", ["--trainpref=train", "--tag", "<a>,<b>"]),
        ("no tag '<2yy>'", ["--trainpref=train", "--tokenizer-from", "base", "--tag", "<2yy>"]),
        ("--shard needs --tokenizer-from", ["--trainpref=train", "--shard", "1/2"]),
        ("'3/2' is not I/N", ["--trainpref=train", "--tokenizer-from", "base", "--shard", "3/2"]),
        ("leave no pair", ["--trainpref=train", "--min-len", "9", "--max-len", "8"]),
        (
            "--tokenizer-from and --vocab-size cannot be combined",
            ["--trainpref=train", "--tokenizer-from", "base", "--vocab-size", "300"],
        ),
        (
            "--report valid.xx would overwrite a file which this command reads",
            ["--trainpref=train", "--validpref=valid", "--vocab-size=320", "--report=valid.xx"],
        ),
        ("--drop-overlap does nothing without a valid or test set", ["--trainpref=train", "--drop-overlap"]),
        ("--max-len does nothing", ["--validpref=valid", "--tokenizer-from=base", "--max-len=9"]),
        ("--strict does nothing", ["--testpref=test", "--tokenizer-from=base", "--strict"]),
        ("--temperature does nothing without several", ["--trainpref=train", "--temperature", "5"]),
        ("leave out --drop-duplicates", ["--trainpref=train", "--strict", "--drop-duplicates"]),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(
    message: str, flags: list[str], corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(corpora)
    zipfile.ZipFile("archive.zip", "w").close()
    before = contents(corpora)
    refused(message, *flags, "--destdir", tmp_path / "data", "--workers", "1")
    assert list(tmp_path.iterdir()) == []
    assert contents(corpora) == before


LIMITS = ("min", "max", "above", "below")
NUMERIC = [
    flag_of(field)
    for field in dataclasses.fields(PreprocessConfig)
    if any(field.metadata[k] is not None for k in LIMITS)
]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e400", "9" * 30])
@pytest.mark.parametrize("flag", NUMERIC)
def test_numbers_outside_the_limits_are_refused(flag: str, value: str, corpora: Path, tmp_path: Path) -> None:
    refused(flag, "--trainpref", corpora / "train", "--destdir", tmp_path / "data", f"{flag}={value}")


def test_every_number_has_limits() -> None:
    assert len(NUMERIC) == 12
    assert "--max-ratio" in NUMERIC


def test_a_temperature_that_repeats_a_corpus_beyond_reason_is_refused(corpora: Path, tmp_path: Path) -> None:
    train = f"{corpora / 'train'},{corpora / 'test'}"
    flags = ["--trainpref", train, "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    refused("makes an epoch contain each pair of a corpus", *flags, "--temperature", "0.1")
    assert list(tmp_path.iterdir()) == []
