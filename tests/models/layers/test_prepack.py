"""Prepacked linear layers equal plain layers, and other modules stay unchanged."""

import logging
import random
import subprocess
import sys
import warnings

import pytest
import torch
from builders import tiny_transformer
from torch import nn
from torch.nn.utils import parametrizations

from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.models.layers.prepack import (
    InferenceLinear,
    Int8Linear,
    PrepackedLinear,
    largest_int8_weight,
    prepack,
    prepacked_linear,
)


def plain_int8(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Returns the product of whole numbers in float64."""
    mantissa, exponent = torch.frexp(linear.weight.abs().amax(1) / largest_int8_weight())
    scale = torch.ldexp((mantissa * 2**17).round(), exponent - 17)  # 17 significant bits
    weight = (linear.weight / scale[:, None]).round().double()
    largest = x.abs().amax(1, keepdim=True)
    whole = (x * (127 / largest)).round().double()
    bias = 0 if linear.bias is None else linear.bias.double()
    return (whole @ weight.T) * (largest / 127).double() * scale.double() + bias


@pytest.mark.parametrize("bias", [True, False])
def test_int8_equals_its_definition(bias):
    torch.manual_seed(1)
    linear, x = nn.Linear(70, 33, bias=bias), torch.randn(9, 70)
    with torch.no_grad():
        torch.testing.assert_close(Int8Linear(linear)(x).double(), plain_int8(linear, x), rtol=1e-5, atol=1e-5)


def test_int8_of_a_row_does_not_depend_on_other_rows():
    torch.manual_seed(1)
    with torch.no_grad():
        layer, x = Int8Linear(nn.Linear(64, 50)), torch.randn(300, 64)
        x[7] *= 1000
        together = layer(x)
        for row in (0, 7, 299):
            assert torch.equal(layer(x[row : row + 1])[0], together[row])


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 1e-4], ids=["batch", "noise"])
def test_int8_of_a_sentence_differs_in_a_batch_only_where_an_input_is_rounded_to_another_integer(monkeypatch, noise):
    """In a batch, attention adds in another order (1e-7), which may move an input of an int8 layer across a half.

    For each row of each layer, equal inputs give equal outputs. Other outputs differ by at most the weights of the
    inputs that became other integers, times the step of the row. Noise in the embeddings makes such inputs frequent.
    """
    calls = []

    def recorded(self, x):
        y = product(self, x)
        calls.append((self, x.clone(), y.clone()))
        return y

    product = Int8Linear.product
    monkeypatch.setattr(Int8Linear, "product", recorded)
    model = tiny_transformer(60, d_model=512, d_ff=512, heads=4, encoder_layers=2, decoder_layers=1)
    prepack(model, "int8")
    draw = random.Random(3)
    sentences = [[*(draw.randrange(3, 60) for _ in range(draw.randint(1, 15))), EOS] for _ in range(12)]

    def layers_of(chosen):
        calls.clear()
        with torch.inference_mode():
            inputs = Packed.from_lists([[BOS, *ids[:-1]] for ids in chosen])
            model.output_projection(model(Packed.from_lists(chosen), inputs))
        return list(calls)

    def integers(x):
        largest = x.abs().amax(1, keepdim=True)
        return torch.add(torch.tensor(128.0), x / largest, alpha=127).round(), largest

    batch, first, changed_integers, equal_rows = layers_of(sentences), 0, 0, 0
    with torch.no_grad():
        for embedding in {module for module in model.modules() if isinstance(module, nn.Embedding)}:
            embedding.weight *= 1 + noise * torch.randn_like(embedding.weight)
    for ids in sentences:
        rows = slice(first, first + len(ids))
        first += len(ids)
        for (layer, x, y), (_, x_batch, y_batch) in zip(layers_of([ids]), batch, strict=True):
            x_batch, y_batch = x_batch[rows], y_batch[rows]
            (whole, largest), (whole_batch, largest_batch) = integers(x), integers(x_batch)
            changed = (whole - whole_batch).abs()
            scaled = (largest - largest_batch).abs() / largest + 2e-6  # by rows' scales and by fp32
            bound = changed @ layer.weight.abs().T * largest / 127 + scaled * y.abs().amax(1, keepdim=True) * 2
            assert ((y - y_batch).abs() <= bound).all()
            same = (x == x_batch).all(1)
            assert torch.equal(y[same], y_batch[same])
            changed_integers, equal_rows = changed_integers + int(changed.sum()), equal_rows + int(same.sum())
    assert changed_integers > 0 if noise else equal_rows > 100


def test_prepacked_modules_keep_their_names_and_kinds():
    model = nn.Sequential(nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 8), nn.ReLU()))
    with torch.no_grad():
        x = torch.randn(3, 16)
        expected = model(x)
        prepack(model, "fp32")
        torch.testing.assert_close(model(x), expected)
    assert isinstance(model, nn.Sequential) and isinstance(model[0], nn.LayerNorm)
    assert type(model[1]).__name__ == "Sequential"


def test_int8_of_zeros_is_the_bias():
    linear = nn.Linear(16, 8)
    with torch.no_grad():
        torch.testing.assert_close(Int8Linear(linear)(torch.zeros(2, 16)), linear.bias.expand(2, -1))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2), ("int8", 3e-2)])
def test_packing_changes_results_no_more_than_its_precision(precision, tolerance):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(512, 160), nn.ReLU(), nn.Sequential(nn.Linear(160, 32, bias=False)))
    x = torch.randn(5, 3, 512)
    with torch.no_grad():
        expected = model(x)
        prepack(model, precision)
        found = model(x)
    assert isinstance(model[0], Int8Linear if precision == "int8" else PrepackedLinear)
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert (found - expected).abs().max() < tolerance * expected.abs().max()


def test_int8_is_for_layers_where_it_pays():
    model = nn.Sequential(nn.Linear(512, 8), nn.Linear(256, 300), nn.Linear(16, 4096))
    with torch.no_grad():
        prepack(model, "int8")
    assert isinstance(model[0], Int8Linear) and isinstance(model[2], Int8Linear)
    assert isinstance(model[1], PrepackedLinear)
    assert model[1].dtype == torch.float32


def test_weights_of_7_bits_are_for_processors_whose_sums_saturate(monkeypatch):
    largest_int8_weight.cache_clear()
    monkeypatch.setattr(Int8Linear, "product", lambda layer, x: torch.full((len(x), layer.out_features), 300.0))
    assert largest_int8_weight() == 63
    monkeypatch.undo()
    largest_int8_weight.cache_clear()
    torch.manual_seed(1)
    linear, x = nn.Linear(512, 512), torch.randn(64, 512)
    with torch.no_grad():
        for limit in (63, None):
            errors = Int8Linear(linear, limit)(x) - linear(x)
            assert errors.abs().max() < 0.02 * linear(x).abs().max()  # 0.2 where pairs of products saturate


WITHOUT_KERNELS = """
import types, torch
torch.ops.mkldnn = types.SimpleNamespace()
torch.backends.mkldnn.is_available = lambda: False
torch.backends.quantized = types.SimpleNamespace(supported_engines=["qnnpack"])
from nmtkit.models.layers.prepack import prepack
for precision in ("fp32", "bf16", "int8"):
    model, x = torch.nn.Sequential(torch.nn.Linear(512, 160)), torch.randn(70, 512)
    with torch.no_grad():
        expected = model(x)
        prepack(model, precision)
        assert torch.equal(model(x), expected), precision
"""


@pytest.mark.slow
def test_a_torch_without_onednn_and_fbgemm_keeps_plain_layers():
    done = subprocess.run([sys.executable, "-c", WITHOUT_KERNELS], capture_output=True, text=True)
    assert done.returncode == 0 and "no products in int8" in done.stderr, done.stderr


# --- modules that prepacking must leave as they are -------------------------------------------------------------------


def doubling_hook(module, inputs, output):
    return 2 * output


def doubling_pre_hook(module, inputs):
    return 2 * inputs[0]


def replaced_forward(linear):
    linear.forward = lambda x: 3 * nn.Linear.forward(linear, x)
    return linear


def with_hook(register):
    def build(linear):
        register(linear)
        return linear

    return build


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class ReadsWeight(nn.Module):
    """A module of a plug-in that multiplies by the weight of its child instead of calling the child."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return x @ self.linear.weight.t() + self.linear.bias


def old_weight_norm(linear):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(linear)


MODULES = {
    "forward hook": with_hook(lambda linear: linear.register_forward_hook(doubling_hook)),
    "forward pre-hook": with_hook(lambda linear: linear.register_forward_pre_hook(doubling_pre_hook)),
    "hook of the parent": lambda linear: with_hook(lambda module: module.register_forward_hook(doubling_hook))(
        nn.Sequential(linear, nn.ReLU())
    ),
    "weight_norm": old_weight_norm,
    "parametrization": parametrizations.weight_norm,
    "subclass": lambda linear: Doubled(linear.in_features, linear.out_features),
    "replaced forward": replaced_forward,
    "parent that reads the weight": ReadsWeight,
    "nn.TransformerEncoderLayer": lambda linear: nn.TransformerEncoderLayer(24, 4, 48, batch_first=True),
    "nn.MultiheadAttention in a module": lambda linear: nn.TransformerDecoderLayer(24, 4, 48).self_attn.out_proj,
}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_with_code_of_its_own_computes_the_same_after_prepacking(name, precision):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(24, 24), MODULES[name](nn.Linear(24, 24)), nn.LayerNorm(24)).eval()
    x = torch.randn(2, 5, 24)
    with torch.no_grad():
        expected = model(x)
        prepack(model, precision)
        torch.testing.assert_close(model(x), expected, rtol=0.02, atol=0.02 if precision != "fp32" else 1e-5)
    assert isinstance(model[0], InferenceLinear)


