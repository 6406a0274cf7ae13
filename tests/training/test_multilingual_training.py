"""Training on many directions: sampled epochs, exact resume, validation by direction, translation and scores."""

import json
import logging
import re
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import log_records, tiny_transformer
from click.testing import CliRunner
from digits import digit_rows, spelled, write_digits
from sacrebleu.metrics import BLEU

from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.data.dataset.batching import BatchSampler, DirectionSampling
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.packed import IGNORE_INDEX, Packed
from nmtkit.data.tokenizers.tokenizer import BOS
from nmtkit.models import building, checkpoint
from nmtkit.training.criterions import CRITERIONS
from nmtkit.training.criterions.expected_reward import real_sentences, references
from nmtkit.training.loader import BatchLoader, Position
from nmtkit.training.metrics import Metric, Outputs
from nmtkit.training.validation import Validator

LANGUAGES = ("en", "de", "it")
TOML = """
[[corpus]]
languages = ["en", "de"]
train = "ende"

[[corpus]]
languages = ["en", "it"]
train = "enit"

[[corpus]]
languages = ["en", "de", "it"]
valid = "val"
test = "test"
directions = ["en-de", "de-en", "en-it", "it-en", "de-it"]
"""
MODEL = shlex.split("""
    --arch transformer_tiny --d-model 32 --d-ff 64 --heads 2 --encoder-layers 1 --decoder-layers 1 --dropout 0
    --precision fp32 --device cpu --threads 1 --lr 0.01 --warmup-updates 30 --batch-tokens 500 --max-tokens 500
    --validate-interval none --save-interval none
""")


