"""Metrics of validations equal sacreBLEU and plain arithmetic, and choose the checkpoints that a run keeps."""

import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import log_records, tiny_transformer
from click.testing import CliRunner
from neural_models import write_comet
from sacrebleu.metrics import BLEU

from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.jobs.distributed import launch
from nmtkit.models import checkpoint
from nmtkit.models.architectures.contract import ContractError
from nmtkit.models.building import from_checkpoint, vocabulary_of
from nmtkit.scoring.sentence_metrics import segment_metric
from nmtkit.training import checkpoints
from nmtkit.training.config import JobConfig
from nmtkit.training.metrics import METRICS, CometKiwiConfig, Metric, Objective, Outputs, objective, score_of
from nmtkit.training.run import Run
from nmtkit.training.run_log import Lines
from nmtkit.training.validation import Validator

FLAGS = shlex.split("""
    --arch transformer_tiny --d-model 16 --d-ff 32 --heads 2 --encoder-layers 1 --decoder-layers 1 --dropout 0
    --batch-tokens 400 --max-tokens 200 --precision fp32 --device cpu --valid-beam 2 --lr 0.02 --warmup-updates 10
    --threads 1 --validate-interval none --validate-interval-updates 10 --metrics bleu,chrf,accuracy
""")


def flags(data: Path, save_dir: Path, *more: object) -> list[str]:
    return ["train", str(data), *FLAGS, "--save-dir", str(save_dir), *map(str, more)]


