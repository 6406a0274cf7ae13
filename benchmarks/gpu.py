"""Is nmtkit correct and fast on a GPU? Takes under 25 minutes. Each part is a separate process with a time limit.

    python benchmarks/gpu.py                                    # all parts, on the first GPU
    python benchmarks/gpu.py --parts correctness training       # some parts
    python benchmarks/gpu.py --device cpu                       # everything very small, to test the script

The script needs nmtkit's dependencies (torch 2.11 or later) and this folder; nmtkit itself need not be installed. Each
result is printed at once, and the report (`--output`, JSON) is written after each part. If a part fails, its traceback
is printed. If a part takes too long, it is killed. In both cases, the next part starts. The exit status is the number
of parts that failed or took too long.

Data are synthetic: random ids in sentences of log-normal lengths with a mean of 28 tokens, or lines of made-up words.
"""

import argparse
import importlib
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import ROOT, Row, command, nmtkit, search_path, shown

PARTS = {  # name -> module, function, minutes on a GPU
    "correctness": ("gpu_correctness", "correctness", 3.0),
    "end-to-end": ("gpu", "end_to_end", 5.0),
    "training-base": ("gpu_speed", "base", 3.0),
    "training-big": ("gpu_speed", "big", 3.5),
    "compiled-base": ("gpu_speed", "compiled_base", 3.0),
    "compiled-big": ("gpu_speed", "compiled_big", 3.5),
    "profile": ("gpu_speed", "profile", 1.0),
    "precision": ("gpu_speed", "precisions", 1.5),
    "decoding": ("gpu_speed", "decoding", 4.0),
    "peers": ("gpu_speed", "peers", 3.0),
}
GROUPS = {"training": ["training-base", "training-big", "compiled-base", "compiled-big"]}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes of all parts."""

    device: str
    models: tuple[str, str] = ("base", "big")
    layers: int | None = None  # layers of the encoder and of the decoder; None: as in the preset
    vocabulary: int = 37_000
    batch_tokens: int = 25_000
    max_tokens: tuple[int, ...] = (4_096, 12_500, 25_000, 50_000)
    updates: int = 20
    warmup: int = 4
    slots: tuple[int, ...] = (128, 256, 512)
    beams: tuple[int, ...] = (4, 1)
    sentences: int = 4_096
    rounds: int = 2
    pairs: int = 30_000  # pairs in the text for the end-to-end part
    run_architecture: str = "transformer_base"
    run_updates: int = 30
    run_batch_tokens: int = 25_000

    @property
    def depth(self) -> dict[str, int]:
        """Returns the settings of an architecture that has `layers` layers."""
        return {} if self.layers is None else {"encoder_layers": self.layers, "decoder_layers": self.layers}


SCALES = {
    "cuda": Scale(device="cuda"),
    "cpu": Scale(
        device="cpu", models=("tiny", "tiny"), layers=1, vocabulary=300, batch_tokens=200, max_tokens=(100, 200),
        updates=2, warmup=1, slots=(4,), beams=(2, 1), sentences=6, rounds=1, pairs=120,
        run_architecture="transformer_tiny", run_updates=4, run_batch_tokens=400,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, *GROUPS], default=list(PARTS), metavar="PART",
                        help=f"some of {', '.join([*PARTS, *GROUPS])}")  # fmt: skip
    parser.add_argument("--device", choices=SCALES, default="cuda")
    parser.add_argument("--minutes", type=float, default=25.0, help="time limit of all parts together")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="the report, to which this run is added")
    parser.add_argument("--run-part", nargs=3, help=argparse.SUPPRESS)  # for the process that runs a part
    arguments = parser.parse_args()
    if arguments.run_part:
        module, function, rows = arguments.run_part
        sys.exit(run_part(module, function, SCALES[arguments.device], Path(rows)))
    parts = [part for name in arguments.parts for part in GROUPS.get(name, [name])]
    sys.exit(run_all(list(dict.fromkeys(parts)), arguments.device, arguments.minutes, arguments.output))


def run_all(parts: list[str], device: str, minutes: float, output: Path) -> int:
    """Runs the parts one after the other. Returns the number of failed parts."""
    report = json.loads(output.read_text()) if output.exists() else {"runs": []}
    run: dict[str, Any] = {"device": device, "machine": platform.platform(), "scale": asdict(SCALES[device])}
    run |= {"python": platform.python_version(), "started": time.strftime("%Y-%m-%d %H:%M:%S"), "parts": {}}
    report["runs"].append(run)
    end = time.monotonic() + 60 * minutes
    for part in parts:
        left = end - time.monotonic()
        limit = min(60 * PARTS[part][2], left) if device == "cuda" else left
        print(f"\n=== {part} (at most {limit:.0f} s)", flush=True)
        run["parts"][part] = result = supervise(part, device, limit)
        print(f"--- {part}: {result['status']} after {result['seconds']:.0f} s", flush=True)
        draft = output.with_name(output.name + ".tmp")
        draft.write_text(json.dumps(report, indent=1) + "\n")
        draft.replace(output)
    failed = [part for part, result in run["parts"].items() if result["status"] != "ok"]
    print(
        f"\n{len(parts) - len(failed)} of {len(parts)} parts are ok" + (f"; not: {', '.join(failed)}" if failed else "")
    )
    print(f"the report is {output}")
    return len(failed)


def supervise(part: str, device: str, limit: float) -> dict[str, Any]:
    """Runs a part in a separate process. Returns its status, seconds and rows."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        words = [sys.executable, __file__, "--device", device, "--run-part", *PARTS[part][:2], str(rows)]
        environment = os.environ | {"PYTHONPATH": search_path(), "PYTHONUNBUFFERED": "1"}
        # a new session, so that the processes of the part end together
        process = subprocess.Popen(words, env=environment, start_new_session=True)
        try:
            status = "ok" if process.wait(max(limit, 1.0)) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "took too long"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
        lines = rows.read_text().splitlines() if rows.exists() else []
    return {"status": status, "seconds": time.monotonic() - started, "rows": [json.loads(line) for line in lines]}


