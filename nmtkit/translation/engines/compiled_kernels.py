"""Kernels for rows in the compiled engine: embeddings, norms, activations, softmax, gates, as code for LLVM.

Arguments are addresses and sizes. A size is a count of numbers, unless a docstring says otherwise. A row of a matrix
begins `stride` numbers after the previous row.
"""

import functools
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from nmtkit.translation.engines.compiled_code import NUMBER, REAL, Kernels
from nmtkit.translation.engines.compiled_vectors import FLOAT, LANES, SIZE, Vectors, fold, for_parts, write_each

OUTPUTS = 64  # layers are padded to a multiple of this number of outputs; also the size of a block of `block_maxima`
NORM_COLUMNS = 3  # columns of a table of norms: address of the gains, address of the biases, width
RELU, GELU, SWISH = range(3)

kernels = Kernels("nmtkit")
kernel = kernels.kernel


# --- rows of a model --------------------------------------------------------------------------------------------------


@kernel(NUMBER, NUMBER, NUMBER, REAL, NUMBER)
def embedded(code: Vectors, tokens: Any, positions: Any, width: Any, scale: Any, y: Any) -> None:
    """Writes the embedding of a token times `scale`, plus the encoding of its position."""
    scales = code.broadcast(scale)
    write_each(code, width, (tokens, positions), lambda token, position: code.fma(token, scales, position), y)


@kernel(NUMBER, NUMBER, NUMBER, NUMBER)
def turned(code: Vectors, x: Any, heads: Any, half: Any, turns: Any) -> None:
    """Applies rotary position encodings to the heads that begin at the address x (`relative_positions.Rotary`).

    A head has 2 x `half` numbers. Numbers i and `half` + i are a pair, which is rotated by angle i. `turns` is the
    address of the cosines of the angles. The sines follow the cosines.
    """
    builder = code.builder
    with code.loop(heads, 1) as head:
        first = builder.add(x, builder.mul(builder.mul(head, half), code.size(8)))

        def part(index: Any, mask: Any, first: Any = first) -> None:
            other = builder.add(half, index)
            a, b = code.read(first, index, mask), code.read(first, other, mask)
            cos, sin = code.read(turns, index, mask), code.read(turns, other, mask)
            code.write(builder.fsub(builder.fmul(a, cos), builder.fmul(b, sin)), first, index, mask)
            code.write(builder.fadd(builder.fmul(a, sin), builder.fmul(b, cos)), first, other, mask)

        for_parts(code, half, part)


@kernel(NUMBER, NUMBER, NUMBER)
def copied(code: Vectors, x: Any, size: Any, y: Any) -> None:
    """Copies a row."""
    write_each(code, size, (x,), lambda values: values, y)


@kernel(NUMBER, NUMBER, NUMBER)
def added(code: Vectors, x: Any, size: Any, y: Any) -> None:
    """Adds the row x to the row y."""
    write_each(code, size, (y, x), code.builder.fadd, y)


@kernel(NUMBER, NUMBER, result=REAL)
def largest_size(code: Vectors, x: Any, size: Any) -> Any:
    """Returns the largest absolute value of a row."""
    return code.maximum(fold(code, size, x, lambda values: code.apply("fabs", values), code.larger))


@kernel(NUMBER, NUMBER, NUMBER, NUMBER, REAL, NUMBER)
def layer_norm(code: Vectors, x: Any, size: Any, gains: Any, biases: Any, eps: Any, y: Any) -> None:
    """Writes the layer norm of a row. `eps` is added to the variance. x and y may be the same row."""
    builder = code.builder
    count = builder.sitofp(size, FLOAT)

    def mean_of(function: Any) -> Any:
        return builder.fdiv(code.total(fold(code, size, x, function, builder.fadd)), count)

    def square(values: Any) -> Any:
        difference = builder.fsub(values, mean)
        return builder.fmul(difference, difference)

    mean = code.broadcast(mean_of(lambda values: values))
    root = code.call("llvm.sqrt.f32", FLOAT, builder.fadd(mean_of(square), eps))
    factor = code.broadcast(builder.fdiv(ir.Constant(FLOAT, 1.0), root))

    def normal(values: Any, gain: Any, bias: Any) -> Any:
        return code.fma(builder.fmul(builder.fsub(values, mean), factor), gain, bias)

    write_each(code, size, (x, gains, biases), normal, y)


