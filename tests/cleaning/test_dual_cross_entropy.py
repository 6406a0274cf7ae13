"""The score by two models in `clean` equals the formula of Junczys-Dowmunt 2018, and self-training can be resumed."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import save_tiny_transformer, tiny_tokenizer
from click.testing import CliRunner

import nmtkit
from nmtkit.cleaning import dual_cross_entropy
from nmtkit.cleaning.dual_cross_entropy import DualCrossEntropy, SelfTrained
from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.data.corpora.corpus import Pairs, locate
from nmtkit.data.corpora.pairs import pairs
from nmtkit.data.corpora.writer import CorpusWriter
from nmtkit.demo.run import read_corpus
from nmtkit.jobs import progress

SOURCES = ["the dog runs in the park .", "two men"]
TARGETS = ["a cat sleeps !", "women on the street . the dog"]


def test_the_score_is_the_formula_of_the_paper(tmp_path: Path) -> None:
    paths = [save_tiny_transformer(tmp_path / f"{seed}.pt", tiny_tokenizer(), seed=seed) for seed in (1, 2)]
    scorer = DualCrossEntropy(paths[0], paths[1], ("en", "de"))
    scorer.fit(SOURCES, TARGETS)
    forward, backward = (nmtkit.load(path) for path in paths)
    expected = []
    for source, target in zip(SOURCES, TARGETS, strict=True):
        pieces = [len(forward.tokenizer.encode_target([line]).ids) for line in (target, source)]  # with eos
        a = -forward.score(source, target) / pieces[0]
        b = -backward.score(target, source) / pieces[1]
        expected.append(math.exp(-(abs(a - b) + (a + b) / 2)))
    np.testing.assert_allclose(scorer.score(SOURCES, TARGETS), expected, rtol=1e-4)


def test_exchanged_models_are_refused(tmp_path: Path) -> None:
    paths = []
    for pair in (["en", "de"], ["deu_Latn", "eng_Latn"]):
        paths.append(save_tiny_transformer(tmp_path / f"{pair[0]}.pt", tiny_tokenizer()))
        checkpoint_file.save(paths[-1], checkpoint_file.read(paths[-1]) | {"run": {"languages": pair}})
    DualCrossEntropy(paths[0], paths[1], ("en", "de-AT"))
    for first, second in ((1, 0), (0, 0), (1, 1)):
        with pytest.raises(ValueError, match=r"--(forward|backward) .* translates from .* but the text needs"):
            DualCrossEntropy(paths[first], paths[second], ("en", "de"))


def test_a_pair_that_is_too_long_for_a_model_has_the_worst_score(tmp_path: Path) -> None:
    """With 12 positions, a model reads 11 pieces and eos."""
    paths = [
        save_tiny_transformer(
            tmp_path / f"{seed}.pt", tiny_tokenizer(), seed=seed, positions="learned", max_positions=12
        )
        for seed in (1, 2)
    ]
    scorer, long = DualCrossEntropy(paths[0], paths[1], ("en", "de")), "the dog runs in the park . " * 4
    scorer.fit(SOURCES, TARGETS)
    found = scorer.score(["a cat", long, "a dog", "two men"], ["a dog", "a cat", long, "women"])
    assert found[0] > 1e-9 < found[3] and max(found[1:3]) < 1e-12
    np.testing.assert_allclose(found[[0, 3]], scorer.score(["a cat", "two men"], ["a dog", "women"]), rtol=1e-5)


def test_directions_without_training_data_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    noticed: list[tuple[str, str]] = []

    class Multilingual:
        notice_untrained = noticed.extend

    monkeypatch.setattr(dual_cross_entropy, "likelihoods_of_readable", lambda *arguments, **languages: [])
    for codes in (("it", "de"), (None, "de"), (None, None)):
        dual_cross_entropy.cross_entropies(Multilingual, [], [], codes=codes)  # type: ignore[arg-type]
    assert noticed == [("it", "de")]


def test_two_sides_in_one_language_cannot_train_models(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--self-train .* en$"):
        SelfTrained(tmp_path, ("en", "en"), 1)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["clean", "-s", "en", "-t", "de", "--workers", "1", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stderr


def rows(path: Path) -> list[tuple[str, str, dict[str, object]]]:
    return [row for part in pairs(locate(str(path), "en", "de")) for row in zip(part.sources, part.targets, part.extras,
                                                                               strict=True)]  # fmt: skip


@pytest.mark.slow
def test_self_training_keeps_its_models_and_its_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dual_cross_entropy.SETTINGS, "d_model", 16)
    monkeypatch.setitem(dual_cross_entropy.SETTINGS, "d_ff", 16)
    good = list(dict.fromkeys(read_corpus()["train"]))[:160]
    with CorpusWriter(str(tmp_path / "c.tsv"), ("en", "de")) as writer:
        writer.write(Pairs([row[0] for row in good], [row[1] for row in good], [{}] * len(good)))
    flags = (tmp_path / "c.tsv", "--filters", "empty,length_ratio,numbers", "--self-train", "--self-train-updates", "2",
             "--output", tmp_path / "o.tsv", "--min-probability")  # fmt: skip
    scores = tmp_path / "s.tsv"
    stages: list[str] = []
    at_training: list[str] = []
    train = dual_cross_entropy.train_job

    def observed(*arguments: Any) -> Any:
        at_training.append(stages[-1])
        return train(*arguments)

    monkeypatch.setattr(progress, "begin", lambda title, *_, **__: stages.append(title))
    monkeypatch.setattr(dual_cross_entropy, "train_job", observed)
    run(*flags, "0", "--scores", scores)
    assert at_training == ["Training a model en-de", "Training a model de-en"]
    (folder,) = (tmp_path / "o.tsv.models").iterdir()
    assert {path.name for path in folder.iterdir()} >= {"en-de", "de-en"}
    heading, *lines = [line.split("\t") for line in scores.read_text().splitlines()]
    assert heading[-3:] == ["model", "probability", "reason"]
    values = [float(line[-2]) for line in lines if line[-1] == ""]
    assert len(rows(tmp_path / "o.tsv")) == len(values) and 0 < min(values) <= max(values) < 1

    middle = float(np.median(values))
    models = sorted(folder.rglob("*.pt"))
    times = [path.stat().st_mtime_ns for path in models]
    run(*flags, middle, "--dropped", tmp_path / "d.jsonl")
    assert [path.stat().st_mtime_ns for path in models] == times and len(list(folder.parent.iterdir())) == 1
    kept = rows(tmp_path / "o.tsv")
    assert len(kept) == sum(value >= middle for value in values)
    assert {row[2]["reason"] for row in rows(tmp_path / "d.jsonl")} >= {"probability"}

    run(tmp_path / "c.tsv", "--filters", "empty,length_ratio,numbers", "--from-scores", scores, "--output",
        tmp_path / "again.tsv", "--min-probability", middle)  # fmt: skip
    assert rows(tmp_path / "again.tsv") == kept


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--forward", __file__], "--forward does nothing"),
        (["--forward", __file__, "--backward", __file__, "--self-train"], "--self-train and --forward"),
        (["--forward", "a.pt", "--backward", "b.pt"], "--forward a.pt"),
        (["--min-model", "0.1"], "--min-model does nothing"),
    ],
    ids=["one model", "models twice", "missing file", "no models"],
)
def test_mistakes_in_the_flags_of_models_are_named(flags: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "c.tsv").write_text("a\tb\n")
    arguments = ["clean", "-s", "en", "-t", "de", str(tmp_path / "c.tsv"), "--output", str(tmp_path / "o.tsv"), *flags]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.output
    assert not (tmp_path / "o.tsv").exists()
