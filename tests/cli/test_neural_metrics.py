"""Neural metrics choose candidates: in generate, rerank, clean, and as the reward of a training."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders import (
    log_records,
    save_tiny_transformer,
    save_transformer,
    tiny_tokenizer,
    tiny_transformer,
    write_corpus,
)
from click.testing import CliRunner, Result
from neural_models import write_comet

from nmtkit.cli import main
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.packed import Packed
from nmtkit.demo.run import read_corpus
from nmtkit.models.building import from_checkpoint, vocabulary_of
from nmtkit.scoring.sentence_metrics import segment_metric
from nmtkit.training.criterions import CRITERIONS
from nmtkit.translation.server_teacher import best

SOURCES = ["a dog runs .", "the cat sleeps in the park .", "two men"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("neural")
    for kind in ("comet", "kiwi"):
        write_comet(folder / kind, kind)
    save_tiny_transformer(folder / "tiny.pt", tiny_tokenizer(), sharpness=2.0, decoder_layers=1)
    (folder / "source.en").write_text("".join(f"{line}\n" for line in SOURCES))
    return folder


def nmtkit(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def generated(folder: Path, *arguments: object) -> list[dict]:
    common = ["--path", folder / "tiny.pt", "--input", folder / "source.en", "--format", "jsonl", "--device", "cpu"]
    result = nmtkit("generate", *common, "--max-len-a", 0, "--max-len-b", 6, *arguments)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["comet", "cometkiwi"])
def test_candidates_are_sorted_by_their_utility(name: str, folder: Path) -> None:
    text = f"{name}={folder / {'comet': 'comet', 'cometkiwi': 'kiwi'}[name]}"
    metric = segment_metric(text)
    records = generated(folder, "--sampling", "--nbest", 5, "--mbr", text)
    assert [record["source"] for record in records] == SOURCES
    for record in records:
        texts = [each["text"] for each in record["hypotheses"]]
        found = [each["utility"] for each in record["hypotheses"]]
        for index, text in enumerate(texts):
            others = texts[:index] + texts[index + 1 :]
            size = len(others) if metric.reads_reference else 1
            references = others if metric.reads_reference else None
            scores = metric.scores([text] * size, sources=[record["source"]] * size, references=references)
            assert found[index] == pytest.approx(sum(scores) / size, abs=1e-3)
        assert found == sorted(found, reverse=True)


def test_processes_give_the_candidates_of_a_single_process(folder: Path) -> None:
    flags = ["--sampling", "--nbest", 3, "--mbr", f"comet={folder / 'comet'}"]
    single, several = (generated(folder, *flags, "--workers", count) for count in (1, 2))
    for one, other in zip(single, several, strict=True):
        assert [each["text"] for each in one["hypotheses"]] == [each["text"] for each in other["hypotheses"]]


def test_an_unknown_metric_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x", "x.pt"):
        Path(name).touch()
    for flags, fact in (
        (["generate", "--path", "x.pt", "--mbr", "commet", "--nbest", "4"], "comet"),
        (["generate", "--path", "x.pt", "--mbr", "chrf=x", "--nbest", "4"], "chrf=x"),
        (["rerank", "x", "--estimate", "comet", "--format", "jsonl"], "cometkiwi or metricx-qe"),
        (["rerank", "x", "--estimate", "cometkiwi"], "--feature"),
        (["clean", "-s", "a", "-t", "b", "x", "--output", "y", "--quality", "bleu"], "cometkiwi or metricx-qe"),
        (["train", "x", "--criterion", "expected_reward", "--reward", "commet"], "--reward"),
        (["train", "x", "--metrics", "comet", "--comet-model", "nowhere"], "nowhere is not a folder"),
        (["train", "x", "--metrics", "comet", "--comet-model", "nowhere", "--dry-run"], "nowhere is not a folder"),
        (["rerank", "x", "--tune", "x", "--metric", "comet=nowhere"], "nowhere is not a folder"),
    ):
        result = nmtkit(*flags)
        assert result.exit_code == 2 and fact in " ".join(result.stderr.split()), result.stderr


def test_rerank_adds_estimates_and_tunes_their_weight(folder: Path, tmp_path: Path) -> None:
    records = generated(folder, "--beam", 4, "--nbest", 4)
    lists = tmp_path / "nbest.jsonl"
    lists.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    estimate, comet = f"cometkiwi={folder / 'kiwi'}", f"comet={folder / 'comet'}"
    result = nmtkit("rerank", lists, "--estimate", estimate, "--feature", "cometkiwi=1000", "--format", "jsonl")
    assert result.exit_code == 0, result.output
    for record in map(json.loads, result.stdout.splitlines()):
        texts = [each["text"] for each in record["hypotheses"]]
        found = [each["cometkiwi"] for each in record["hypotheses"]]
        assert found == pytest.approx(segment_metric(estimate).scores(texts, sources=[record["source"]] * 4), abs=1e-3)
        assert found == sorted(found, reverse=True)
    reference = tmp_path / "reference.de"
    reference.write_text("".join(f"{record['hypotheses'][-1]['text']}\n" for record in records))
    flags = ["--tune", reference, "--metric", comet, "--trials", 5, "--feature", "cometkiwi=1", "--estimate", estimate]
    tuned = nmtkit("rerank", lists, *flags)
    assert tuned.exit_code == 0 and estimate in tuned.stderr.replace("\n", ""), tuned.output


@pytest.mark.slow
def test_clean_drops_pairs_of_low_estimated_quality(folder: Path, tmp_path: Path) -> None:
    pairs = read_corpus()["train"][:400]
    corpus = tmp_path / "corpus.tsv"
    corpus.write_text("en\tde\n" + "".join(f"{source}\t{target}\n" for source, target in pairs))
    path = write_comet(tmp_path / "kiwi", "kiwi") / "checkpoints" / "model.ckpt"
    contents = torch.load(path, weights_only=True)
    contents["state_dict"]["estimator.ff.6.bias"] -= 0.6  # scores around the middle of 0 and 1
    torch.save(contents, path)
    estimate = f"cometkiwi={tmp_path / 'kiwi'}"
    metric = segment_metric(estimate)
    qualities = metric.qualities([target for _, target in pairs], sources=[source for source, _ in pairs])
    limit = round(sorted(qualities)[200] / 100, 5)
    common = ["clean", "-s", "en", "-t", "de", corpus, "--output", tmp_path / "out.tsv", "--filters", "empty"]
    common += ["--scores", tmp_path / "scores.tsv", "--workers", 1, "--duplicates", "none", "--min-probability", 0]
    result = nmtkit(*common, "--quality", estimate, "--min-model", limit)
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader((tmp_path / "scores.tsv").open(), delimiter="\t"))
    expected = [min(1.0, max(0.0, quality / 100)) for quality in qualities]
    assert [float(row["model"]) for row in rows] == pytest.approx(expected, abs=1e-5)
    assert [row["reason"] == "model" for row in rows] == [value < limit for value in expected]


@pytest.mark.parametrize("name", ["comet", "kiwi"])
def test_the_reward_of_a_candidate_is_its_quality(name: str, folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    entry = CRITERIONS["expected_reward"]
    metric = f"{'comet' if name == 'comet' else 'cometkiwi'}={folder / name}"
    criterion = entry.factory(replace(entry.preset, reward=metric), tokenizer).train()
    texts, reference = ["a dog", "the cat sleeps"], "a cat"
    candidates = [[ids.tolist()[:-1] for ids in tokenizer.encode_target(texts).split()]]
    source: Packed = tokenizer.encode_source([SOURCES[1]])
    (target,) = tokenizer.encode_target([reference]).split()
    device = next(tiny_transformer(vocabulary_of(tokenizer)).parameters()).device
    rewards, owner = criterion.rewards(candidates, source, [target.tolist()], device)
    scored = segment_metric(metric).scores(texts, sources=[SOURCES[1]] * 2, references=[reference] * 2)
    assert rewards.tolist() == pytest.approx([score / 100 for score in scored], abs=1e-5) and owner.tolist() == [0, 0]


def test_estimates_of_reranking_read_sources_without_tags(folder: Path, tmp_path: Path) -> None:
    estimate, plain = f"cometkiwi={folder / 'kiwi'}", "All are equal before the law."
    save_transformer(tmp_path / "tags.pt", tags=["<2de>"])
    (tmp_path / "source.en").write_text(f"<2de> {plain}\n{plain}\n")
    flags = ["--path", tmp_path / "tags.pt", "--input", tmp_path / "source.en", "--format", "jsonl", "--device", "cpu"]
    generated = nmtkit("generate", *flags, "--max-len-a", 0, "--max-len-b", 6, "--nbest", 2)
    (tmp_path / "nbest.jsonl").write_text(generated.stdout)
    result = nmtkit(
        "rerank", tmp_path / "nbest.jsonl", "--estimate", estimate, "--feature", "cometkiwi=1", "--format", "jsonl"
    )
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["source"] for record in records] == [f"<2de> {plain}", plain]
    found = [each for record in records for each in record["hypotheses"]]
    scores = segment_metric(estimate).scores([each["text"] for each in found], sources=[plain] * 4)
    assert [each["cometkiwi"] for each in found] == pytest.approx(scores, abs=1e-5)


def test_distill_chooses_by_any_metric(folder: Path) -> None:
    candidates = ["der Hund", "ein Hund läuft", "die Katze schläft"]
    estimate = f"cometkiwi={folder / 'kiwi'}"
    chosen = best(candidates, choose="mbr", metric=estimate, source="the dog", device="cpu")
    scores = segment_metric(estimate).scores(candidates, sources=["the dog"] * 3)
    assert chosen == candidates[scores.index(max(scores))]
    comet = f"comet={folder / 'comet'}"
    chosen = best(candidates, choose="reference", metric=comet, source="the dog", device="cpu", reference="ein Hund")
    scores = segment_metric(comet).scores(candidates, sources=["the dog"] * 3, references=["ein Hund"] * 3)
    assert chosen == candidates[scores.index(max(scores))]


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a dataset whose source lines begin with the tag <2yy>, and the corpus without tags."""
    folder = tmp_path_factory.mktemp("tagged")
    for name, pairs in (("train", 60), ("valid", 12)):
        write_corpus(folder / name, pairs, seed=pairs)
    flags = ["-s", "xx", "-t", "yy", "--trainpref", folder / "train", "--tag", "<2yy>", "--validpref", folder / "valid"]
    result = nmtkit(
        "preprocess", *flags, "--valid-tag", "<2yy>", "--vocab-size", 320, "--workers", 1, "--destdir", folder / "data"
    )
    assert result.exit_code == 0, result.output
    return folder