def run_part(module: str, function: str, scale: Scale, rows: Path) -> int:
    """Prints each row of a part and adds it to the file `rows`. Returns the number of wrong results; 1 for an error."""
    wrong = 0
    with rows.open("a") as file:
        try:
            for row in getattr(importlib.import_module(module), function)(scale):
                print("  " + "  ".join(f"{key} {shown(value)}" for key, value in row.items() if key != "text"))
                if "text" in row:
                    print(row["text"])
                file.write(json.dumps(row) + "\n")
                file.flush()
                wrong += row.get("ok") is False
        except Exception:
            text = traceback.format_exc()
            print(text, flush=True)
            file.write(json.dumps({"traceback": text}) + "\n")
            return 1
    return wrong


# --- the commands of a user -------------------------------------------------------------------------------------------


def write_text(folder: Path, pairs: int) -> None:
    """Writes lines of log-normal lengths with a mean of 28 words. A target is the source backwards, in capitals."""
    draw = random.Random(1)
    syllables = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
    words = ["".join(draw.choice(syllables) for _ in range(draw.randint(1, 4))) for _ in range(4_000)]
    for split, count in (("train", pairs), ("valid", min(pairs // 10, 200))):
        with (folder / f"{split}.xx").open("w") as source, (folder / f"{split}.yy").open("w") as target:
            for _ in range(count):
                length = min(200, max(1, round(draw.lognormvariate(math.log(28) - 0.15, 0.55))))
                # as in a language, some words are frequent: an index is a product of two uniform random numbers
                line = [words[int(len(words) * draw.random() * draw.random())] for _ in range(length)]
                source.write(" ".join(line) + "\n")
                target.write(" ".join(reversed(line)).upper() + "\n")


def end_to_end(scale: Scale) -> Iterator[Row]:
    """Runs the commands of a user on made-up text, and compares the weights of a resumed run and a whole run."""
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), str(Path(name) / "data")
        write_text(folder, scale.pairs)
        files = ["--trainpref", str(folder / "train"), "--validpref", str(folder / "valid"), "--destdir", data]
        size = "8000" if scale.pairs > 1000 else "400"
        done = nmtkit("preprocess", "-s", "xx", "-t", "yy", *files, "--vocab-size", size)
        yield {"command": "preprocess", "seconds": done.seconds}
        half, whole = str(scale.run_updates // 2), str(scale.run_updates)
        common = ["train", data, "--device", scale.device, "--arch", scale.run_architecture, "--seed", "7"]
        common += ["--batch-tokens", str(scale.run_batch_tokens), "--warmup-updates", "20", "--log-interval", "5"]
        common += ["--save-interval-updates", half]
        common += [part for name, value in scale.depth.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        scored, plain = ["--validate-interval-updates", half], ["--validate-interval", "none"]
        runs = {  # title -> folder, updates, flags
            "train, BLEU in validation": ("whole", whole, scored),
            "train, stopped half-way": ("parts", half, scored),
            "train, resumed": ("parts", whole, scored),
            "train, fsdp on one rank": ("fsdp", half, ["--parallel", "fsdp", *plain]),
        }
        if scale.device == "cuda":
            runs |= {f"train, {kind}": (kind, half, ["--precision", kind, *scored]) for kind in ("fp16", "fp32")}
            runs["train, compiled"] = "compiled", half, ["--compile", *plain]
        for title, (save_dir, updates, flags) in runs.items():
            done = nmtkit(*common, "--save-dir", str(folder / save_dir), "--max-update", updates, *flags)
            yield {"command": title, "seconds": done.seconds}
        ends = (folder / save_dir / "last.pt" for save_dir in ("whole", "parts"))
        yield {"check": "a resumed run equals a whole one"} | difference(*ends)
        lines, output = folder / "valid.xx", folder / "output"
        count = len(lines.read_text().splitlines())
        python = [sys.executable, "-m"]
        torchrun = [*python, "torch.distributed.run", "--nproc-per-node", "1", "-m"]
        for title, flags, start in (
            ("generate", [], python),
            ("generate, greedy", ["--beam", "1"], python),
            ("generate, fp32", ["--precision", "fp32"], python),
            ("generate under torchrun", [], torchrun),
        ):
            words = [
                *start,
                "nmtkit",
                "generate",
                "--path",
                str(folder / "whole" / "last.pt"),
                "--device",
                scale.device,
            ]
            done = command([*words, *flags], stdin=lines, stdout=output, PYTHONPATH=str(ROOT))
            yield {"command": title, "seconds": done.seconds, "ok": len(output.read_text().splitlines()) == count}


def difference(first: Path, second: Path) -> Row:
    """Returns the largest difference of two checkpoints' weights, and whether rounding errors can explain it."""
    import torch

    states = [torch.load(path, map_location="cpu", weights_only=True)["model"] for path in (first, second)]
    largest = max(float((states[0][name] - states[1][name]).abs().max()) for name in states[0])
    size = max(float(tensor.abs().max()) for tensor in states[0].values())
    # on a GPU, sums of gradients by atomic additions differ from run to run
    return {"largest_difference": largest, "largest_weight": size, "ok": largest <= 0.02 * size}


if __name__ == "__main__":
    main()
