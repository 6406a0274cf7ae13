"""Engines on one thread of a CPU: nmtkit's engines beside CTranslate2, with the same weights and the same search.

    python benchmarks/engines.py --checkpoint best.pt --lines test.en       # needs nmtkit[export,numba]
    python benchmarks/engines.py --parts base wide --precisions int8

trained   A checkpoint on real lines.
base      transformer_base with random weights, 15 forced steps on sentences of 8 to 19 pieces.
wide      The same with the 58,101 entries of an OPUS-MT model.

For each number of lines n, a system translates n lines at a time, from text to text. Nothing rewards length (`--lenpen
0`), so that the search is the same. CTranslate2 has batches of 32 lines, its fastest here. Models are loaded before the
clock starts. A row has the medians of all rounds; the last columns are speeds relative to CTranslate2.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import sentencepiece
import torch
from harness import Report, Row, Timing, in_turns, parser

from nmtkit.data import checkpoint_file
from nmtkit.data.dataset.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models import building
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.models.formats import ctranslate2 as ctranslate2_export
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.translator import Translator

NUMBERS, BEAMS, STEPS, BATCH = (1, 4, 16, 64, 256), (1, 4), 15, 32
LINES = 64  # smallest number of lines of a round
COMPUTE_TYPES = {"fp32": "float32", "int8": "int8"}
System = Callable[[], list[str]]


def random_model(folder: Path, vocabulary: int) -> Path:
    """Returns a checkpoint of transformer_base with random weights and made-up words as its vocabulary."""
    path = folder / f"base-{vocabulary}.pt"
    if not path.exists():
        generator = np.random.default_rng(0)
        letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
        words = sorted({"".join(generator.choice(letters, 6)) for _ in range(2 * vocabulary)})
        lines = [" ".join(words[start : start + 9]) for start in range(0, len(words), 9)]
        tokenizer = Tokenizer(train_model(lines, vocabulary))
        torch.manual_seed(0)
        preset = ARCHITECTURES["transformer_base"].preset
        model = building.build("transformer_base", preset, building.vocabulary_of(tokenizer))
        checkpoint_file.save(path, building.to_checkpoint(model, "transformer_base", preset, tokenizer, [], 0))
    return path


def made_lines(path: Path) -> list[str]:
    """Returns lines of 8 to 19 random pieces of the vocabulary of a model."""
    tokenizer = building.from_checkpoint(path)[1]
    generator = np.random.default_rng(1)
    ids = [generator.integers(300, tokenizer.source_size, size) for size in generator.integers(8, 20, max(NUMBERS))]
    return ["".join(tokenizer.source_pieces(row.tolist())).replace("▁", " ").strip() for row in ids]


def nmtkit_system(
    path: Path, engine: str, precision: Any, lines: list[str], size: int, search: SearchOptions
) -> System:
    translator = Translator.load(path, engine=engine, precision=precision)
    pipeline = translator.pipeline(search)

    def run() -> list[str]:
        parts = [lines[start : start + size] for start in range(0, len(lines), size)]
        return [line.text for part in parts for line in translator.stream(part, pipeline)]

    return run


def ctranslate2_system(path: Path, precision: str, lines: list[str], size: int, beam: int, steps: int | None) -> System:
    """Returns CTranslate2 with SentencePiece, which encodes and decodes all lines of a call together."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        ctranslate2_export.save(path, folder, "int8" if precision == "int8" else "float32")
        kind = COMPUTE_TYPES[precision]
        translator = ctranslate2.Translator(str(folder), inter_threads=1, intra_threads=1, compute_type=kind)
        source, target = (
            sentencepiece.SentencePieceProcessor(model_file=str(next(folder.glob(f"[{side}j]*.model"))))
            for side in "st"
        )
    limits = {} if steps is None else {"min_decoding_length": steps, "max_decoding_length": steps}

    def run() -> list[str]:
        texts = []
        for start in range(0, len(lines), size):
            pieces = source.encode(lines[start : start + size], out_type=str)
            results = translator.translate_batch(
                pieces, beam_size=beam, length_penalty=0, max_batch_size=BATCH, **limits
            )  # fmt: skip
            texts += target.decode([result.hypotheses[0] for result in results])
        return texts

    return run


def measured(arguments: argparse.Namespace, path: Path, lines: list[str], forced: bool, report: Report) -> None:
    for precision in arguments.precisions:
        rows: list[Row] = []
        for beam in BEAMS:
            for size in arguments.numbers:
                part = lines[: max(size, LINES)]
                steps = {"min_len": STEPS - 1, "max_len_a": 0.0, "max_len_b": STEPS - 1} if forced else {}
                search = SearchOptions(beam=beam, lenpen=0, **steps)
                systems = {
                    engine: nmtkit_system(path, engine, precision, part, size, search) for engine in arguments.engines
                }
                forced_steps = STEPS - 1 if forced else None
                systems["CTranslate2"] = ctranslate2_system(path, precision, part, size, beam, forced_steps)
                rows.append({"beam": beam, "n": size} | figures(in_turns(systems, arguments.rounds), len(part) / size))
        report.table(f"{path.stem}, {precision}, one thread: milliseconds a call", rows)


def figures(timings: dict[str, Timing], calls: float) -> Row:
    medians = {name: float(np.median(timing.seconds)) for name, timing in timings.items()}
    row: Row = {name: 1000 * seconds / calls for name, seconds in medians.items()}
    relative = {f"{name} / CTranslate2": medians["CTranslate2"] / medians[name] for name in medians}
    return row | {name: value for name, value in relative.items() if not name.startswith("CTranslate2")}


def main() -> None:
    flags = parser(__doc__, ["trained", "base", "wide"], rounds=5, threads=1)
    flags.add_argument("--checkpoint", type=Path, help="of the part trained")
    flags.add_argument("--lines", type=Path, help="source lines of the part trained")
    flags.add_argument("--precisions", nargs="+", choices=list(COMPUTE_TYPES), default=list(COMPUTE_TYPES))
    flags.add_argument("--engines", nargs="+", default=["numba", "torch"])
    flags.add_argument("--numbers", nargs="+", type=int, default=list(NUMBERS), help="of lines at a time")
    arguments = flags.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.numbers = 1, [1, 4]
    torch.set_num_threads(arguments.threads)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    report = Report(arguments)
    if "trained" in arguments.parts:
        if arguments.checkpoint is None or arguments.lines is None:
            flags.error("the part trained needs --checkpoint and --lines")
        lines = arguments.lines.read_text(encoding="utf-8").split("\n")[:-1]
        measured(arguments, arguments.checkpoint, lines[:: max(1, len(lines) // max(NUMBERS))], False, report)
    for part, vocabulary in (("base", 10_000), ("wide", 58_101)):
        if part in arguments.parts:
            path = random_model(arguments.folder, vocabulary)
            measured(arguments, path, made_lines(path), True, report)


if __name__ == "__main__":
    main()
