"""Products of the compiled engine: linear layers in 8 bits and in fp32, also for the outputs of a shortlist.

Weights are packed once, in blocks of 16 outputs. A block has the weights of all its outputs for the first one, two or
four inputs, then for the next inputs. A vector holds 16 outputs of one row, so a step of a product is one instruction
for 16 outputs and one, two or four inputs.

In 8 bits, a row of inputs has one scale, and an output has one scale. Sums of products are exact integers, so that
every processor gives the same numbers.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from nmtkit.translation.engines.compiled_code import NUMBER, REAL, Array, features, inner
from nmtkit.translation.engines.compiled_kernels import OUTPUTS, kernel, kernels
from nmtkit.translation.engines.compiled_vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LANES,
    SIZE,
    WIDE,
    Vectors,
    for_parts,
)

LIMIT = 127  # largest absolute value of an input and of a weight in 8 bits

# --- instructions -----------------------------------------------------------------------------------------------------


class DotProducts:
    """An instruction that adds the products of four inputs and four weights, all of 8 bits, to a 32-bit sum.

    vpdpbusd of x86 (VNNI) reads unsigned inputs, so `offset` is added to inputs. The correction of an output, which is
    subtracted, is `offset` times the sum of its weights. sdot of ARM reads signed inputs.
    """

    group, kind, weight_size = 4, BYTE, 1

    def __init__(self, instruction: str, lanes: int, operand: Any, offset: int) -> None:
        self.instruction, self.lanes, self.operand, self.offset = instruction, lanes, operand, offset

    def inputs(self, code: Vectors, x: Any, index: Any) -> Any:
        number = code.load_number(code.builder.add(x, index), code.size(0), INT)
        return code.broadcast(number)

    def weights(self, code: Vectors, w: Any, index: Any) -> Any:
        return code.load(code.builder.add(w, code.builder.mul(index, code.size(LANES))), code.size(0), INT)

    def add(self, code: Vectors, total: Any, x: Any, w: Any) -> Any:
        """Applies the instruction to each part of `lanes` sums."""
        builder, sums = code.builder, ir.VectorType(INT, self.lanes)
        parts = []
        for first in range(0, LANES, self.lanes):
            lanes = ir.Constant(sums, list(range(first, first + self.lanes)))
            before, *factors = (builder.shuffle_vector(each, each, lanes) for each in (total, x, w))
            operands = [builder.bitcast(each, self.operand) for each in factors]
            parts.append(code.call(self.instruction, sums, before, *operands))
        while len(parts) > 1:
            lanes = ir.Constant(ir.VectorType(INT, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
            parts = [builder.shuffle_vector(x, y, lanes) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]


class Widened:
    """Products of 16-bit integers. Pairs of products are added in 32 bits (pmaddwd), exactly on every processor."""

    group, kind, weight_size, offset = 2, WIDE, 1, 0

    def inputs(self, code: Vectors, x: Any, index: Any) -> Any:
        number = code.load_number(code.builder.add(x, code.builder.mul(index, code.size(2))), code.size(0), INT)
        return code.builder.bitcast(code.broadcast(number), ir.VectorType(WIDE, 2 * LANES))

    def weights(self, code: Vectors, w: Any, index: Any) -> Any:
        address = code.builder.add(w, code.builder.mul(index, code.size(LANES)))
        loaded = code.load(address, code.size(0), BYTE, 2 * LANES)
        return code.builder.sext(loaded, ir.VectorType(WIDE, 2 * LANES))

    def add(self, code: Vectors, total: Any, x: Any, w: Any) -> Any:
        wide = ir.VectorType(INT, 2 * LANES)
        products = code.builder.mul(code.builder.sext(x, wide), code.builder.sext(w, wide))
        even, odd = (ir.Constant(INTS, list(range(first, 2 * LANES, 2))) for first in (0, 1))
        pairs = [code.builder.shuffle_vector(products, products, lanes) for lanes in (even, odd)]
        return code.builder.add(total, code.builder.add(*pairs))


class Floats:
    """Products in fp32."""

    group, kind, weight_size, offset = 1, FLOAT, 4, 0

    def inputs(self, code: Vectors, x: Any, index: Any) -> Any:
        return code.broadcast(code.load_number(x, index))

    def weights(self, code: Vectors, w: Any, index: Any) -> Any:
        return code.load(w, code.builder.mul(index, code.size(LANES)))

    def add(self, code: Vectors, total: Any, x: Any, w: Any) -> Any:
        return code.fma(x, w, total)


def instructions() -> DotProducts | Widened:
    """Returns the fastest exact method of the processor for products of 8-bit integers."""
    if "avx512vnni" in features():
        return DotProducts("llvm.x86.avx512.vpdpbusd.512", 16, ir.VectorType(INT, 16), offset=128)
    if "avxvnni" in features():
        return DotProducts("llvm.x86.avx512.vpdpbusd.256", 8, ir.VectorType(INT, 8), offset=128)
    if "dotprod" in features():
        return DotProducts("llvm.aarch64.neon.sdot.v4i32.v16i8", 4, ir.VectorType(BYTE, 16), offset=0)
    return Widened()


INTEGERS, REALS = instructions(), Floats()
VECTORS = 4 if "avx512f" in features() else 1  # vectors of outputs of a kernel; registers must hold all sums


# --- products ---------------------------------------------------------------------------------------------------------


def product_name(kind: Any, rows: int) -> str:
    return f"product_{type(kind).__name__}_{rows}"


def product_kernel(kind: Any, rows: int) -> Any:
    """Returns the kernel that computes VECTORS x 16 outputs for `rows` rows of inputs, for compiled code.

    The arguments are: inputs (address of the first row, and bytes of a row), scales of the rows, weights of the
    outputs, number of inputs, the scale, the correction and the bias of each output, results (address of the first
    output in the first row, and numbers of a row), the smallest result (0 for ReLU, or -inf), and whether the results
    are added to the numbers in memory.
    """
    accumulators = FLOATS if kind is REALS else INTS
    block = LANES * kind.weight_size  # bytes of the weights of one input for 16 outputs

    def product(
        code: Vectors, x: Any, x_stride: Any, x_scales: Any, w: Any, inputs: Any, scales: Any, corrections: Any,
        biases: Any, y: Any, y_stride: Any, floor: Any, adds: Any,
    ) -> None:  # fmt: skip
        builder = code.builder
        added = builder.icmp_signed("!=", adds, code.size(0))
        starts = [builder.add(x, builder.mul(x_stride, code.size(row))) for row in range(rows)]
        blocks = [code.offset(w, inputs, block * vector) for vector in range(VECTORS)]
        totals = [[code.variable(ir.Constant(accumulators, None)) for _ in blocks] for _ in starts]
        with code.loop(inputs, kind.group) as index:
            weights = [kind.weights(code, each, index) for each in blocks]
            for start, totals_of_row in zip(starts, totals, strict=True):
                number = kind.inputs(code, start, index)
                for total, weight in zip(totals_of_row, weights, strict=True):
                    builder.store(kind.add(code, builder.load(total), number, weight), total)
        lowest = code.broadcast(floor)
        for vector in range(VECTORS):
            first = code.size(LANES * vector)
            bias = code.load(biases, first)
            if kind is not REALS:
                scale, correction = code.load(scales, first), code.load(corrections, first, INT)
            for row in range(rows):
                result = builder.load(totals[row][vector])
                if kind is not REALS:
                    factor = builder.fmul(scale, code.broadcast(code.load_number(x_scales, code.size(row))))
                    result = builder.sitofp(builder.sub(result, correction), FLOATS)
                    result = code.fma(result, factor, bias)
                else:
                    result = builder.fadd(result, bias)
                result = code.larger(result, lowest)
                place = builder.add(builder.mul(y_stride, code.size(row)), first)
                before = builder.select(added, code.load(y, place), code.constant(0))
                code.store(builder.fadd(result, before), y, place)

    product.__name__ = product_name(kind, rows)
    return kernel(*[NUMBER] * 10, REAL, NUMBER)(product)


MOST_ROWS = 6
for number_of_rows in (MOST_ROWS, 4, 2, 1):
    product_kernel(INTEGERS, number_of_rows)
    product_kernel(REALS, number_of_rows)


def packed_size(outputs: int) -> int:
    """Returns the number of outputs of a packed product: the next multiple of OUTPUTS."""
    return -(-outputs // OUTPUTS) * OUTPUTS


def packed(weight: Array, group: int) -> Array:
    """Packs weights [outputs, inputs] as [outputs / 16, inputs / group, 16, group], padded with zeros."""
    outputs, inputs = weight.shape
    whole = np.zeros((packed_size(outputs), -(-inputs // LANES) * LANES), weight.dtype)
    whole[:outputs, :inputs] = weight
    blocks = whole.reshape(len(whole) // LANES, LANES, whole.shape[1] // group, group).transpose(0, 2, 1, 3)
    result = aligned(blocks.shape, weight.dtype)
    result[...] = blocks
    return result


def aligned(shape: tuple[int, ...], dtype: Any) -> Array:
    """Returns an array that begins at a multiple of 64 bytes, so that no vector crosses a cache line."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


