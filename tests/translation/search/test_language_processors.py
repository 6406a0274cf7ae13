"""Logits processors of models of several languages: language tokens are given, so they count in no score."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from builders import fragments, save_ending_transformer, tiny_transformer

import nmtkit
from nmtkit.data import checkpoint_file
from nmtkit.models.building import from_checkpoint, to_checkpoint, vocabulary_of
from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS

LANGUAGES = ("en", "de", "it")
DIRECTIONS = list(itertools.permutations(LANGUAGES, 2))
WEIGHT = 0.7
BUILT_IN = ("lm_fusion", "contrastive")


def settings_of(name: str, folder: Path) -> dict[str, Any]:
    """Returns the settings of a processor for the models in `folder`. A new processor needs an entry here."""
    return {
        "lm_fusion": {"lm": folder / "lm.pt", "lm_weight": WEIGHT},
        "contrastive": {"contrast": folder / "second.pt", "contrast_weight": WEIGHT},
    }[name] | {"logits_processors": [name]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processors")
    save_ending_transformer(folder / "model.pt", languages=LANGUAGES)
    save_ending_transformer(folder / "second.pt", languages=LANGUAGES, d_ff=40)
    tokenizer = from_checkpoint(folder / "model.pt")[1]
    lm = tiny_transformer(vocabulary_of(tokenizer), encoder_layers=0, sharpness=3.0)
    checkpoint_file.save(folder / "lm.pt", to_checkpoint(lm, "transformer_lm_tiny", lm.config, tokenizer, [], 1))
    return folder


def test_every_processor_of_the_package_is_tested_here() -> None:
    own = {name for name, entry in LOGITS_PROCESSORS.entries.items() if entry.factory.__module__.startswith("nmtkit.")}
    assert own == set(BUILT_IN)


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"min_len": 5}, {"max_len_b": 2}, {}], ids=str)
@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
@pytest.mark.parametrize("name", BUILT_IN)
def test_lengths_and_penalties_count_pieces(
    folder: Path, name: str, source: str, target: str, limits: dict[str, int]
) -> None:
    options = {"max_len_a": 0.0, "max_len_b": 6, "source_lang": source, "target_lang": target} | limits
    model = nmtkit.load(folder / "model.pt", device="cpu")
    for found in model.translate(fragments()[:6], nbest=3, lenpen=1.0, **options, **settings_of(name, folder)):
        for hypothesis in found.hypotheses:
            pieces = len(hypothesis.pieces)
            assert options.get("min_len", 0) <= pieces <= options["max_len_b"]
            assert hypothesis.score == pytest.approx(hypothesis.log_probability / ((5 + pieces + 1) / 6))


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_a_fused_score_is_the_sum_of_both_scores_without_the_language_token(
    folder: Path, source: str, target: str
) -> None:
    model, lm = (nmtkit.load(folder / name, device="cpu") for name in ("model.pt", "lm.pt"))
    options = {"max_len_a": 0.0, "max_len_b": 6, "source_lang": source, "target_lang": target}
    compared = 0
    lines = fragments()[:24]
    for line, found in zip(
        lines, model.translate(lines, nbest=1, **options, **settings_of("lm_fusion", folder)), strict=True
    ):
        (hypothesis,) = found.hypotheses
        if model.tokenizer.target_pieces(model.tokenizer.encode_target([found.text]).ids[:-1]) != hypothesis.pieces:
            continue
        wanted = model.score(line, found.text, source_lang=source, target_lang=target)
        wanted += WEIGHT * lm.score("", found.text, target_lang=target)
        assert hypothesis.log_probability == pytest.approx(wanted, abs=1e-3)
        compared += 1
    assert compared > 3