def test_scores_on_a_dataset_read_sources_without_tags(folder: Path, tagged: Path) -> None:
    split = Dataset.open(tagged / "data")["valid"]
    sources = (tagged / "valid.xx").read_text().splitlines()
    assert split.source_lines() == [f"<2yy> {line}" for line in sources]
    assert split.untagged_source_lines() == sources
    common = ["score", "--sys", tagged / "valid.yy", "--format", "json"]
    files = [*common, "--ref", tagged / "valid.yy", "--src", tagged / "valid.xx"]
    dataset = [*common, "--data", tagged / "data", "--gen-subset", "valid"]
    for flags in (["--metric", f"cometkiwi={folder / 'kiwi'}"], ["--metric", "chrf", "--by-length", "source"]):
        expected, found = (nmtkit(*words, *flags) for words in (files, dataset))
        assert found.exit_code == expected.exit_code == 0, found.output
        assert found.stdout == expected.stdout


@pytest.mark.slow
def test_validations_read_sources_without_tags(folder: Path, tagged: Path, tmp_path: Path) -> None:
    model = ["--arch", "transformer_tiny", "--d-model", 16, "--d-ff", 16, "--encoder-layers", 1, "--decoder-layers", 1]
    metric = ["--metrics", "cometkiwi", "--cometkiwi-model", folder / "kiwi", "--device", "cpu", "--precision", "fp32"]
    result = nmtkit("train", tagged / "data", *model, *metric, "--max-update", 1, "--save-dir", tmp_path / "run")
    assert result.exit_code == 0, result.output
    (record,) = log_records(tmp_path / "run", "valid")
    hypotheses = (tmp_path / "run/validation/update_00000001.txt").read_text().split("\n")[:-1]
    sources = (tagged / "valid.xx").read_text().splitlines()
    scores = segment_metric(f"cometkiwi={folder / 'kiwi'}").scores(hypotheses, sources=sources)
    assert record["cometkiwi"] == pytest.approx(sum(scores) / len(scores), abs=1e-3)