# columns of a table of linear layers
WEIGHT, SCALES, CORRECTIONS, BIASES, INPUTS, PADDED_INPUTS, PADDED_OUTPUTS, IN_8_BITS = range(8)
COLUMNS = 8


# --- linear layers ----------------------------------------------------------------------------------------------------


@kernel(NUMBER, NUMBER, REAL, NUMBER)
def rounded(code: Vectors, x: Any, size: Any, factor: Any, y: Any) -> None:
    """Writes the numbers of a row times `factor`, rounded to integers, in the format that `INTEGERS` reads.

    The last part of 16 numbers is written whole, with zeros for missing numbers.
    """
    builder, factors = code.builder, code.broadcast(factor)
    offset = ir.Constant(INTS, [INTEGERS.offset] * LANES)

    def part(index: Any, mask: Any) -> None:
        numbers = builder.fmul(code.read(x, index, mask), factors)
        integers = builder.fptosi(code.apply("rint", numbers), INTS)
        narrow = builder.trunc(builder.add(integers, offset), ir.VectorType(INTEGERS.kind, LANES))
        code.store(narrow, y, index)

    for_parts(code, size, part)


BYTES_OF_INPUT = {BYTE: 1, WIDE: 2, FLOAT: 4}[INTEGERS.kind]
STEP = LANES * VECTORS  # outputs of one call of a product kernel
SMALLEST = 1e-30  # avoids a division by zero for a row of zeros


