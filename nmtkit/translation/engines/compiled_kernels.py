"""Kernels of rows in the compiled engine: norms, softmax and attention, as code for LLVM."""

import functools
from typing import Any

import numpy as np
from llvmlite import ir

from nmtkit.translation.engines.compiled_code import NUMBER, REAL, Kernels, inner
from nmtkit.translation.engines.compiled_vectors import (
    FLOAT,
    LANES,
    Vectors,
    for_parts,
)

OUTPUTS = 64  # outputs of a block

kernels = Kernels("nmtkit")
kernel = kernels.kernel


# --- functions of a row -----------------------------------------------------------------------------------------------


@kernel(NUMBER, NUMBER, result=REAL)
def largest_size(code: Vectors, x: Any, size: Any) -> Any:
    """Returns the largest absolute value of a row."""
    largest = code.variable(code.constant(0))

    def part(index: Any, mask: Any) -> None:
        values = code.load(x, index) if mask is None else code.load_part(x, index, mask, code.constant(0))
        code.builder.store(code.larger(code.builder.load(largest), code.apply("fabs", values)), largest)

    for_parts(code, size, part)
    return code.maximum(code.builder.load(largest))


@kernel(NUMBER, NUMBER, NUMBER, NUMBER, REAL, NUMBER, result=REAL)
def layer_norm(code: Vectors, x: Any, size: Any, gains: Any, biases: Any, eps: Any, y: Any) -> Any:
    """Writes the layer norm of a row, and returns its largest absolute value. `eps` is added to the variance."""
    builder, zero = code.builder, code.constant(0)
    count = builder.sitofp(size, FLOAT)

    def sum_over(values_of: Any) -> Any:
        total = code.variable(zero)

        def part(index: Any, mask: Any) -> None:
            values = code.load(x, index) if mask is None else code.load_part(x, index, mask, zero)
            values = values_of(values)
            if mask is not None:
                values = builder.select(mask, values, zero)
            builder.store(builder.fadd(builder.load(total), values), total)

        for_parts(code, size, part)
        return code.total(builder.load(total))

    mean = code.broadcast(builder.fdiv(sum_over(lambda values: values), count))

    def square(values: Any) -> Any:
        difference = builder.fsub(values, mean)
        return builder.fmul(difference, difference)

    variance = builder.fdiv(sum_over(square), count)
    root = builder.call(code.declared("llvm.sqrt.f32", ir.FunctionType(FLOAT, [FLOAT])), [builder.fadd(variance, eps)])
    factor = code.broadcast(builder.fdiv(ir.Constant(FLOAT, 1.0), root))
    largest = code.variable(zero)

    def part(index: Any, mask: Any) -> None:
        def loaded(address: Any) -> Any:
            return code.load(address, index) if mask is None else code.load_part(address, index, mask, zero)

        normal = builder.fmul(builder.fsub(loaded(x), mean), factor)
        result = code.fma(normal, loaded(gains), loaded(biases))
        if mask is None:
            code.store(result, y, index)
        else:
            code.store_part(result, y, index, mask)
        builder.store(code.larger(builder.load(largest), code.apply("fabs", result)), largest)

    for_parts(code, size, part)
    return code.maximum(builder.load(largest))


@kernel(NUMBER, NUMBER, REAL, NUMBER, result=REAL)
def exponentials(code: Vectors, x: Any, size: Any, shift: Any, y: Any) -> Any:
    """Writes exp(x - shift) of a row, and returns the sum. No number may exceed `shift`; x and y may be equal."""
    builder, shifts, zero = code.builder, code.broadcast(shift), code.constant(0)
    total = code.variable(zero)

    def part(index: Any, mask: Any) -> None:
        values = code.load(x, index) if mask is None else code.load_part(x, index, mask, shifts)
        values = code.exponential(builder.fsub(values, shifts))
        if mask is None:
            code.store(values, y, index)
        else:
            values = builder.select(mask, values, zero)
            code.store_part(values, y, index, mask)
        builder.store(builder.fadd(builder.load(total), values), total)

    for_parts(code, size, part)
    return code.total(builder.load(total))


