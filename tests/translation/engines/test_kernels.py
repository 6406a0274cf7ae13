"""Kernels of the compiled engine: exact integers, and float64 up to rounding, for every shape and every processor."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

import numba

from nmtkit.translation.engines import compiled_attention as attention
from nmtkit.translation.engines import compiled_kernels as kernels
from nmtkit.translation.engines import compiled_products as products
from nmtkit.translation.engines import (
    compiled_search,  # noqa: F401  compiles the kernels
)
from nmtkit.translation.engines.compiled_vectors import LANES

SIZES = (1, 15, 16, 17, 64, 100, 515)
GENERATOR = np.random.default_rng(0)


def reals(*shape: int) -> Any:
    return GENERATOR.normal(size=shape).astype(np.float32)


@numba.njit
def linear(layers: Any, rows: int, x: Any, integers: Any, scales: Any, y: Any, floor: Any, adds: int) -> None:
    products.linear(
        layers.ctypes.data, 0, rows, x.ctypes.data, x.strides[0], integers.ctypes.data, integers.strides[0],
        scales.ctypes.data, y.ctypes.data, y.shape[1], floor, adds,
    )  # fmt: skip


def padded(x: Any, multiple: int = LANES) -> Any:
    result = np.zeros((len(x), -(-x.shape[1] // multiple) * multiple), x.dtype)
    result[:, : x.shape[1]] = x
    return result


def outputs(x: Any, weight: Any, scale: Any, bias: Any, floor: float = -np.inf, before: Any = None) -> Any:
    """Returns the outputs of a linear layer: of weights in fp32, or of integers with a scale for each output."""
    (rows, inputs), number = x.shape, len(weight)
    in_8_bits = weight.dtype == np.int8
    packed = products.packed(weight, products.INTEGERS.group if in_8_bits else 1)
    size = products.packed_size(number)
    arrays = [np.zeros(size, kind) for kind in (np.float32, np.int32, np.float32)]
    arrays[0][:number], arrays[2][:number] = scale, bias
    arrays[1][:number] = products.INTEGERS.offset * weight.astype(np.int32).sum(1) if in_8_bits else 0
    addresses = [array.ctypes.data for array in (packed, *arrays)]
    layers = np.array([[*addresses, inputs, padded(x).shape[1], size, int(in_8_bits)]])
    y = np.zeros((rows, size), np.float32) if before is None else padded(before, kernels.OUTPUTS)
    integers = np.zeros((rows, padded(x).shape[1] * products.BYTES_OF_INPUT), np.uint8)
    linear(layers, rows, padded(x), integers, np.zeros(rows, np.float32), y, np.float32(floor), before is not None)
    return y[:, :number]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 12, 23])
@pytest.mark.parametrize(("inputs", "number"), [(64, 64), (128, 384), (37, 70), (5, 3), (515, 100)])
def test_a_product_in_8_bits_is_the_exact_sum_of_integers(rows: int, inputs: int, number: int) -> None:
    """With inputs whose largest value is 127, inputs are integers and all scales are 1: the result is exact."""
    x = GENERATOR.integers(-127, 128, (rows, inputs)).astype(np.float32)
    x[:, 0] = 127
    weight = GENERATOR.integers(-127, 128, (number, inputs)).astype(np.int8)
    result = outputs(x, weight, np.ones(number, np.float32), np.zeros(number, np.float32))
    np.testing.assert_array_equal(result, x.astype(np.int64) @ weight.astype(np.int64).T)


@pytest.mark.parametrize("inputs", SIZES)
def test_rounded_inputs_have_one_scale_for_each_row(inputs: int) -> None:
    x, weight = reals(7, inputs) * np.float32([[1e-3], [1], [1e3], [0], [1], [7], [1e9]]), reals(9, inputs)
    scale = np.abs(weight).max(1) / 127
    integers, bias = np.rint(weight / scale[:, None]).astype(np.int8), reals(9)
    steps = np.maximum(np.abs(x).max(1, keepdims=True), 1e-30).astype(np.float64) / 127
    expected = np.rint(x / steps) @ integers.astype(np.float64).T * steps * scale + bias
    result = outputs(x, integers, scale, bias)
    # a number near the middle of two integers may be rounded up or down
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=2 * float((steps * scale).max()) * 127)
    np.testing.assert_allclose(result[3], bias)


@pytest.mark.parametrize(("inputs", "number"), [(64, 64), (128, 384), (37, 70), (5, 3), (515, 100)])
def test_a_product_in_fp32_equals_float64(inputs: int, number: int) -> None:
    x, weight, bias = reals(11, inputs), reals(number, inputs), reals(number)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T + bias
    np.testing.assert_allclose(outputs(x, weight, 0, bias), expected, atol=1e-4)
    np.testing.assert_allclose(outputs(x, weight, 0, bias, floor=0.0), np.maximum(expected, 0), atol=1e-4)
    before = reals(11, number)
    np.testing.assert_allclose(outputs(x, weight, 0, bias, before=before), expected + before, atol=1e-4)


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_a_row_has_the_same_outputs_alone_and_beside_other_rows(in_8_bits: bool) -> None:
    x, weight, ones = reals(23, 100), reals(70, 100), np.ones(70, np.float32)
    if in_8_bits:
        weight = np.rint(weight * 30).astype(np.int8)
    together = outputs(x, weight, ones, ones)
    for first, end in ((0, 1), (1, 3), (4, 8), (8, 14), (14, 23)):
        np.testing.assert_array_equal(outputs(x[first:end], weight, ones, ones), together[first:end])


@numba.njit
def norm(x: Any, gain: Any, bias: Any, eps: Any, y: Any) -> None:
    kernels.layer_norm(x.ctypes.data, len(x), gain.ctypes.data, bias.ctypes.data, eps, y.ctypes.data)


@pytest.mark.parametrize("size", SIZES)
def test_a_layer_norm_equals_float64(size: int) -> None:
    x, gain, bias, y = reals(size) + 3, reals(size), reals(size), np.full(size + 1, 7, np.float32)
    norm(x, gain, bias, np.float32(1e-5), y)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean()) / np.sqrt(wide.var() + 1e-5) * gain + bias
    np.testing.assert_allclose(y[:size], expected, atol=2e-5)
    assert y[size] == 7


@numba.njit
def activated(x: Any, size: int, activation: int, gated: int) -> None:
    kernels.activated(x.ctypes.data, x.shape[1], len(x), size, activation, gated)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["relu", "gelu", "swish"])
def test_activations_equal_float64(name: str, gated: bool) -> None:
    x = np.concatenate([reals(2, 200) * 3, np.float32([[0.0, -50, 50, -1e-3, 1e-3] * 40])])
    wide, size = torch.from_numpy(x.astype(np.float64)), 70
    function = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "swish": torch.nn.functional.silu}[name]
    expected = function(wide[:, :size]) * (wide[:, size : 2 * size] if gated else 1)
    result = x.copy()
    activated(result, size, {"relu": 0, "gelu": 1, "swish": 2}[name], int(gated))
    np.testing.assert_allclose(result[:, :size], expected.numpy(), rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(result[:, size:], x[:, size:])


@numba.njit
def recurrent(gates: Any, before: Any, after: Any, y: Any) -> None:
    kernels.recurrent(gates.ctypes.data, len(before), before.ctypes.data, after.ctypes.data, y.ctypes.data)


@numba.njit
def gated_sum(x: Any, average: Any, gates: Any, y: Any) -> None:
    kernels.gated_sum(x.ctypes.data, average.ctypes.data, gates.ctypes.data, len(x), y.ctypes.data)


@pytest.mark.parametrize("size", SIZES)
def test_recurrences_and_gates_equal_float64(size: int) -> None:
    gates, before, after, y = reals(2 * size) * 4, reals(size), np.full(size + 1, 7, np.float32), reals(size)
    start, wide = y.copy(), gates.astype(np.float64)
    recurrent(gates, before, after, y)
    forget = 1 / (1 + np.exp(-wide[size:]))
    state = forget * before + (1 - forget) * wide[:size]
    np.testing.assert_allclose(after[:size], state, atol=1e-5)
    np.testing.assert_allclose(y, start + np.maximum(state, 0), atol=1e-5)
    assert after[size] == 7
    x, average, y = reals(size), reals(size), start.copy()
    gated_sum(x, average, gates, y)
    np.testing.assert_allclose(y, start + x / (1 + np.exp(-wide[:size])) + forget * average, atol=1e-5)


@numba.njit
def mixture(x: Any, y: Any, normalizers: Any, result: Any) -> None:
    half, target = np.float32(0.5), result.ctypes.data
    kernels.mixed(x.ctypes.data, len(x), normalizers[0], half, target, 1)
    kernels.mixed(y.ctypes.data, len(y), normalizers[1], half, target, 0)
    kernels.logarithms(target, len(x))


@pytest.mark.parametrize("size", SIZES)
def test_a_mixture_of_two_distributions_equals_float64(size: int) -> None:
    x, y, result = reals(size) * 5, reals(size) * 5, np.zeros(size, np.float32)
    wide = torch.from_numpy(np.stack([x, y]).astype(np.float64))
    mixture(x, y, wide.logsumexp(1).float().numpy(), result)
    expected = wide.log_softmax(1).logsumexp(0) - np.log(2)
    np.testing.assert_allclose(result, expected.numpy(), rtol=2e-6, atol=2e-6)


@numba.njit(nogil=True)
def take(counter: Any, result: Any) -> None:
    for index in range(len(result)):
        result[index] = kernels.taken(counter.ctypes.data)


def test_threads_take_different_numbers() -> None:
    counter, results = np.zeros(1, np.int64), np.zeros((4, 20_000), np.int64)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda row: take(counter, row), results))
    np.testing.assert_array_equal(np.sort(results.ravel()), np.arange(results.size))


@numba.njit
def exponentials(x: Any, shift: Any, factor: Any, y: Any) -> Any:
    return kernels.exponentials(x.ctypes.data, len(x), shift, factor, y.ctypes.data)


@numba.njit
def sum_of_exponentials(x: Any, shift: Any) -> Any:
    return kernels.sum_of_exponentials(x.ctypes.data, len(x), shift)


@pytest.mark.parametrize("size", SIZES)
def test_exponentials_equal_float64(size: int) -> None:
    x, y = reals(size) * 20, np.full(size + 1, 7, np.float32)
    total = exponentials(x, x.max(), np.float32(0.5), y)
    expected = np.exp((x.astype(np.float64) - x.max()) / 2)
    np.testing.assert_allclose(y[:size], expected, rtol=1e-5, atol=1e-37)
    np.testing.assert_allclose(total, expected.sum(), rtol=3e-6)
    assert y[size] == 7
    expected = np.exp(x.astype(np.float64) - x.max())
    blocks = np.full(-(-size // kernels.OUTPUTS) * kernels.OUTPUTS, -np.inf, np.float32)
    blocks[:size] = x
    np.testing.assert_allclose(sum_of_exponentials(blocks, x.max()), expected.sum(), rtol=3e-6)


def test_a_sum_of_exponentials_with_nan_is_nan() -> None:
    x = reals(128)
    x[70] = np.nan
    assert np.isnan(sum_of_exponentials(x, np.float32(5)))


@numba.njit
def maxima(x: Any, y: Any) -> Any:
    return kernels.block_maxima(x.ctypes.data, len(x), y.ctypes.data)


def test_block_maxima_ignore_nan() -> None:
    x, y = reals(5 * kernels.OUTPUTS), np.zeros(5, np.float32)
    x[3] = np.nan
    x[kernels.OUTPUTS : 2 * kernels.OUTPUTS] = np.nan
    largest = maxima(x, y)
    assert largest == np.nanmax(x) and y[1] == -np.inf
    np.testing.assert_array_equal(y[[0, 2, 3, 4]], np.nanmax(x.reshape(5, -1)[[0, 2, 3, 4]], 1))


@numba.njit
def next_above(x: Any, first: int, end: int, limit: Any) -> int:
    return kernels.next_above(x.ctypes.data, first, end, limit)


def test_the_next_number_above_a_limit_is_found() -> None:
    x = reals(96)
    x[[20, 50]] = np.nan, -np.inf
    for first, end, limit in (
        (0, 96, 1.5),
        (3, 70, 0.9),
        (17, 18, -9.0),
        (20, 33, -9.0),
        (50, 51, -np.inf),
        (9, 9, -9.0),
    ):
        expected = next((index for index in range(first, end) if x[index] > limit), end)
        assert next_above(x, first, end, np.float32(limit)) == expected
    assert all(next_above(x, index, 96, np.float32(x[index] - 1)) == index for index in range(96) if x[index] > -9)


@numba.njit
def attend(query: Any, heads: int, memory: Any, places: Any, weights: Any, y: Any, recorded: Any) -> None:
    width = len(query) // heads
    keys = memory.ctypes.data
    attention.attended(
        query.ctypes.data, width, heads, keys, keys + 4 * len(query), places.ctypes.data, len(places), memory.shape[1],
        np.float32(0.3), weights.ctypes.data, y.ctypes.data, recorded.ctypes.data, np.float32(1 / heads),
    )  # fmt: skip


@pytest.mark.parametrize(("heads", "width"), [(1, 16), (4, 32), (3, 64), (3, 8), (2, 70)])
@pytest.mark.parametrize("count", [1, 2, 4, 5, 17, 40])
def test_attention_equals_float64(heads: int, width: int, count: int) -> None:
    size = heads * width
    query, memory, recorded = reals(size), reals(50, 2 * size), np.zeros(count + 1, np.float32)
    places, y = GENERATOR.permutation(50)[:count], np.full(size + 1, 7, np.float32)
    weights = np.zeros((heads, (-(-count // LANES) + 1) * LANES), np.float32)
    attend(query, heads, memory, places, weights, y, recorded)
    keys, values = memory[places, :size].astype(np.float64), memory[places, size:].astype(np.float64)
    mean = np.zeros(count)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        scores = np.exp(0.3 * (keys[:, part] @ query[part]))
        np.testing.assert_allclose(y[part], scores @ values[:, part] / scores.sum(), atol=1e-5)
        mean += scores / scores.sum() / heads
    np.testing.assert_allclose(recorded[:count], mean, atol=1e-6)
    assert y[size] == 7 and recorded[count] == 0
