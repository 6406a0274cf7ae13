"""Milliseconds for n sentences at once on a CPU, beside CTranslate2 with the same weights.

    python benchmarks/latency.py DATA [--trained CHECKPOINT] [--only base,int8,beam4,n1,threads1] [--before CHECKOUT]

DATA is a dataset of Multi30k as `nmtkit preprocess` makes it; CHECKPOINT a model trained on it. Needs `nmtkit[export]`.

base: transformer_base with random weights at DATA's vocabulary, sources of about 15 tokens, every output forced to 15
steps. trained: CHECKPOINT on lines of the test set, each system with its own rule to stop; percentiles over single
lines too. A time is from lines to translated lines, segmentation by SentencePiece included.

Each system is a process of its own that is warm and idle while the others run; systems take turns, round by round, on
the same lines, and of each the median round counts. With `--before` a second checkout of nmtkit takes its turns too.
`--only` takes words: models (base, trained), precisions, beam1 or beam4, n1, n4, n16, n64, n256, threads1 or threads2.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GROUPS = {1: 16, 4: 6, 16: 2, 64: 1, 256: 1}  # sentences of a group: groups that one turn translates
PRECISIONS = {"int8": "int8", "bf16": "bfloat16", "fp32": "float32"}  # ours -> CTranslate2's compute type
PERCENTILES = (50, 90, 99)
STEPS = 15  # of every output of the random model
CT2_BATCH = 32  # its best for many sentences here


@dataclass(frozen=True)
class Contest:
    """One line of the table."""

    model: str
    precision: str
    beam: int
    threads: int


def nmtkit_system(contest: Contest, path: str) -> Callable[[list[str]], Any]:
    import torch

    from nmtkit.translation.translator import Translator

    torch.set_num_threads(contest.threads)
    translator = Translator.load(path, precision=contest.precision)  # type: ignore[arg-type]
    forced = {"min_len": STEPS - 1, "max_len_a": 0, "max_len_b": STEPS - 1} if contest.model == "base" else {}
    return lambda lines: translator.translate(lines, beam=contest.beam, **forced)


def ctranslate2_system(contest: Contest, path: str) -> Callable[[list[str]], Any]:
    import ctranslate2
    import sentencepiece

    type_ = PRECISIONS[contest.precision]
    translator = ctranslate2.Translator(path, inter_threads=1, intra_threads=contest.threads, compute_type=type_)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(next(Path(path).glob("*.model"))))
    forced = {"min_decoding_length": STEPS, "max_decoding_length": STEPS} if contest.model == "base" else {}

    def translate(lines: list[str]) -> Any:
        found = translator.translate_batch(
            pieces.encode(lines, out_type=str), beam_size=contest.beam, max_batch_size=CT2_BATCH, **forced
        )
        return [pieces.decode(result.hypotheses[0]) for result in found]

    return translate


def serve(contest: Contest, path: str, name: str) -> None:
    """Translates the groups of lines that come in on stdin, and answers with the seconds of each."""
    system = (ctranslate2_system if name == "CTranslate2" else nmtkit_system)(contest, path)
    print(json.dumps("ready"), flush=True)
    for message in sys.stdin:
        seconds = []
        for group in json.loads(message):
            start = time.perf_counter()
            system(group)
            seconds.append(time.perf_counter() - start)
        print(json.dumps(seconds), flush=True)


class System:
    """A process that serves one system."""

    def __init__(self, contest: Contest, path: Path, name: str, checkout: Path) -> None:
        arguments = [sys.executable, __file__, "--serve", json.dumps([asdict(contest), str(path), name])]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": str(contest.threads)}
        self.process = subprocess.Popen(
            arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.answer() == "ready"

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def seconds(self, groups: Sequence[Sequence[str]]) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(groups) + "\n")
        self.process.stdin.flush()
        found: list[float] = self.answer()
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(systems: dict[str, System], lines: list[str], n: int, rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds a group of each round of each system, after a first round that warms them up."""
    groups = [[lines[(group * n + i) % len(lines)] for i in range(n)] for group in range(GROUPS[n])]
    times: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(rounds + 1):
        for name, system in systems.items():
            seconds = system.seconds(groups)
            if turn:
                times[name].append(1000 * sum(seconds) / len(seconds))
    return times


