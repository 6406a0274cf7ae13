"""--finetune-from accepts a model with other settings only if the weights of the checkpoint keep their meaning."""

import dataclasses
import logging
import typing
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TINY_CONFIGS, save_tiny_transformer, tiny_model, tiny_tokenizer, tiny_transformer
from torch import Tensor

from nmtkit.config import derive, field_types
from nmtkit.data import checkpoint_file
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models.architectures import ARCHITECTURES, Architecture
from nmtkit.models.building import build, to_checkpoint, vocabulary_of
from nmtkit.training.initial_weights import start_from

TOKENIZER = tiny_tokenizer()
SOURCE = Packed.from_lists([[40 + i for i in range(9)] + [2], [60, 61, 2]], "cpu")
TARGET = Packed.from_lists([[1] + [70 + i for i in range(9)], [1, 90, 91]], "cpu")


def checkpoint_of(path: Path, architecture: str, **config: Any) -> Path:
    model = tiny_model(architecture, vocabulary_of(TOKENIZER), **config)
    with torch.no_grad():  # no norm is still 1, and no bias 0
        for parameter in dict.fromkeys(model.parameters()):
            parameter += 0.2 * torch.randn_like(parameter)
    settings = derive(ARCHITECTURES[architecture].preset, TINY_CONFIGS[architecture] | config, "test")
    checkpoint_file.save(path, to_checkpoint(model, architecture, settings, TOKENIZER, [], 1))
    return path


def started(path: Path, architecture: str, *, partial: bool = False, **config: Any) -> Architecture:
    settings = derive(ARCHITECTURES[architecture].preset, TINY_CONFIGS[architecture] | config, "test")
    model = build(architecture, settings, vocabulary_of(TOKENIZER)).eval()
    start_from(model, architecture, settings, TOKENIZER, path, partial=partial)
    return model


def output(model: Architecture) -> Tensor:
    with torch.no_grad():
        return model.output_projection(model(SOURCE, TARGET))


def other_values(hint: Any, value: Any) -> list[Any]:
    """Returns values of a field's type other than `value`."""
    if isinstance(value, bool):
        return [not value]
    if typing.get_origin(hint) is typing.Literal:
        return [choice for choice in typing.get_args(hint) if choice != value]
    if isinstance(value, tuple):
        return [(1, *value[1:]), (1, 1)]
    if isinstance(value, float):
        return [value / 2 + 0.01]
    return [1, 2, 8] if value is None else [number for number in (value // 2, value + 1, value * 2) if number != value]


# one architecture for each type of config: student_tiny has the fields of transformer_tiny
NAMES = {type(ARCHITECTURES[name].preset): name for name in sorted(TINY_CONFIGS)}.values()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name.startswith("transformer") else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_a_setting_that_changes_the_output_is_refused_or_declared(name: str, tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path / "old.pt", name)
    preset = derive(ARCHITECTURES[name].preset, TINY_CONFIGS[name], "test")
    weights = checkpoint_file.read(path)["model"]
    expected = output(started(path, name))
    accepted = set()
    for field, hint in field_types(type(preset)).items():
        declared = next(it for it in dataclasses.fields(preset) if it.name == field).metadata["finetuning"]
        for value in other_values(hint, getattr(preset, field)):
            try:
                changed = tiny_model(name, vocabulary_of(TOKENIZER), **{field: value})
            except ValueError:  # not allowed with the other settings
                continue
            state = changed.state_dict()
            loads = state.keys() == weights.keys() and all(state[key].shape == weights[key].shape for key in state)
            if loads:
                changed.load_state_dict(weights)
            same = loads and torch.equal(output(changed), expected)
            try:
                model = started(path, name, **{field: value})
            except ValueError as error:
                assert not same or declared == "refused", (field, value)
                assert "--finetune-partial" in str(error)
            else:
                assert same or declared == "adapts", (field, value)
                assert declared == "adapts" or torch.equal(output(model), expected)
                accepted.add(field)
    assert "dropout" in accepted or "dropout" not in field_types(type(preset))


@pytest.mark.parametrize(
    ("old", "new", "facts"),
    [
        ({}, {"heads": 4}, ["--heads 2", "4"]),
        ({}, {"scale_embeddings": False, "heads": 4}, ["--scale-embeddings on", "off", "--heads 2"]),
        ({"decoder_layers": 3}, {"decoder_layers": 1}, ["--decoder-layers 3", "1"]),
        ({"positions": "learned"}, {"positions": "sinusoidal"}, ["parameters", "positions"]),
        ({"tie_output": False}, {}, ["one matrix", "output_projection.weight"]),
        ({"share_embeddings": False}, {}, ["one matrix", "target_embedding.tokens.weight"]),
    ],
)
def test_a_refusal_names_both_values(
    old: dict[str, Any], new: dict[str, Any], facts: list[str], tmp_path: Path
) -> None:
    path = checkpoint_of(tmp_path / "old.pt", "transformer_tiny", **old)
    with pytest.raises(ValueError, match="--finetune-partial") as error:
        started(path, "transformer_tiny", **new)
    assert all(fact in str(error.value) for fact in facts)
    assert str(path) in str(error.value)


SEPARATE = Tokenizer(TOKENIZER.source_model, train_model(["cats and dogs run in the park"], 300))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"tie_output": False}),
        ({}, {"share_embeddings": False}),
        ({"encoder_layers": 2, "encoder_tied_layers": (1, 1)}, {"encoder_layers": 2}),
        ({"decoder_tied_layers": (1, 1)}, {}),
    ],
)
def test_shared_matrices_may_become_two(old: dict[str, Any], new: dict[str, Any], tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path / "old.pt", "transformer_tiny", **old)
    assert torch.equal(
        output(started(path, "transformer_tiny", **new)), output(started(path, "transformer_tiny", **old))
    )


