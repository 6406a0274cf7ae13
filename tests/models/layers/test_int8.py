"""Weights in 8 bits: integers and scales of rows."""

import pytest
import torch
from torch import nn

from nmtkit.models.layers import int8
from nmtkit.models.layers.prepack import Int8Linear


def test_a_row_becomes_integers_and_its_largest_value_127() -> None:
    weight = torch.tensor([[0.5, -1.0, 0.25, 0.004], [0.0, 0.0, 0.0, 0.0], [254.0, 3.0, -2.0, 1.0]])
    integers, scale = int8.quantize(weight)
    # 1 / 127 is 2 ** -7 * 1.0078740; with 17 significant bits, 2 ** -23 * 66052
    assert integers.tolist() == [[64, -127, 32, 1], [0, 0, 0, 0], [127, 2, -1, 0]]
    assert scale.dtype == torch.float32
    assert [float(scale[0]) * 2**23, float(scale[2])] == [66052.0, 2.0]
    assert int8.dequantize(integers, scale)[2].tolist() == [254.0, 4.0, -2.0, 0.0]


@pytest.mark.parametrize("limit", [127, 63])
@pytest.mark.parametrize("size", [1e-37, 1e-20, 1.0, 1e20])
def test_rounding_a_second_time_changes_nothing(size: float, limit: int) -> None:
    torch.manual_seed(1)
    weight = torch.randn(4000, 3, 16) * size
    integers, scale = int8.quantize(weight, limit)
    assert scale.shape == (4000, 3) and int(integers.abs().max()) <= limit
    rounded = int8.dequantize(integers, scale)
    products = integers.double() * scale.double()[..., None]
    assert torch.equal(rounded.double(), products)  # exact in fp32
    again, same = int8.quantize(rounded, limit)
    assert torch.equal(again, integers) and torch.equal(same, scale)
    if size > 1e-30:  # the largest value of smaller rows counts as 1e-30
        assert (rounded - weight).abs().max() <= weight.abs().max() / limit / 2 * (1 + 1e-4)
        assert integers.abs().amax(-1).min() == limit


def test_an_int8_layer_has_the_integers_of_a_file() -> None:
    torch.manual_seed(2)
    plain, rounded = nn.Linear(64, 200), nn.Linear(64, 200)
    rounded.bias = plain.bias
    with torch.no_grad():
        rounded.weight.copy_(int8.dequantize(*int8.quantize(plain.weight)))
        layers = [Int8Linear(linear, limit=127) for linear in (plain, rounded)]
        x = torch.randn(40, 64)
        assert torch.equal(layers[0].weight, layers[1].weight)
        assert torch.equal(layers[0](x), layers[1](x))
        assert not torch.equal(plain.weight, rounded.weight)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (torch.zeros(3, 8), True),
        (torch.zeros(2, 3, 8), True),
        (torch.zeros(3, 7), False),
        (torch.zeros(100), False),
        (torch.zeros(3, 8, dtype=torch.int64), False),
    ],
    ids=["matrix", "three_axes", "narrow", "vector", "integers"],
)
def test_vectors_and_short_rows_stay(weight: torch.Tensor, expected: bool) -> None:
    assert int8.is_quantizable(weight) is expected
