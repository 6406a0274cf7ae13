"""Kernels of the compiled engine: exact integers, and float64 up to rounding, for every shape and every processor."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

import numba

from nmtkit.translation.engines import (
    compiled_code,
    compiled_search,  # noqa: F401  compiles the kernels
)
from nmtkit.translation.engines import compiled_kernels as kernels
from nmtkit.translation.engines import compiled_products as products
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
def norm(x: Any, gain: Any, bias: Any, eps: Any, y: Any) -> Any:
    return kernels.layer_norm(x.ctypes.data, len(x), gain.ctypes.data, bias.ctypes.data, eps, y.ctypes.data)


@pytest.mark.parametrize("size", SIZES)
def test_a_layer_norm_equals_float64(size: int) -> None:
    x, gain, bias, y = reals(size) + 3, reals(size), reals(size), np.full(size + 1, 7, np.float32)
    largest = norm(x, gain, bias, np.float32(1e-5), y)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean()) / np.sqrt(wide.var() + 1e-5) * gain + bias
    np.testing.assert_allclose(y[:size], expected, atol=2e-5)
    assert largest == np.abs(y[:size]).max() and y[size] == 7


@numba.njit
def exponentials(x: Any, shift: Any, y: Any) -> Any:
    return kernels.exponentials(x.ctypes.data, len(x), shift, y.ctypes.data)


@numba.njit
def sum_of_exponentials(x: Any, shift: Any) -> Any:
    return kernels.sum_of_exponentials(x.ctypes.data, len(x), shift)


@pytest.mark.parametrize("size", SIZES)
def test_exponentials_equal_float64(size: int) -> None:
    x, y = reals(size) * 20, np.full(size + 1, 7, np.float32)
    total = exponentials(x, x.max(), y)
    expected = np.exp(x.astype(np.float64) - x.max())
    np.testing.assert_allclose(y[:size], expected, rtol=1e-5, atol=1e-37)
    np.testing.assert_allclose(total, expected.sum(), rtol=3e-6)
    assert y[size] == 7
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
def attend(query: Any, heads: int, memory: Any, places: Any, weights: Any, y: Any) -> None:
    width = len(query) // heads
    keys = memory.ctypes.data
    kernels.attend(
        query.ctypes.data, width, heads, keys, keys + 4 * len(query), places.ctypes.data, len(places), memory.shape[1],
        np.float32(0.3), weights.ctypes.data, y.ctypes.data,
    )  # fmt: skip


@pytest.mark.parametrize(("heads", "width"), [(1, 16), (4, 32), (3, 8), (2, 70)])
@pytest.mark.parametrize("count", [1, 2, 17, 40])
def test_attention_equals_float64(heads: int, width: int, count: int) -> None:
    size = heads * width
    query, memory = reals(size), reals(50, 2 * size)
    places, y = GENERATOR.permutation(50)[:count], np.zeros(size, np.float32)
    attend(query, heads, memory, places, np.zeros(count, np.float32), y)
    keys, values = memory[places, :size].astype(np.float64), memory[places, size:].astype(np.float64)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        scores = np.exp(0.3 * (keys[:, part] @ query[part]))
        np.testing.assert_allclose(y[part], scores @ values[:, part] / scores.sum(), atol=1e-5)


PROCESSORS = {
    "AVX-512 without VNNI": (
        "skylake-avx512",
        "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd,+avx2,+fma,+bmi,+bmi2",
    ),
    "AVX2": ("haswell", "+avx,+avx2,+fma,+bmi,+bmi2"),
    "SSE2": ("x86-64", "+sse2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSORS)
def test_the_kernels_work_on_older_processors(name: str) -> None:
    if "vnni" not in " ".join(compiled_code.features()):
        pytest.skip("this processor lacks instructions that are tested")
    cpu, features = PROCESSORS[name]
    environment = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-m", "not slow"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_products_on_arm_use_its_instruction() -> None:
    """Reads the assembly language only: there is no such processor here."""
    script = (
        "from nmtkit.translation.engines import compiled_products as p; "
        "print(p.kernels.assembly('aarch64-unknown-linux-gnu', 'neoverse-n1', '+neon,+dotprod').count('sdot'))"
    )
    environment = os.environ | {"NUMBA_CPU_NAME": "neoverse-n1", "NUMBA_CPU_FEATURES": "+neon,+dotprod"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 20
