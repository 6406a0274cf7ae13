import dataclasses
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import save_tiny_transformer
from click.testing import CliRunner, Result

from nmtkit.cli import main
from nmtkit.cli.preprocess import command
from nmtkit.config import flag_of
from nmtkit.corpora import blocks
from nmtkit.corpora.corpus import Pairs
from nmtkit.corpora.writer import CorpusWriter
from nmtkit.data.batching import BatchSampler
from nmtkit.data.binarized import Dataset, verify
from nmtkit.data.config import PreprocessConfig

WORDS = "bado kelu miro sate vonu pika zulo tera gano feli".split()  # noqa: SIM905
FLAGS = ["-s", "xx", "-t", "yy"]
LIMITS = ("min", "max", "above", "below")


def lines(count: int, seed: int) -> list[list[str]]:
    """Both sides of made-up pairs; the target is the source backwards, in capitals."""
    rng = np.random.default_rng(seed)
    sources = [[WORDS[index] for index in rng.integers(0, 10, rng.integers(2, 9))] for _ in range(count)]
    return [[" ".join(words) for words in sources], [" ".join(words[::-1]).upper() for words in sources]]


def write(prefix: Path, sides: list[list[str]]) -> str:
    for language, side in zip(("xx", "yy"), sides, strict=True):
        prefix.with_name(f"{prefix.name}.{language}").write_bytes("".join(line + "\n" for line in side).encode())
    return str(prefix)


def preprocess(*flags: str | Path) -> Result:
    workers = [] if any(str(flag).startswith("--workers") for flag in flags) else ["--workers", "1"]
    return CliRunner().invoke(command, [*FLAGS, *workers, *map(str, flags)])


