"""Pairs that `nmtkit preprocess` drops from the training set, and corpora that it refuses."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from preprocess_command import lines, preprocess, refused, write

from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.dataset.report import CorpusReport, sampled


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
        assert texts == ["", "ab", " ".join("x" * 400), "pika", "a"]
    assert len(dataset["train"]) == 301  # `\u2028 a\x85` is the only good pair of the odd ones


def test_strict_names_the_first_bad_pair(corpora: Path, tmp_path: Path) -> None:
    sides = lines(30, 5)
    sides[1][17] = ""
    odd = write(tmp_path / "odd", sides)
    flags = ["--trainpref", odd, "--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    refused("odd.xx:18 and " + str(tmp_path / "odd.yy") + ":18: empty side", *flags, "--strict")
    assert not (tmp_path / "data").exists()
    assert preprocess(*flags).exit_code == 0


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
    assert "valid or test 4 kept" in " ".join(kept.stderr.split())
    dropped = preprocess(*flags, "--destdir", tmp_path / "dropped", "--drop-overlap")
    assert "valid or test 4 dropped" in " ".join(dropped.stderr.split())
    assert len(Dataset.open(tmp_path / "dropped")["train"]) == 50
    page = (tmp_path / "report.html").read_text()
    assert "valid or test (dropped)" in page
    assert test[0][0] in page
    assert "<svg" in page
    assert "50 of 54 training pairs are kept, 4 are dropped (7.4%)" in page
    samples = page.split("<h2>Sentence pairs of ")[1].split("</table>")[0]
    assert len(re.findall("<tr><td", samples)) == 5
    assert "</s>" not in page.split("<details>")[0].replace("&lt;/s&gt;", "</s>")  # frequent pieces are folded
    assert "http" not in page.replace("http-equiv", "")


def test_the_sample_of_a_corpus_comes_from_all_of_its_lines(corpora: Path, tmp_path: Path) -> None:
    sides = lines(3000, 11)
    sides[0][:300] = [""] * 300  # dropped pairs are not part of the training set
    large = write(tmp_path / "large", sides)
    page = tmp_path / "report.html"
    flags = ["--trainpref", large, "--tokenizer-from", corpora / "base", "--report", page]
    assert preprocess(*flags, "--destdir", tmp_path / "data").exit_code == 0
    table = page.read_text().split("<h2>Sentence pairs of ")[1].split("</table>")[0]
    cells = [re.findall("<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    found = [(int(line.replace(",", "")) - 1, source, target) for line, source, target in cells]
    assert [(sides[0][row], sides[1][row]) for row, *_ in found] == [tuple(texts) for _, *texts in found]
    assert max(row for row, *_ in found) > 2000 and min(row for row, *_ in found) >= 300


def test_a_sample_of_samples_is_the_sample_of_all_lines() -> None:
    reports = []
    for size in (100, 8192, 20_000):
        corpus = CorpusReport(Path("a"), Path("b"))
        for first in range(1, 20_001, size):
            block = range(first, min(first + size, 20_001))
            corpus.add_samples([(line, str(line), "") for line in sampled(block)])
        reports.append([line for line, *_ in corpus.samples])
    assert reports[0] == reports[1] == reports[2] and len(reports[0]) == 5
    assert max(b - a for a, b in pairwise([0, *reports[0], 20_000])) < 10_000


def test_an_over_long_line_is_dropped_from_training_and_refused_in_a_test_set(corpora: Path, tmp_path: Path) -> None:
    sides = lines(30, 5)
    sides[1][7] = "x" * (5 << 20)
    long = write(tmp_path / "long", sides)
    flags = ["--tokenizer-from", corpora / "base", "--destdir", tmp_path / "data"]
    refused("long.xx:8 and", "--testpref", long, *flags)
    assert preprocess("--trainpref", long, *flags).exit_code == 0
    assert len(Dataset.open(tmp_path / "data")["train"]) == 29


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