@pytest.mark.parametrize("tokenizers", list(permutations([TOKENIZER, SEPARATE])), ids=["to separate", "to joint"])
@pytest.mark.parametrize(
    ("old", "new"),
    [({"tie_output": False}, {}), ({}, {"decoder_tied_layers": (1, 1)})],
    ids=["output", "layers"],
)
def test_two_matrices_may_not_become_one_when_the_vocabularies_do(
    old: dict[str, Any], new: dict[str, Any], tokenizers: tuple[Tokenizer, Tokenizer], tmp_path: Path
) -> None:
    path = save_tiny_transformer(tmp_path / "old.pt", tokenizers[0], **old)
    model = tiny_transformer(vocabulary_of(tokenizers[1]), **new)
    with pytest.raises(ValueError, match="one matrix"):
        start_from(model, "transformer_tiny", model.config, tokenizers[1], path)


def test_settings_to_which_training_adapts_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoint_of(tmp_path / "old.pt", "transformer_tiny", output_bias=True)
    with caplog.at_level(logging.WARNING, "nmtkit"):
        started(path, "transformer_tiny", output_bias=False, positions="sinusoidal_fairseq")
    (said,) = caplog.messages
    for fact in (
        "--positions sinusoidal, here sinusoidal_fairseq",
        "--output-bias on, here off",
        "output_projection.bias",
    ):
        assert fact in said


def test_a_partial_start_says_both_remainders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoint_of(tmp_path / "old.pt", "transformer_tiny", decoder_layers=2, output_bias=True)
    with caplog.at_level(logging.INFO, "nmtkit"):
        started(path, "transformer_tiny", partial=True, decoder_layers=1, heads=4)
    said = "\n".join(caplog.messages)
    for fact in ("--heads 2, here 4", "--decoder-layers 2, here 1", "left out: decoder.1"):
        assert fact in said


def test_a_partial_start_says_which_matrices_become_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoint_of(tmp_path / "old.pt", "transformer_tiny")
    with caplog.at_level(logging.WARNING, "nmtkit"):
        started(path, "transformer_tiny", partial=True, decoder_tied_layers=(1, 1))
    assert "decoder.1.self_attention" in "\n".join(caplog.messages)