def run(*words: object) -> str:
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == 0, result.output
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 1,000 pairs of en and de and 800 pairs of en and it, with a vocabulary of words."""
    folder = tmp_path_factory.mktemp("many")
    for name, count, seed, languages in (
        ("ende", 1000, 1, ("en", "de")),
        ("enit", 800, 2, ("en", "it")),
        ("val", 12, 3, LANGUAGES),
        ("test", 10, 4, LANGUAGES),
    ):
        write_digits(folder / name, digit_rows(count, seed, 3), languages)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("corpora.toml").write_text(TOML)
        run(
            "preprocess",
            "--corpora=corpora.toml",
            "--destdir=bin",
            "--model-type=word",
            "--vocab-size=36",
            "--workers=1",
        )
    return folder


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    """Returns the run of a model that was trained for a few seconds."""
    save = home / "trained"
    run("train", home / "bin", *MODEL, "--save-dir", save, "--max-update=250", "--sampling-temperature=5",
        "--metrics=accuracy,bleu", "--validate-interval-updates=250", "--valid-beam=1")  # fmt: skip
    return save


@pytest.mark.slow
def test_a_tiny_model_learns_all_trained_directions(home: Path, trained: Path) -> None:
    (record,) = log_records(trained, "valid")
    names = [f"{row['source']}-{row['target']}" for row in record["directions"]]
    assert names == ["en-de", "de-en", "en-it", "it-en", "de-it"]
    translations = (trained / "validation/update_00000250.txt").read_text().splitlines()
    for number, name in enumerate(names[:4]):
        references = [spelled(row, name[3:]) for row in digit_rows(12, 3, 3)]
        found = translations[12 * number : 12 * number + 12]
        assert sum(map(str.__eq__, found, references)) > 0.9 * 12, name
    assert [row.get("trained", True) for row in record["directions"]] == [True, True, True, True, False]
    for row in record["followed"]:
        source, target = row["direction"].split("-")
        numbers = next(each for each in digit_rows(12, 3, 3) if spelled(each, source) == row["source"])
        assert row["reference"] == spelled(numbers, target)
        assert row["translation"] in translations[12 * names.index(row["direction"]) :][:12]
    assert f"{record['followed'][0]['direction']}: " in (trained / "report.html").read_text()
    for score in ("accuracy", "bleu", "loss"):
        mean = np.mean([row[score] for row in record["directions"][:4]])
        assert record[score] == pytest.approx(mean, rel=1e-4)


def test_generate_names_all_zero_shot_directions_of_a_dataset_in_one_notice(home: Path, tmp_path: Path) -> None:
    dataset = Dataset.open(home / "bin")
    model = tiny_transformer(building.vocabulary_of(dataset.tokenizer))
    contents = building.to_checkpoint(model, "transformer_tiny", model.config, dataset.tokenizer, [], 1)
    checkpoint_file.save(tmp_path / "model.pt", contents | {"run": {"directions": [["en", "de"], ["it", "en"]]}})
    words = run("generate", home / "bin", "--gen-subset=test", "--path", tmp_path / "model.pt", "--max-len-b=2").split()
    assert words.count("(zero-shot);") == 1
    assert "de to en, en to it, de to it (zero-shot)" in " ".join(words)


# --- the epochs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [10_000, 170])
def test_an_epoch_has_each_pair_as_often_as_the_weight_of_its_direction(window: int) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 9, 2000).astype(np.int32)
    index = rng.choice(4, 2000, p=[0.5, 0.3, 0.15, 0.05]).astype(np.uint16)
    weights = np.array([0.25, 1.0, 2.5, 0.0])
    sampler = BatchSampler(lengths, lengths, 100, 7, window, sampling=DirectionSampling(index, weights))
    epochs = []
    for epoch in (1, 2):
        updates = list(sampler.epoch(epoch))
        counts = np.bincount(np.concatenate(updates), minlength=2000)
        for direction, allowed in enumerate([{0, 1}, {1}, {2, 3}, {0}]):
            assert set(counts[index == direction].tolist()) == allowed
        # four standard deviations of a mean of Bernoulli numbers
        for direction in (0, 2):
            share = counts[index == direction]
            deviation = 4 * np.sqrt(0.25 * (0.75 if direction == 0 else 1) / len(share))
            assert abs(share.mean() - weights[direction]) < deviation
        again = BatchSampler(lengths, lengths, 100, 7, window, sampling=DirectionSampling(index, weights)).epoch(
            epoch, 5
        )
        assert [update.tolist() for update in again] == [update.tolist() for update in updates[5:]]
        if window == 10_000:  # the number of updates of several windows is an estimate
            assert abs(len(updates) / sampler.updates_per_epoch - 1) < 0.05
        assert all(lengths[update].sum() <= 100 for update in updates)
        epochs.append(counts)
    assert (epochs[0] != epochs[1]).any()


def test_weights_of_one_leave_the_epochs_as_they_are() -> None:
    lengths = np.random.default_rng(0).integers(2, 9, 300).astype(np.int32)
    sampling = DirectionSampling(np.zeros(300, np.uint16), np.ones(1))
    rows = np.concatenate(list(BatchSampler(lengths, lengths, 100, 7, sampling=sampling).epoch(1)))
    assert sorted(rows.tolist()) == list(range(300))


def test_an_update_is_the_same_for_one_process_and_for_two(home: Path) -> None:
    split = Dataset.open(home / "bin")["train"]
    sampling = DirectionSampling(split.direction_index, np.array([0.5, 1.5, 2.0, 1.0, 0.0]))

    def tokens(ranks: int) -> list[Counter[tuple[int, ...]]]:
        """Returns the target sentences of all ranks in the first updates."""
        sampler = BatchSampler(split.source.lengths, split.target.lengths, 300, 1, sampling=sampling)
        updates: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(4)]
        for rank in range(ranks):
            loader = BatchLoader(split, sampler, 90, rank, ranks, torch.device("cpu"))
            stream = loader._updates(Position(2, 3))
            for found in updates:
                for _, batch in next(stream).micro_batches:
                    ends = batch.target_input.layout.lengths.cumsum(0).tolist()
                    for start, end in zip([0, *ends], ends, strict=False):
                        sentence = tuple(batch.target_output[start:end].tolist())
                        found[sentence] += int(batch.target_tokens > 0)
        return updates

    assert tokens(1) == tokens(2)
    assert sum(map(Counter.total, tokens(1))) > 100


@pytest.mark.slow
def test_a_resumed_run_equals_the_whole_run(home: Path, tmp_path: Path) -> None:
    def weights(save: Path, *ends: int) -> dict[str, torch.Tensor]:
        for end in ends:
            run("train", home / "bin", *MODEL, "--save-dir", save, "--max-update", end, "--save-interval-updates=100",
                "--sampling-temperature=3", "--sampling-weights=en-it=2,de-en=0.5")  # fmt: skip
        return checkpoint.load(save / "last.pt")["model"]

    whole, parts = weights(tmp_path / "whole", 30), weights(tmp_path / "parts", 13, 30)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    changed = CliRunner().invoke(
        main, ["train", str(home / "bin"), *MODEL, "--save-dir", str(tmp_path / "parts"), "--max-update=40",
               "--sampling-temperature=5", "--sampling-weights=en-it=2,de-en=0.5"]
    )  # fmt: skip
    assert changed.exit_code == 2
    assert "sampling temperature" in changed.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sampling-weights=en-fr=2", "direction 'en-fr'"),
        ("--sampling-weights=de-it=2", "no pairs of de-it"),
        ("--sampling-weights=en-de=0,de-en=0,en-it=0,it-en=0", "--sampling-weights en-de=0"),
        ("--sampling-weights=en-de=0.001,de-en=0,en-it=0,it-en=0", "--sampling-weights en-de=0.001"),
        ("--sampling-weights=en-de=x", "direction and a weight"),
        ("--sampling-temperature=0", "--sampling-temperature is 0.0"),
    ],
)
def test_sampling_of_unknown_or_missing_directions_is_an_error(
    home: Path, tmp_path: Path, words: str, message: str
) -> None:
    result = CliRunner().invoke(main, ["train", str(home / "bin"), *MODEL, "--save-dir", str(tmp_path / "run"), words])
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")


def test_sampling_needs_many_directions(mirror_data: Path, tmp_path: Path) -> None:
    words = ["train", str(mirror_data), *MODEL, "--save-dir", str(tmp_path / "run"), "--sampling-temperature=5"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "--sampling-temperature" in result.stderr


# --- validation -------------------------------------------------------------------------------------------------------


class Heard(Metric):
    """Records the texts and the target language of each call, which the signature names.

    The score is the number of sentences.
    """

    translates = True

    def __init__(self) -> None:
        self.outputs: list[Outputs] = []

    def score(self, outputs: Outputs) -> float:
        self.outputs.append(outputs)
        self.signature = f"into {outputs.target_lang}"
        return len(outputs.hypotheses)


def test_scores_of_a_validation_are_means_over_the_trained_directions(home: Path, trained: Path) -> None:
    split = Dataset.open(home / "bin")["valid"]
    model, _ = building.from_checkpoint(trained / "last.pt")
    criterion = CRITERIONS["label_smoothed_cross_entropy"].factory(
        CRITERIONS["label_smoothed_cross_entropy"].preset, split.tokenizer
    )
    heard = Heard()

    def validator(part: Any, **more: Any) -> Validator:
        return Validator(part, 100, torch.device("cpu"), "fp32", {"heard": heard}, beam=1, **more)

    whole = validator(split.first_rows(7), averaged=split.directions[:4])
    scores = whole.scores(model, criterion)
    assert scores is not None
    assert [outputs.target_lang for outputs in heard.outputs] == ["de", "en", "it", "en", "it"]
    for number, (direction, outputs) in enumerate(zip(split.directions, heard.outputs, strict=True)):
        rows = digit_rows(12, 3, 3)[:7]
        assert outputs.sources == [spelled(row, direction.source) for row in rows]
        assert outputs.references == [spelled(row, direction.target) for row in rows]
        record = whole.by_direction[number]
        assert (record["source"], record["target"], record["sentences"]) == (direction.source, direction.target, 7)
        # the loss of the direction from a plain pass over its rows
        batch = split.batch(split.rows_of(number)[:7])
        loss = criterion(model, batch)
        assert record["loss"] == pytest.approx(float(loss.sum.detach()) / batch.target_tokens, rel=1e-4)
    assert whole.signatures == {"heard": "en-de: into de; de-en, it-en: into en; en-it: into it"}
    losses = [record["loss"] for record in whole.by_direction[:4]]
    assert scores["loss"] == pytest.approx(sum(losses) / 4)
    assert scores["ppl"] == pytest.approx(np.exp(np.mean([record["nll"] for record in whole.by_direction[:4]])))


def test_the_checkpoint_the_log_and_the_pages_have_the_directions(home: Path, trained: Path) -> None:
    contents = checkpoint.load(trained / "last.pt")
    directions = [("en", "de"), ("de", "en"), ("en", "it"), ("it", "en")]
    assert building.directions_of(contents) == set(directions)
    assert "en-de, de-en, en-it, it-en" in run("inspect", trained / "last.pt")
    shown = run("inspect", home / "bin", "--all")
    assert re.search(r"valid 12, test 10, train 1,000\n", shown)
    assert re.search(r"valid 12, test 10, train 0\n", shown)
    page = (trained / "report.html").read_text()
    assert "after update 250" in page
    matrix = page[page.index("BLEU by direction") :]
    assert re.findall(r"<th>(\w+)</th>", matrix)[:6] == ["de", "en", "it", "en", "de", "it"]
    (record,) = log_records(trained, "valid")
    bleu = {f"{row['source']}-{row['target']}": row["bleu"] for row in record["directions"]}
    cells = re.findall(r"</span>([\d.]+\*?)</td>|<td></td>", matrix)[:9]
    expected = ["en-de", None, "en-it", None, "de-en", "de-it", None, "it-en", None]
    assert cells == ["" if name is None else f"{bleu[name]:.1f}{'*' * (name == 'de-it')}" for name in expected]


@pytest.mark.slow
def test_a_fine_tuned_model_knows_the_directions_of_its_base(home: Path, trained: Path, tmp_path: Path) -> None:
    base, one = trained / "last.pt", tmp_path / "one.toml"
    one.write_text(f'[[corpus]]\nlanguages = ["de", "it"]\ntrain = "{home}/val"\ndirections = ["de-it"]\n')
    run("preprocess", f"--corpora={one}", f"--tokenizer-from={base}", f"--destdir={tmp_path}/bin", "--workers=1")
    words = ["train", tmp_path / "bin", "--finetune-from", base, "--save-dir", tmp_path / "run", "--device=cpu"]
    said = run(*words, "--max-update=1")  # without a valid set
    assert f"\ncurves: {tmp_path}/run/report.html\n" in said
    assert said.endswith("--source-lang de --target-lang it < source.txt\n")
    contents = checkpoint.load(tmp_path / "run/last.pt")
    known = {("en", "de"), ("de", "en"), ("en", "it"), ("it", "en")}
    assert building.directions_of(contents) == {("de", "it"), *known}
    (tmp_path / "in.txt").write_text("un\n")
    for source, target, warned in (("en", "de", False), ("it", "de", True)):
        said = run("generate", "--path", tmp_path / "run/last.pt", "--source-lang", source, "--target-lang", target,
                   "--input", tmp_path / "in.txt", "--output", tmp_path / "out.txt", "--max-len-b=3")  # fmt: skip
        assert ("it to de" in said) is warned


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, set()),
        ({"directions": [["en", "de"]]}, {("en", "de")}),
        ({"directions": [["en", "de"]], "base_directions": []}, set()),
        ({"directions": [["en", "de"]], "base_directions": [["it", "en"]]}, {("en", "de"), ("it", "en")}),
        ({"languages": ["en", "de"], "base_directions": [["it", "en"]]}, {("en", "de"), ("it", "en")}),
    ],
    ids=["imported", "trained", "imported-tuned", "tuned", "tuned-on-one"],
)
def test_directions_of_a_model_include_the_base_and_are_unknown_if_those_of_the_base_are(
    facts: dict[str, Any], expected: set[tuple[str, str]]
) -> None:
    contents: Any = {"run": facts}
    assert building.directions_of(contents) == expected


# --- the loss of language tokens --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uncounted(home: Path, trained: Path) -> Path:
    """The dataset of `home`, whose language tokens the loss does not count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        run("preprocess", "--corpora=corpora.toml", "--tokenizer-from=bin", "--destdir=uncounted",
            "--no-language-token-loss", "--workers=1")  # fmt: skip
    return home / "uncounted"