def test_hooks_registered_after_prepacking_are_called():
    model = nn.Sequential(nn.Linear(24, 24), nn.Sequential(nn.LayerNorm(24)))
    calls = []
    with torch.inference_mode():
        prepack(model, "fp32")
        for module in (model[0], model[1], model[1][0]):
            module.register_forward_hook(lambda module, inputs, output: calls.append(type(module).__name__))
            module.register_forward_pre_hook(lambda module, inputs: calls.append("before"))
        model(torch.randn(3, 24))
    assert calls == ["before", "PrepackedLinear", "before", "before", "LayerNorm", "Sequential"]


def test_layers_that_two_parents_share_are_packed_once():
    linear = nn.Linear(24, 24)
    model = nn.Sequential(nn.Sequential(linear), nn.Sequential(linear, linear))
    x = torch.randn(3, 24)
    with torch.no_grad():
        expected = model(x)
        prepack(model, "fp32")
        torch.testing.assert_close(model(x), expected)
    assert model[0][0] is model[1][0] is model[1][1] and isinstance(model[0][0], InferenceLinear)


@pytest.mark.parametrize(("precision", "size"), [("fp32", 300), ("bf16", 300), ("int8", 512), ("int8", 100)])
def test_the_weight_of_a_prepacked_layer_is_what_it_multiplies_by(precision, size):
    torch.manual_seed(1)
    with torch.inference_mode():
        layer = prepacked_linear(nn.Linear(size, 90, bias=False), precision)
        x = torch.eye(size)
        torch.testing.assert_close(layer(x).t(), layer.weight, rtol=1e-2, atol=1e-6)
        assert layer.weight.shape == (layer.out_features, layer.in_features) == (90, size)


def test_gradients_through_a_prepacked_model_raise_an_error():
    model = nn.Sequential(nn.Embedding(5, 24), nn.Linear(24, 24))
    with torch.inference_mode():
        prepack(model, "fp32")
    result = model(torch.tensor([1, 2]))  # the forward pass alone works with gradients enabled
    with pytest.raises(RuntimeError, match="trainable=True"):
        result.sum().backward()


def test_an_embedding_that_both_sides_share_is_not_taken_for_a_changed_module(caplog):
    model = tiny_transformer()
    assert model.source_embedding.tokens is model.target_embedding.tokens
    with caplog.at_level(logging.INFO, logger="nmtkit"):
        prepack(model, "fp32")
    assert "compute in fp32" not in caplog.text
