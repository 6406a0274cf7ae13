"""Start: how long does a command take to its first translation, and how much memory? Compares programs of CTranslate2.

    python benchmarks/start.py --checkpoint captions.pt                     # needs nmtkit[numba,export]
    python benchmarks/start.py --checkpoint captions.pt --argos argosvenv/bin/argos-translate

CTranslate2   A program that imports only CTranslate2 and SentencePiece.
Argos         argos-translate in its environment (`pip install argostranslate`), with a package of the same model.

Each command translates one line. Systems take turns, and the median round counts. The table has the seconds from the
start of the command to the first translation and to the end, and the CPU seconds of the command, on which other
processes have less influence. Memory is the largest resident set of the process. The first round is not counted: it
compiles modules to bytecode, as the installation of a package does. The machine code of the search is compiled before
the first round.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import astuple, dataclass
from itertools import permutations
from pathlib import Path

from harness import Report, Row, command, nmtkit, parser

LINE = "A dog runs."
CTRANSLATE2 = """
import sys
from pathlib import Path
import ctranslate2, sentencepiece
folder, compute_type, beam = sys.argv[1], sys.argv[2], int(sys.argv[3])
pieces = sentencepiece.SentencePieceProcessor(model_file=str(next(Path(folder).glob("*.model"))))
translator = ctranslate2.Translator(folder, compute_type=compute_type, inter_threads=1, intra_threads=1)
source = pieces.encode([line.rstrip("\\n") for line in sys.stdin], out_type=str)
for result in translator.translate_batch(source, beam_size=beam):
    print(pieces.decode(result.hypotheses[0]))
"""
INSTALL = """
import sys
from argostranslate import package
for path in sys.argv[1:]:
    package.install_from_path(path)
"""
# Argos downloads a model that splits text into sentences. To avoid the download, the text is one sentence here.
ARGOS = """
from argostranslate.sbd import MiniSBDSentencizer
MiniSBDSentencizer.split_sentences = lambda self, text: [text]
from argostranslate.cli import main
main()
"""
KINDS = {"fp32": "float32", "int8": "int8"}  # nmtkit's precision -> CTranslate2's compute type


@dataclass(frozen=True)
class System:
    command: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Start:
    """Seconds and MB of one command."""

    first_translation: float
    clock: float
    processor: float
    memory: float


def systems(options: argparse.Namespace, precision: str) -> dict[str, System]:
    """Returns the command of each system. Other processes make all exports, so that this process stays small.

    The memory of this process counts for the commands that it starts, because a child begins as a copy of its parent.
    """
    flags = ["--path", str(options.checkpoint), "--precision", precision, "--beam", str(options.beam), "--quiet"]
    flags += ["--lenpen", "0", "--threads", "1", "--device", "cpu"]
    generate = [sys.executable, "-m", "nmtkit", "generate", *flags]
    folder = options.folder / f"{options.checkpoint.stem}-start-{precision}"
    if not folder.exists():
        nmtkit(
            "export",
            str(options.checkpoint),
            str(folder),
            "--format",
            "ctranslate2",
            "--quantization",
            KINDS[precision],
        )
    result = {
        f"nmtkit, --engine {engine}": System([*generate, "--engine", engine], {})
        for engine in ("auto", "torch", "ctranslate2")
    }
    program = [sys.executable, "-c", CTRANSLATE2, str(folder), KINDS[precision], str(options.beam)]
    result["CTranslate2"] = System(program, {})
    if options.argos is not None:
        result["Argos"] = argos(options, precision)
    return result


def argos(options: argparse.Namespace, precision: str) -> System:
    """Returns the command of Argos Translate."""
    python, environment = argos_environment(options, options.argos, precision)
    pair = options.source_lang, options.target_lang
    return System([python, "-c", ARGOS, "--from", pair[0], "--to", pair[1], LINE], environment)


def argos_environment(options: argparse.Namespace, program: Path, precision: str) -> tuple[str, dict[str, str]]:
    """Returns the Python in the environment of a program, and environment variables that name a folder of packages.

    The packages have the model of `options.checkpoint`, for both directions of the language pair: LibreTranslate
    downloads packages if there are fewer than two.
    """
    python, folder = str(program.absolute().parent / "python"), (options.folder / f"argos-{precision}").resolve()
    environment = {"ARGOS_PACKAGES_DIR": str(folder), "ARGOS_INTRA_THREADS": "1", "ARGOS_INTER_THREADS": "1"}
    if not folder.exists():
        packages = []
        for pair in permutations((options.source_lang, options.target_lang)):
            package = folder.with_name(f"{'_'.join(pair)}-{precision}.argosmodel")
            package.unlink(missing_ok=True)
            words = ["--format", "argos", "--quantization", KINDS[precision], "--pair", "-".join(pair)]
            nmtkit("export", str(options.checkpoint), str(package), *words)
            packages.append(str(package))
        command([python, "-c", INSTALL, *packages], **environment)
    return python, environment


def measured(system: System, bytecode: Path) -> Start:
    """Runs a command with LINE as its input. Python keeps bytecode of modules in the folder `bytecode`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": str(bytecode), **system.environment}
    begun = time.perf_counter()
    process = subprocess.Popen(
        system.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{LINE}\n".encode())
    process.stdin.close()
    translation = process.stdout.readline()
    first = time.perf_counter() - begun
    process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0 and translation.strip(), system.command
    return Start(first, time.perf_counter() - begun, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def rows_of(rounds: list[dict[str, Start]]) -> list[Row]:
    medians = {
        name: Start(*map(statistics.median, zip(*(astuple(each[name]) for each in rounds), strict=True)))
        for name in rounds[0]
    }
    peer = medians["CTranslate2"]
    rows: list[Row] = []
    for name, start in medians.items():
        row: Row = {"system": name, "first translation, s": start.first_translation, "end, s": start.clock}
        row |= {"processor, s": start.processor, "memory, MB": start.memory}
        row |= {"time / CTranslate2": start.first_translation / peer.first_translation}
        rows.append(row | {"memory / CTranslate2": start.memory / peer.memory})
    return rows


def main() -> None:
    flags = parser(__doc__, rounds=5)
    flags.add_argument("--checkpoint", type=Path, required=True)
    flags.add_argument("--precisions", choices=list(KINDS), nargs="+", default=list(KINDS))
    flags.add_argument("--beam", type=int, default=4)
    flags.add_argument("--argos", type=Path, metavar="PROGRAM", help="path of argos-translate in its environment")
    options = flags.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rounds = 1 if options.quick else options.rounds
    report = Report(options)
    nmtkit("precompile")
    for precision in options.precisions:
        commands = systems(options, precision)
        bytecode = (options.folder / "bytecode").resolve()
        turns = [{name: measured(each, bytecode) for name, each in commands.items()} for _ in range(rounds + 1)]
        report.table(f"one line with beam {options.beam}, {precision}", rows_of(turns[1:]))


if __name__ == "__main__":
    main()
