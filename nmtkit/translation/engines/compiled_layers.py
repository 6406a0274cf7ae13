"""Layers compiled by Numba, for searches over a few rows on a CPU.

An operation of torch takes several microseconds for a few rows, whatever its size. One step of a small Transformer has
almost a hundred operations. A compiled function has no such costs. Needs the package numba.

Weights of one kind are stacked over the layers of a stack, so that a function selects a layer by its index. Weights are
in fp32, or integers of 8 bits with a scale for each output (`int8.quantize`). The inputs of an 8-bit product become
integers of 14 bits, with one scale for each row. Sums of these products are exact in 32 bits.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from nmtkit.config.files import cache_folder
from nmtkit.translation.engines.compiled_int8 import LANES, sums_of_products

# L layers of a stack, T rows, I inputs, O outputs, D model width, H heads, S keys

Array = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])
RELAXED = {"reassoc", "contract", "nsz", "arcp"}  # infinities and NaN keep their meaning
INPUT_LIMIT = np.float32(8191)  # largest absolute value of an input of an 8-bit product
LOG2_E = np.float32(1.4426950408889634)
sums_4_2, sums_1_4 = sums_of_products(4, 2), sums_of_products(1, 4)
SMALLEST = np.float32(1e-30)
# Coefficients of a polynomial for 2 ** x on [0, 1), lowest power first, with a relative error below 2e-7. They come
# from a Chebyshev interpolation.
COEFFICIENTS = np.polynomial.Chebyshev.interpolate(np.exp2, 6, (0.0, 1.0)).convert(kind=np.polynomial.Polynomial).coef
C0, C1, C2, C3, C4, C5, C6 = COEFFICIENTS.astype(np.float32)


class Linear(NamedTuple):
    """Linear layers of a stack: y = x W^T + b."""

    weight: Array  # L O I, fp32 or int8
    scale: Array  # L O, fp32: scales of integers; L 0 for weights in fp32
    bias: Array  # L O


class Norm(NamedTuple):
    """Layer norms of a stack."""

    gain: Array  # L D
    bias: Array  # L D


class Space(NamedTuple):
    """Memory for the numbers of a softmax. Both arrays have the same size."""

    numbers: Array  # fp32
    bits: Array  # int32


def compiled(function: F) -> F:
    """Compiles a function at its first call for a combination of types. Keeps the machine code in files."""
    return with_machine_code(function, RELAXED)


def compiled_without_nan(function: F) -> F:
    """Does the same as `compiled` for a function whose result for NaN does not matter."""
    return with_machine_code(function, RELAXED | {"nnan"})


def with_machine_code(function: F, relaxed: set[str]) -> F:
    """Compiles a function like `numba.njit`, and keeps its machine code in a folder for this version of the sources.

    With one folder for all versions, Numba would use old machine code after a change in a file with a called function.
    `relaxed` are the rules of IEEE 754 that the machine code may break (flags of LLVM).
    """
    config: Any = numba.config
    usual = config.CACHE_DIR  # not empty if the user has set NUMBA_CACHE_DIR
    config.CACHE_DIR = str(Path(usual or cache_folder()) / f"numba-{fingerprint()}")
    try:
        return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=relaxed)(function))
    finally:
        config.CACHE_DIR = usual


@functools.cache
def fingerprint() -> str:
    """Returns a digest of the source files of all compiled functions of nmtkit. Their names begin with `compiled`."""
    sources = sorted(Path(__file__).parents[1].glob("*/compiled*.py"))
    return hashlib.blake2b(b"".join(path.read_bytes() for path in sources), digest_size=8).hexdigest()


# --- products -------------------------------------------------------------------------------------------------------


@compiled
def linear(x: Array, rows: int, layer: Linear, index: int, y: Array) -> None:
    """Writes the outputs of layer `index` for the first `rows` rows of x [T, I] to y [T, O]."""
    weight, bias = layer.weight[index], layer.bias[index]
    if layer.scale.shape[1]:
        product_int8(x, rows, weight, layer.scale[index], bias, y)
    else:
        product(x, rows, weight, bias, y)


@compiled
def product(x: Array, rows: int, weight: Array, bias: Array, y: Array) -> None:
    """Writes x W^T + b to y. Four rows and two outputs at a time share the loads of their operands."""
    outputs, inputs = weight.shape
    row = 0
    while row + 4 <= rows:
        x0, x1, x2, x3 = x[row], x[row + 1], x[row + 2], x[row + 3]
        for output in range(0, outputs - 1, 2):
            u, v = weight[output], weight[output + 1]
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
            for i in range(inputs):
                a0 += x0[i] * u[i]
                a1 += x1[i] * u[i]
                a2 += x2[i] * u[i]
                a3 += x3[i] * u[i]
                b0 += x0[i] * v[i]
                b1 += x1[i] * v[i]
                b2 += x2[i] * v[i]
                b3 += x3[i] * v[i]
            c, d = bias[output], bias[output + 1]
            y[row, output], y[row, output + 1] = a0 + c, b0 + d
            y[row + 1, output], y[row + 1, output + 1] = a1 + c, b1 + d
            y[row + 2, output], y[row + 2, output + 1] = a2 + c, b2 + d
            y[row + 3, output], y[row + 3, output + 1] = a3 + c, b3 + d
        if outputs % 2:
            for r in range(row, row + 4):
                y[r, outputs - 1] = dot(x[r], weight[outputs - 1]) + bias[outputs - 1]
        row += 4
    for r in range(row, rows):
        for output in range(outputs):
            y[r, output] = dot(x[r], weight[output]) + bias[output]


@compiled
def dot(x: Array, y: Array) -> Any:
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * y[i]
    return total


@compiled
def product_int8(x: Array, rows: int, weight: Array, scale: Array, bias: Array, y: Array) -> None:
    """Writes x W^T + b to y, where W are integers times a scale for each output."""
    outputs, inputs = weight.shape
    rounded = np.empty((rows, inputs), np.int16)
    steps = np.empty(rows, np.float32)  # scales of the rounded inputs
    for row in range(rows):
        largest = max(largest_size(x[row]), SMALLEST)
        factor = INPUT_LIMIT / largest
        for i in range(inputs):
            rounded[row, i] = np.int16(np.rint(x[row, i] * factor))
        steps[row] = largest / INPUT_LIMIT
    row = done = 0  # outputs before `done` are computed in blocks
    if inputs % LANES == 0:
        x_address, address = rounded.ctypes.data, weight.ctypes.data
        while row + 4 <= rows:
            for output in range(0, outputs - 1, 2):
                sums = sums_4_2(x_address + 2 * row * inputs, address + output * inputs, inputs)
                for i in range(4):
                    for j in range(2):
                        factor = steps[row + i] * scale[output + j]
                        y[row + i, output + j] = np.float32(sums[2 * i + j]) * factor + bias[output + j]
            if outputs % 2:
                for r in range(row, row + 4):
                    total = dot_int8(rounded[r], weight[outputs - 1])
                    y[r, outputs - 1] = total * (steps[r] * scale[outputs - 1]) + bias[outputs - 1]
            row += 4
        done = outputs - outputs % 4
        for r in range(row, rows):
            for output in range(0, done, 4):
                sums = sums_1_4(x_address + 2 * r * inputs, address + output * inputs, inputs)
                for i in range(4):
                    y[r, output + i] = np.float32(sums[i]) * (steps[r] * scale[output + i]) + bias[output + i]
    for r in range(row, rows):
        for output in range(done, outputs):
            y[r, output] = dot_int8(rounded[r], weight[output]) * (steps[r] * scale[output]) + bias[output]


@compiled
def dot_int8(x: Array, y: Array) -> Any:
    total = np.int32(0)
    for i in range(x.shape[0]):
        total = np.int32(total + np.int32(x[i]) * np.int32(y[i]))  # without the conversion, Numba adds in 64 bits
    return np.float32(total)


# --- functions of rows ----------------------------------------------------------------------------------------------


@compiled
def layer_norm(x: Array, rows: int, norm: Norm, index: int, eps: Any, y: Array) -> None:
    """Applies layer norm `index` to the first `rows` rows of x [T, D], and writes the results to y.

    x and y may be the same array. `eps` is added to the variance.
    """
    gain, bias = norm.gain[index], norm.bias[index]
    width = x.shape[1]
    for row in range(rows):
        total = np.float32(0)
        for i in range(width):
            total += x[row, i]
        mean = total / np.float32(width)
        squares = np.float32(0)
        for i in range(width):
            squares += (x[row, i] - mean) * (x[row, i] - mean)
        factor = np.float32(1) / np.sqrt(squares / np.float32(width) + eps)
        for i in range(width):
            y[row, i] = (x[row, i] - mean) * factor * gain[i] + bias[i]


@compiled
def add(x: Array, change: Array, rows: int) -> None:
    for row in range(rows):
        for i in range(x.shape[1]):
            x[row, i] += change[row, i]


@compiled
def relu(x: Array, rows: int) -> None:
    for row in range(rows):
        for i in range(x.shape[1]):
            x[row, i] = max(x[row, i], np.float32(0))


@compiled_without_nan  # so that vector instructions can be used
def maximum(x: Array, size: int) -> Any:
    """Returns the largest of the first `size` numbers of x. The result for NaN is any number."""
    largest = np.float32(-np.inf)
    for i in range(size):
        largest = max(largest, x[i])
    return largest


@compiled_without_nan
def largest_size(x: Array) -> Any:
    """Returns the largest absolute value in x."""
    largest = np.float32(0)
    for i in range(x.shape[0]):
        largest = max(largest, abs(x[i]))
    return largest


@compiled
def exponentials(x: Array, size: int, shift: Any, space: Space, y: Array) -> Any:
    """Writes exp(x - shift) of the first `size` numbers of x to y. Returns the sum. x and y may be the same array.

    No number may exceed `shift`. exp(z) is 2 ** n times a polynomial of the rest, and 2 ** n is made from the bits of
    its exponent, so that vector instructions can be used. Numbers below exp(-87) count as exp(-87).
    """
    bits = space.bits
    powers = bits.view(np.float32)
    for i in range(size):
        z = max((x[i] - shift) * LOG2_E, np.float32(-126))
        whole = np.floor(z)
        r = z - whole
        bits[i] = np.int32(np.int32(whole) + np.int32(127)) << np.int32(23)
        y[i] = C0 + r * (C1 + r * (C2 + r * (C3 + r * (C4 + r * (C5 + r * C6)))))
    total = np.float32(0)
    for i in range(size):
        y[i] *= powers[i]
        total += y[i]
    return total


@compiled
def sigmoid(x: Array, space: Space) -> None:
    """Replaces the numbers of x [D] by 1 / (1 + exp(-x)), computed from exp(-|x|)."""
    size, y = x.shape[0], space.numbers
    for i in range(size):
        y[i] = -abs(x[i])
    exponentials(y, size, np.float32(0), space, y)
    for i in range(size):
        x[i] = (np.float32(1) if x[i] >= 0 else y[i]) / (np.float32(1) + y[i])


@compiled
def attend(
    query: Array, memory: Array, columns: tuple[int, int], seen: Array, size: int, heads: int, space: Space, y: Array
) -> None:
    """Writes the attention of one query to y: softmax(q K^T / sqrt(D / H)) V for each head.

    The heads of `query` [D] and y [D] lie side by side. Row i of `memory` has the key of position i from column
    columns[0] on, and the value from column columns[1] on. The query sees the positions seen[0] to seen[size - 1].
    """
    width = query.shape[0] // heads
    scale = np.float32(1) / np.sqrt(np.float32(width))
    weights = space.numbers
    for head in range(heads):
        start = head * width
        key, value = columns[0] + start, columns[1] + start
        q, out = query[start : start + width], y[start : start + width]
        for i in range(size):
            weights[i] = dot(q, memory[seen[i], key : key + width]) * scale
        total = exponentials(weights, size, maximum(weights, size), space, weights)
        for j in range(width):
            out[j] = 0
        for i in range(size):
            weight, v = weights[i] / total, memory[seen[i], value : value + width]
            for j in range(width):
                out[j] += weight * v[j]
