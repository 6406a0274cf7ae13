"""Hooks and code that replace the code of a model after it was loaded have their effect with every engine."""

from pathlib import Path

import pytest
import torch
from builders import fragments, save_ending_transformer

import nmtkit
from nmtkit.translation.engines import ENGINES

LINES = fragments()[:6]
SHORT = {"beam": 2, "lenpen": 0.0, "max_len_a": 0.0, "max_len_b": 6}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ending_transformer(tmp_path_factory.mktemp("model") / "model.pt")


@pytest.fixture(scope="module")
def silent(path: Path) -> list[str]:
    """Returns the translations of the model whose first layer of the encoder returns zeros, from changed weights."""
    model = nmtkit.load(path, device="cpu", trainable=True)
    for parameter in list(model.architectures[0].encoder[0].parameters()):
        parameter.data.zero_()  # the layer ends in a norm
    return model.translate(LINES, **SHORT)


@pytest.fixture(params=["auto", *ENGINES.names()])
def model(request: pytest.FixtureRequest, path: Path) -> nmtkit.Model:
    if request.param in ("numba", "ctranslate2"):
        pytest.importorskip(request.param)
    return nmtkit.load(path, engine=request.param, device="cpu")


def test_a_hook_has_its_effect_until_it_is_removed(model: nmtkit.Model, silent: list[str]) -> None:
    plain = model.translate(LINES, **SHORT)
    hook = model.architectures[0].encoder[0].register_forward_hook(lambda module, inputs, output: 0 * output)
    assert model.translate(LINES, **SHORT) == silent != plain
    hook.remove()
    assert model.translate(LINES, **SHORT) == plain


def test_a_replaced_forward_has_its_effect(model: nmtkit.Model, silent: list[str]) -> None:
    layer = model.architectures[0].encoder[0]
    layer.forward = lambda x, *context: 0 * type(layer).forward(layer, x, *context)
    assert model.translate(LINES, **SHORT) == silent


def test_a_global_hook_sees_every_call_of_a_module(model: nmtkit.Model, path: Path) -> None:
    def classes(other: nmtkit.Model) -> list[str]:
        called: list[str] = []
        handle = torch.nn.modules.module.register_module_forward_pre_hook(
            lambda module, inputs: called.append(type(module).__name__)
        )
        try:
            other.translate(LINES, **SHORT)
        finally:
            handle.remove()
        return called

    assert {"EncoderLayer", "DecoderLayer", "LayerNorm"} <= set(classes(model))


def test_a_changed_weight_has_its_effect(model: nmtkit.Model, path: Path) -> None:
    plain = model.translate(LINES, **SHORT)
    expected = nmtkit.load(path, device="cpu", trainable=True)
    for each in (model, expected):
        with torch.no_grad():
            each.architectures[0].decoder[-1].feed_forward_norm.weight.mul_(-1.0)
    assert model.translate(LINES, **SHORT) == expected.translate(LINES, **SHORT) != plain


def test_a_replaced_module_has_its_effect(model: nmtkit.Model, path: Path) -> None:
    plain = model.translate(LINES, **SHORT)
    expected = nmtkit.load(path, device="cpu", trainable=True)
    for each in (model, expected):
        each.architectures[0].decoder[-1].feed_forward_norm = torch.nn.Tanh()
    assert model.translate(LINES, **SHORT) == expected.translate(LINES, **SHORT) != plain
