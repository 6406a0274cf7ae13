"""Part of `gpu.py`: the commands that a user types, on made-up text, and whether a resumed run ends alike."""

import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu import BENCHMARKS, Row, Scale

SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]


def write_text(folder: Path, pairs: int) -> None:
    """Lines of log-normal lengths, 28 words at the mean; a target is the source backwards, in capitals."""
    draw = random.Random(1)
    words = ["".join(draw.choice(SYLLABLES) for _ in range(draw.randint(1, 4))) for _ in range(4_000)]
    for split, count in (("train", pairs), ("valid", min(pairs // 10, 200))):
        with (folder / f"{split}.xx").open("w") as source, (folder / f"{split}.yy").open("w") as target:
            for _ in range(count):
                length = min(200, max(1, round(draw.lognormvariate(math.log(28) - 0.15, 0.55))))
                # common words are more common: the index of a word is a product of two uniform numbers
                line = [words[int(len(words) * draw.random() * draw.random())] for _ in range(length)]
                source.write(" ".join(line) + "\n")
                target.write(" ".join(reversed(line)).upper() + "\n")


def nmtkit(folder: Path, *arguments: str, stdin: Path | None = None, launch: tuple[str, ...] = ()) -> tuple[float, str]:
    """Runs a command in `folder`; returns its seconds and stdout. Raises RuntimeError with its stderr if it fails."""
    paths = [str(BENCHMARKS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    start = time.perf_counter()
    with stdin.open() if stdin else open(os.devnull) as lines:
        done = subprocess.run(
            [sys.executable, "-m", *launch, "nmtkit", *arguments],
            cwd=folder, stdin=lines, capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"nmtkit {' '.join(arguments)} ended with status {done.returncode}:\n{done.stderr[-6000:]}")
    return time.perf_counter() - start, done.stdout


def end_to_end(scale: Scale) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder, scale.pairs)
        seconds, _ = nmtkit(
            folder, "preprocess", "-s", "xx", "-t", "yy", "--trainpref", "train", "--validpref", "valid",
            "--destdir", "data", "--vocab-size", "8000" if scale.pairs > 1000 else "400",
        )  # fmt: skip
        yield {"command": "preprocess", "seconds": seconds}
        half, whole = scale.run_updates // 2, scale.run_updates
        common = [
            "train", "data", "--device", scale.device, "--arch", scale.run_architecture, "--seed", "7",
            "--batch-tokens", str(scale.run_batch_tokens), "--warmup-updates", "20", "--log-interval", "5",
            "--save-interval-updates", str(half),
        ]  # fmt: skip
        common += [part for name, value in scale.depth.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        scored = ["--validate-interval-updates", str(half)]
        plain = ["--validate-interval", "none"]
        runs = {
            "train, BLEU in validation": ["--save-dir", "whole", "--max-update", str(whole), *scored],
            "train, stopped half-way": ["--save-dir", "parts", "--max-update", str(half), *scored],
            "train, resumed": ["--save-dir", "parts", "--max-update", str(whole), *scored],
            "train, fsdp on one rank": ["--save-dir", "fsdp", "--max-update", str(half), "--parallel", "fsdp", *plain],
        }
        if scale.device == "cuda":
            runs |= {
                "train, fp16": ["--save-dir", "fp16", "--max-update", str(half), "--precision", "fp16", *scored],
                "train, fp32": ["--save-dir", "fp32", "--max-update", str(half), "--precision", "fp32", *scored],
                "train, compiled": ["--save-dir", "compiled", "--max-update", str(half), "--compile", *plain],
            }
        for title, flags in runs.items():
            yield {"command": title, "seconds": nmtkit(folder, *common, *flags)[0]}
        ends = (folder / save_dir / "last.pt" for save_dir in ("whole", "parts"))
        yield {"check": "a resumed run equals a whole one"} | difference(*ends)
        checkpoint = str(Path("whole") / "last.pt")
        lines = folder / "valid.xx"
        count = len(lines.read_text().splitlines())
        launch = ("torch.distributed.run", "--nproc-per-node", "1", "-m")
        for title, flags, started in (
            ("generate", [], ()),
            ("generate, greedy", ["--beam", "1"], ()),
            ("generate, fp32", ["--precision", "fp32"], ()),
            ("generate under torchrun", [], launch),
        ):
            device = ["--device", scale.device]
            seconds, out = nmtkit(
                folder, "generate", "--path", checkpoint, *device, *flags, stdin=lines, launch=started
            )
            yield {"command": title, "seconds": seconds, "ok": len(out.splitlines()) == count}


def difference(first: Path, second: Path) -> Row:
    """How far the weights of two checkpoints are apart, beside how far the sum of rounding errors may take them."""
    states = [torch.load(path, map_location="cpu", weights_only=True)["model"] for path in (first, second)]
    largest = max(float((states[0][name] - states[1][name]).abs().max()) for name in states[0])
    size = max(float(tensor.abs().max()) for tensor in states[0].values())
    # sums of gradients by atomic additions differ from run to run on a GPU
    return {"largest_difference": largest, "largest_weight": size, "ok": largest <= 0.02 * size}
