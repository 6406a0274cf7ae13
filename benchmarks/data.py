"""Data: how fast is `nmtkit preprocess`, how much memory does it need, and how soon does a training on its data start?

    python benchmarks/data.py --text m30k --pairs 600000
    python benchmarks/data.py --text m30k --parts scale             # 2.5 GB of files, which are removed at the end

speed   Pairs per second of nmtkit, and of a plain script that calls SentencePiece line by line. The texts are this
        text, and long texts that repeat it with a letter changed in one of 33, 12 or 2 words, because nmtkit is faster
        for words that repeat. The tokenizer is given. Times are of whole processes, and the systems take turns.
        Compare core-seconds, because the plain script has one process. The script checks that both write the same ids.
scale   Memory of preprocessing for `--small` and `--large` pairs, how full updates are, and the time and the memory
        until the first batch of a dataset of `--huge` pairs (with the lengths of this text, and random ids). Memory is
        anonymous memory, summed over a process and its children every 20 ms; mapped files are not counted.
"""

import argparse
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import Report, Row, Workspace, busy_cores, children, chosen, command, parser, search_path

from nmtkit.data.dataset.batching import BatchSampler
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.dataset.dataset_files import FORMAT, MANIFEST, SIDES, array_file

LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
BATCH_TOKENS = 25_000

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

FIRST_BATCH = """
import sys
from pathlib import Path
from nmtkit.data.dataset.batching import BatchSampler, micro_batches
from nmtkit.data.dataset.binarized import Dataset
split = Dataset.open(Path(sys.argv[1]))["train"]
update = next(iter(BatchSampler(split.source.lengths, split.target.lengths, 25_000, seed=1).epoch(1)))
split.batch(micro_batches(update, split.source.lengths, split.target.lengths, 4096)[0])
"""


def write_text(workspace: Workspace, prefix: Path, pairs: int | None, rate: int) -> int:
    """Writes the training set again and again, up to `pairs` pairs (None: once). Returns the number of pairs.

    Changes a letter in about one of `rate` words; 0: in none.
    """
    for side, language in enumerate(workspace.pair):
        text = np.frombuffer(workspace.file("train", side).read_bytes(), np.uint8)
        rng = np.random.default_rng(side)
        letters = np.flatnonzero((text >= ord("a")) & (text <= ord("z")))
        words = int(np.count_nonzero((text == ord(" ")) | (text == ord("\n"))))
        ends = np.flatnonzero(text == ord("\n")) + 1
        pairs = len(ends) if pairs is None else pairs
        with Path(f"{prefix}.{language}").open("wb") as file:
            for start in range(0, pairs, len(ends)):
                copy = text.copy()
                if rate:
                    changed = rng.choice(letters, words // rate)
                    copy[changed] = rng.choice(LETTERS, len(changed))
                file.write(copy[: ends[min(pairs - start, len(ends)) - 1]].tobytes())
    assert pairs is not None
    return pairs


def preprocess(workspace: Workspace, text: Path, output: Path, workers: int) -> list[str]:
    flags = ["-s", workspace.pair[0], "-t", workspace.pair[1], "--trainpref", str(text), "--destdir", str(output)]
    flags += ["--tokenizer-from", str(workspace.data / "tokenizer" / "joint.model"), "--workers", str(workers)]
    return [sys.executable, "-m", "nmtkit", "preprocess", *flags, "--overwrite", "--quiet", "--max-ratio", "1000"]


# --- speed ------------------------------------------------------------------------------------------------------------


def speed(arguments: argparse.Namespace, workspace: Workspace, report: Report, folder: Path) -> None:
    for rate in arguments.rates:
        pairs = write_text(workspace, folder / "text", arguments.pairs if rate else None, rate)
        (folder / "plain").mkdir(exist_ok=True)
        files = [f"{folder / 'text'}.{language}" for language in workspace.pair]
        model = str(workspace.data / "tokenizer" / "joint.model")
        commands = {
            "plain": [sys.executable, "-c", PLAIN, model, *files, str(folder / "plain")],
            "nmtkit, 1 worker": preprocess(workspace, folder / "text", folder / "one", 1),
            "nmtkit, 2 workers": preprocess(workspace, folder / "text", folder / "two", 2),
        }
        done: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(arguments.rounds):
            for name, words in chosen(commands, arguments.only).items():
                finished = command(words, OMP_NUM_THREADS="1", PYTHONPATH=search_path())
                done[name].append((finished.seconds, finished.core_seconds))
        if all(done.values()):
            for side in SIDES:
                ids = (folder / "two" / array_file("train", side, "ids")).read_bytes()
                assert ids == (folder / "plain" / f"{side}.ids").read_bytes(), f"the {side} ids differ"
        rows: list[Row] = []
        for name, rounds in done.items():
            if rounds:
                seconds, cores = (statistics.median(values) for values in zip(*rounds, strict=True))
                rows.append({"system": name, "seconds": seconds, "pairs/s": pairs / seconds})
                rows[-1] |= {"pairs/core-s": pairs / cores, "rounds": rounds}
        for row in rows if done["plain"] else ():
            row["pairs/core-s of plain's"] = row["pairs/core-s"] / rows[0]["pairs/core-s"]
        changed = f"a letter changed in one word of {rate}" if rate else "the text as it is"
        report.table(f"{pairs:,} pairs, {changed}", rows)


# --- scale ------------------------------------------------------------------------------------------------------------


def peak_gigabytes(words: list[str]) -> tuple[float, float]:
    """Returns the peak of the anonymous memory of a command and its children in GB, and the seconds of the command."""
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, sum(map(anonymous_kilobytes, [process.pid, *children(process.pid)])))
        time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"{words} ended with status {process.returncode}")
    return peak / 1e6, time.perf_counter() - start


