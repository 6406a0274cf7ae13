"""nmtkit's decoding speed on a CPU beside CTranslate2's: same weights, same input, one run.

    python benchmarks/generate_speed.py DATA --trained CHECKPOINT [--rounds 5] [--output results.json]

DATA is a dataset of Multi30k as `nmtkit preprocess` makes it; CHECKPOINT a model trained on it. Needs `nmtkit[export]`.

(a) transformer_base with random weights at DATA's vocabulary, sources of about 15 tokens, beam 4, every output forced
    to 15 tokens: nmtkit's are 14 pieces and eos, CTranslate2's 15 pieces: both take 15 steps.
(b) CHECKPOINT on the test set, beam 4, with BLEU. nmtkit searches until no open hypothesis can win, at its default
    length penalty; CTranslate2 until 4 have ended, at its own.

Two processes (nmtkit) or translators (CTranslate2) of one thread each. Both run in every precision that they have on
this machine, and the figure to quote is the ratio within one precision. Systems take turns, round by round, so that a
busy machine slows all of them alike; of each the median round counts, by the clock and in core-seconds. Processes and
weights are warm. nmtkit takes its default batches, CTranslate2 those that are fastest for it here.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import ctranslate2
import torch
from turns import in_turns_by_core

from nmtkit import checkpoint, models
from nmtkit.architectures import ARCHITECTURES
from nmtkit.data.binarized import Dataset
from nmtkit.formats.ctranslate2 import save as save_ctranslate2
from nmtkit.scoring.metrics import score
from nmtkit.search.options import SearchOptions
from nmtkit.translation.parallel import worker_processes
from nmtkit.translation.requests import Request
from nmtkit.translation.translator import Translator

PROCESSES = 2
BATCH = 32  # sentences; CTranslate2's best here, of 16, 32 and 64
PRECISIONS = {"int8": "int8", "bf16": "bfloat16", "fp32": "float32"}  # ours -> CTranslate2's compute type
Outputs = list[list[str]]  # pieces
System = Callable[[], Outputs]


def random_base(data: Dataset, folder: Path) -> Path:
    torch.manual_seed(1)
    preset = ARCHITECTURES["transformer_base"].preset
    model = models.build("transformer_base", preset, models.vocabulary_of(data.tokenizer))
    path = folder / "base.pt"
    checkpoint.save(path, models.to_checkpoint(model, "transformer_base", preset, data.tokenizer, [], 0))
    return path


def ours(stack: ExitStack, path: Path, precision: str, lines: list[str], options: SearchOptions) -> System:
    translator = Translator.load(path, precision=precision)
    decode = stack.enter_context(worker_processes(translator, options, PROCESSES))
    requests, pipeline = [Request(line) for line in lines], translator.pipeline(options)

    def run() -> Outputs:
        return [
            translation.hypotheses[0].pieces for translation in translator.run([requests], pipeline, decode, PROCESSES)
        ]

    return run


def theirs(folder: Path, path: Path, compute_type: str, pieces: Outputs, **options: int) -> System:
    directory = folder / f"{path.stem}-{compute_type}"
    save_ctranslate2(path, directory, "int8" if compute_type == "int8" else "float32")
    translator = ctranslate2.Translator(
        str(directory), inter_threads=PROCESSES, intra_threads=1, compute_type=compute_type
    )

    def run() -> Outputs:
        found = translator.translate_batch(pieces, beam_size=4, max_batch_size=BATCH, **options)
        return [result.hypotheses[0] for result in found]

    return run


def contestants(
    stack: ExitStack,
    folder: Path,
    path: Path,
    lines: list[str],
    pieces: Outputs,
    options: SearchOptions,
    **their_options: int,
) -> dict[str, System]:
    """Returns both systems in every precision that they have here; the key is their name and our word for it."""
    systems = {f"nmtkit {name}": ours(stack, path, name, lines, options) for name in PRECISIONS}
    supported = ctranslate2.get_supported_compute_types("cpu")
    for name, compute_type in PRECISIONS.items():
        if compute_type in supported:
            systems[f"CTranslate2 {name}"] = theirs(folder, path, compute_type, pieces, **their_options)
    return systems


def measure(systems: dict[str, System], extra: int, rounds: int) -> dict[str, dict[str, object]]:
    """Returns seconds, speeds and output of each system; each of nmtkit's sentences counts `extra` more tokens."""
    outputs, seconds, core_seconds = in_turns_by_core(systems, rounds)
    results: dict[str, dict[str, object]] = {}
    for name, found in outputs.items():
        tokens = sum(len(pieces) + (extra if name.startswith("nmtkit") else 0) for pieces in found)
        results[name] = {
            "tokens": tokens,
            "seconds": [round(value, 3) for value in seconds[name]],
            "core_seconds": [round(value, 3) for value in core_seconds[name]],
            "tokens_per_second": round(tokens / statistics.median(seconds[name])),
            "tokens_per_core_second": round(tokens / max(0.01, statistics.median(core_seconds[name]))),
            "output": found,
        }
    return results


