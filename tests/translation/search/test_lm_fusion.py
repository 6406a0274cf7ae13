"""Shallow fusion with a language model: against exhaustive search, in every search, in Python and by the command."""

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import save_ending_transformer, save_tiny_transformer, tiny_tokenizer, tiny_transformer
from click.testing import CliRunner

import nmtkit
from nmtkit.cli import main
from nmtkit.contracts import check_logits_processor
from nmtkit.data import checkpoint_file
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.models.building import from_checkpoint, to_checkpoint, vocabulary_of
from nmtkit.translation.search.decoding import beam_search
from nmtkit.translation.search.logits_processors.second_model import LMFusion
from nmtkit.translation.search.options import SearchOptions

SOURCES = [[3, 5, 4, EOS], [6, EOS], [5, 5, 3, 6, EOS]]
LENGTH, WORDS, WEIGHT = 3, range(3, 7), 0.7


def fusion(weight: float = WEIGHT) -> LMFusion:
    """A processor with a tiny language model of seven tokens, without a checkpoint."""
    result = LMFusion.__new__(LMFusion)
    result.path, result.flag, result.weight, result.device = Path("lm.pt"), "--lm", weight, None
    result.model = tiny_transformer(7, encoder_layers=0, sharpness=6.0, seed=5).requires_grad_(False)
    return result


def exhaustive(source: list[int]) -> dict[tuple[int, ...], float]:
    """Returns log p(y | x) + WEIGHT log p_lm(y) of every output of at most LENGTH words, each by two full passes."""
    translator, lm = tiny_transformer(7, sharpness=6.0, seed=3), fusion().model
    scores = {}
    with torch.no_grad():
        for length in range(LENGTH + 1):
            for words in itertools.product(WORDS, repeat=length):
                inputs, tokens = Packed.from_lists([[BOS, *words]]), torch.tensor([*words, EOS])
                total = 0.0
                for model, weight, read in ((translator, 1.0, source), (lm, WEIGHT, [EOS])):
                    logits = model.output_projection(model(Packed.from_lists([read]), inputs)).double()
                    total += weight * float(logits.log_softmax(1)[torch.arange(length + 1), tokens].sum())
                scores[words] = total
    return scores


def search(sources: list[list[int]], processor: LMFusion, **settings: Any) -> list[list[Any]]:
    options = SearchOptions(lenpen=0, max_len_a=0, max_len_b=LENGTH, **settings)
    model = tiny_transformer(7, sharpness=6.0, seed=3)
    return beam_search([model], Packed.from_lists(sources), options, processors=[processor])


@pytest.mark.slow
def test_a_wide_beam_finds_the_best_outputs_of_the_fused_scores() -> None:
    found = search(SOURCES, fusion(), beam=64, nbest=3)
    for source, hypotheses in zip(SOURCES, found, strict=True):
        scores = exhaustive(source)
        best = sorted(scores, key=lambda ids: -scores[ids])[:3]
        assert [tuple(hypothesis.tokens) for hypothesis in hypotheses] == best
        assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx([scores[ids] for ids in best], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"beam": 2}, {"beam": 1}, {"sampling": True, "nbest": 3}], ids=str)
