"""Writes vector code for LLVM. The kernels that compiled code of Numba calls consist of this code. Needs numba.

LLVM vectorises the loops of Numba only in simple cases. So the functions of this file write explicit vector
instructions. A vector has LANES numbers. If the processor has shorter vectors, LLVM divides a vector into several, so
sums have the same order on every processor. Addresses are integers, because the address of a part of an array is then a
sum.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

LANES = 16
BYTE, WIDE, INT, FLOAT, SIZE = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType(), ir.IntType(64)
INTS, FLOATS = ir.VectorType(INT, LANES), ir.VectorType(FLOAT, LANES)
LOG2_E = 1.4426950408889634


def coefficients(function: Callable[[Any], Any], degree: int) -> Any:
    """Returns the coefficients of a polynomial for a function on [0, 1], from a Chebyshev interpolation."""
    chebyshev = np.polynomial.Chebyshev.interpolate(function, degree, (0.0, 1.0))
    return chebyshev.convert(kind=np.polynomial.Polynomial).coef


# Coefficients of polynomials, lowest power first.
POWER = coefficients(np.exp2, 6)  # 2 ** x, with a relative error below 2e-7
LOGARITHM = coefficients(lambda x: np.log1p(x) / x, 9)  # log(1 + x) / x, with a relative error below 1e-7
ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def integers(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


class Vectors:
    """Writes vector code. All methods take and return values of LLVM."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    # --- constants and memory ---

    @staticmethod
    def constant(value: float) -> Any:
        return ir.Constant(FLOATS, [float(np.float32(value))] * LANES)

    @staticmethod
    def size(value: int) -> Any:
        return ir.Constant(SIZE, value)

    def at(self, address: Any, index: Any, kind: Any) -> Any:
        """Returns a pointer to element `index` of an array that begins at `address`. The elements have type `kind`."""
        return self.builder.gep(self.builder.inttoptr(address, kind.as_pointer()), [index])

    def vector_at(self, address: Any, index: Any, kind: ir.VectorType) -> Any:
        """Returns a pointer to a vector of type `kind` that begins at element `index` of an array.

        The array begins at `address`. Its elements have the same type as the elements of the vector.
        """
        return self.builder.bitcast(self.at(address, index, kind.element), kind.as_pointer())

    def load(self, address: Any, index: Any, kind: Any = FLOAT, lanes: int = LANES) -> Any:
        loaded = self.builder.load(self.vector_at(address, index, ir.VectorType(kind, lanes)))
        loaded.align = 1
        return loaded

    def store(self, vector: Any, address: Any, index: Any) -> None:
        self.builder.store(vector, self.vector_at(address, index, vector.type)).align = 1

    def load_number(self, address: Any, index: Any, kind: Any = FLOAT) -> Any:
        loaded = self.builder.load(self.at(address, index, kind))
        loaded.align = 1
        return loaded

    def mask(self, count: Any) -> Any:
        """Returns a mask that is true for the first `count` lanes."""
        lanes = ir.Constant(INTS, list(range(LANES)))
        return self.builder.icmp_signed("<", lanes, self.broadcast(self.builder.trunc(count, INT)))

    def read(self, address: Any, index: Any, mask: Any, other: Any = None) -> Any:
        """Loads a complete part of a row if `mask` is None, otherwise the lanes of `mask`.

        The lanes outside the mask get the numbers of the vector `other`, or 0.
        """
        if mask is None:
            return self.load(address, index)
        pointer = self.vector_at(address, index, FLOATS)
        other = self.constant(0) if other is None else other
        return self.call(f"llvm.masked.load.v{LANES}f32.p0", FLOATS, pointer, ir.Constant(INT, 1), mask, other)

    def write(self, vector: Any, address: Any, index: Any, mask: Any) -> None:
        """Stores a complete part of a row if `mask` is None, otherwise the lanes of `mask`."""
        if mask is None:
            self.store(vector, address, index)
        else:
            pointer = self.vector_at(address, index, FLOATS)
            self.call(f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), vector, pointer, ir.Constant(INT, 1), mask)

    def offset(self, address: Any, numbers: Any, size: int = 4) -> Any:
        """Returns the address that is `numbers` x `size` bytes after an address."""
        return self.builder.add(address, self.builder.mul(numbers, self.size(size)))

    def broadcast(self, number: Any) -> Any:
        kind = ir.VectorType(number.type, LANES)
        vector = self.builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(INT, 0))
        return self.builder.shuffle_vector(vector, ir.Constant(kind, ir.Undefined), integers(0))

    # --- arithmetic ---

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        """Calls an intrinsic function of LLVM with its full name, such as "llvm.sqrt.f32"."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def apply(self, name: str, *vectors: Any) -> Any:
        """Calls an intrinsic function of LLVM for vectors of fp32, such as "fma"."""
        return self.call(f"llvm.{name}.v{LANES}f32", FLOATS, *vectors)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """Returns x * y + z, rounded once."""
        return self.apply("fma", x, y, z)

    def larger(self, x: Any, y: Any) -> Any:
        """Returns the larger numbers of two vectors. Where y is NaN, the result is x."""
        return self.builder.select(self.builder.fcmp_ordered(">", y, x), y, x)

    def exponential(self, x: Any) -> Any:
        """Returns exp(x) of numbers up to 0. Numbers below -87 count as -87, and NaN stays NaN.

        exp(x) is 2 ** n times a polynomial of the rest, and 2 ** n is made from the bits of its exponent.
        """
        builder = self.builder
        z = self.larger(builder.fmul(x, self.constant(LOG2_E)), self.constant(-126))
        whole = self.apply("floor", z)
        exponent = builder.add(builder.fptosi(whole, INTS), integers(127))
        power = builder.bitcast(builder.shl(exponent, integers(23)), FLOATS)
        return builder.fmul(self.polynomial(POWER, builder.fsub(z, whole)), power)

    def polynomial(self, coefficients: Sequence[float], x: Any) -> Any:
        result = self.constant(coefficients[-1])
        for coefficient in coefficients[-2::-1]:
            result = self.fma(result, x, self.constant(coefficient))
        return result

    def sigmoid(self, x: Any) -> Any:
        """Returns 1 / (1 + exp(-x))."""
        builder = self.builder
        power = self.exponential(builder.fneg(self.apply("fabs", x)))
        numerator = builder.select(builder.fcmp_ordered("<", x, self.constant(0)), power, self.constant(1))
        return builder.fdiv(numerator, builder.fadd(self.constant(1), power))

    def erf(self, x: Any) -> Any:
        """Returns the error function, with an absolute error below 3e-7.

        Source: Abramowitz and Stegun 1964, "Handbook of Mathematical Functions", formula 7.1.26.
        """
        builder, size = self.builder, self.apply("fabs", x)
        one = self.constant(1)
        t = builder.fdiv(one, self.fma(self.constant(0.3275911), size, one))
        power = self.exponential(builder.fneg(builder.fmul(size, size)))
        result = builder.fsub(one, builder.fmul(builder.fmul(self.polynomial(ERF, t), t), power))
        return builder.select(builder.fcmp_ordered("<", x, self.constant(0)), builder.fneg(result), result)

    def logarithm(self, x: Any) -> Any:
        """Returns the natural logarithm of numbers from 2 ** -126 on. Smaller numbers give -inf.

        x is 2 ** n times a number from 1 to 2. A polynomial approximates the logarithm of this number.
        """
        builder = self.builder
        bits = builder.bitcast(x, INTS)
        exponent = builder.sub(builder.lshr(bits, integers(23)), integers(127))
        mantissa = builder.bitcast(builder.or_(builder.and_(bits, integers(0x7FFFFF)), integers(0x3F800000)), FLOATS)
        rest = builder.fsub(mantissa, self.constant(1))
        result = builder.fmul(self.polynomial(LOGARITHM, rest), rest)
        result = self.fma(builder.sitofp(exponent, FLOATS), self.constant(math.log(2)), result)
        small = builder.fcmp_ordered("<", x, self.constant(2.0**-126))
        return builder.select(small, self.constant(-math.inf), result)

    def total(self, vector: Any) -> Any:
        """Returns the sum of all lanes: halves are added until one number is left."""
        return self.folded(vector, self.builder.fadd)

    def maximum(self, vector: Any) -> Any:
        return self.folded(vector, self.larger)

    def folded(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        width = LANES // 2
        while width:
            kind = ir.VectorType(INT, width)
            low, high = ir.Constant(kind, list(range(width))), ir.Constant(kind, list(range(width, 2 * width)))
            vector = combine(
                self.builder.shuffle_vector(vector, vector, low), self.builder.shuffle_vector(vector, vector, high)
            )
            width //= 2
        return self.builder.extract_element(vector, ir.Constant(INT, 0))

    # --- control ---

    def variable(self, value: Any) -> Any:
        """Returns a pointer to a variable that a loop can change. LLVM keeps the variable in a register."""
        place = cgutils.alloca_once(self.builder, value.type)
        self.builder.store(value, place)
        return place

    @contextmanager
    def loop(self, stop: Any, step: int) -> Iterator[Any]:
        """A loop whose index takes the values 0, step, … below `stop`."""
        with cgutils.for_range_slice(self.builder, self.size(0), stop, self.size(step)) as (index, _):
            yield index


def for_parts(code: Vectors, size: Any, body: Callable[[Any, Any], None]) -> None:
    """Writes `body` for each part of LANES numbers of a row, and for a shorter last part of the row.

    `body` gets the index of the first number, and a mask of the lanes, which is None for a complete part.
    """
    builder = code.builder
    whole = builder.and_(size, code.size(-LANES))
    with code.loop(whole, LANES) as index:
        body(index, None)
    rest = builder.sub(size, whole)
    with builder.if_then(builder.icmp_signed(">", rest, code.size(0)), likely=False):
        body(whole, code.mask(rest))


def write_each(code: Vectors, size: Any, rows: Sequence[Any], function: Callable[..., Any], y: Any) -> None:
    """Sets y[i] to function(a[i], b[i], …) for each index i, where a, b, … are the `rows`.

    Each row, y included, is given by its address and has `size` numbers.
    """

    def part(index: Any, mask: Any) -> None:
        code.write(function(*(code.read(row, index, mask) for row in rows)), y, index, mask)

    for_parts(code, size, part)


def fold(code: Vectors, size: Any, x: Any, function: Callable[[Any], Any], combine: Callable[[Any, Any], Any]) -> Any:
    """Returns a vector of partial results for a row x of `size` numbers.

    Lane i starts with 0, and combines function(a) for a = x[i], x[i + LANES], x[i + 2 LANES], …
    """
    result, zero = code.variable(code.constant(0)), code.constant(0)

    def part(index: Any, mask: Any) -> None:
        values = function(code.read(x, index, mask))
        values = values if mask is None else code.builder.select(mask, values, zero)
        code.builder.store(combine(code.builder.load(result), values), result)

    for_parts(code, size, part)
    return code.builder.load(result)