@kernel(*[NUMBER] * 10, REAL, NUMBER)
def linear(
    code: Vectors, layers: Any, index: Any, rows: Any, x: Any, x_stride: Any, integers: Any, integers_stride: Any,
    scales: Any, y: Any, y_stride: Any, floor: Any, adds: Any,
) -> None:  # fmt: skip
    """Writes the outputs of linear layer `index` for rows of inputs to y, or adds them to the numbers in y.

    `layers` is the table of linear layers. A row of x has `x_stride` bytes, and a row of y has `y_stride` numbers.
    `integers` and `scales` are memory for inputs in 8 bits. A row of `integers` has `integers_stride` bytes. Results
    below `floor` become `floor`.
    """
    builder = code.builder
    row = code.offset(layers, index, 8 * COLUMNS)
    layer = [code.load_number(row, code.size(column), SIZE) for column in range(COLUMNS)]

    def products(kind: Any, x: Any, x_stride: Any) -> None:
        with code.loop(layer[PADDED_OUTPUTS], STEP) as output:
            weights = code.offset(layer[WEIGHT], builder.mul(layer[PADDED_INPUTS], output), kind.weight_size)
            details = [code.offset(layer[column], output) for column in (SCALES, CORRECTIONS, BIASES)]

            def block_of_rows(first: Any, count: int, weights: Any = weights, details: Any = details) -> None:
                arguments = [
                    builder.add(x, builder.mul(first, x_stride)), x_stride, code.offset(scales, first), weights,
                    layer[PADDED_INPUTS], *details,
                    code.offset(y, builder.add(builder.mul(first, y_stride), output)), y_stride, floor, adds,
                ]  # fmt: skip
                builder.call(kernels.function(product_name(kind, count)), arguments)

            whole = builder.mul(builder.sdiv(rows, code.size(MOST_ROWS)), code.size(MOST_ROWS))
            with code.loop(whole, MOST_ROWS) as first:
                block_of_rows(first, MOST_ROWS)
            done = code.variable(whole)
            for count in (4, 2, 1):
                first = builder.load(done)
                with builder.if_then(builder.icmp_signed("<=", code.size(count), builder.sub(rows, first))):
                    block_of_rows(first, count)
                    builder.store(builder.add(first, code.size(count)), done)

    in_8_bits = builder.icmp_signed("!=", layer[IN_8_BITS], code.size(0))
    with builder.if_else(in_8_bits) as (then, otherwise):
        with then:
            limit = ir.Constant(FLOAT, float(LIMIT))
            with code.loop(rows, 1) as number:
                start = builder.add(x, builder.mul(number, x_stride))
                largest = builder.call(kernels.function("largest_size"), [start, layer[INPUTS]])
                largest = code.larger(largest, ir.Constant(FLOAT, float(np.float32(SMALLEST))))
                target = builder.add(integers, builder.mul(number, integers_stride))
                factor = builder.fdiv(limit, largest)
                builder.call(kernels.function("rounded"), [start, layer[INPUTS], factor, target])
                builder.store(builder.fdiv(largest, limit), code.at(scales, number, FLOAT))
            products(INTEGERS, integers, integers_stride)
        with otherwise:
            products(REALS, x, x_stride)


