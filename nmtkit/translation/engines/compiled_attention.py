"""Attention of a single query in the compiled engine, as code for LLVM: softmax(q K^T x scale) V for each head.

Keys and values can lie anywhere in memory: key i of a head begins `stride` x places[i] numbers after the address
`keys`. The kernels for the usual widths of heads keep a query and the weighted sum of values in registers, and add up
the products of four keys together. They make three passes over all heads: products, exponentials, sums. Within a head,
each step waits for the result of the previous step (a maximum, a sum, a division). Meanwhile, the processor works on
the next head. For these widths, the memory for weights has a section for each head. The section begins with LANES
numbers: first the maxima of the products, later the sum of the exponentials. The weights of the positions follow,
padded to a multiple of LANES numbers.
"""

from typing import Any

from llvmlite import ir

from nmtkit.translation.engines.compiled_code import NUMBER, REAL
from nmtkit.translation.engines.compiled_kernels import kernel, kernels
from nmtkit.translation.engines.compiled_vectors import FLOAT, INT, LANES, SIZE, Vectors, for_parts, write_each

KEYS = 4  # keys whose products are computed together
PARTS = (2, 4)  # kernels are made for heads of 2 and 4 vectors: 32 and 64 numbers
FOURS = ir.VectorType(FLOAT, KEYS)


def lanes(numbers: list[int]) -> Any:
    return ir.Constant(ir.VectorType(INT, len(numbers)), numbers)


def totals(code: Vectors, vectors: list[Any]) -> Any:
    """Returns the sums of four vectors as one vector. Each sum adds its numbers in the order of `Vectors.total`."""
    builder = code.builder

    def halves(x: Any, y: Any, low: list[int], high: list[int]) -> Any:
        return builder.fadd(builder.shuffle_vector(x, y, lanes(low)), builder.shuffle_vector(x, y, lanes(high)))

    eights = [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]
    a, b = halves(vectors[0], vectors[1], *eights), halves(vectors[2], vectors[3], *eights)
    low = [start + lane for start in range(0, 32, 8) for lane in range(4)]
    c = halves(a, b, low, [lane + 4 for lane in low])
    low = [start + lane for start in range(0, 16, 4) for lane in range(2)]
    d = halves(c, c, low, [lane + 2 for lane in low])
    return halves(d, d, [0, 2, 4, 6], [1, 3, 5, 7])


def write_products(
    code: Vectors, parts: int, query: Any, keys: Any, places: Any, count: Any, stride: Any, scale: Any, y: Any
) -> None:
    """Writes the products of a query and `count` keys, times `scale`, to y, after a vector of maxima.

    The products are written in vectors of LANES numbers. Lane i of the maxima is the largest number in lane i of these
    vectors. If the last vector is not full, it ends with -inf. `parts` is the number of vectors of a query.
    """
    builder = code.builder
    products_at = code.offset(y, code.size(LANES))
    queries = [code.load(query, code.size(LANES * part)) for part in range(parts)]
    largest = code.variable(code.constant(float("-inf")))
    last, scales = builder.sub(count, code.size(1)), code.broadcast(scale)

    def product(index: Any) -> Any:
        """Multiplies the query and key `index` element by element. Returns the sum of the resulting vectors.

        An index beyond the last key reads the last key, so that no load leaves the memory of the keys.
        """
        index = builder.select(builder.icmp_signed("<", index, last), index, last)
        start = builder.mul(code.load_number(places, index, SIZE), stride)
        total = None
        for part, q in enumerate(queries):
            k = code.load(keys, builder.add(start, code.size(LANES * part)))
            total = builder.fmul(q, k) if total is None else code.fma(q, k, total)
        return total

    with code.loop(count, LANES) as first:
        fours = []
        for begin in range(0, LANES, KEYS):
            four = code.variable(ir.Constant(FOURS, [0.0] * KEYS))
            start = builder.add(first, code.size(begin))
            with builder.if_then(builder.icmp_signed("<", start, count)):
                products = [product(builder.add(start, code.size(number))) for number in range(KEYS)]
                builder.store(totals(code, products), four)
            fours.append(builder.load(four))
        eights = [
            builder.shuffle_vector(x, y, lanes([*range(8)])) for x, y in zip(fours[::2], fours[1::2], strict=True)
        ]
        values = builder.fmul(builder.shuffle_vector(*eights, lanes([*range(LANES)])), scales)
        values = builder.select(code.mask(builder.sub(count, first)), values, code.constant(float("-inf")))
        code.store(values, products_at, first)
        builder.store(code.larger(builder.load(largest), values), largest)
    code.store(builder.load(largest), y, code.size(0))


def replace_by_exponentials(code: Vectors, x: Any, count: Any) -> None:
    """Replaces the products of `write_products` by exp(product - largest product), and the number at x by the sum."""
    builder, shifts = code.builder, code.broadcast(code.maximum(code.load(x, code.size(0))))
    products = code.offset(x, code.size(LANES))
    total = code.variable(code.constant(0))
    with code.loop(count, LANES) as first:
        values = code.exponential(builder.fsub(code.load(products, first), shifts))
        code.store(values, products, first)
        builder.store(builder.fadd(builder.load(total), values), total)
    builder.store(code.total(builder.load(total)), code.at(x, code.size(0), FLOAT))