def test_language_tokens_are_read_but_not_counted(home: Path, uncounted: Path) -> None:
    plain, split = (Dataset.open(folder)["valid"] for folder in (home / "bin", uncounted))
    rows = np.array([0, 14, 59])
    before, after = plain.batch(rows), split.batch(rows)
    assert torch.equal(before.target_input.values, after.target_input.values)
    starts = after.target_input.layout.cu_seqlens[:-1].long()
    languages = plain.tokenizer.languages.values()
    assert set(before.target_output[starts].tolist()) <= set(languages)
    assert after.target_output[starts].tolist() == [IGNORE_INDEX] * 3
    rest = torch.ones(len(before.target_output), dtype=torch.bool).index_fill(0, starts, False)
    assert torch.equal(before.target_output[rest], after.target_output[rest])
    assert after.target_tokens == before.target_tokens - 3 == split.counted_tokens(rows)
    assert split.select(rows).counted_tokens() == after.target_tokens
    # expected_reward compares with the whole translations
    assert real_sentences(after).tolist() == [0, 1, 2]
    expected = [ids[1:].tolist() for ids in before.target_input.with_values(before.target_output).split()]
    assert references(after, torch.arange(3)) == expected


@pytest.mark.parametrize("origin", ["sample", "nbest"])
@pytest.mark.parametrize("counted", [True, False])
def test_candidates_of_expected_reward_are_in_the_language_of_their_target(
    home: Path, uncounted: Path, origin: str, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = Dataset.open(home / "bin" if counted else uncounted)["valid"]
    model = tiny_transformer(building.vocabulary_of(split.tokenizer)).train()  # knows nothing about languages
    entry = CRITERIONS["expected_reward"]
    settings = {"candidates": origin, "candidates_per_sentence": 4, "candidate_extra": 0}
    criterion = entry.factory(replace(entry.preset, **settings), split.tokenizer).train()
    drawn: list[list[list[list[int]]]] = []
    candidates = criterion.candidates

    def record(*arguments: Any) -> Any:
        drawn.append(candidates(*arguments))
        return drawn[-1]

    monkeypatch.setattr(criterion, "candidates", record)
    rows = np.array([0, 14, 29, 41, 59])
    criterion(model, split.batch(rows)).sum.backward()
    (groups,) = drawn
    for row, group in zip(rows.tolist(), groups, strict=True):
        assert {tokens[0] for tokens in group} == {split.target.sentence(row)[0]}
        pieces = len(split.source.sentence(row)) - 2  # without the language token and eos
        assert len(group) == 4 and all(len(tokens) - 1 <= pieces for tokens in group)


@pytest.mark.slow
def test_loss_perplexity_and_accuracy_leave_out_uncounted_tokens(trained: Path, uncounted: Path) -> None:
    save = uncounted.parent / "uncounted_run"
    run("train", uncounted, "--finetune-from", trained / "last.pt", "--save-dir", save, "--max-update=1", "--lr=1e-9",
        "--validate-first", "--metrics=accuracy", "--criterion=cross_entropy", "--batch-tokens=500",
        "--precision=fp32", "--device=cpu")  # fmt: skip
    first = log_records(save, "valid")[0]
    model, tokenizer = building.from_checkpoint(trained / "last.pt")
    split = Dataset.open(uncounted)["valid"]
    for number, row in enumerate(first["directions"]):
        nll = correct = tokens = 0.0
        for index in split.rows_of(number).tolist():
            target = split.target.sentence(index)
            assert target[0] == tokenizer.languages[row["target"]]
            with torch.no_grad():
                memory = model.eval().encode(Packed.from_lists([split.source.sentence(index)]))
                features = model.decode(memory, Packed.from_lists([[BOS, *target[:-1]]]))
                rows = model.output_projection(features).double().log_softmax(-1)[1:]  # without the language token
            nll -= float(rows[range(len(rows)), target[1:]].sum())
            correct += float((rows.argmax(-1) == torch.tensor(target[1:])).sum())
            tokens += len(rows)
        assert row["nll"] == pytest.approx(nll / tokens, rel=1e-4)
        assert row["accuracy"] == pytest.approx(100 * correct / tokens)
    assert first["loss"] == pytest.approx(np.mean([row["nll"] for row in first["directions"][:4]]), rel=1e-4)


def test_the_loss_of_an_update_is_divided_by_the_counted_tokens(uncounted: Path) -> None:
    split = Dataset.open(uncounted)["train"]
    sampler = BatchSampler(split.source.lengths, split.target.lengths, 500, 1)
    loader = BatchLoader(split, sampler, 100, 0, 1, torch.device("cpu"))
    update = loader.update(Position(1, 0), next(sampler.epoch(1)), ends_epoch=False)
    counted = sum(int((batch.target_output != IGNORE_INDEX).sum()) for _, batch in update.micro_batches)
    assert len(update.micro_batches) > 1
    assert update.target_tokens == counted == sum(batch.target_tokens for _, batch in update.micro_batches)


def test_the_flag_needs_language_tokens_on_the_target_side(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    pair = ["preprocess", "-s", "en", "-t", "de", "--trainpref", home / "ende", "--destdir", tmp_path / "bin"]
    many = ["preprocess", "--corpora", home / "corpora.toml", "--destdir", tmp_path / "bin", "--model-type=word",
            "--vocab-size=36", "--language-tokens=target-on-source"]  # fmt: skip
    for words, message in (
        (pair, "--no-language-token-loss does nothing without --corpora or --target-language-token"),
        (many, "--no-language-token-loss has no effect, because the language tokens of this tokenizer are on the"),
    ):
        result = CliRunner().invoke(main, [*map(str, words), "--no-language-token-loss"])
        assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.stderr


# --- use of the dataset -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_generate_and_score_work_on_each_direction(
    home: Path, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    model, output = trained / "last.pt", tmp_path / "out.txt"
    run("generate", home / "bin", "--gen-subset=test", "--path", model, "--beam=2", "--output", output, "--device=cpu")
    lines = output.read_text().splitlines()
    assert len(lines) == 50
    rows = digit_rows(10, 4, 3)
    names = ["en-de", "de-en", "en-it", "it-en", "de-it"]
    expected = {}
    for number, name in enumerate(names):
        source, target = name.split("-")
        (tmp_path / "in.txt").write_text("".join(spelled(row, source) + "\n" for row in rows))
        alone = tmp_path / "alone.txt"
        run("generate", "--path", model, "--source-lang", source, "--target-lang", target, "--beam=2", "--device=cpu",
            "--input", tmp_path / "in.txt", "--output", alone)  # fmt: skip
        hypotheses = lines[10 * number : 10 * number + 10]
        assert alone.read_text().splitlines() == hypotheses
        references = [spelled(row, target) for row in rows]
        expected[name] = BLEU().corpus_score(hypotheses, [references]).score
    words = ["score", "--data", home / "bin", "--gen-subset=test", "--sys", output, "--metric=bleu"]
    shown = json.loads(run(*words, "--format=json"))
    found = {row["direction"]: row["scores"][0]["score"] for row in shown["directions"]}
    assert found == pytest.approx(expected)
    assert [row.get("trained", True) for row in shown["directions"]] == [True] * 4 + [False]
    mean = np.mean([expected[name] for name in names[:4]])
    assert shown["average"]["BLEU"] == pytest.approx(mean)
    table = run(*words).splitlines()
    signatures = [line for line in run(*words, "--metric=bleu,chrf").splitlines() if "nrefs:" in line]
    assert [line.index("nrefs:") for line in signatures] == [7, 7]  # in one column: the longest name is chrF2
    assert table[1].split() == ["en-de", "10", f"{expected['en-de']:.1f}"]
    assert table[6].split() == ["average", f"{mean:.1f}"]


def test_generate_with_fields_and_jsonl_counts_lines_over_all_directions(
    home: Path, trained: Path, tmp_path: Path
) -> None:
    output, prefix = tmp_path / "out.jsonl", tmp_path / "prefix.txt"
    names = ["de", "en", "it", "en", "it"]
    prefix.write_text("".join(spelled([7], language) + "\n" for language in names for _ in range(10)))
    run("generate", home / "bin", "--gen-subset=test", "--path", trained / "last.pt", "--format=jsonl", "--beam=1",
        "--prefix", prefix, "--output", output, "--device=cpu")  # fmt: skip
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["id"] for record in records] == list(range(50))
    assert [record["direction"].partition("-")[2] for record in records[::10]] == names
    starts = [record["hypotheses"][0]["text"].split()[0] for record in records]
    assert starts == prefix.read_text().split()
    prefix.write_text("seven\n" * 51)
    words = ["generate", home / "bin", "--gen-subset=test", "--path", trained / "last.pt", "--device=cpu"]
    result = CliRunner().invoke(main, [*map(str, words), "--prefix", str(prefix)])
    assert result.exit_code == 2
    assert "more lines than" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gen-subset train", "sorted by direction"),
        ("--source-lang en --target-lang de", "--source-lang en"),
        ("--pivot en --target-lang de", "--pivot does not translate"),
    ],
)
def test_generate_refuses_what_has_no_single_direction(home: Path, trained: Path, words: str, message: str) -> None:
    command = ["generate", str(home / "bin"), "--path", str(trained / "last.pt"), "--device=cpu", *words.split()]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert message in result.stderr


def test_score_of_one_direction_is_asked_for_where_it_matters(home: Path, tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("x\n" * 50)
    for more in ("--sentence-level", "--target-lang=de"):
        words = ["score", "--data", str(home / "bin"), "--gen-subset=test", "--sys", str(tmp_path / "out.txt"), more]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 2
        assert "--data has many directions" in result.stderr


def test_the_next_command_names_the_languages_if_the_dataset_has_no_subset_to_translate(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    (tmp_path / "corpora.toml").write_text('[[corpus]]\nlanguages = ["en", "it"]\ntrain = "enit"')
    run("preprocess", "--corpora", tmp_path / "corpora.toml", "--destdir", tmp_path / "bin", "--tokenizer-from", "bin",
        "--workers=1")  # fmt: skip
    shown = run("train", tmp_path / "bin", *MODEL, "--save-dir", tmp_path / "run", "--max-update=1")
    expected = f"nmtkit generate --path {tmp_path / 'run/last.pt'} --source-lang en --target-lang it < source.txt"
    assert f"next: {expected}\n" in shown