@kernel(NUMBER, NUMBER, REAL, result=REAL)
def sum_of_exponentials(code: Vectors, x: Any, size: Any, shift: Any) -> Any:
    """Returns the sum of exp(x - shift) of a row whose size is a multiple of OUTPUTS. No number may exceed `shift`."""
    builder, shifts = code.builder, code.broadcast(shift)
    totals = [code.variable(code.constant(0)) for _ in range(OUTPUTS // LANES)]
    with code.loop(size, OUTPUTS) as index:
        for number, total in enumerate(totals):
            values = code.load(x, builder.add(index, code.size(LANES * number)))
            values = code.exponential(builder.fsub(values, shifts))
            builder.store(builder.fadd(builder.load(total), values), total)
    vectors = [builder.load(total) for total in totals]
    return code.total(functools.reduce(builder.fadd, vectors))


@kernel(NUMBER, NUMBER, NUMBER, result=REAL)
def block_maxima(code: Vectors, x: Any, size: Any, y: Any) -> Any:
    """Writes the maximum of each block of OUTPUTS numbers of a row, and returns the largest. NaN is ignored."""
    builder = code.builder
    lowest = ir.Constant(FLOAT, float("-inf"))
    overall = code.variable(lowest)
    with code.loop(size, OUTPUTS) as index:
        largest = code.constant(float("-inf"))
        for number in range(OUTPUTS // LANES):
            largest = code.larger(largest, code.load(x, builder.add(index, code.size(LANES * number))))
        value = code.maximum(largest)
        builder.store(value, code.at(y, builder.sdiv(index, code.size(OUTPUTS)), FLOAT))
        before = builder.load(overall)
        builder.store(builder.select(builder.fcmp_ordered(">", value, before), value, before), overall)
    return builder.load(overall)


# --- attention --------------------------------------------------------------------------------------------------------


@kernel(NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, REAL, NUMBER, result=REAL)
def dots(
    code: Vectors, query: Any, width: Any, keys: Any, places: Any, count: Any, stride: Any, scale: Any, y: Any
) -> Any:
    """Writes the dot products of a query and `count` keys, times `scale`, and returns the largest.

    Key i begins `stride` x places[i] numbers after the address `keys`; `places` are 64-bit integers.
    """
    builder, zero = code.builder, code.constant(0)
    largest = code.variable(ir.Constant(FLOAT, float("-inf")))
    with code.loop(count, 1) as number:
        first = builder.mul(code.load_number(places, number, code.size(0).type), stride)
        total = code.variable(zero)
        builder.store(zero, total)

        def part(index: Any, mask: Any, first: Any = first, total: Any = total) -> None:
            place = builder.add(first, index)
            if mask is None:
                q, k = code.load(query, index), code.load(keys, place)
            else:
                q, k = code.load_part(query, index, mask, zero), code.load_part(keys, place, mask, zero)
            builder.store(code.fma(q, k, builder.load(total)), total)

        for_parts(code, width, part)
        value = builder.fmul(code.total(builder.load(total)), scale)
        builder.store(value, code.at(y, number, FLOAT))
        before = builder.load(largest)
        builder.store(builder.select(builder.fcmp_ordered(">", value, before), value, before), largest)
    return builder.load(largest)


@kernel(NUMBER, REAL, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER)
def weighted_sum(
    code: Vectors, weights: Any, factor: Any, width: Any, values: Any, places: Any, count: Any, stride: Any, y: Any
) -> None:
    """Writes the sum of `count` values, each times its weight, times `factor`. `places` and `stride`: see `dots`."""
    builder, zero, factors = code.builder, code.constant(0), code.broadcast(factor)

    def part(index: Any, mask: Any) -> None:
        total = code.variable(zero)
        builder.store(zero, total)
        with code.loop(count, 1) as number:
            first = builder.mul(code.load_number(places, number, code.size(0).type), stride)
            place = builder.add(first, index)
            value = code.load(values, place) if mask is None else code.load_part(values, place, mask, zero)
            weight = code.broadcast(code.load_number(weights, number))
            builder.store(code.fma(weight, value, builder.load(total)), total)
        result = builder.fmul(builder.load(total), factors)
        if mask is None:
            code.store(result, y, index)
        else:
            code.store_part(result, y, index, mask)

    for_parts(code, width, part)


@inner
def attend(
    query: int,
    width: int,
    heads: int,
    keys: int,
    values: int,
    places: int,
    count: int,
    stride: int,
    scale: Any,
    weights: int,
    y: int,
) -> None:
    """Writes the attention of one query to y: softmax(q K^T x scale) V for each head of `width` numbers.

    All arguments but sizes are addresses. `weights` is memory for `count` numbers.
    """
    for head in range(heads):
        first = 4 * width * head
        largest = dots(query + first, width, keys + first, places, count, stride, scale, weights)
        total = exponentials(weights, count, largest, weights)
        weighted_sum(weights, np.float32(1) / total, width, values + first, places, count, stride, y + first)
