"""Two cores of a CPU: does a batch on two threads, or do two processes, take half the time of one thread?

    python benchmarks/threads.py --checkpoint best.pt --lines test.en           # needs nmtkit[numba]
    python benchmarks/threads.py --parts base

trained   A checkpoint on real lines.
base      transformer_base with random weights. Sentences have 8 to 19 pieces, and each search is forced to 15 steps.

For each number of lines n, a system translates n lines at a time, from text to text, with the compiled search: on one
thread, on two threads, and with two processes (`--workers 2`), which share the n lines. Models are loaded and processes
are started before the clock starts. The table has the milliseconds of a call (medians of all rounds), and the times
relative to one thread.
"""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from engines import FORCED, base_model, made_lines
from harness import Report, Row, in_turns, nmtkit, parser

from nmtkit.translation.parallel import worker_processes
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Request
from nmtkit.translation.translator import Translator

LINES = {"trained": 256, "base": 64}  # smallest number of lines in a round


def systems(stack: ExitStack, translator: Translator, path: Path, search: SearchOptions, lines: list[str], size: int,
            precision: str) -> dict[str, Callable[[], list[str]]]:  # fmt: skip
    pipeline = translator.pipeline(search)
    load = partial(Translator.load, path, engine="numba", precision=precision)
    workers = stack.enter_context(worker_processes(translator, search, 2, load))
    parts = [list(map(Request, lines[start : start + size])) for start in range(0, len(lines), size)]

    def run(threads: int, processes: int) -> list[str]:
        torch.set_num_threads(threads)
        decoder = None if processes == 1 else workers
        return [line.text for part in parts for line in translator.run([part], pipeline, decoder, processes)]

    return {
        "one thread": partial(run, 1, 1),
        "two threads": partial(run, 2, 1),
        "two processes": partial(run, 1, 2),
    }  # fmt: skip


def measured(options: argparse.Namespace, name: str, path: Path, lines: list[str], report: Report) -> None:
    forced, least = name == "base", 4 if options.quick else LINES[name]
    for precision in options.precisions:
        translator, rows = Translator.load(path, engine="numba", precision=precision), list[Row]()
        for beam in options.beams:
            search = replace(FORCED if forced else SearchOptions(), beam=beam, lenpen=0)
            for size in options.numbers:
                part = lines[: max(size, least)]
                with ExitStack() as stack:
                    named = systems(stack, translator, path, search, part, size, precision)
                    timings = in_turns(named, options.rounds)
                assert len({tuple(timing.output) for timing in timings.values()}) == 1
                calls = len(part) / size
                medians = {name: 1000 * float(np.median(timing.seconds)) / calls for name, timing in timings.items()}
                ratios = {f"{name} / one": value / medians["one thread"] for name, value in medians.items()}
                del ratios["one thread / one"]
                rows.append({"beam": beam, "n": size} | medians | ratios)
        report.table(f"{path.stem}, {precision}: milliseconds a call", rows)


def main() -> None:
    flags = parser(__doc__, ["trained", "base"], rounds=5)
    flags.add_argument("--checkpoint", type=Path, help="for the part `trained`")
    flags.add_argument("--lines", type=Path, help="source lines for the part `trained`")
    flags.add_argument("--precisions", nargs="+", choices=["fp32", "int8"], default=["int8"])
    flags.add_argument("--beams", nargs="+", type=int, default=[1, 4])
    flags.add_argument("--numbers", nargs="+", type=int, default=[16, 64, 256], help="numbers of lines at a time")
    options = flags.parse_args()
    if options.quick:
        options.rounds, options.numbers = 1, [4]
    options.folder.mkdir(parents=True, exist_ok=True)
    report = Report(options)
    nmtkit("precompile")
    if "trained" in options.parts:
        if options.checkpoint is None or options.lines is None:
            flags.error("the part `trained` needs --checkpoint and --lines")
        lines = options.lines.read_text(encoding="utf-8").split("\n")[:-1]
        measured(options, "trained", options.checkpoint, lines[:: max(1, len(lines) // LINES["trained"])], report)
    if "base" in options.parts:
        path = base_model(options.folder)
        measured(options, "base", path, made_lines(path), report)


if __name__ == "__main__":
    main()