def anonymous_kilobytes(process: int) -> int:
    """Returns the anonymous memory of a process in kB, or 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def synthetic(folder: Path, like: Dataset, pairs: int) -> None:
    """Writes a dataset of `pairs` pairs whose lengths are drawn from another dataset, and whose ids are random."""
    rng = np.random.default_rng(1)
    folder.mkdir()
    like.tokenizer.save(folder / "tokenizer")
    split, counts = like["train"], dict.fromkeys(SIDES, 0)
    names = [(side, name) for side in SIDES for name in ("ids", "offsets", "lengths")]
    files = {(side, name): (folder / array_file("train", side, name)).open("wb") for side, name in names}
    for start in range(0, pairs, 1 << 20):
        chosen_rows = rng.integers(0, len(split), min(1 << 20, pairs - start))
        for side, values in zip(SIDES, (split.source, split.target), strict=True):
            lengths = np.asarray(values.lengths)[chosen_rows]
            ends = np.cumsum(lengths, dtype=np.int64)
            ids = rng.integers(3, like.tokenizer.target_size, ends[-1], np.uint16)
            ids[ends - 1] = 2
            for name, array in (("lengths", lengths), ("offsets", counts[side] + ends - lengths), ("ids", ids)):
                files[side, name].write(array.tobytes())
            counts[side] += int(ends[-1])
    for file in files.values():
        file.close()
    sizes = {side: {"tokens": counts[side], "dtype": "uint16"} for side in SIDES}
    arrays = {path.name: {"bytes": path.stat().st_size, "sha256": digest(path)} for path in folder.glob("*.bin")}
    manifest = like.manifest | {"nmtkit_dataset": FORMAT, "report": {"corpora": []}, "settings": {}, "files": arrays}
    (folder / MANIFEST).write_text(json.dumps(manifest | {"splits": {"train": {"pairs": pairs, **sizes}}}))


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def scale(arguments: argparse.Namespace, workspace: Workspace, report: Report, folder: Path) -> None:
    rows: list[Row] = []
    for pairs in (arguments.small, arguments.large):
        write_text(workspace, folder / "text", pairs, 33)
        peak, seconds = peak_gigabytes(preprocess(workspace, folder / "text", folder / "data", 2))
        rows.append({"job": f"preprocess of {pairs:,} pairs, 2 workers", "seconds": seconds, "GB anonymous": peak})
    dataset = Dataset.open(folder / "data")
    lengths = [np.asarray(side.lengths) for side in (dataset["train"].source, dataset["train"].target)]
    sampler = BatchSampler(*lengths, BATCH_TOKENS, seed=1)
    filled = [max(side[update].sum() for side in lengths) / BATCH_TOKENS for update in sampler.epoch(1)]
    synthetic(folder / "huge", dataset, arguments.huge)
    peak, seconds = peak_gigabytes([sys.executable, "-c", FIRST_BATCH, str(folder / "huge")])
    rows.append({"job": f"first batch of {arguments.huge:,} pairs", "seconds": seconds, "GB anonymous": peak})
    title = f"{len(filled):,} updates of {BATCH_TOKENS:,} tokens on {arguments.large:,} pairs"
    report.table(f"{title} are {np.mean(filled):.2%} full", rows)


def main() -> None:
    parts = {"speed": speed, "scale": scale}
    flags = parser(__doc__, list(parts))
    flags.add_argument(
        "--rates", type=int, nargs="+", default=[0, 33, 12, 2], help="change one of this many words; 0: no word"
    )
    flags.add_argument("--pairs", type=int, default=600_000, help="pairs of each changed text")
    flags.add_argument("--small", type=int, default=300_000)
    flags.add_argument("--large", type=int, default=3_000_000)
    flags.add_argument("--huge", type=int, default=36_000_000)
    arguments = flags.parse_args()
    if arguments.quick:
        arguments.pairs, arguments.small, arguments.large, arguments.huge = 900, 500, 900, 5_000
        arguments.rates, arguments.rounds = [0, 12], 1
    workspace, report = Workspace(arguments), Report(arguments)
    with tempfile.TemporaryDirectory(dir=workspace.folder) as name, busy_cores(arguments.busy):
        for part in arguments.parts:
            folder = Path(name) / part
            folder.mkdir()
            parts[part](arguments, workspace, report, folder)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
