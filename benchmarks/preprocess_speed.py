"""Pairs a second of `nmtkit preprocess`, against a plain script that calls SentencePiece line by line.

    python benchmarks/preprocess_speed.py --text data/train -s en -t de            # data/train.en, .de, also .gz

First on the text as it is, then on longer ones: the text again and again, with a letter changed in one word of 33, 12
and 2 (`--rates`), since a cache of words gains by repeats. The tokenizer is given, as in a second run on the same data;
times are of whole processes, from start to exit, and every ratio is of runs that took turns. The figure to quote is
that per core-second: the plain script has one process. Both write the same ids, which is checked.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from nmtkit.corpora.compression import open_bytes
from nmtkit.corpora.corpus import locate_side

LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)

PLAIN = """
import sys
from array import array
import numpy as np
import sentencepiece
model, source, target, out = sys.argv[1:]
processor = sentencepiece.SentencePieceProcessor(model_file=model)
for side, path in (("source", source), ("target", target)):
    ids, lengths = array("H"), array("i")
    with open(path, encoding="utf-8", newline="\\n") as file:
        for line in file:
            pieces = processor.encode(line.rstrip("\\n"), add_eos=True)
            ids.extend(pieces)
            lengths.append(len(pieces))
    lengths = np.array(lengths)
    np.array(ids).tofile(f"{out}/{side}.ids")
    lengths.tofile(f"{out}/{side}.lengths")
    (np.cumsum(lengths, dtype=np.int64) - lengths).tofile(f"{out}/{side}.offsets")
"""


def perturbed_text(path: Path, output: Path, pairs: int, one_word_in: int, seed: int) -> None:
    """Writes `pairs` lines: those of `path` over and over, with letters changed at random."""
    with open_bytes(path) as file:
        text = np.frombuffer(file.read(), np.uint8)
    rng = np.random.default_rng(seed)
    small_letters = np.flatnonzero((text >= ord("a")) & (text <= ord("z")))
    words = int(np.count_nonzero(text == ord(" "))) + int(np.count_nonzero(text == ord("\n")))
    ends = np.flatnonzero(text == ord("\n")) + 1
    with output.open("wb") as file:
        while pairs > 0:
            copy = text.copy()
            changed = rng.choice(small_letters, words // one_word_in)
            copy[changed] = rng.choice(LETTERS, len(changed))
            file.write(copy[: ends[min(pairs, len(ends)) - 1]].tobytes())
            pairs -= len(ends)


def make_text(prefix: str, languages: tuple[str, str], pairs: int, one_word_in: int, folder: Path) -> Path:
    """Writes perturbed files into `folder` and returns their prefix."""
    prefix_made = folder / f"text{pairs}"
    for seed, language in enumerate(languages):
        output = prefix_made.with_name(f"{prefix_made.name}.{language}")
        perturbed_text(locate_side(prefix, language), output, pairs, one_word_in, seed)
    return prefix_made


def nmtkit_command(arguments: argparse.Namespace, text: Path, model: Path, out: Path, workers: int) -> list[str]:
    flags = [
        "-s",
        arguments.source_lang,
        "-t",
        arguments.target_lang,
        "--trainpref",
        str(text),
        "--tokenizer-from",
        str(model),
    ]
    flags += ["--destdir", str(out), "--workers", str(workers), "--overwrite", "--quiet", "--max-ratio", "1000"]
    return [sys.executable, "-m", "nmtkit", "preprocess", *flags]


def seconds(command: list[str]) -> tuple[float, float]:
    """Returns the seconds by the clock and the CPU seconds of all processes."""
    started, used = time.perf_counter(), os.times()
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    now = os.times()
    used_now = now.children_user + now.children_system - used.children_user - used.children_system
    return time.perf_counter() - started, used_now


def train_tokenizer(arguments: argparse.Namespace, folder: Path) -> Path:
    flags = ["-s", arguments.source_lang, "-t", arguments.target_lang, "--trainpref", arguments.text, "--quiet"]
    flags += ["--vocab-size", str(arguments.vocab_size), "--destdir", str(folder / "tokenizer-data"), "--overwrite"]
    subprocess.run([sys.executable, "-m", "nmtkit", "preprocess", *flags], check=True)
    return folder / "tokenizer-data" / "tokenizer" / "joint.model"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", required=True, help="prefix of parallel text to repeat")
    parser.add_argument("-s", "--source-lang", default="en")
    parser.add_argument("-t", "--target-lang", default="de")
    parser.add_argument("--vocab-size", type=int, default=10_000)
    parser.add_argument("--perturb", type=int, default=33, metavar="N", help="change a letter in one word of N")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_flags(parser)
    parser.add_argument(
        "--rates", type=int, nargs="+", default=[0, 33, 12, 2], metavar="N", help="0: the text as it is"
    )
    parser.add_argument("--pairs", type=int, default=600_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer-from", type=Path, help="a tokenizer to use; by default one is trained on the text")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = arguments.tokenizer_from or train_tokenizer(arguments, Path(name))
        for rate in arguments.rates:
            folder = Path(name) / str(rate)
            folder.mkdir()
            compare(arguments, model, rate, folder)


def compare(arguments: argparse.Namespace, model: Path, rate: int, folder: Path) -> None:
    """Times all on text of one rate of changed words, and prints the ratios."""
    languages = arguments.source_lang, arguments.target_lang
    pairs = arguments.pairs
    if rate:
        text = make_text(arguments.text, languages, pairs, rate, folder)
    else:
        text = folder / "text"
        for language in languages:
            with open_bytes(locate_side(arguments.text, language)) as file:
                content = file.read()
            pairs = content.count(b"\n")
            Path(f"{text}.{language}").write_bytes(content)
    plain_out = folder / "plain"
    plain_out.mkdir()
    files = [f"{text}.{language}" for language in languages]
    commands = {
        "plain": [sys.executable, "-c", PLAIN, str(model), *files, str(plain_out)],
        "1 worker": nmtkit_command(arguments, text, model, folder / "one", 1),
        "2 workers": nmtkit_command(arguments, text, model, folder / "two", 2),
    }
    taken: dict[str, list[float]] = {kind: [] for kind in commands}
    used: dict[str, list[float]] = {kind: [] for kind in commands}
    for _ in range(arguments.rounds):
        for kind, command in commands.items():
            clock, cores = seconds(command)
            taken[kind].append(clock)
            used[kind].append(cores)
    for side in ("source", "target"):
        same = (plain_out / f"{side}.ids").read_bytes() == (folder / "two" / f"train.{side}.ids.bin").read_bytes()
        assert same, f"the {side} ids differ"
    print(f"\n{pairs:,} pairs, " + (f"a letter changed in one word of {rate}" if rate else "the text as it is"))
    ratios = {
        "1 worker / plain, per core-second": (used["plain"], used["1 worker"]),
        "1 worker / plain, by the clock": (taken["plain"], taken["1 worker"]),
        "2 workers / 1, by the clock": (taken["1 worker"], taken["2 workers"]),
    }
    for title, (slow, fast) in ratios.items():
        of_rounds = [a / b for a, b in zip(slow, fast, strict=True)]
        print(f"{title}: {statistics.median(of_rounds):.2f} (rounds {', '.join(f'{x:.2f}' for x in of_rounds)})")
    for kind, times in taken.items():
        core, rate_by_clock = pairs / statistics.median(used[kind]), pairs / statistics.median(times)
        shown = ", ".join(f"{time:.1f}" for time in times)
        print(f"{kind:10} {rate_by_clock:10,.0f} pairs/s ({shown} s); {core:9,.0f} per core-second")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