def percentiles(systems: dict[str, System], lines: list[str]) -> dict[str, list[float]]:
    """Returns percentiles of the milliseconds of single lines; systems take turns line by line."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    for line in lines:
        for name, system in systems.items():
            times[name].append(1000 * system.seconds([[line]])[0])
    return {name: [sorted(found)[len(found) * p // 100] for p in PERCENTILES] for name, found in times.items()}


def contests(only: set[str], models: Sequence[str]) -> list[Contest]:
    """Returns the lines of the table that `only` leaves; a kind of which it names none is taken whole."""

    def chosen(words: Sequence[str]) -> list[str]:
        return [word for word in words if word in only] or list(words)

    return [
        Contest(model, precision, int(beam[4:]), int(threads[7:]))
        for threads in chosen(["threads1", "threads2"])
        for model in chosen(models)
        for beam in chosen(["beam4", "beam1"])
        for precision in chosen(list(PRECISIONS))
    ]


def random_base(data: Any, folder: Path) -> Path:
    import torch

    from nmtkit import checkpoint, models
    from nmtkit.architectures import ARCHITECTURES

    torch.manual_seed(1)
    preset = ARCHITECTURES["transformer_base"].preset
    model = models.build("transformer_base", preset, models.vocabulary_of(data.tokenizer))
    path = folder / "base.pt"
    checkpoint.save(path, models.to_checkpoint(model, "transformer_base", preset, data.tokenizer, [], 0))
    return path


def run(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    import ctranslate2

    from nmtkit.data.binarized import Dataset
    from nmtkit.formats import ctranslate2 as export

    data = Dataset.open(arguments.data)
    lines = data["test"].source_lines()
    lengths = [len(ids) for ids in data.tokenizer.encode_source(lines).split()]
    middle = sorted(range(len(lines)), key=lambda line: abs(lengths[line] - 15))
    chosen = {"base": [lines[index] for index in middle], "trained": lines}
    paths = {"base": arguments.base or random_base(data, folder)}
    if arguments.trained is not None:
        paths["trained"] = arguments.trained
    supported = ctranslate2.get_supported_compute_types("cpu")
    only = set(filter(None, arguments.only.split(",")))
    sizes = [n for n in GROUPS if f"n{n}" in only] or list(GROUPS)
    here = Path(__file__).parents[1]
    report = []
    for contest in contests(only, list(paths)):
        path, kind = paths[contest.model], "int8" if contest.precision == "int8" else "float32"
        directory = folder / f"{contest.model}-{kind}"
        if not directory.exists():
            export.save(path, directory, kind)  # type: ignore[arg-type]
        systems = {"nmtkit": System(contest, path, "nmtkit", here)}
        if arguments.before is not None:
            systems["before"] = System(contest, path, "before", arguments.before)
        if PRECISIONS[contest.precision] in supported:
            systems["CTranslate2"] = System(contest, directory, "CTranslate2", here)
        for n in sizes:
            times = measure(systems, chosen[contest.model], n, arguments.rounds)
            report.append({**asdict(contest), "n": n, "milliseconds": times})
            show(contest, f"n={n}", {name: statistics.median(found) for name, found in times.items()})
        if contest.model == "trained" and 1 in sizes:
            found = percentiles(systems, lines[: arguments.lines])
            report.append({**asdict(contest), "percentiles": found})
            for index, percentile in enumerate(PERCENTILES):
                show(contest, f"n=1 p{percentile}", {name: values[index] for name, values in found.items()})
        for system in systems.values():
            system.close()
    return report


def show(contest: Contest, kind: str, milliseconds: dict[str, float]) -> None:
    columns = "".join(f"  {name} {value:8.2f} ms" for name, value in milliseconds.items())
    ours = milliseconds["nmtkit"]
    ratios = "".join(f"  {value / ours:5.2f}x {name}" for name, value in milliseconds.items() if name != "nmtkit")
    words = f"{contest.model} {contest.precision} beam {contest.beam} threads {contest.threads}"
    print(f"{words:<36}{kind:<10}{columns} {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--trained", type=Path)
    parser.add_argument("--base", type=Path, help="a random transformer_base that both checkouts can read")
    parser.add_argument("--before", type=Path, help="a second checkout of nmtkit")
    parser.add_argument("--only", default="", help="words, by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lines", type=int, default=60, help="single lines for the percentiles")
    parser.add_argument("--output", type=Path, help="JSON")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        contest, path, name = json.loads(arguments.serve)
        return serve(Contest(**contest), path, name)
    with tempfile.TemporaryDirectory() as name:
        report = run(arguments, Path(name))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
