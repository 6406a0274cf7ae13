"""Measures the time of each part of a translation with the compiled search, and the limit by the speed of products.

    python benchmarks/parts.py --models teacher.pt student.pt:shortlist --lines test.en          # needs nmtkit[numba]

`:shortlist` after a model restricts the search to the shortlist of the checkpoint. For each model, beam size and number
of lines n in a call, the table has the microseconds of a line (medians of all calls): in all, for text and ids
(Python), for the encoder and for the decoder. "products" are the linear layers alone, called in the order of the model
for as many rows as the search has. With a shortlist, the output projection is not included. The limit is the time of
the same multiply-adds at the highest rate that the product kernel reaches on this core (512 inputs, 2,048 outputs, 96
rows).
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from harness import Report, Row, nmtkit, parser

from nmtkit.translation.engines import compiled_model, lockstep
from nmtkit.translation.engines.compiled_products import COLUMNS, INPUTS, PADDED_OUTPUTS, WEIGHT, aligned, linear
from nmtkit.translation.engines.compiled_search import ENCODED
from nmtkit.translation.engines.compiled_weights import WeightTables
from nmtkit.translation.engines.lockstep import MOST_ROWS, MOST_SENTENCES, LockstepSearch
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Request
from nmtkit.translation.translator import Translator

NO_FLOOR = np.float32(-np.inf)


# --- products ---------------------------------------------------------------------------------------------------------


@numba.njit
def multiply(layers: Any, indices: Any, rows: int, x: Any, integers: Any, scales: Any, y: Any, repeats: int) -> None:
    for _ in range(repeats):
        for index in indices:
            linear(
                layers.ctypes.data, index, rows, x.ctypes.data, x.strides[0], integers.ctypes.data, integers.shape[1],
                scales.ctypes.data, y.ctypes.data, y.shape[1], NO_FLOOR, 0,
            )  # fmt: skip


def seconds_of(layers: Any, indices: Any, rows: int, repeats: int) -> float:
    """Returns the seconds to apply the linear layers `indices` of a table, one after the other, to `rows` rows."""
    widest = int(layers[:, INPUTS].max()), int(layers[:, PADDED_OUTPUTS].max())
    x, y = aligned((rows, widest[0]), np.float32), aligned((rows, widest[1]), np.float32)
    x[...] = np.random.default_rng(0).standard_normal(x.shape)
    integers, scales = aligned((rows, 2 * widest[0] + 64), np.uint8), np.zeros(rows, np.float32)
    found = []
    for _ in range(5):
        start = time.perf_counter()
        multiply(layers, indices, rows, x, integers, scales, y, repeats)
        found.append((time.perf_counter() - start) / repeats)
    return float(np.median(found[1:]))


def highest_rate(precision: Any) -> float:
    """Returns the multiply-adds per second of the product kernel, with weights that fit into the level 2 cache."""
    tables = WeightTables(precision)
    tables.linear(torch.randn(2048, 512), None)
    return 96 * 512 * 2048 / seconds_of(np.array(tables.linears, np.int64), np.array([0]), 96, 20)


def products(search: LockstepSearch, part: str, rows: int, repeats: int) -> tuple[int, float]:
    """Returns the multiply-adds for a row and the seconds for `rows` rows in the linear layers of a part of the model.

    The projections of the memory to keys and values belong to the part "encoder".
    """
    record, layers = search.models[0], search.linears[0].reshape(-1, COLUMNS)
    first = compiled_model.LINEARS_OF_ENCODER_LAYER * int(record["encoder_layers"])
    decoder, count = compiled_model.LINEARS_OF_DECODER_LAYER, int(record["decoder_layers"])
    memory = [first + decoder * layer + compiled_model.MEMORY for layer in range(count)]
    indices = {
        "encoder": [*range(first), *memory],
        "decoder": [index for index in range(first, first + decoder * count) if index not in memory],
        "output": [len(layers) - 1],
    }[part]
    used = np.array([index for index in indices if layers[index, WEIGHT]])
    operations = int((layers[used, INPUTS] * layers[used, PADDED_OUTPUTS]).sum())
    return operations, seconds_of(layers, used, rows, repeats)


# --- calls ------------------------------------------------------------------------------------------------------------


class Clock:
    """Adds up the seconds of calls of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = self.function(*arguments)
        self.seconds += time.perf_counter() - start
        return result