def test_a_sentence_has_the_same_outputs_alone_and_in_a_batch(settings: dict[str, Any]) -> None:
    processor = fusion()
    together = search(SOURCES, processor, **settings)
    if "sampling" not in settings:  # the seed of a sample is the index of its sentence
        for source, hypotheses in zip(SOURCES, together, strict=True):
            ((alone, *_),) = search([source], processor, **settings)
            assert alone.tokens == hypotheses[0].tokens
            assert alone.score == pytest.approx(hypotheses[0].score, abs=1e-4)
    for source, hypotheses in zip(SOURCES, together, strict=True):
        scores = exhaustive(source)
        for each in hypotheses:
            assert each.score == pytest.approx(scores[tuple(each.tokens)], abs=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fusion")
    _, tokenizer = from_checkpoint(save_ending_transformer(folder / "model.pt"))
    lm = tiny_transformer(vocabulary_of(tokenizer), encoder_layers=0, sharpness=4.0)
    contents = to_checkpoint(lm, "transformer_lm_tiny", lm.config, tokenizer, [], 1)
    checkpoint_file.save(folder / "lm.pt", contents)
    save_tiny_transformer(folder / "other.pt", tiny_tokenizer(), encoder_layers=0)
    return folder


def generate(folder: Path, *arguments: str, input: str = "all human beings are born free\n") -> Any:
    base = ["generate", "--path", str(folder / "model.pt"), "--beam", "2", "--max-len-a", "0", "--max-len-b", "8"]
    return CliRunner().invoke(main, [*base, *arguments], input=input)


def test_the_command_and_python_search_with_the_language_model(folder: Path) -> None:
    chosen = ["--logits-processors", "lm_fusion", "--lm", str(folder / "lm.pt"), "--lm-weight", "2"]
    result = generate(folder, *chosen)
    assert result.exit_code == 0, result.output
    assert result.stdout != generate(folder).stdout
    model = nmtkit.load(folder / "model.pt", device="cpu")
    settings: dict[str, Any] = {"beam": 2, "max_len_a": 0, "max_len_b": 8, "logits_processors": ["lm_fusion"]}
    line = "all human beings are born free"
    assert model.translate(line, lm=folder / "lm.pt", lm_weight=2, **settings) + "\n" == result.stdout
    line = "All are equal before the law."
    (best,) = model.translate(line, nbest=1, lm=folder / "lm.pt", lm_weight=0.5, lenpen=0, **settings).hypotheses
    lm = nmtkit.load(folder / "lm.pt", device="cpu")
    fused = model.score(line, best.text) + 0.5 * lm.score("", best.text)
    assert best.score == pytest.approx(fused, abs=1e-3) and math.isfinite(fused)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "lm_fusion needs --lm FILE"),
        (["--lm", "{folder}/model.pt"], "not a language model"),
        (["--lm", "{folder}/other.pt"], "other target pieces than"),
        (["--lm", "{folder}/lm.pt", "--lm-weight", "-1"], "--lm-weight is -1.0"),
    ],
    ids=["missing", "translation model", "vocabulary", "weight"],
)
def test_a_wrong_language_model_is_refused(folder: Path, arguments: list[str], message: str) -> None:
    words = [argument.format(folder=folder) for argument in arguments]
    result = generate(folder, "--logits-processors", "lm_fusion", *words)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())


def test_a_language_model_without_its_processor_is_an_error(folder: Path) -> None:
    result = generate(folder, "--lm", str(folder / "lm.pt"))
    message = "--lm does nothing without --logits-processors lm_fusion"
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.output


@pytest.mark.slow
def test_processors_belong_to_the_second_step_of_a_pivot(folder: Path) -> None:
    model, lm = str(folder / "model.pt"), ["--logits-processors", "lm_fusion", "--lm", str(folder / "lm.pt")]
    lm += ["--lm-weight", "2"]
    steps = generate(folder, "--pivot", "en", "--pivot-path", model, "--format", "jsonl", *lm)
    assert steps.exit_code == 0, steps.output
    record = json.loads(steps.stdout)
    first = generate(folder).stdout.rstrip("\n")
    assert record["pivot"] == first != generate(folder, *lm).stdout.rstrip("\n")
    assert record["hypotheses"][0]["text"] + "\n" == generate(folder, *lm, input=first + "\n").stdout


def test_the_contract_of_processors_holds(folder: Path) -> None:
    _, tokenizer = from_checkpoint(folder / "lm.pt")
    check_logits_processor("lm_fusion", tokenizer, lm=str(folder / "lm.pt"), lm_weight=0.3)


@pytest.mark.slow
def test_shards_belong_to_the_contents_of_the_language_model(folder: Path, tmp_path: Path) -> None:
    def job(weight: str = "0.5") -> Any:
        flags = ["--logits-processors", "lm_fusion", "--lm", str(lm), "--lm-weight", weight]
        return generate(folder, *flags, "--input", str(text), "--output-dir", str(tmp_path / "shards"))

    lm, text = tmp_path / "lm.pt", tmp_path / "text"
    text.write_text("all human beings are born free\n")
    shutil.copy(folder / "model.pt", lm)
    assert "not a language model" in " ".join(job().stderr.split())
    shutil.copy(folder / "lm.pt", lm)
    assert job().exit_code == 0, "the mistake above left a plan"
    assert "--lm-weight" in job("0.25").stderr
    lm.rename(tmp_path / "moved.pt")
    lm = tmp_path / "moved.pt"
    assert job().exit_code == 0, "contents count, not names"
    _, tokenizer = from_checkpoint(folder / "lm.pt")
    other = tiny_transformer(vocabulary_of(tokenizer), encoder_layers=0, sharpness=2.0)
    checkpoint_file.save(lm, to_checkpoint(other, "transformer_lm_tiny", other.config, tokenizer, [], 1))
    result = job()
    assert result.exit_code == 2 and "--lm" in result.stderr and "SHA-256" in result.stderr
