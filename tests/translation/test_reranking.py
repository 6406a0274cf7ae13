"""Noisy-channel reranking: `nmtkit rerank`, against scores of the models that are asked one text at a time."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from builders import save_ending_transformer, save_transformer, tiny_transformer
from click.testing import CliRunner

import nmtkit
from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.models import checkpoint
from nmtkit.models.building import from_checkpoint, to_checkpoint, vocabulary_of
from nmtkit.translation.reranking import NBest, RerankingWeights, read_nbest, tune

LINES = ["all human beings are born free", "", "everyone has the right to life"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rerank")
    _, tokenizer = from_checkpoint(save_ending_transformer(folder / "model.pt"))
    for name, layers, seed in (("back", 1, 2), ("lm", 0, 3)):
        model = tiny_transformer(vocabulary_of(tokenizer), encoder_layers=layers, seed=seed, sharpness=3.0)
        contents = to_checkpoint(model, "transformer_tiny", model.config, tokenizer, [], 1)
        checkpoint_file.save(folder / f"{name}.pt", contents)
    search = ["--beam", "4", "--nbest", "4", "--max-len-a", "0", "--max-len-b", "6", "--format", "jsonl"]
    result = CliRunner().invoke(
        main, ["generate", "--path", str(folder / "model.pt"), *search], input="\n".join(LINES) + "\n"
    )
    assert result.exit_code == 0, result.output
    (folder / "nbest.jsonl").write_text(result.stdout)
    return folder


def rerank(folder: Path, *arguments: str, file: str = "nbest.jsonl") -> Any:
    words = [word.format(folder=folder) for word in arguments]
    return CliRunner().invoke(main, ["rerank", str(folder / file), *words])


MODELS = ["--backward", "{folder}/back.pt", "--lm", "{folder}/lm.pt"]


@pytest.mark.slow
def test_scores_are_sums_of_the_models_that_are_asked_one_text_at_a_time(folder: Path) -> None:
    settings = ["--weight-backward", "0.7", "--weight-lm", "0.2", "--lenpen", "0.5"]
    result = rerank(folder, *MODELS, *settings, "--format", "jsonl")
    assert result.exit_code == 0, result.output
    model, back, lm = (nmtkit.load(folder / f"{name}.pt", device="cpu") for name in ("model", "back", "lm"))
    orders = []
    for line, written in zip(LINES, result.stdout.splitlines(), strict=True):
        hypotheses = json.loads(written)["hypotheses"]
        assert [each["score"] for each in hypotheses] == sorted((each["score"] for each in hypotheses), reverse=True)
        for each in hypotheses:
            text = each["text"]
            total = each["log_probability"] + 0.7 * back.score(text, line) + 0.2 * lm.score("", text)
            penalty = ((5 + len(each["pieces"]) + 1) / 6) ** 0.5
            assert each["score"] == pytest.approx(total / penalty, abs=2e-3)
            if line:
                assert each["log_probability"] == pytest.approx(model.score(line, text), abs=0.5)
        orders.append([each["text"] for each in hypotheses])
    chosen = rerank(folder, *MODELS, *settings).stdout.splitlines()
    assert chosen == [texts[0] for texts in orders]
    before = [json.loads(line)["hypotheses"][0]["text"] for line in (folder / "nbest.jsonl").read_text().splitlines()]
    assert chosen != before


def test_a_hypothesis_that_is_too_long_for_a_model_comes_last(folder: Path) -> None:
    """With 4 positions, the language model reads 3 pieces and eos."""
    _, tokenizer = from_checkpoint(folder / "model.pt")
    short = tiny_transformer(vocabulary_of(tokenizer), encoder_layers=0, seed=3, positions="learned", max_positions=4)
    checkpoint_file.save(folder / "short.pt", to_checkpoint(short, "transformer_tiny", short.config, tokenizer, [], 1))
    result = rerank(folder, "--lm", "{folder}/short.pt", "--format", "jsonl")
    assert result.exit_code == 0, result.output
    lengths = []
    for line in result.stdout.splitlines():
        pieces = [(each["lm_log_probability"] is None, len(each["pieces"])) for each in json.loads(line)["hypotheses"]]
        assert all(none == (length > 3) for none, length in pieces) and pieces == sorted(
            pieces, key=lambda pair: pair[0]
        )
        lengths += [length for _, length in pieces]
    too_long = sum(length > 3 for length in lengths)
    assert 0 < too_long < len(lengths) and f"{too_long} hypotheses are too long" in " ".join(result.stderr.split())


@pytest.mark.parametrize("limit", [{}, {"positions": "learned", "max_positions": 4}])
def test_a_text_that_no_model_can_read_is_an_error(folder: Path, limit: dict[str, Any]) -> None:
    """With limited positions, such a text counted as too long."""
    _, tokenizer = from_checkpoint(folder / "model.pt")
    model = tiny_transformer(vocabulary_of(tokenizer), encoder_layers=0, seed=3, **limit)
    checkpoint_file.save(folder / "other.pt", to_checkpoint(model, "transformer_tiny", model.config, tokenizer, [], 1))
    hypotheses = [{"text": text, "log_probability": -1.0, "pieces": ["x"]} for text in ("all", "a\ud800")]
    (folder / "half.jsonl").write_text(json.dumps({"id": 0, "source": "all", "hypotheses": hypotheses}) + "\n")
    result = rerank(folder, "--lm", "{folder}/other.pt", file="half.jsonl")
    assert result.exit_code == 2 and "line 2" in result.output and "U+D800" in result.output


def test_the_source_of_a_translation_through_a_third_language_is_the_text_in_that_language(folder: Path) -> None:
    records = [json.loads(line) for line in (folder / "nbest.jsonl").read_text().splitlines()]
    pivoted = [record | {"source": "alle Menschen", "pivot": record["source"]} for record in records]
    (folder / "pivoted.jsonl").write_text("".join(json.dumps(record) + "\n" for record in pivoted))
    expected = rerank(folder, *MODELS)
    assert expected.exit_code == 0 and rerank(folder, *MODELS, file="pivoted.jsonl").stdout == expected.stdout
    assert [each.source for each in read_nbest(map(json.dumps, pivoted), "pivoted")] == LINES


def test_the_backward_model_writes_sources_without_tags(tmp_path: Path) -> None:
    save_transformer(tmp_path / "back.pt", tags=["<2de>"])
    hypotheses = [{"text": "all are equal", "log_probability": -1.0, "pieces": ["x"]}]
    found = []
    for source in ("all", "<2de> all"):
        (tmp_path / "nbest.jsonl").write_text(json.dumps({"source": source, "hypotheses": hypotheses}) + "\n")
        result = rerank(tmp_path, "--backward", "{folder}/back.pt", "--format", "jsonl")
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout)["hypotheses"])
    assert found[0] == found[1]


def test_log_probabilities_in_the_file_are_used_again(folder: Path) -> None:
    first = rerank(folder, *MODELS, "--format", "jsonl")
    (folder / "scored.jsonl").write_text(first.stdout)
    again = rerank(folder, file="scored.jsonl")
    assert again.exit_code == 0, again.output
    assert again.stdout == rerank(folder, *MODELS).stdout
    alone = rerank(folder, "--lenpen", "0.6")
    assert (
        alone.stdout.splitlines()[0]
        == json.loads((folder / "nbest.jsonl").read_text().splitlines()[0])["hypotheses"][0]["text"]
    )


def listed(*hypotheses: tuple[str, float, float, float]) -> NBest:
    fields = "text", "log_probability", "backward_log_probability", "lm_log_probability"
    return NBest(
        {"source": "x", "hypotheses": [dict(zip(fields, each, strict=True)) | {"pieces": ["a"]} for each in hypotheses]}
    )


def test_tuning_finds_weights_that_choose_the_references() -> None:
    lists = [listed(("bad", -1, -9, -1), ("good", -2, -1, -5)), listed(("worse", -3, -5, -1), ("fine", -3, -4, -1.5))]

    def right(texts: list[str]) -> float:
        return sum(text in ("good", "fine") for text in texts)

    weights, highest, first = tune(lists, right, RerankingWeights(0.0, 1.0, 0.0), 50, 1)
    assert (first, highest) == (0, 2)
    # good beats bad iff 8 b > 1 + 4 l, and fine beats worse iff b > 0.5 l
    assert 8 * weights.backward > 1 + 4 * weights.lm and weights.backward > 0.5 * weights.lm
    assert tune(lists, right, weights, 50, 1)[0] == weights


def test_the_command_tunes_and_names_the_next_command(folder: Path) -> None:
    lines = (folder / "nbest.jsonl").read_text().splitlines()
    texts = [[each["text"] for each in json.loads(line)["hypotheses"]] for line in lines]
    (folder / "valid.de").write_text("\n".join(rows[-1] for rows in texts) + "\n")
    result = rerank(folder, *MODELS, "--tune", "{folder}/valid.de", "--metric", "chrf", "--trials", "20")
    assert result.exit_code == 0, result.output
    assert "nmtkit rerank test.jsonl --backward" in result.stderr.replace("\n", " ")
    assert re.search(r"--weight-backward \S+ --weight-lm \S+ --lenpen \S+ > test.out", result.stderr.replace("\n", " "))
    alone = rerank(folder, "--tune", "{folder}/valid.de", "--trials", "2").stderr.replace("\n", " ")
    assert re.search(r"nmtkit rerank test.jsonl --lenpen \S+ > test.out", alone)
    (folder / "valid.tsv").write_text("".join(f"a source\t{rows[-1]}\n" for rows in texts))
    corpus = rerank(folder, "--tune", "{folder}/valid.tsv", "--trials", "2").stderr.replace("\n", " ")
    assert corpus == alone  # whole lines of a corpus were the references
    alone = rerank(folder, "--tune", "{folder}/valid.de", "--trials", "2", "-t", "de", "--format", "jsonl")
    (command,) = re.findall(r"next: nmtkit rerank test.jsonl (.*) > test.out", alone.stderr)
    again = rerank(folder, *command.split())  # --target-lang was in the command, which needs a model for it
    assert again.exit_code == 0 and len(again.stdout.splitlines()) == len(LINES), again.stderr
    before, after = (float(part.split()[0]) for part in result.stderr.removeprefix("chrf ").split(", ")[:2])
    assert after >= before


def test_a_log_probability_of_null_is_the_worst() -> None:
    nbest = listed(("never", -1, -1, -1), ("often", -9, -9, -9))
    nbest.hypotheses[0]["backward_log_probability"] = None
    record = nbest.reranked(RerankingWeights(1.0, 0.0, 0.0))
    assert [each["text"] for each in record["hypotheses"]] == ["often", "never"]
    nbest.hypotheses[0]["errors"] = nbest.hypotheses[1]["errors"] = None
    assert all(
        nbest.score(each, RerankingWeights(0.0, 0.0, 0.0, {"errors": -1.0})) == -math.inf for each in nbest.hypotheses
    )
    assert record["hypotheses"][1]["score"] is None and not math.isnan(record["hypotheses"][0]["score"])


@pytest.mark.parametrize("number", [math.nan, math.inf, "-1.5"])
def test_numbers_that_cannot_be_compared_are_refused(number: float | str) -> None:
    for name in ("log_probability", "backward_log_probability"):
        hypothesis = {"text": "a", "log_probability": -1.0, "pieces": ["a"], name: number}
        with pytest.raises(ValueError, match="list:1 "):
            read_nbest([json.dumps({"source": "x", "hypotheses": [hypothesis]})], "list")
    nbest = listed(("a", -1, -1, -1))
    nbest.hypotheses[0]["estimate"] = number
    with pytest.raises(ValueError, match="--feature estimate"):
        nbest.check_features(["estimate"], "list:1")


def test_a_feature_of_the_hypotheses_is_added_after_the_length_penalty(folder: Path) -> None:
    records = [json.loads(line) for line in (folder / "nbest.jsonl").read_text().splitlines()]
    for record in records:
        for rank, each in enumerate(record["hypotheses"]):
            each["estimate"] = rank / 10
    (folder / "estimated.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["--lenpen", "0.5", "--feature", "estimate=30", "--format", "jsonl"]
    result = rerank(folder, *words, file="estimated.jsonl")
    assert result.exit_code == 0, result.output
    for record, line in zip(records, result.stdout.splitlines(), strict=True):
        first = json.loads(line)["hypotheses"][0]
        expected = {
            each["text"]: each["log_probability"] / ((5 + len(each["pieces"]) + 1) / 6) ** 0.5 + 30 * each["estimate"]
            for each in record["hypotheses"]
        }
        assert first["score"] == pytest.approx(max(expected.values()), abs=1e-4)
        assert expected[first["text"]] == max(expected.values())
    references = "".join(record["hypotheses"][-1]["text"] + "\n" for record in records)
    (folder / "last.de").write_text(references)
    tuned = rerank(folder, "--feature", "estimate=0", "--tune", "{folder}/last.de", file="estimated.jsonl")
    assert tuned.exit_code == 0 and "--feature estimate=" in " ".join(tuned.stderr.split())
    negative = rerank(folder, "--feature", "estimate=-30", file="estimated.jsonl")
    assert negative.stdout.splitlines() == [record["hypotheses"][0]["text"] for record in records]


def test_tuning_keeps_the_sign_of_a_feature() -> None:
    lists = [listed(("bad", -1, -1, -1), ("good", -1.5, -1, -1))]
    for each, value in zip(lists[0].hypotheses, (1.0, 0.0), strict=True):
        each["errors"] = value
    weights, highest, first = tune(
        lists, lambda texts: float(texts == ["good"]), RerankingWeights(0.0, 0.0, 0.0, {"errors": -0.0}), 50, 1
    )
    assert (first, highest) == (0, 1) and weights.features["errors"] < -0.4


@pytest.fixture(scope="module")
def directed(folder: Path) -> Path:
    """Returns models with the languages of their datasets: a backward model, a forward model, and a language model."""
    for name, origin, languages in (
        ("de-en", "back", ["de", "en"]),
        ("en-de", "back", ["en", "de"]),
        ("lm-de", "lm", ["en", "de"]),
    ):
        contents = checkpoint.load(folder / f"{origin}.pt")
        checkpoint_file.save(folder / f"{name}.pt", contents | {"run": {"languages": languages}})
    return folder


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        (["--lm", "{folder}/lm-de.pt"], "from de into the language of the sources (--lm {folder}/lm-de.pt)"),
        (["-t", "de"], "from de into the language of the sources (--target-lang)"),
        (["-s", "en"], "from the language of the translations into en (--source-lang)"),
        (["-s", "eng_Latn", "-t", "deu"], "from deu into eng_Latn (--target-lang, --source-lang)"),
    ],
    ids=["lm", "target", "source", "both"],
)
def test_a_backward_model_of_the_forward_direction_is_refused(directed: Path, known: list[str], wanted: str) -> None:
    result = rerank(directed, "--backward", "{folder}/en-de.pt", *known)
    message = (
        f"--backward {directed}/en-de.pt translates from en into de, but a backward model must translate "
        f"{wanted.format(folder=directed)}"
    )
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.stderr
    right = rerank(directed, "--backward", "{folder}/de-en.pt", *known)
    assert right.exit_code == 0, right.output
    assert right.stdout == rerank(directed, "--backward", "{folder}/back.pt", *known[: 2 * ("--lm" in known)]).stdout


@pytest.mark.parametrize("model", ["--lm", "--backward"])
def test_lists_of_several_directions_are_refused(folder: Path, model: str) -> None:
    lists = [json.loads(line) for line in (folder / "nbest.jsonl").read_text().splitlines()]
    directions = ["en-de", "en-it", "de-en"]
    lines = [json.dumps(each | {"direction": pair}) for each, pair in zip(lists, directions, strict=True)]
    (folder / "many.jsonl").write_text("".join(f"{line}\n" for line in lines))
    result = rerank(folder, model, f"{{folder}}/{model[2:].replace('ward', '')}.pt", file="many.jsonl")
    assert result.exit_code == 2 and "de-en, en-de, en-it" in " ".join(result.stderr.split())
    assert rerank(folder, "--feature", "score=1", file="many.jsonl").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lm", "{folder}/back.pt"], "not a language model"),
        (["--backward", "{folder}/lm.pt"], "give it as --lm"),
        (["--trials", "5"], "--trials does nothing"),
        (["--tune", "{folder}/short.de"], "line counts differ"),
        (["--feature", "estimate"], "such as estimate=0.5"),
        (["--feature", "a=1,a=2"], "--feature has two"),
        (["--estimate", "cometkiwi=a,cometkiwi=b", "--feature", "cometkiwi=1"], "--estimate has two"),
        (["--feature", "score=1,text=1"], "--feature text"),
        (["--weight-lm", "0.5"], "--weight-lm has no effect"),
        (["--weight-backward", "0.5"], "give --backward FILE"),
        (
            ["--feature", "nothing=1"],
            "lacks --feature nothing",
        ),
    ],
    ids=[
        "lm",
        "backward",
        "trials",
        "references",
        "no weight",
        "twice",
        "two models",
        "text",
        "no-lm",
        "no-backward",
        "missing",
    ],
)
def test_what_cannot_be_reranked_is_said(folder: Path, arguments: list[str], message: str) -> None:
    (folder / "short.de").write_text("ein\n")
    result = rerank(folder, *arguments)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())
    with pytest.raises(ValueError, match=r"out\.de:1 .*n-best list"):
        read_nbest(["Ein Hund"], "out.de")