@kernel(NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, REAL, NUMBER)
def normalized(code: Vectors, norms: Any, index: Any, rows: Any, x: Any, stride: Any, eps: Any, y: Any) -> None:
    """Applies layer norm `index` of the table `norms` to rows of x, and writes the results to rows of y.

    Rows of x and rows of y begin every `stride` numbers. A missing norm has the width 0 in the table. The kernel then
    does nothing.
    """
    builder = code.builder
    table = code.offset(norms, index, 8 * NORM_COLUMNS)
    gains, biases, width = (code.load_number(table, code.size(column), SIZE) for column in range(NORM_COLUMNS))
    with builder.if_then(builder.icmp_signed("!=", width, code.size(0))), code.loop(rows, 1) as row:
        source, target = (code.offset(each, builder.mul(row, stride)) for each in (x, y))
        builder.call(kernels.function("layer_norm"), [source, width, gains, biases, eps, target])


@kernel(NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER)
def activated(code: Vectors, x: Any, stride: Any, rows: Any, size: Any, activation: Any, gated: Any) -> None:
    """Applies an activation to `size` numbers of each row. With `gated`, multiplies by the next `size` numbers."""
    builder = code.builder
    is_gated = builder.icmp_signed("!=", gated, code.size(0))

    def relu(values: Any) -> Any:
        return code.larger(values, code.constant(0))

    def gelu(values: Any) -> Any:
        error = code.erf(builder.fmul(values, code.constant(0.5**0.5)))
        return builder.fmul(builder.fmul(code.constant(0.5), values), builder.fadd(code.constant(1), error))

    def swish(values: Any) -> Any:
        return builder.fmul(values, code.sigmoid(values))

    for number, function in {RELU: relu, GELU: gelu, SWISH: swish}.items():
        same = builder.icmp_signed("==", activation, code.size(number))
        with builder.if_then(same), code.loop(rows, 1) as row:
            first = code.offset(x, builder.mul(row, stride))
            second = builder.select(is_gated, code.offset(first, size), first)

            def result(values: Any, gates: Any, function: Any = function) -> Any:
                values = function(values)
                return builder.select(is_gated, builder.fmul(values, gates), values)

            write_each(code, size, (first, second), result, first)


# --- states of fixed size ---------------------------------------------------------------------------------------------


@kernel(NUMBER, NUMBER, NUMBER, NUMBER, NUMBER)
def recurrent(code: Vectors, gates: Any, width: Any, before: Any, after: Any, y: Any) -> None:
    """Computes an SSRU: the new state is c = f b + (1 - f) v, with the old state b. Adds relu(c) to y.

    `gates` has v, then the numbers whose sigmoid is f.
    """
    builder, one = code.builder, code.constant(1)
    forgets = code.offset(gates, width)

    def part(index: Any, mask: Any) -> None:
        forget = code.sigmoid(code.read(forgets, index, mask))
        value = builder.fmul(builder.fsub(one, forget), code.read(gates, index, mask))
        state = code.fma(forget, code.read(before, index, mask), value)
        code.write(state, after, index, mask)
        code.write(builder.fadd(code.read(y, index, mask), code.larger(state, code.constant(0))), y, index, mask)

    for_parts(code, width, part)


@kernel(NUMBER, NUMBER, REAL, NUMBER, NUMBER)
def averaged(code: Vectors, x: Any, width: Any, share: Any, before: Any, after: Any) -> None:
    """Writes share * before + (1 - share) * x to `after`: the new average, from the old average and the new row x."""
    shares = code.broadcast(share)

    def average(values: Any, old: Any) -> Any:
        return code.fma(shares, code.builder.fsub(old, values), values)

    write_each(code, width, (x, before), average, after)


@kernel(NUMBER, NUMBER, NUMBER, NUMBER, NUMBER)
def gated_sum(code: Vectors, x: Any, average: Any, gates: Any, width: Any, y: Any) -> None:
    """Adds sigmoid(i) x + sigmoid(f) average to y. `gates` has i, then f."""
    builder = code.builder

    def total(i: Any, f: Any, values: Any, averages: Any, before: Any) -> Any:
        current = builder.fmul(code.sigmoid(i), values)
        return builder.fadd(before, code.fma(code.sigmoid(f), averages, current))

    write_each(code, width, (gates, code.offset(gates, width), x, average, y), total, y)