def test_utilities_and_rewards_read_sources_without_tags(folder: Path, tmp_path: Path) -> None:
    estimate = f"cometkiwi={folder / 'kiwi'}"
    save_transformer(tmp_path / "tags.pt", tags=["<2de>"])
    (tmp_path / "source.en").write_text("<2de> All are equal before the law.\n")
    flags = ["--path", tmp_path / "tags.pt", "--input", tmp_path / "source.en", "--format", "jsonl", "--device", "cpu"]
    result = nmtkit("generate", *flags, "--max-len-a", 0, "--max-len-b", 6, "--nbest", 3, "--mbr", estimate)
    assert result.exit_code == 0, result.output
    hypotheses = json.loads(result.stdout)["hypotheses"]
    texts, source = [each["text"] for each in hypotheses], "All are equal before the law."
    scores = segment_metric(estimate).scores(texts, sources=[source] * 3)
    assert [each["utility"] for each in hypotheses] == pytest.approx(scores, abs=1e-3)
    _, tokenizer = from_checkpoint(tmp_path / "tags.pt")
    entry = CRITERIONS["expected_reward"]
    criterion = entry.factory(replace(entry.preset, reward=estimate), tokenizer).train()
    candidates = [[ids.tolist()[:-1] for ids in tokenizer.encode_target(texts).split()]]
    tagged_source = tokenizer.encode_source([f"<2de> {source}"])
    rewards, _ = criterion.rewards(candidates, tagged_source, [[5]], torch.device("cpu"))
    assert rewards.tolist() == pytest.approx([score / 100 for score in scores], abs=1e-5)
