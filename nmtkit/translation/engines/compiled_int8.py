"""Sums of products of 16-bit and 8-bit integers, as code for LLVM.

LLVM turns these products and sums into the instructions that processors have for this purpose (pmaddwd, and vpdpwssd
with VNNI), but only from code of this form. Loops of Numba take up to twice as long. Needs the package numba.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16  # products of one step; the number of inputs must be a multiple
WIDE, NARROW, SUM = ir.IntType(16), ir.IntType(8), ir.IntType(32)
EVEN, ODD = (ir.Constant(ir.VectorType(SUM, LANES // 2), list(range(first, LANES, 2))) for first in (0, 1))


def sums_of_products(rows: int, outputs: int) -> Callable[..., Any]:
    """Returns a function that multiplies `rows` rows of inputs by `outputs` rows of weights, for compiled code.

    The function gets the address of the inputs (16 bits), the address of the weights (8 bits), and the length of a row.
    It returns the dot product of each row of inputs with each row of weights, as a tuple of 32-bit integers: first all
    products of the first row of inputs. rows x outputs is 4 or 8.
    """

    @intrinsic
    def sums(context: Any, inputs: Any, weights: Any, size: Any) -> Any:
        result = types.UniTuple(types.int32, rows * outputs)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            inputs, weights, size = arguments
            step = ir.Constant(size.type, LANES)
            totals = [cgutils.alloca_once_value(builder, ir.Constant(EVEN.type, None)) for _ in range(rows * outputs)]
            with cgutils.for_range_slice(builder, ir.Constant(size.type, 0), size, step) as (index, _):

                def load(address: Any, row: int, kind: Any) -> Any:
                    """Returns the next numbers of a row, converted to 32 bits."""
                    position = builder.add(builder.mul(size, ir.Constant(size.type, row)), index)
                    pointer = builder.gep(builder.inttoptr(address, kind.as_pointer()), [position])
                    loaded = builder.load(builder.bitcast(pointer, ir.VectorType(kind, LANES).as_pointer()))
                    loaded.align = 1
                    return builder.sext(loaded, ir.VectorType(SUM, LANES))

                x = [load(inputs, row, WIDE) for row in range(rows)]
                w = [load(weights, output, NARROW) for output in range(outputs)]
                for total, (a, b) in zip(totals, [(a, b) for a in x for b in w], strict=True):
                    products = builder.mul(a, b)
                    builder.store(builder.add(builder.load(total), pairwise_sums(builder, products, products)), total)
            vectors = [builder.load(total) for total in totals]
            while len(vectors) > 1:  # each vector becomes a part of one vector, in the same order
                vectors = [pairwise_sums(builder, a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
            (vector,) = vectors
            if rows * outputs == LANES // 4:
                vector = pairwise_sums(builder, vector, vector)
            numbers = [builder.extract_element(vector, ir.Constant(SUM, index)) for index in range(rows * outputs)]
            return cgutils.pack_array(builder, numbers)

        return result(types.uintp, types.uintp, types.intp), generate

    function: Callable[..., Any] = sums
    return function


def pairwise_sums(builder: Any, a: Any, b: Any) -> Any:
    """Returns the sums of neighbours in a vector, or in two vectors one after the other."""
    return builder.add(builder.shuffle_vector(a, b, EVEN), builder.shuffle_vector(a, b, ODD))