# --- softmax ----------------------------------------------------------------------------------------------------------


@kernel(NUMBER, NUMBER, REAL, REAL, NUMBER, result=REAL)
def exponentials(code: Vectors, x: Any, size: Any, shift: Any, factor: Any, y: Any) -> Any:
    """Writes exp((x - shift) factor) of a row, and returns the sum. No number may exceed `shift`.

    x and y may be the same row. `factor` is positive.
    """
    builder, shifts, factors, zero = code.builder, code.broadcast(shift), code.broadcast(factor), code.constant(0)
    total = code.variable(zero)

    def part(index: Any, mask: Any) -> None:
        values = code.read(x, index, mask, shifts)
        values = code.exponential(builder.fmul(builder.fsub(values, shifts), factors))
        if mask is not None:
            values = builder.select(mask, values, zero)
        code.write(values, y, index, mask)
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
    """Writes the maximum of each block of OUTPUTS numbers of a row, and returns the largest maximum. NaN is ignored."""
    builder = code.builder
    overall = code.variable(ir.Constant(FLOAT, float("-inf")))
    with code.loop(size, OUTPUTS) as index:
        largest = code.constant(float("-inf"))
        for number in range(OUTPUTS // LANES):
            largest = code.larger(largest, code.load(x, builder.add(index, code.size(LANES * number))))
        value = code.maximum(largest)
        builder.store(value, code.at(y, builder.sdiv(index, code.size(OUTPUTS)), FLOAT))
        builder.store(code.larger(builder.load(overall), value), overall)
    return builder.load(overall)


@kernel(NUMBER, NUMBER, NUMBER, REAL, result=NUMBER)
def next_above(code: Vectors, x: Any, first: Any, end: Any, limit: Any) -> Any:
    """Returns the index of the first number of a row that exceeds `limit`, from `first` on; `end` if there is none.

    The memory of the row has a multiple of LANES numbers.
    """
    builder, limits, result = code.builder, code.broadcast(limit), code.variable(end)
    start = builder.and_(first, code.size(-LANES))
    parts = builder.sdiv(builder.add(builder.sub(end, start), code.size(LANES - 1)), code.size(LANES))
    with cgutils.for_range(builder, parts) as loop:
        index = builder.add(start, builder.mul(loop.index, code.size(LANES)))
        inside = builder.and_(code.mask(builder.sub(end, index)), builder.not_(code.mask(builder.sub(first, index))))
        above = builder.and_(inside, builder.fcmp_ordered(">", code.load(x, index), limits))
        bits = builder.zext(builder.bitcast(above, ir.IntType(LANES)), SIZE)
        with builder.if_then(builder.icmp_signed("!=", bits, code.size(0))):
            lane = builder.cttz(bits, ir.Constant(ir.IntType(1), 1))
            builder.store(builder.add(index, lane), result)
            loop.do_break()
    return builder.load(result)


@kernel(NUMBER, NUMBER, REAL, REAL, NUMBER, NUMBER)
def mixed(code: Vectors, x: Any, size: Any, shift: Any, share: Any, y: Any, first: Any) -> None:
    """Adds `share` times exp(x - shift) of a row to the row y. If `first` is not 0, overwrites the row y instead."""
    builder, shifts, shares = code.builder, code.broadcast(shift), code.broadcast(share)
    is_first = builder.icmp_signed("!=", first, code.size(0))

    def total(values: Any, before: Any) -> Any:
        values = builder.fmul(code.exponential(builder.fsub(values, shifts)), shares)
        return builder.fadd(builder.select(is_first, code.constant(0), before), values)

    write_each(code, size, (x, y), total, y)


@kernel(NUMBER, NUMBER)
def logarithms(code: Vectors, x: Any, size: Any) -> None:
    """Replaces the numbers of a row by their logarithms. Numbers below 2 ** -126 become -inf."""
    write_each(code, size, (x,), code.logarithm, x)


# --- threads ----------------------------------------------------------------------------------------------------------


@kernel(NUMBER, result=NUMBER)
def taken(code: Vectors, counter: Any) -> Any:
    """Returns the integer at an address, and increases the integer by 1. Each thread gets a different number."""
    pointer = code.at(counter, code.size(0), SIZE)
    return code.builder.atomic_rmw("add", pointer, code.size(1), "monotonic")
