"""`nmtkit preprocess`: its messages, its corpora and its tokenizers."""

import gzip
import json
import re
from pathlib import Path

import pytest
from builders import save_tiny_transformer
from click.testing import CliRunner
from preprocess_command import contents, lines, preprocess, refused, write

from nmtkit.cli import main
from nmtkit.data.corpora.corpus import Pairs
from nmtkit.data.corpora.writer import CorpusWriter
from nmtkit.data.dataset.binarized import Dataset


def test_says_what_it_did_and_what_comes_next(corpora: Path, tmp_path: Path) -> None:
    flags = ["--trainpref", corpora / "train", "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    result = preprocess(*flags)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "300 training pairs read, 0 dropped" in result.stderr
    assert f"next: nmtkit train {tmp_path / 'data'}" in result.stderr
    line = re.search(rf"line (\d+) of {corpora / 'train.xx'}", result.stderr)
    assert line is not None
    texts = [(corpora / f"train.{code}").read_text().splitlines()[int(line[1]) - 1] for code in ("xx", "yy")]
    assert all(text in result.stderr[line.end() :] for text in (f"  xx  {texts[0]}\n", f"  yy  {texts[1]}\n"))
    up = tmp_path / "data" / ".." / "up"
    assert f"next: nmtkit train {tmp_path / 'up'} " in preprocess(*flags[:-1], up).stderr
    assert preprocess(*flags, "--overwrite", "--quiet").stderr == ""


@pytest.mark.slow
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
    assert f"the {model_type} vocabulary" in result.stderr
