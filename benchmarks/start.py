"""Start: time and memory of a command that translates a single line, beside a program that uses CTranslate2 alone.

    python benchmarks/start.py --checkpoint captions.pt        # needs nmtkit[numba,export]

Systems take turns, and the median round counts. Seconds of the processor, from the start of the command to its end,
suffer less from other processes than seconds of the clock. Memory is the largest resident set of the process.
CTranslate2 reads a model that the first round exports, and the compiled search reads its machine code from the cache.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

LINE = "A dog runs.\n"
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


EXPORT = """
import sys
from pathlib import Path
from nmtkit.translation.engines.ctranslate2 import exported
print(exported(Path(sys.argv[1]), sys.argv[2]))
"""


def systems(checkpoint: Path, precision: str, beam: int) -> dict[str, list[str]]:
    """Returns the command of each system."""
    # in a separate process, because a new process counts the memory of the process that starts it
    export = [sys.executable, "-c", EXPORT, str(checkpoint), precision]
    folder = subprocess.run(export, check=True, capture_output=True, text=True).stdout.strip()
    generate = [sys.executable, "-m", "nmtkit", "generate", "--path", str(checkpoint), "--precision", precision]
    generate += ["--beam", str(beam), "--lenpen", "0", "--threads", "1", "--quiet", "--engine"]
    kind = {"fp32": "float32", "int8": "int8"}
    return {
        **{f"nmtkit, {engine}": [*generate, engine] for engine in ("numba", "torch", "ctranslate2")},
        "CTranslate2": [sys.executable, "-c", CTRANSLATE2, folder, kind[precision], str(beam)],
    }


def measured(command: list[str]) -> tuple[float, float, float]:
    """Runs a command. Returns the seconds of the processor, the seconds of the clock, and MB of memory."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(LINE.encode())
    process.stdin.close()
    translation = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0 and translation.strip(), command
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - begun, usage.ru_maxrss / 1024


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    arguments.add_argument("--checkpoint", type=Path, required=True)
    arguments.add_argument("--precision", choices=["fp32", "int8"], nargs="+", default=["fp32", "int8"])
    arguments.add_argument("--beam", type=int, default=4)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    print(
        "| precision | system | processor, s | clock, s | memory, MB | memory / CTranslate2 | processor / CTranslate2 |"
    )
    print("|---|---|---:|---:|---:|---:|---:|")
    for precision in options.precision:
        commands = systems(options.checkpoint, precision, options.beam)
        rounds = [{name: measured(command) for name, command in commands.items()} for _ in range(options.rounds + 1)]
        median = {
            name: [statistics.median(each[name][index] for each in rounds[1:]) for index in range(3)]
            for name in commands
        }
        for name, (processor, clock, memory) in median.items():
            peer = median["CTranslate2"]
            print(
                f"| {precision} | {name} | {processor:.2f} | {clock:.2f} | {memory:.0f} | {memory / peer[2]:.2f} "
                f"| {processor / peer[0]:.2f} |"
            )


if __name__ == "__main__":
    main()
