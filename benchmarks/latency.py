"""Latency: how long do n sentences at once take, beside CTranslate2 with the same weights, or beside another checkout?

    python benchmarks/latency.py --text m30k --only "int8 beam 4"        # needs nmtkit[export]
    python benchmarks/latency.py --text m30k --before CHECKOUT
    python benchmarks/latency.py --text m30k --only "tiny,student" --clock cpu

Models: transformer_base, transformer_tiny (tiny) and student_tiny (student) with random weights, sentences of about 15
pieces and 15 forced steps; and a transformer_tiny (trained: `--checkpoint`, or one that is trained first) on lines of
the test set, where each system has its own rule to stop. A time is from lines to translated lines; `--clock cpu` counts
the seconds of the processor, which other processes disturb less. `--only` takes texts such as `base fp32 beam 1`.
CTranslate2 has no SSRU for the student.
`--engine numba` measures nmtkit's compiled search instead of PyTorch. `--shortlist` adds nmtkit with a shortlist of
100 entries for each source piece.

Each system is a process of `--latency-threads` threads, which is warm and idle while the others run. Systems take
turns, round by round, on the same lines, and the median round counts. For single lines there are percentiles, too.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, Report, Row, Server, Workspace, answer, busy_cores, chosen, nmtkit, parser

GROUPS = {1: 16, 4: 6, 16: 2, 64: 1, 256: 1}  # sentences of a group: groups of one turn
PRECISIONS = {"int8": "int8", "bf16": "bfloat16", "fp32": "float32"}  # ours -> CTranslate2's compute type
ARCHS = {"base": "transformer_base", "tiny": "transformer_tiny", "student": "student_tiny"}
MODELS = (*ARCHS, "trained")
PERCENTILES = (50, 90, 99)
STEPS = 15


def nmtkit_system(
    path: str, precision: str, beam: int, forced: bool, threads: int, engine: str, shortlist: bool = False
) -> Callable[[list[str]], Any]:
    import nmtkit

    model = nmtkit.load(path, precision=precision, threads=threads, engine=engine)
    steps = {"min_len": STEPS - 1, "max_len_a": 0, "max_len_b": STEPS - 1} if forced else {}
    return lambda lines: model.translate(lines, beam=beam, shortlist=shortlist, **steps)


def ctranslate2_system(path: str, precision: str, beam: int, forced: bool, threads: int) -> Callable[[list[str]], Any]:
    import ctranslate2
    import sentencepiece

    compute_type = PRECISIONS[precision]
    translator = ctranslate2.Translator(path, inter_threads=1, intra_threads=threads, compute_type=compute_type)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(next(Path(path).glob("*.model"))))
    steps = {"min_decoding_length": STEPS, "max_decoding_length": STEPS} if forced else {}

    def translate(lines: list[str]) -> Any:
        source = pieces.encode(lines, out_type=str)
        results = translator.translate_batch(source, beam_size=beam, max_batch_size=32, **steps)
        return [pieces.decode(result.hypotheses[0]) for result in results]

    return translate


def child(system: str, settings: list[Any], clock: str) -> None:
    """Answers groups of lines with the seconds of each group."""
    now = time.process_time if clock == "cpu" else time.perf_counter
    translate = (ctranslate2_system if system == "CTranslate2" else nmtkit_system)(*settings)

    def seconds(group: list[str]) -> float:
        start = now()
        translate(group)
        return now() - start

    answer(lambda groups: [seconds(group) for group in groups])


def milliseconds(servers: dict[str, Server], lines: Sequence[str], n: int, rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds of a group in each round, after a round that warms the processes up."""
    groups = [[lines[(group * n + i) % len(lines)] for i in range(n)] for group in range(GROUPS[n])]
    times: dict[str, list[float]] = {name: [] for name in servers}
    for turn in range(rounds + 1):
        for name, server in servers.items():
            seconds = server.ask(groups)
            if turn:
                times[name].append(1000 * statistics.mean(seconds))
    return times


def row_of(kind: str, values: dict[str, float]) -> Row:
    """Returns the times, and the speed of each system relative to CTranslate2, or else to nmtkit."""
    base = "CTranslate2" if "CTranslate2" in values else "nmtkit"
    ratios = {f"{name} / {base}": values[base] / value for name, value in values.items() if name != base}
    return {"ms": kind, **values, **ratios}