def refused(message: str, *flags: str | Path) -> str:
    """Runs a preprocess that must fail as a user's mistake, saying `message`; returns all it said."""
    result = preprocess(*flags)
    assert result.exit_code == 2, result.output
    text = " ".join(result.stderr.split())
    assert message in text, text
    return text


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefixes train, more, valid and test, and a tokenizer in the dataset `base` of train, valid and test."""
    folder = tmp_path_factory.mktemp("corpora")
    for seed, (name, count) in enumerate((("train", 300), ("more", 100), ("valid", 15), ("test", 12))):
        write(folder / name, lines(count, seed))
    flags = [f"--{name}pref={folder / name}" for name in ("train", "valid", "test")]
    result = preprocess(*flags, "--destdir", folder / "base", "--vocab-size", "320", "--workers", "1")
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_LINES", 16)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_says_what_it_did_and_what_comes_next(corpora: Path, tmp_path: Path) -> None:
    flags = ["--trainpref", corpora / "train", "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    result = preprocess(*flags)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "300 training pairs read, 0 dropped" in result.stderr
    assert f"next: nmtkit train {tmp_path / 'data'}" in result.stderr
    assert preprocess(*flags, "--overwrite", "--quiet").stderr == ""


@pytest.mark.usefixtures("small_blocks")
def test_output_is_the_same_for_1_2_and_5_workers(corpora: Path, tmp_path: Path) -> None:
    sides = lines(200, 7)
    for side, other in ((0, 1), (1, 0)):
        sides[side] += [*sides[side][:20], "", "bad\0", *sides[other][:3], "pika " * 300]
    write(tmp_path / "odd", sides)
    for language in ("xx", "yy"):
        path = tmp_path / f"odd.{language}"
        (tmp_path / f"odd.{language}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    for workers in (1, 2, 5):
        flags = [f"--trainpref={corpora / 'train'},{tmp_path / 'odd'}", "--validpref", corpora / "valid"]
        flags += ["--vocab-size", "320", "--drop-duplicates", "--weights", "1,2.5", "--workers", str(workers)]
        result = preprocess(*flags, "--destdir", tmp_path / str(workers))
        assert result.exit_code == 0, result.output
    first = contents(tmp_path / "1")
    assert first == contents(tmp_path / "2") == contents(tmp_path / "5")
    report = json.loads(first["manifest.json"])["report"]["corpora"]
    assert report[1]["dropped"].pop("duplicate pair") >= 20
    assert report[1]["dropped"] == {"NUL byte": 1, "empty side": 1, "too many pieces": 1}


def test_filters_touch_the_training_set_alone(corpora: Path, tmp_path: Path) -> None:
    odd = write(tmp_path / "odd", [["", "a\0b", "x " * 400, "pika\r", "\u2028 a\x85"], ["A", "B", "C", "", "D"]])
    result = preprocess(
        "--trainpref", f"{corpora / 'train'},{odd}", "--validpref", odd, "--testpref", f"{corpora / 'test'},{odd}",
        "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    dataset = Dataset.open(tmp_path / "data")
    assert list(dataset.splits) == ["valid", "test", "test1", "train"]
    for name in ("valid", "test1"):
        assert len(dataset[name]) == 5
        assert dataset[name].references() == ["A", "B", "C", "", "D"]
        assert dataset[name].source_lines()[3:] == ["pika", "\u2028 a\x85"]
        texts = [dataset.tokenizer.decode_source(dataset[name].source.sentence(row)) for row in range(5)]
        assert texts == ["", "a\0b", " ".join("x" * 400), "pika", "\u2028 a\x85"]
    assert len(dataset["train"]) == 301  # `\u2028 a\x85` is the only good pair of the odd ones


def test_strict_names_the_first_bad_pair(corpora: Path, tmp_path: Path) -> None:
    sides = lines(30, 5)
    sides[1][17] = ""
    odd = write(tmp_path / "odd", sides)
    flags = ["--trainpref", odd, "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    refused("odd.xx:18 and " + str(tmp_path / "odd.yy") + ":18: empty side", *flags, "--strict")
    assert not (tmp_path / "data").exists()
    assert preprocess(*flags).exit_code == 0


def bad_utf8(folder: Path) -> list[str]:
    prefix = write(folder / "bad", lines(30, 5))
    text = (folder / "bad.yy").read_bytes().split(b"\n")
    text[11] += b"\xe4"
    (folder / "bad.yy").write_bytes(b"\n".join(text))
    return ["--trainpref", prefix]


def unequal(folder: Path) -> list[str]:
    sides = lines(30, 5)
    return ["--trainpref", write(folder / "bad", [sides[0], sides[1][:-1]])]


def all_dropped(folder: Path) -> list[str]:
    return ["--trainpref", write(folder / "bad", [["a"] * 3, [""] * 3])]


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("bad.yy:12: byte", bad_utf8),
        ("bad.xx has 30 lines, but", unequal),
        ("no training pair is left; dropped: empty side: 3", all_dropped),
        ("no such file:", lambda folder: ["--trainpref", str(folder / "absent")]),
        ("bad.xx is empty", lambda folder: ["--trainpref", write(folder / "bad", [[], []])]),
    ],
)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_bad_input_is_named_and_nothing_is_left(
    message: str, flags: Callable[[Path], list[str]], workers: str, corpora: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    given = flags(tmp_path)
    made = sorted(tmp_path.iterdir())
    refused(message, *given, "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data", "--workers", workers)
    assert sorted(tmp_path.iterdir()) == made
    assert before == []


@pytest.mark.parametrize("kind", ["train", "valid"])
def test_bad_text_is_found_before_a_tokenizer_is_trained(kind: str, corpora: Path, tmp_path: Path) -> None:
    flags = bad_utf8(tmp_path) if kind == "train" else ["--trainpref", str(corpora / "train"), *bad_utf8(tmp_path)]
    flags = flags if kind == "train" else [*flags[:2], "--validpref", flags[3]]
    refused("bad.yy:12: byte", *flags, "--destdir", tmp_path / "data", "--vocab-size", "320")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("no corpus is given", []),
        ("largest possible size is", ["--trainpref=train", "--vocab-size", "20000"]),
        ("no such file", ["--trainpref=train", "--tokenizer-from", "absent.model"]),
        ("not a SentencePiece model", ["--trainpref=train", "--tokenizer-from", "train.xx"]),
        ("not a checkpoint", ["--trainpref=train", "--tokenizer-from", "archive.zip"]),
        ("--weights has 2 numbers for 1 training corpora", ["--trainpref=train", "--weights", "1,2"]),
        ("--weights is 0.0; it must be above 0", ["--trainpref=train", "--weights", "0"]),
        ("--weights 0.001 leaves none of the 300 pairs", ["--trainpref=train", "--vocab-size=320", "--weights=0.001"]),
        (
            "every training corpus has a --tag, and 2 valid sets have none; give --valid-tag",
            ["--trainpref=train", "--validpref=valid,valid", "--tag", "<2yy>"],
        ),
        (
            "every training corpus has a --tag, and 1 test sets have none; give --test-tag",
            ["--trainpref=train", "--validpref=valid", "--testpref=test", "--tag", "<2yy>", "--valid-tag", "<2yy>"],
        ),
        ("give one of them", ["--trainpref=train", "--weights", "2", "--temperature", "5"]),
        ("--tag has 2 items for 1 corpora", ["--trainpref=train", "--tag", "<a>,<b>"]),
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


def test_only_a_dataset_is_overwritten_and_only_on_request(corpora: Path, tmp_path: Path) -> None:
    target = tmp_path / "data"
    flags = ["--testpref", corpora / "test", "--tokenizer-from", corpora / "base", "--destdir", target]
    target.mkdir()
    assert preprocess(*flags).exit_code == 0  # an empty folder is as good as none
    refused("holds a dataset; give --overwrite", *flags)
    assert preprocess(*flags, "--overwrite").exit_code == 0
    (target / "manifest.json").rename(target / "thesis.txt")
    refused("not an nmtkit dataset", *flags, "--overwrite")
    assert (target / "thesis.txt").exists()


@pytest.mark.parametrize("name", ["thesis.txt", "tokenizer/notes.txt", "checkpoints/last.pt"])
def test_a_dataset_with_files_of_others_is_not_replaced(name: str, corpora: Path, tmp_path: Path) -> None:
    flags = ["--testpref", corpora / "test", "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    assert preprocess(*flags).exit_code == 0
    (tmp_path / "data" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "data" / name).touch()
    before = contents(tmp_path)
    refused(
        f"{name} was not written by preprocess" if "check" not in name else "was not written", *flags, "--overwrite"
    )
    assert contents(tmp_path) == before


@pytest.mark.parametrize("manifest", ["{}", '{"name": "my browser extension"}', '{"nmtkit_dataset": 1}', "nonsense"])
@pytest.mark.parametrize("name", ["data", "data.tmp", "data.old.tmp", "data/shard-1-of-2"])
def test_a_manifest_alone_makes_no_dataset(name: str, manifest: str, corpora: Path, tmp_path: Path) -> None:
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "manifest.json").write_text(manifest)
    (tmp_path / name / "thesis.txt").touch()
    before = contents(tmp_path)
    flags = ["--testpref", corpora / "test", "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    message = "is not an unfinished dataset" if name.endswith("tmp") else "not an nmtkit dataset"
    if not name.endswith("tmp") and "nmtkit_dataset" in manifest:
        message = "thesis.txt was not written by preprocess"
    for overwrite in ([], ["--overwrite"]):
        refused(message, *flags, *overwrite)
        assert contents(tmp_path) == before


def test_a_link_to_a_dataset_is_followed_and_stays(corpora: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    flags = ["--testpref", corpora / "test", "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "link"]
    assert preprocess(*flags).exit_code == 0
    assert preprocess(*flags, "--overwrite").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]
    (tmp_path / "disk.tmp").symlink_to(corpora)
    refused("is not an unfinished dataset", *flags, "--overwrite")
    assert (corpora / "base" / "manifest.json").exists()


def test_shards_are_not_added_to_a_whole_dataset(corpora: Path, tmp_path: Path) -> None:
    flags = ["--trainpref", corpora / "train", "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    assert preprocess(*flags).exit_code == 0
    refused("made without --shard", *flags, "--shard", "1/2")


@pytest.mark.parametrize("changed", [0, 1])
def test_a_dataset_of_shards_is_identified_by_the_files_of_every_shard(
    changed: int, corpora: Path, tmp_path: Path
) -> None:
    """A run resumes only on the dataset with the fingerprint of its start."""
    flags = ["--trainpref", corpora / "train", "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    for shard in ("1/2", "2/2"):
        assert preprocess(*flags, "--shard", shard).exit_code == 0
    before = Dataset.open(tmp_path / "data").fingerprint
    path = tmp_path / "data" / f"shard-{changed + 1}-of-2" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["train.source.ids.bin"] = "0" * 64
    manifests = Dataset.open(tmp_path / "data").manifests
    manifests[changed] = manifest
    assert replace(Dataset.open(tmp_path / "data"), manifests=manifests).fingerprint != before


def test_an_over_long_line_is_dropped_from_training_and_refused_in_a_test_set(corpora: Path, tmp_path: Path) -> None:
    sides = lines(30, 5)
    sides[1][7] = "x" * (5 << 20)
    long = write(tmp_path / "long", sides)
    flags = ["--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    refused("line 8 of", "--testpref", long, *flags)
    assert preprocess("--trainpref", long, *flags).exit_code == 0
    assert len(Dataset.open(tmp_path / "data")["train"]) == 29


def test_a_full_disk_leaves_nothing(corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    for workers in ("1", "2"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            refused(
                "No space left on device", "--trainpref", corpora / "train", "--tokenizer-from", corpora / "base",
                "--destdir", tmp_path / "data", "--workers", workers,
            )  # fmt: skip
        assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_blocks")
def test_shards_read_as_one_dataset(corpora: Path, tmp_path: Path) -> None:
    flags = ["--trainpref", corpora / "train", "--validpref", corpora / "valid", "--tokenizer-from", corpora / "base"]
    flags += ["--destdir", tmp_path / "data"]
    for shard in (1, 3, 2):
        if shard == 2:
            with pytest.raises(ValueError, match="lacks shard-2-of-3"):
                Dataset.open(tmp_path / "data")
        result = preprocess(*flags, "--shard", f"{shard}/3")
        assert result.exit_code == 0, result.output
    shards, whole = Dataset.open(tmp_path / "data"), Dataset.open(corpora / "base")
    assert shards["valid"].references() == whole["valid"].references()
    split = shards["train"]
    pairs = sorted((split.source.sentence(row), split.target.sentence(row)) for row in range(len(split)))
    train = whole["train"]
    assert pairs == sorted((train.source.sentence(row), train.target.sentence(row)) for row in range(len(train)))
    updates = list(BatchSampler(split.source.lengths, split.target.lengths, 100, 1).epoch(1))
    assert sorted(np.concatenate(updates).tolist()) == list(range(300))
    batch = split.batch(updates[0])
    assert batch.target_output.tolist() == [token for row in updates[0] for token in split.target.sentence(row)]
    assert "train: 300 pairs, checksums are correct" in verify(tmp_path / "data")

    shutil.rmtree(tmp_path / "data" / "shard-2-of-3")
    write(tmp_path / "other", lines(300, 77))
    other = ["--trainpref", tmp_path / "other", "--vocab-size", "310", "--destdir", tmp_path / "other-data"]
    assert preprocess(*other).exit_code == 0
    flags[5] = tmp_path / "other-data"
    assert preprocess(*flags, "--shard", "2/3").exit_code == 0
    with pytest.raises(ValueError, match=r"shard-2-of-3 and .* have different tokenizers"):
        Dataset.open(tmp_path / "data")


def test_a_shard_without_text_is_empty(corpora: Path, tmp_path: Path) -> None:
    flags = ["--trainpref", corpora / "train", "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    for shard in ("1/2", "2/2"):
        assert preprocess(*flags, "--shard", shard).exit_code == 0
    assert len(Dataset.open(tmp_path / "data")["train"]) == 300


def test_tags_come_before_the_source(corpora: Path, tmp_path: Path) -> None:
    result = preprocess(
        f"--trainpref={corpora / 'train'},{corpora / 'more'}", "--testpref", corpora / "test", "--vocab-size", "320",
        "--tag", "<2yy>,", "--test-tag", "<2yy>", "--destdir", tmp_path / "data",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    dataset = Dataset.open(tmp_path / "data")
    texts = [dataset.tokenizer.decode_source(dataset["train"].source.sentence(row)) for row in range(400)]
    expected = [f"<2yy> {line}" for line in lines(300, 0)[0]] + lines(100, 1)[0]
    assert sorted(texts) == sorted(expected)
    tagged = [f"<2yy> {line}" for line in lines(12, 3)[0]]
    assert dataset["test"].source_lines() == tagged
    encoded = dataset.tokenizer.encode_source(tagged[:1]).ids.tolist()
    assert dataset["test"].source.sentence(0) == encoded


def test_untagged_valid_sets_beside_tagged_training_corpora_are_told(corpora: Path, tmp_path: Path) -> None:
    flags = [f"--trainpref={corpora / 'train'},{corpora / 'more'}", "--validpref", corpora / "valid"]
    flags += ["--vocab-size", "320", "--tag", "<2yy>,"]
    told = "training corpora have tags, but valid sets have none; --valid-tag adds tags"
    assert told in preprocess(*flags, "--destdir", tmp_path / "one").stderr
    result = preprocess(*flags, "--valid-tag", "", "--destdir", tmp_path / "two")
    assert result.exit_code == 0 and "--valid-tag" not in result.stderr
    assert Dataset.open(tmp_path / "two")["valid"].source_lines() == lines(15, 2)[0]


@pytest.mark.parametrize(("weight", "pairs"), [("0.5", 150), ("0.25", 75), ("2.5", 750)])
def test_a_corpus_is_seen_as_often_as_its_weight_says(weight: str, pairs: int, corpora: Path, tmp_path: Path) -> None:
    flags = ["--trainpref", corpora / "train", "--tokenizer-from", corpora / "base", "--weights", weight]
    assert preprocess(*flags, "--destdir", tmp_path / "data").exit_code == 0
    assert len(Dataset.open(tmp_path / "data")["train"]) == pairs


def test_overlapping_pairs_are_counted_and_dropped_on_request(corpora: Path, tmp_path: Path) -> None:
    train, test = lines(50, 11), lines(12, 3)
    write(tmp_path / "overlapping", [train[side] + test[side][:4] for side in (0, 1)])
    flags = [
        "--trainpref",
        tmp_path / "overlapping",
        "--testpref",
        corpora / "test",
        "--tokenizer-from",
        corpora / "base",
    ]
    flags += ["--report", tmp_path / "report.html"]
    kept = preprocess(*flags, "--destdir", tmp_path / "kept")
    assert "also in valid or test 4 kept" in " ".join(kept.stderr.split())
    dropped = preprocess(*flags, "--destdir", tmp_path / "dropped", "--drop-overlap")
    assert "also in valid or test 4 dropped" in " ".join(dropped.stderr.split())
    assert len(Dataset.open(tmp_path / "dropped")["train"]) == 50
    page = (tmp_path / "report.html").read_text()
    assert "also in valid or test (dropped)" in page
    assert test[0][0] in page
    assert "<svg" in page
    assert "http" not in page.replace("http-equiv", "")


def test_separate_vocabularies_and_reuse_of_their_models(corpora: Path, tmp_path: Path) -> None:
    flags = ["--trainpref", corpora / "train"]
    made = [*flags, "--separate-vocab", "--vocab-size", "320", "--destdir", tmp_path / "first"]
    assert preprocess(*made).exit_code == 0
    first = Dataset.open(tmp_path / "first")
    assert not first.tokenizer.joint
    models = f"{tmp_path}/first/tokenizer/source.model,{tmp_path}/first/tokenizer/target.model"
    trained = save_tiny_transformer(tmp_path / "trained.pt", first.tokenizer)
    for name, model in (("again", tmp_path / "first"), ("files", models), ("checkpoint", trained)):
        assert preprocess(*flags, "--tokenizer-from", model, "--destdir", tmp_path / name).exit_code == 0
        again = Dataset.open(tmp_path / name)
        assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
        assert again["train"].source.ids.tolist() == first["train"].source.ids.tolist()


@pytest.mark.parametrize("model_type", ["word", "char"])
def test_a_vocabulary_that_cannot_be_sampled_is_refused_by_train(
    model_type: str, corpora: Path, tmp_path: Path
) -> None:
    flags = ["--trainpref", corpora / "train", "--model-type", model_type, "--destdir", tmp_path / "data"]
    assert preprocess(*flags, "--vocab-size", "20" if model_type == "word" else "300").exit_code == 0
    flags = [
        "train",
        str(tmp_path / "data"),
        "--arch",
        "transformer_tiny",
        "--transforms",
        "bpe_dropout",
        "--device",
        "cpu",
    ]
    result = CliRunner().invoke(main, [*flags, "--save-dir", str(tmp_path / "run"), "--max-update", "1"])
    assert result.exit_code == 2
    assert (
        f"--transforms bpe_dropout needs several segmentations of a word, but the {model_type} vocabulary"
        in result.stderr
    )


# --- kill -9 --------------------------------------------------------------------------------------------------------

DIE_AT = """
import os, signal, sys
from nmtkit.corpora import blocks
from nmtkit.corpora.corpus import Pairs
from nmtkit.corpora.writer import CorpusWriter
from nmtkit.data import dataset_files, encoding
from nmtkit.cli import main
blocks.BLOCK_LINES = 16
name, calls = sys.argv[1].split(":")
module, attribute = {"write": (encoding.os, "pwrite"), "rename": (dataset_files.os, "rename")}[name]
original, left = getattr(module, attribute), [int(calls)]
def dying(*arguments):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
setattr(module, attribute, dying)
main(sys.argv[2:])
"""


def killed(point: str, *flags: str | Path) -> None:
    result = subprocess.run([sys.executable, "-c", DIE_AT, point, "preprocess", *FLAGS, *map(str, flags)], check=False)
    assert result.returncode == -signal.SIGKILL


def check_after_kill(point: str, corpora: Path, folder: Path) -> None:
    """Kills a preprocess at `point`; nothing may look finished, and the next run must make what was wanted."""
    flags = ["--trainpref", corpora / "train", "--tokenizer-from", corpora / "base", "--destdir", folder / "data"]
    killed(point, *flags, "--workers", "1")
    assert not (folder / "data").exists()
    result = preprocess(*flags)
    assert result.exit_code == 0, result.output
    assert [path.name for path in folder.iterdir()] == ["data"]
    verify(folder / "data")
    assert len(Dataset.open(folder / "data")["train"]) == 300


@pytest.mark.slow
@pytest.mark.parametrize("point", ["write:30", "write:0", "rename:4"])
def test_a_killed_preprocess_leaves_nothing_that_looks_finished(point: str, corpora: Path, tmp_path: Path) -> None:
    check_after_kill(point, corpora, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("calls", np.random.default_rng(5).integers(1, 95, 6).tolist())
def test_a_preprocess_killed_anywhere_leaves_nothing_that_looks_finished(
    calls: int, corpora: Path, tmp_path: Path
) -> None:
    check_after_kill(f"write:{calls}", corpora, tmp_path)


@pytest.mark.parametrize("suffix", [".tsv", ".tsv.zst", ".tmx", ".jsonl.gz", ".parquet", ".zip"])
@pytest.mark.usefixtures("small_blocks")
def test_every_format_gives_the_dataset_of_two_files(suffix: str, corpora: Path, tmp_path: Path) -> None:
    sides = lines(40, 9)
    sides[0][20], sides[1][20] = "odd\u2028line \r pika", "x\x85y"
    sides[0][30] = "pika " * 6000  # an over-long line
    prefix = write(tmp_path / "c", sides)
    with CorpusWriter(str(tmp_path / f"c{suffix}"), ("xx", "yy")) as writer:
        writer.write(Pairs(*sides, [{}] * 40))
    made = []
    for number, train in enumerate((prefix, tmp_path / f"c{suffix}")):
        result = preprocess(
            "--trainpref", train, "--validpref", corpora / "valid", "--vocab-size", "320", "--destdir",
            tmp_path / str(number), "--drop-control",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        made.append(contents(tmp_path / str(number)))
        manifest = json.loads(made[-1].pop("manifest.json"))
        report = manifest["report"]["corpora"][0]
        assert (report["read"], report["dropped"]) == (40, {"over-long line": 1, "control character": 1})
    assert made[0] == made[1]


def test_columns_of_a_table_are_chosen_by_number(corpora: Path, tmp_path: Path) -> None:
    source, target = lines(30, 3)
    rows = [f"{number}\t{b}\t{a}\n" for number, (a, b) in enumerate(zip(source, target, strict=True))]
    (tmp_path / "c.tsv").write_text("".join(rows))
    flags = ["--testpref", tmp_path / "c.tsv", "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    refused("has 3 columns and no heading that names the languages", *flags)
    refused("--columns has 1 items", *flags, "--columns", "3")
    refused("--columns does nothing for the prefix", "--validpref", corpora / "valid", *flags, "--columns", "3,2")
    result = preprocess(*flags, "--columns", "3,2")
    assert result.exit_code == 0, result.output
    assert Dataset.open(tmp_path / "data")["test"].source_lines() == source