def show(title: str, results: dict[str, dict[str, object]]) -> None:
    print(f"\n{title}")
    speeds = {
        name: [float(str(result[unit])) for unit in ("tokens_per_second", "tokens_per_core_second")]
        for name, result in results.items()
    }
    for precision in PRECISIONS:
        if theirs := speeds.get(f"CTranslate2 {precision}"):
            clock, cores = (mine / other for mine, other in zip(speeds[f"nmtkit {precision}"], theirs, strict=True))
            print(
                f"  {precision}: nmtkit is {clock:.2f} times as fast as CTranslate2, per core-second {cores:.2f} times"
            )
        else:
            print(f"  {precision}: CTranslate2 has none on this machine, so there is no ratio")
    for name, result in results.items():
        clock, cores = speeds[name]
        print(
            f"  {name:<22}{clock:>7,.0f} tok/s {cores:>7,.0f} a core-second"
            f"  {result.get('bleu', '')}  {result['seconds']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--trained", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sentences", type=int, default=256, help="of the test set, in (a)")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # before anything is computed: workers are forked
    data = Dataset.open(arguments.data)
    lines, references = data["test"].source_lines(), data["test"].references()
    encoded = data.tokenizer.encode_source(lines).split()
    pieces = [data.tokenizer.source_pieces(ids[:-1]) for ids in encoded]
    report: dict[str, dict[str, dict[str, object]]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        base, number = random_base(data, folder), arguments.sentences
        middle = sorted(range(len(lines)), key=lambda line: abs(len(encoded[line]) - 15))[:number]
        forced = SearchOptions(beam=4, min_len=14, max_len_a=0, max_len_b=14)
        chosen_lines, chosen_pieces = [lines[i] for i in middle], [pieces[i] for i in middle]
        limits = {"min_decoding_length": 15, "max_decoding_length": 15}
        systems = contestants(stack, folder, base, chosen_lines, chosen_pieces, forced, **limits)
        report["base"] = measure(systems, 1, arguments.rounds)
        show("(a) transformer_base, random weights, 15 forced tokens", report["base"])
        if arguments.trained is not None:
            systems = contestants(stack, folder, arguments.trained, lines, pieces, SearchOptions())
            report["trained"] = measure(systems, 1, arguments.rounds)
            for result in report["trained"].values():
                texts = [
                    data.tokenizer.decode_target([data.tokenizer._target.piece_to_id(piece) for piece in output])
                    for output in result["output"]
                ]
                result["bleu"] = f"BLEU {score(texts, [references])[0].value:.2f}"
            plain, whole = report["trained"]["nmtkit fp32"]["output"], report["trained"]["nmtkit int8"]["output"]
            show(f"(b) {arguments.trained.name} on the test set", report["trained"])
            print(f"  int8 changes {sum(a != b for a, b in zip(plain, whole, strict=True))} of {len(lines)} sentences")
    if arguments.output is not None:
        for part in report.values():
            for result in part.values():
                del result["output"]
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