def train(data: Path, save_dir: Path, *more: object) -> str:
    result = CliRunner().invoke(main, flags(data, save_dir, *more))
    assert result.exit_code == 0, result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def trained(mirror_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metrics") / "run"
    train(mirror_data, folder, "--max-update", 40)
    return folder


def test_scores_are_those_of_sacrebleu_on_the_kept_translations(mirror_data: Path, trained: Path) -> None:
    from sacrebleu.metrics import BLEU, CHRF

    references = Dataset.open(mirror_data)["valid"].references()
    assert [record["update"] for record in log_records(trained, "valid")] == [10, 20, 30, 40]
    for record in log_records(trained, "valid"):
        hypotheses = (trained / f"validation/update_{record['update']:08d}.txt").read_text().split("\n")[:-1]
        assert record["bleu"] == pytest.approx(BLEU().corpus_score(hypotheses, [references]).score, rel=1e-5)
        assert record["chrf"] == pytest.approx(CHRF().corpus_score(hypotheses, [references]).score, rel=1e-5)
    metrics = {"bleu": BLEU(), "chrf": CHRF()}
    for metric in metrics.values():
        metric.corpus_score(hypotheses, [references])
    signatures = {name: str(metric.get_signature()) for name, metric in metrics.items()}
    assert checkpoint_file.read(trained / "last.pt")["signatures"] == signatures


def test_accuracy_is_the_share_of_tokens_that_a_plain_loop_finds_most_probable(
    mirror_data: Path, trained: Path
) -> None:
    model, _ = from_checkpoint(trained / "last.pt")
    split = Dataset.open(mirror_data)["valid"]
    correct, tokens = 0, 0
    losses: dict[bool, list[float]] = {True: [], False: []}  # by whether a sentence has ten tokens or fewer
    with torch.no_grad():
        for pair in range(len(split)):
            batch = split.batch(np.array([pair]))
            log_p = model.output_projection(model(batch.source, batch.target_input)).log_softmax(-1)
            for row, target in zip(log_p, batch.target_output.tolist(), strict=True):
                correct, tokens = correct + (row.max() == row[target]).item(), tokens + 1
                smoothed = 0.9 * row[target] + 0.1 * row.mean()
                losses[len(log_p) <= 10].append(-float(smoothed))
    last = log_records(trained, "valid")[-1]
    assert last["accuracy"] == pytest.approx(100 * correct / tokens, rel=1e-5)
    assert last["loss"] == pytest.approx(np.mean(losses[True] + losses[False]), rel=1e-4)
    short = [row for row in last["by_length"] if row["tokens"] == "1-10"]
    assert [row["loss"] for row in short] == ([pytest.approx(np.mean(losses[True]), rel=1e-4)] if losses[True] else [])
    assert sum(row["sentences"] for row in last["by_length"]) == len(split)


@pytest.mark.slow
def test_two_ranks_score_as_one(mirror_data: Path, trained: Path, tmp_path: Path) -> None:
    assert launch(flags(mirror_data, tmp_path / "run", "--max-update", 10), 2) == 0
    for one, two in zip(log_records(trained, "valid"), log_records(tmp_path / "run", "valid"), strict=False):
        assert {name for name in one if name != "seconds"} == {name for name in two if name != "seconds"}
        for name in ("loss", "ppl", "accuracy", "chrf"):
            assert two[name] == pytest.approx(one[name], rel=2e-2), name
    texts = [
        (folder / "validation/update_00000010.txt").read_text().split("\n") for folder in (trained, tmp_path / "run")
    ]
    assert len(texts[0]) == len(texts[1])
    assert sum(a == b for a, b in zip(*texts, strict=True)) > 0.8 * len(texts[0])


@pytest.mark.slow
def test_the_best_checkpoint_is_that_of_the_metric_also_when_resumed(mirror_data: Path, tmp_path: Path) -> None:
    more = ["--best-checkpoint-metric", "accuracy", "--lr", "1.0", "--keep-last", "1", "--save-interval", "none"]
    for updates in (30, 60):
        train(mirror_data, tmp_path, "--max-update", updates, *more)
    scores = {record["update"]: record["accuracy"] for record in log_records(tmp_path, "valid")}
    best = max(scores, key=lambda update: scores[update])
    assert (tmp_path / "best.pt").resolve().name == checkpoints.file_name(best)
    running = [record["best"] for record in log_records(tmp_path, "valid")]
    assert running == [value > max(list(scores.values())[:i], default=-1) for i, value in enumerate(scores.values())]
    averaged = tmp_path.parent / "averaged.pt"
    best_two = ["average-checkpoints", tmp_path, "--best", 1, "--best-checkpoint-metric", "accuracy"]
    assert CliRunner().invoke(main, [*map(str, best_two), "--output", str(averaged)]).exit_code == 0
    assert checkpoint.load(averaged)["averaged"] == [checkpoints.file_name(best)]


@pytest.mark.slow
def test_patience_counts_validations_without_a_higher_score(mirror_data: Path, tmp_path: Path) -> None:
    more = ["--best-checkpoint-metric", "chrf", "--patience", "2", "--max-update", "400", "--lr", "3.0"]
    assert "no better chrf in" in train(mirror_data, tmp_path, *more)
    scores = [record["chrf"] for record in log_records(tmp_path, "valid")]
    assert max(scores) == scores[-3]


@pytest.mark.slow
def test_going_by_another_metric_starts_the_best_anew(mirror_data: Path, tmp_path: Path) -> None:
    train(mirror_data, tmp_path, "--max-update", 10)
    train(mirror_data, tmp_path, "--max-update", 20, "--best-checkpoint-metric", "bleu")
    saved = checkpoint.load(tmp_path / "last.pt")
    assert saved["training"]["objective"] == ["bleu", True]
    assert saved["training"]["best"] == pytest.approx(-log_records(tmp_path, "valid")[-1]["bleu"], rel=1e-5)
    plateau = ["--lr-scheduler", "plateau"]
    train(mirror_data, tmp_path / "plateau", "--max-update", 10, *plateau)
    again = flags(mirror_data, tmp_path / "plateau", "--max-update", 20, "--best-checkpoint-metric", "chrf", *plateau)
    assert "resume with --best-checkpoint-metric loss" in CliRunner().invoke(main, again).stderr


@pytest.mark.slow
def test_a_count_of_the_criterion_can_be_followed_and_a_wrong_one_is_named(mirror_data: Path, tmp_path: Path) -> None:
    train(mirror_data, tmp_path / "run", "--max-update", 10, "--best-checkpoint-metric", "nll:min")
    wrong = flags(mirror_data, tmp_path / "other", "--max-update", 10, "--best-checkpoint-metric", "agreement:max")
    said = CliRunner().invoke(main, wrong).stderr
    assert "loss, nll, ppl, bleu, chrf, accuracy" in said


PLUGIN = """
from dataclasses import dataclass
from nmtkit.config import Config, option
from nmtkit.training.metrics import METRICS, Metric

@dataclass(frozen=True, kw_only=True)
class ErrorsConfig(Config):
    errors_weight: float = option(1.0, "Multiplies the score.", above=0)

@METRICS.register("errors", ErrorsConfig())
class Errors(Metric):
    higher_is_better, translates = False, True

    def __init__(self, config):
        self.weight = config.errors_weight

    def score(self, outputs):
        pairs = zip(outputs.hypotheses, outputs.references, strict=True)
        return self.weight * sum(hypothesis != reference for hypothesis, reference in pairs)
"""


@pytest.mark.slow
def test_a_plug_in_metric_is_logged_shown_drawn_and_followed(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(METRICS, "entries", dict(METRICS.entries))
    (tmp_path / "errors.py").write_text(PLUGIN)
    more = ["--plugin", tmp_path / "errors.py", "--metrics", "errors", "--errors-weight", 0.5, "--max-update", 20]
    said = train(mirror_data, tmp_path / "run", *more, "--best-checkpoint-metric", "errors")
    hypotheses = (tmp_path / "run/validation/update_00000020.txt").read_text().split("\n")[:-1]
    references = Dataset.open(mirror_data)["valid"].references()
    errors = 0.5 * sum(a != b for a, b in zip(hypotheses, references, strict=True))
    assert log_records(tmp_path / "run", "valid")[-1]["errors"] == errors
    assert f"errors {errors:.4g}" in said
    assert "errors by update" in (tmp_path / "run/report.html").read_text()
    assert checkpoint.load(tmp_path / "run/last.pt")["training"]["objective"] == ["errors", False]


@pytest.mark.slow
def test_three_fixed_sentences_are_shown_at_every_validation(mirror_data: Path, tmp_path: Path) -> None:
    said = train(mirror_data, tmp_path / "run", "--max-update", 20).splitlines()
    first, second = (record["followed"] for record in log_records(tmp_path / "run", "valid"))
    assert len(first) == 3
    assert [row["source"] for row in first] == [row["source"] for row in second]
    references = Dataset.open(mirror_data)["valid"].references()
    for row in second:
        assert f"  translation  {row['translation']}" in said
        assert said.count(f"  reference    {row['reference']}") == 2
        assert row["reference"] in references
    page = (tmp_path / "run/report.html").read_text()
    assert "Best validation sentences" in page and "Worst validation sentences" in page
    assert "Three sentences" in page and "By length" in page


def test_a_neural_metric_gets_the_sources_of_each_validation(tmp_path: Path) -> None:
    model = write_comet(tmp_path / "model", "kiwi")
    metric = METRICS["cometkiwi"].factory(CometKiwiConfig(cometkiwi_model=str(model)))
    texts = {"hypotheses": ["der Hund", "die Katze"], "references": ["x", "y"], "sums": {}, "tokens": 4}
    scores = [metric.score(Outputs(sources=sources, **texts)) for sources in (["a dog", "cat"], ["cat", "a dog"])]
    reference = segment_metric(f"cometkiwi={model}")
    for score, sources in zip(scores, (["a dog", "cat"], ["cat", "a dog"]), strict=True):
        assert score == pytest.approx(sum(reference.scores(texts["hypotheses"], sources=sources)) / 2, abs=1e-4)
    assert scores[0] != scores[1]
    entries = [METRICS[name] for name in ("comet", "metricx", "metricx-qe")]
    assert [entry.factory(entry.preset).higher_is_better for entry in entries] == [True, False, False]


@pytest.mark.slow
def test_bleu_of_a_validation_knows_the_target_language_also_by_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["他今天早上去学校了。", "我非常喜欢吃苹果和香蕉。", "我们明天一起去公园吧。"] * 10
    for language in ("en", "zh"):
        (tmp_path / f"x.{language}").write_text("".join(f"{line}\n" for line in lines))
    make = f"preprocess -s en -t zh --trainpref {tmp_path}/x --validpref {tmp_path}/x --destdir {tmp_path}/data-bin"
    assert CliRunner().invoke(main, [*make.split(), "--vocab-size", "300"]).exit_code == 0
    worse = [line.replace("公园", "学校") for line in lines]
    monkeypatch.setattr(Validator, "translations", lambda self, model: worse)
    train(tmp_path / "data-bin", tmp_path / "run", "--max-update", 10, "--metrics", "bleu")
    [record] = log_records(tmp_path / "run", "valid")
    assert record["bleu"] == pytest.approx(BLEU(tokenize="zh").corpus_score(worse, [lines]).score, rel=1e-5)
    [by_length] = record["by_length"]
    assert by_length["bleu"] == pytest.approx(record["bleu"])
    more = ["--metrics", "bleu", "--bleu-tokenize", "intl"]
    train(tmp_path / "data-bin", tmp_path / "intl", "--max-update", 10, *more)
    [other] = log_records(tmp_path / "intl", "valid")
    expected = BLEU(tokenize="intl").corpus_score(worse, [lines]).score
    assert abs(expected - record["bleu"]) > 1
    assert [other["bleu"], other["by_length"][0]["bleu"]] == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize("sharded", [False, True])
def test_validations_share_the_names_of_the_engines_in_the_log(mirror_data: Path, sharded: bool) -> None:
    split = Dataset.open(mirror_data)["valid"].first_rows(2)
    metrics = {"bleu": METRICS["bleu"].factory(METRICS["bleu"].preset)}
    validator = Validator(split, 100, torch.device("cpu"), "fp32", metrics, beam=1, sharded=sharded)
    model = tiny_transformer(vocabulary_of(split.tokenizer)).eval()
    first, second = (validator._translator(model).decoder for _ in range(2))
    first.told.add("numba")
    assert second.told == {"numba"}


class Given(Metric):
    """Returns a fixed score, or reads texts without `translates`."""

    def __init__(self, value: float | None) -> None:
        self.value = value

    def score(self, outputs: Outputs) -> float:
        return float(len(outputs.hypotheses)) if self.value is None else self.value


def test_a_score_that_is_not_finite_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert math.isnan(score_of("mine", Given(math.nan), Outputs(sums={}, tokens=1)))
    assert "score returned nan" in caplog.text
    caplog.clear()
    assert score_of("mine", Given(1.0), Outputs(sums={}, tokens=1)) == 1
    assert not caplog.text


def test_a_metric_that_reads_texts_must_ask_for_them() -> None:
    texts = Outputs(sums={}, tokens=1, sources=["a"], hypotheses=["b"], references=["c"])  # of another metric
    with pytest.raises(ContractError, match=r"metric mine: .*translates = True"):
        score_of("mine", Given(None), texts)
    metric = Given(None)
    metric.translates = True
    assert score_of("mine", metric, texts) == 1


def test_directions_are_known_or_asked_for() -> None:
    metrics: dict[str, Metric] = {"bleu": METRICS["bleu"].factory(METRICS["bleu"].preset)}
    assert objective("ppl", metrics) == Objective("ppl", False)
    assert objective("bleu", metrics) == Objective("bleu", True)
    assert objective("divergence:min", metrics) == Objective("divergence", False)
    with pytest.raises(ValueError, match="if higher"):
        objective("divergence", metrics)
    with pytest.raises(ValueError, match=r"--best-checkpoint-metric chrf .*--metrics chrf"):
        objective("chrf", metrics)


def test_a_metric_may_not_take_the_name_of_a_loss(mirror_data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(METRICS, "entries", dict(METRICS.entries))
    METRICS.register("nll", METRICS["accuracy"].preset)(METRICS["accuracy"].factory)
    settings = {"max_update": 1, "batch_tokens": 400, "device": "cpu", "save_dir": tmp_path / "run", "d_model": 8}
    names = {"architecture": "transformer_tiny", "metrics": "nll"}
    job = JobConfig.read(names=names, settings=settings | {"heads": 1, "encoder_layers": 1, "decoder_layers": 1})
    with pytest.raises(ValueError, match="'nll'"):
        Run(job, mirror_data, Lines()).run()