# --- shortlists -------------------------------------------------------------------------------------------------------

GROUP = INTEGERS.group  # in 8 bits, the packed weights of this number of inputs lie together


@kernel(*[NUMBER] * 6)
def packed_columns(code: Vectors, columns: Any, count: Any, source: Any, groups: Any, size: Any, target: Any) -> None:
    """Packs the weights of the outputs `columns` into `target`.

    `source` has a row for each output. A row has `groups` groups of weights. A group has `size` bytes: 2 or 4.
    """
    builder = code.builder
    for kind, number in ((INT, 4), (WIDE, 2)):
        with builder.if_then(builder.icmp_signed("==", size, code.size(number))), code.loop(count, 1) as index:
            row = code.offset(source, builder.mul(code.load_number(columns, index, ir.IntType(64)), groups), number)
            block, lane = builder.sdiv(index, code.size(LANES)), builder.srem(index, code.size(LANES))
            first = builder.add(builder.mul(builder.mul(block, groups), code.size(LANES)), lane)
            place = code.offset(target, first, number)
            with code.loop(groups, 1) as group:
                value = code.load_number(row, group, kind)
                builder.store(value, code.at(place, builder.mul(group, code.size(LANES)), kind))


@kernel(NUMBER, NUMBER, NUMBER, NUMBER)
def selected(code: Vectors, columns: Any, count: Any, x: Any, y: Any) -> None:
    """Writes the 32-bit numbers of x with the indices `columns` to y."""
    with code.loop(count, 1) as index:
        place = code.load_number(columns, index, ir.IntType(64))
        code.builder.store(code.load_number(x, place, INT), code.at(y, index, INT))


@kernel(NUMBER, NUMBER, NUMBER, NUMBER)
def filled(code: Vectors, y: Any, first: Any, end: Any, bits: Any) -> None:
    """Writes a 32-bit number to y at the indices from `first` to `end` - 1."""
    builder = code.builder
    with code.loop(builder.sub(end, first), 1) as index:
        builder.store(builder.trunc(bits, INT), code.at(y, builder.add(first, index), INT))


MINUS_INFINITY = 0xFF800000  # the bits of -inf


@inner
def pack_shortlist(output: Array, columns: Array, row: Array) -> None:
    """Packs the output projection of the target pieces `columns` for a slot of the search.

    `output` and `row` are rows of tables of linear layers. `output` is the projection to all pieces; its matrix has a
    row of weights for each piece. `row` is the projection of the slot; its memory gets the packed projection. Padding
    outputs in the last block have the bias -inf, so the search never chooses these outputs. The padding outputs keep
    old weights, which are finite.
    """
    count, address = len(columns), columns.ctypes.data
    size = (count + OUTPUTS - 1) // OUTPUTS * OUTPUTS
    row[PADDED_OUTPUTS] = size
    groups, group_size = row[PADDED_INPUTS], 4
    if row[IN_8_BITS]:
        groups, group_size = groups // GROUP, GROUP
    packed_columns(address, count, output[WEIGHT], groups, group_size, row[WEIGHT])
    for column in (SCALES, CORRECTIONS, BIASES):
        selected(address, count, output[column], row[column])
    filled(row[SCALES], count, size, 0)
    filled(row[CORRECTIONS], count, size, 0)
    filled(row[BIASES], count, size, MINUS_INFINITY)