def write_sum(
    code: Vectors, parts: int, weights: Any, factor: Any, values: Any, places: Any, count: Any, stride: Any, y: Any
) -> None:
    """Writes `factor` times the weighted sum of `count` values to y."""
    builder = code.builder
    sums = [code.variable(code.constant(0)) for _ in range(parts)]
    with code.loop(count, 1) as number:
        start = builder.mul(code.load_number(places, number, SIZE), stride)
        weight = code.broadcast(code.load_number(weights, number))
        for part, total in enumerate(sums):
            value = code.load(values, builder.add(start, code.size(LANES * part)))
            builder.store(code.fma(weight, value, builder.load(total)), total)
    factors = code.broadcast(factor)
    for part, total in enumerate(sums):
        code.store(builder.fmul(builder.load(total), factors), y, code.size(LANES * part))


@kernel(NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, REAL, NUMBER, result=REAL)
def products_of_any_width(
    code: Vectors, query: Any, width: Any, keys: Any, places: Any, count: Any, stride: Any, scale: Any, y: Any
) -> Any:
    """Writes the products of a query and `count` keys, times `scale`, to y, and returns the largest product.

    In contrast to `write_products`, the head may have any width.
    """
    builder = code.builder
    largest = code.variable(ir.Constant(FLOAT, float("-inf")))
    with code.loop(count, 1) as number:
        first = builder.mul(code.load_number(places, number, SIZE), stride)
        total = code.variable(code.constant(0))

        def part(index: Any, mask: Any, first: Any = first, total: Any = total) -> None:
            key = code.read(keys, builder.add(first, index), mask)
            builder.store(code.fma(code.read(query, index, mask), key, builder.load(total)), total)

        for_parts(code, width, part)
        value = builder.fmul(code.total(builder.load(total)), scale)
        builder.store(value, code.at(y, number, FLOAT))
        builder.store(code.larger(builder.load(largest), value), largest)
    return builder.load(largest)


@kernel(NUMBER, REAL, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER)
def sum_of_any_width(
    code: Vectors, weights: Any, factor: Any, width: Any, values: Any, places: Any, count: Any, stride: Any, y: Any
) -> None:
    """Does the same as `write_sum` for a head of any width."""
    builder, factors = code.builder, code.broadcast(factor)

    def part(index: Any, mask: Any) -> None:
        total = code.variable(code.constant(0))
        with code.loop(count, 1) as number:
            start = builder.mul(code.load_number(places, number, SIZE), stride)
            weight = code.broadcast(code.load_number(weights, number))
            value = code.read(values, builder.add(start, index), mask)
            builder.store(code.fma(weight, value, builder.load(total)), total)
        code.write(builder.fmul(builder.load(total), factors), y, index, mask)

    for_parts(code, width, part)


@kernel(*[NUMBER] * 8, REAL, NUMBER, NUMBER, NUMBER, REAL)
def attended(
    code: Vectors, query: Any, width: Any, heads: Any, keys: Any, values: Any, places: Any, count: Any, stride: Any,
    scale: Any, weights: Any, y: Any, recorded: Any, share: Any,
) -> None:  # fmt: skip
    """Writes the attention of one query to y, for `heads` heads of `width` numbers.

    `weights` is memory for the attention weights of all heads. Unless the address `recorded` is 0, `share` times the
    attention weights of all heads are added to the numbers at `recorded`.
    """
    builder = code.builder
    one = ir.Constant(FLOAT, 1.0)

    def inverse(weights: Any, total: Any) -> Any:
        """Returns 1 / `total`, the factor of the weighted sum of a head. Records the attention weights of the head."""
        with builder.if_then(builder.icmp_signed("!=", recorded, code.size(0)), likely=False):
            factor = code.broadcast(builder.fdiv(share, total))
            rows = weights, recorded
            write_each(code, count, rows, lambda weight, before: code.fma(weight, factor, before), recorded)
        return builder.fdiv(one, total)

    last = builder.add(count, code.size(LANES - 1))
    # size of the section of a head in `weights`, in numbers
    section = builder.add(builder.and_(last, code.size(-LANES)), code.size(LANES))

    other_width = ir.Constant(ir.IntType(1), 1)
    for parts in PARTS:
        size = code.size(LANES * parts)
        other_width = builder.and_(other_width, builder.icmp_signed("!=", width, size))
        with builder.if_then(builder.icmp_signed("==", width, size)):
            with code.loop(heads, 1) as head:
                q, k = (code.offset(each, builder.mul(head, size)) for each in (query, keys))
                own = code.offset(weights, builder.mul(head, section))
                write_products(code, parts, q, k, places, count, stride, scale, own)
            with code.loop(heads, 1) as head:
                replace_by_exponentials(code, code.offset(weights, builder.mul(head, section)), count)
            with code.loop(heads, 1) as head:
                v, result = (code.offset(each, builder.mul(head, size)) for each in (values, y))
                own = code.offset(weights, builder.mul(head, section))
                own, total = code.offset(own, code.size(LANES)), code.load_number(own, code.size(0))
                write_sum(code, parts, own, inverse(own, total), v, places, count, stride, result)
    with builder.if_then(other_width, likely=False), code.loop(heads, 1) as head:
        q, k, v, result = (code.offset(each, builder.mul(head, width)) for each in (query, keys, values, y))
        products = kernels.function("products_of_any_width")
        largest = builder.call(products, [q, width, k, places, count, stride, scale, weights])
        total = builder.call(kernels.function("exponentials"), [weights, count, largest, one, weights])
        arguments = [weights, inverse(weights, total), width, v, places, count, stride, result]
        builder.call(kernels.function("sum_of_any_width"), arguments)
