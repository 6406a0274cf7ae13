"""Packs the output projection of a shortlist for the compiled engine: the weights of a few hundred target pieces."""

from typing import Any

from llvmlite import ir

from nmtkit.translation.engines.compiled_code import NUMBER, inner
from nmtkit.translation.engines.compiled_kernels import OUTPUTS, kernel
from nmtkit.translation.engines.compiled_model import Array, record
from nmtkit.translation.engines.compiled_products import BIASES, CORRECTIONS, PADDED_OUTPUTS, SCALES, WEIGHT
from nmtkit.translation.engines.compiled_vectors import INT, LANES, WIDE, Vectors

# Output projection with a row for each piece. `weight`, `scales`, `corrections` and `biases` are addresses of arrays.
# The weights of a piece are `groups` groups of inputs. A group has `size` bytes.
OUTPUT = record("weight scales corrections biases groups size")


@kernel(*[NUMBER] * 6)
def packed_columns(code: Vectors, columns: Any, count: Any, source: Any, groups: Any, size: Any, target: Any) -> None:
    """Packs the groups of weights of the outputs `columns`. A group of an output has `size` bytes: 2 or 4."""
    builder = code.builder
    for kind, number in ((INT, 4), (WIDE, 2)):
        with builder.if_then(builder.icmp_signed("==", size, code.size(number))), code.loop(count, 1) as index:
            piece = code.load_number(columns, index, ir.IntType(64))
            row = code.offset(source, builder.mul(piece, groups), number)
            block, lane = builder.sdiv(index, code.size(LANES)), builder.srem(index, code.size(LANES))
            place = code.offset(target, builder.mul(builder.mul(block, groups), code.size(LANES)), number)
            place = code.offset(place, lane, number)
            with code.loop(groups, 1) as group:
                value = code.load_number(row, group, kind)
                pointer = code.at(place, builder.mul(group, code.size(LANES)), kind)
                builder.store(value, pointer)


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
def pack_shortlist(output: Any, columns: Array, table: Array, slot: int) -> None:
    """Packs the output projection of the target pieces `columns` for a slot of the search.

    Row `slot` of `table`, a table of linear layers, has the addresses of the memory for the packed projection. Padding
    outputs in the last block have the bias -inf, so the search never chooses these outputs. The padding outputs keep
    old weights, which are finite.
    """
    count, address = len(columns), columns.ctypes.data
    size = (count + OUTPUTS - 1) // OUTPUTS * OUTPUTS
    row = table[slot]
    row[PADDED_OUTPUTS] = size
    packed_columns(address, count, output.weight, output.groups, output.size, row[WEIGHT])
    selected(address, count, output.scales, row[SCALES])
    selected(address, count, output.corrections, row[CORRECTIONS])
    selected(address, count, output.biases, row[BIASES])
    filled(row[SCALES], count, size, 0)
    filled(row[CORRECTIONS], count, size, 0)
    filled(row[BIASES], count, size, MINUS_INFINITY)