def measured(translator: Translator, search: SearchOptions, lines: list[str], n: int, rounds: int) -> Row:
    """Returns the microseconds and the source and target tokens per line, as medians over calls of `n` lines."""
    pipeline = translator.pipeline(search)
    encode, decode = Clock(lockstep.compiled.encode_sentences), Clock(lockstep.compiled.search)
    lockstep.compiled.encode_sentences, lockstep.compiled.search = encode, decode
    calls = []
    try:
        for _ in range(rounds + 1):
            for start in range(0, len(lines), n):
                requests = list(map(Request, lines[start : start + n]))
                encode.seconds = decode.seconds = 0.0
                before = time.perf_counter()
                found = list(translator.run([requests], pipeline))
                total = time.perf_counter() - before
                targets = sum(len(line.hypotheses[0].tokens) + 1 for line in found)
                sources = sum(len(translator.tokenizer.encode_source([line.source]).ids) for line in found)
                calls.append(np.array([total, encode.seconds, decode.seconds, sources, targets]) / len(requests))
    finally:
        lockstep.compiled.encode_sentences, lockstep.compiled.search = encode.function, decode.function
    total, encoder, decoder, sources, targets = np.median(calls[len(calls) // (rounds + 1) :], 0).tolist()
    text = total - encoder - decoder
    return {"µs": 1e6 * total, "text": 1e6 * text, "encoder": 1e6 * encoder, "decoder": 1e6 * decoder,
            "source tokens": sources, "target tokens": targets}  # fmt: skip


def row(model: str, beam: int, n: int, options: argparse.Namespace, lines: list[str], rate: float) -> Row:
    path, _, shortlist = model.partition(":")
    translator = Translator.load(Path(path), engine="numba", precision=options.precision)
    settings = SearchOptions(beam=beam, lenpen=0, shortlist=bool(shortlist), keep_loops=True)
    found = measured(translator, settings, lines, n, options.rounds)
    search, repeats = translator.decoder.engine.prepared(), 2 if options.quick else 50
    rows = beam * max(1, min(MOST_SENTENCES, MOST_ROWS // beam, n))
    operations, seconds = products(search, "encoder", ENCODED, repeats)
    sources, targets = found["source tokens"], beam * found["target tokens"]
    result: Row = {"model": Path(path).stem + " shortlist" * bool(shortlist), "beam": beam, "n": n}
    result |= {name: found[name] for name in ("µs", "text", "encoder")}
    result |= {
        "encoder's products": 1e6 * seconds / ENCODED * sources,
        "encoder's limit": 1e6 * operations * sources / rate,
    }
    parts = [products(search, part, rows, repeats) for part in ("decoder", *(() if shortlist else ("output",)))]
    result["decoder"] = found["decoder"]
    result["decoder's products"] = sum(1e6 * seconds / rows * targets for _, seconds in parts)
    result["decoder's limit"] = sum(1e6 * operations * targets / rate for operations, _ in parts)
    return result


def main() -> None:
    flags = parser(__doc__, rounds=5)
    flags.add_argument("--models", nargs="+", required=True, metavar="FILE[:shortlist]")
    flags.add_argument("--lines", type=Path, required=True, help="source lines")
    flags.add_argument("--precision", choices=["fp32", "int8"], default="int8")
    flags.add_argument("--beams", nargs="+", type=int, default=[1, 4])
    flags.add_argument("--numbers", nargs="+", type=int, default=[1, 64], help="numbers of lines at a time")
    options = flags.parse_args()
    if options.quick:
        options.rounds, options.numbers = 1, [4]
    report = Report(options)
    torch.set_num_threads(1)
    nmtkit("precompile")
    lines = options.lines.read_text(encoding="utf-8").split("\n")[:-1][: 8 if options.quick else 256]
    rate = highest_rate(options.precision)
    rows = [
        row(model, beam, n, options, lines, rate)
        for model in options.models
        for beam in options.beams
        for n in options.numbers
    ]
    report.table(
        f"{options.precision}, {rate / 1e9:.0f} thousand million multiply-adds a second: microseconds a line", rows
    )


if __name__ == "__main__":
    main()