def contest(arguments: argparse.Namespace, name: str, path: Path, lines: list[str], report: Report) -> None:
    """Measures all sizes of groups for one model, precision and beam."""
    import ctranslate2

    from nmtkit.models.formats import ctranslate2 as export

    model, precision, _, beam = name.split()
    settings = [precision, int(beam), model != "trained", arguments.latency_threads]
    ours = [str(path), *settings, arguments.engine]
    systems: dict[str, tuple[list[Any], Path]] = {"nmtkit": (ours, ROOT)}
    if arguments.before:
        systems["before"] = ours, arguments.before.resolve()
    if arguments.shortlist:
        systems["nmtkit shortlist"] = [*ours, True], ROOT
    if model != "student" and PRECISIONS[precision] in ctranslate2.get_supported_compute_types("cpu"):
        folder = path.with_name(f"{path.stem}-{'int8' if precision == 'int8' else 'float32'}-latency")
        if not folder.exists():
            export.save(path, folder, "int8" if precision == "int8" else "float32")
        systems["CTranslate2"] = [str(folder), *settings], ROOT
    servers = {
        system: Server(__file__, [system, values, arguments.clock], checkout, arguments.latency_threads)
        for system, (values, checkout) in systems.items()
    }
    rows = []
    for n in arguments.sizes:
        times = milliseconds(servers, lines, n, arguments.rounds)
        rows.append(row_of(f"n = {n}", {system: statistics.median(values) for system, values in times.items()}))
    if model == "trained":
        singles: dict[str, list[float]] = {system: [] for system in servers}
        for line in lines[: 2 if arguments.quick else 60]:
            for system, server in servers.items():
                singles[system].append(1000 * server.ask([[line]])[0])
        for percentile in PERCENTILES:
            values = {system: sorted(times)[len(times) * percentile // 100] for system, times in singles.items()}
            rows.append(row_of(f"n = 1, p{percentile}", values))
    for server in servers.values():
        server.close()
    report.table(f"{name}, {arguments.latency_threads} thread(s)", rows)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--checkpoint", type=Path, help="the trained model; default: one is trained")
    flags.add_argument("--before", type=Path, help="a second checkout of nmtkit")
    flags.add_argument("--sizes", type=int, nargs="+", choices=GROUPS, default=list(GROUPS), help="sentences at once")
    flags.add_argument("--latency-threads", type=int, default=1, help="of each process")
    flags.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="time of a clock or of the processor")
    flags.add_argument("--engine", choices=("torch", "numba"), default="torch", help="the search of nmtkit")
    flags.add_argument("--shortlist", action="store_true", help="also measure nmtkit with a shortlist")
    flags.add_argument("--child", help=argparse.SUPPRESS)
    arguments = flags.parse_args()
    if arguments.child:
        return child(*json.loads(arguments.child))
    from nmtkit.data import checkpoint_file
    from nmtkit.data.dataset.binarized import Dataset

    if arguments.quick:
        arguments.sizes, arguments.rounds, arguments.only = [1, 4], 1, arguments.only or "fp32 beam 1"
    workspace, report = Workspace(arguments), Report(arguments)
    lines, tokenizer = workspace.lines("test", 0), Dataset.open(workspace.data).tokenizer
    lengths = [len(ids) for ids in tokenizer.encode_source(lines).split()]
    middle = [lines[index] for index in sorted(range(len(lines)), key=lambda line: abs(lengths[line] - STEPS))]
    training = f"--arch transformer_tiny --max-update {2 if arguments.quick else 900} --threads 2"

    def of(model: str) -> tuple[Path, list[str]]:
        if model == "trained":
            path, text = arguments.checkpoint or workspace.trained("tiny", training), lines
        else:
            arch = "transformer_tiny" if arguments.quick and model == "base" else ARCHS[model]
            path, text = workspace.untrained(arch), middle
        if arguments.shortlist and "shortlist" not in checkpoint_file.read(path, mmap=True):
            nmtkit("shortlist", str(workspace.data), "--path", str(path))
        return path, text

    kinds = [(model, precision, beam) for model in MODELS for beam in (4, 1) for precision in PRECISIONS]
    names = {f"{model} {precision} beam {beam}": model for model, precision, beam in kinds}
    with busy_cores(arguments.busy):
        for name, model in chosen(names, arguments.only).items():
            contest(arguments, name, *of(model), report)


if __name__ == "__main__":
    main()
