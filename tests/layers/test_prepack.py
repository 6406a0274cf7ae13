"""Packed linear layers against plain ones."""

import pytest
import torch
from torch import nn

from nmtkit.layers.prepack import Fp16Linear, Int8Linear, PrepackedLinear, prepack, prepacked_linear, round_up_rows


def plain_int8(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Whole numbers, multiplied in float64."""
    scale = linear.weight.abs().amax(1) / 127
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


@pytest.mark.parametrize("inputs", [128, 2048])
def test_int8_is_the_same_by_either_engine(inputs):
    torch.manual_seed(1)
    with torch.no_grad():
        layer, x = Int8Linear(nn.Linear(inputs, 65)), torch.randn(60, inputs) * torch.rand(60, 1)
        x[0] = torch.arange(inputs) * 127 / inputs  # halves among them, which are rounded to even numbers
        found = layer(x)
        assert layer.few is not None
        layer.few = None
        assert torch.equal(layer(x), found)


def test_small_layers_multiply_fp16_weights_in_fp32_alike_for_any_rows():
    torch.manual_seed(1)
    linear, x = nn.Linear(128, 100), torch.randn(60, 128)
    with torch.no_grad():
        layer = prepacked_linear(linear, "int8")
        assert isinstance(layer, Fp16Linear)
        found = layer(x)
        expected = x.double() @ linear.weight.half().double().T + linear.bias.double()
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(layer(x.view(3, 20, 128)), found.view(3, 20, 100))
        for row in (0, 7, 59):
            assert torch.equal(layer(x[row : row + 1])[0], found[row])


def test_weights_beyond_fp16_or_without_its_kernel_become_bf16(monkeypatch):
    monkeypatch.setattr("nmtkit.layers.prepack.multiplies_in_bf16", lambda: True)
    linear = nn.Linear(8, 8)
    with torch.no_grad():
        linear.weight[0, 0] = 1e5
        assert isinstance(prepacked_linear(linear, "bf16"), PrepackedLinear)
        monkeypatch.setattr("nmtkit.layers.prepack._fp16_linear", None)
        assert isinstance(prepacked_linear(nn.Linear(8, 8), "bf16"), PrepackedLinear)


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


@pytest.mark.parametrize("has_bf16", [True, False])
def test_int8_is_for_layers_where_it_pays(has_bf16, monkeypatch):
    monkeypatch.setattr("nmtkit.layers.prepack.multiplies_in_bf16", lambda: has_bf16)
    model = nn.Sequential(nn.Linear(512, 8), nn.Linear(256, 300), nn.Linear(16, 4096), nn.Linear(256, 256))
    with torch.no_grad():
        prepack(model, "int8")
    assert isinstance(model[0], Int8Linear) and isinstance(model[2], Int8Linear)
    assert isinstance(model[1], PrepackedLinear if has_bf16 else Int8Linear)
    assert isinstance(model[3], Fp16Linear)


def test_numbers_of_rows_come_in_few_kinds():
    kinds = {round_up_rows(rows) for rows in range(1, 1025)}
    assert all(round_up_rows(rows) >= rows for rows in range(1, 1025)) and len(kinds) == 8 + 31
