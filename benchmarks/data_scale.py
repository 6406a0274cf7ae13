"""The data path at scale: memory of preprocess, fill of the updates, and the start of training on 36 M pairs.

    python benchmarks/data_scale.py --text data/train -s en -t de --folder /big/disk      # 2.5 GB, removed at the end

Memory is anonymous memory (RssAnon), summed over a process and its children and sampled every 20 ms; pages of mapped
files, which the kernel may drop at will, are not counted. Makes its input like preprocess_speed.py.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from preprocess_speed import add_flags, make_text, nmtkit_command, train_tokenizer

from nmtkit.data.batching import BatchSampler
from nmtkit.data.binarized import Dataset
from nmtkit.data.dataset_files import FORMAT, MANIFEST, SIDES, array_file

ARRAYS = ("ids", "offsets", "lengths")

FIRST_BATCH = """
import json, re, sys, time
started = time.perf_counter()
from pathlib import Path
import torch
from nmtkit.data.binarized import Dataset
from nmtkit.data.batching import BatchSampler, micro_batches
anonymous = lambda: int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1e6
imported, memory = time.perf_counter() - started, anonymous()
split = Dataset.open(Path(sys.argv[1]))["train"]
sampler = BatchSampler(split.source.lengths, split.target.lengths, 25_000, seed=1)
update = next(iter(sampler.epoch(1)))
parts = micro_batches(update, split.source.lengths, split.target.lengths, 4096)
batch = split.batch(parts[0])
print(json.dumps({"imports": imported, "seconds": time.perf_counter() - started, "before": memory,
                  "after": anonymous(), "tokens": batch.target_tokens, "updates": sampler.updates_per_epoch}))
"""


def peak_anonymous(command: list[str]) -> tuple[float, float]:
    """Returns the peak in gigabytes, summed over the process and its children, and the seconds it took."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(anonymous, family(process.pid))))
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{command} failed")
    assert process.stdout is not None
    sys.stdout.write(process.stdout.read().decode())
    return peak / 1e6, time.perf_counter() - started


def family(pid: int) -> list[int]:
    """Returns a process and its children."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return [pid, *map(int, children)]


def anonymous(pid: int) -> int:
    """Returns kilobytes; 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def synthetic(folder: Path, like: Dataset, pairs: int) -> None:
    """Writes a dataset of `pairs` pairs whose lengths are drawn from another's and whose ids are random."""
    rng = np.random.default_rng(1)
    folder.mkdir()
    like.tokenizer.save(folder / "tokenizer")
    split = like["train"]
    counts = dict.fromkeys(SIDES, 0)
    files = {(side, name): (folder / array_file("train", side, name)).open("wb") for side in SIDES for name in ARRAYS}
    for start in range(0, pairs, 1 << 20):
        rows = rng.integers(0, len(split), min(1 << 20, pairs - start))
        for side, values in zip(SIDES, (split.source, split.target), strict=True):
            lengths = np.asarray(values.lengths)[rows]
            ends = np.cumsum(lengths, dtype=np.int64)
            ids = rng.integers(3, 10_000, ends[-1], np.uint16)
            ids[ends - 1] = 2
            for name, array in (("lengths", lengths), ("offsets", counts[side] + ends - lengths), ("ids", ids)):
                files[side, name].write(array.tobytes())
            counts[side] += int(ends[-1])
    for file in files.values():
        file.close()
    manifest = dict(like.manifest)
    manifest |= {"nmtkit_dataset": FORMAT, "report": {"corpora": []}, "settings": {}}
    manifest["splits"] = {
        "train": {"pairs": pairs, **{side: {"tokens": counts[side], "dtype": "uint16"} for side in SIDES}}
    }
    manifest["files"] = {
        path.name: {"bytes": path.stat().st_size, "sha256": ""} for path in folder.iterdir() if path.suffix == ".bin"
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_flags(parser)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to put the files (default: the temporary folder)"
    )
    parser.add_argument("--small", type=int, default=300_000)
    parser.add_argument("--large", type=int, default=3_000_000)
    parser.add_argument("--huge", type=int, default=36_000_000)
    parser.add_argument("--batch-tokens", type=int, default=25_000)
    arguments = parser.parse_args()
    languages = arguments.source_lang, arguments.target_lang
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        model = train_tokenizer(arguments, folder)
        peaks = []
        for pairs in (arguments.small, arguments.large):
            text = make_text(arguments.text, languages, pairs, arguments.perturb, folder)
            peak, taken = peak_anonymous(nmtkit_command(arguments, text, model, folder / "data", 2))
            peaks.append(peak)
            print(f"preprocess of {pairs:,} pairs, 2 workers: {peak:.3f} GB anonymous at the peak, {taken:.1f} s")
        print(f"peak for {arguments.large:,} pairs / peak for {arguments.small:,}: {peaks[1] / peaks[0]:.2f}")

        dataset = Dataset.open(folder / "data")
        split = dataset["train"]
        lengths = np.asarray(split.source.lengths), np.asarray(split.target.lengths)
        sampler = BatchSampler(*lengths, arguments.batch_tokens, seed=1)
        filled = [max(side[update].sum() for side in lengths) / arguments.batch_tokens for update in sampler.epoch(1)]
        print(
            f"updates of {arguments.batch_tokens:,} tokens: {len(filled):,} (expected {sampler.updates_per_epoch:,}), ",
            end="",
        )
        print(f"filled to {np.mean(filled):.2%} on average")

        synthetic(folder / "huge", dataset, arguments.huge)
        peak, taken = peak_anonymous([sys.executable, "-c", FIRST_BATCH, str(folder / "huge")])
        print(
            f"first batch of {arguments.huge:,} pairs: {taken:.1f} s with imports, {peak:.2f} GB anonymous at the peak"
        )


if __name__ == "__main__":
    main()
