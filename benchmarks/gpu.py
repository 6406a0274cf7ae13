"""Whether nmtkit is right and fast on a GPU, in under 25 minutes: every part is a process of its own with a time limit.

    python benchmarks/gpu.py                                    # all parts, on the first GPU
    python benchmarks/gpu.py --parts correctness training       # some
    python benchmarks/gpu.py --device cpu                       # all of it very small: whether the script itself works

It needs nmtkit's dependencies (torch 2.11 or later) and this folder; nmtkit itself need not be installed. What is
measured is printed as it comes, and after each part the report (`--output`, JSON) is written with what there is. A
part that fails or takes too long prints its traceback, and the next one starts. The exit status is the number of parts
that failed.

Data are synthetic: random ids in sentences of log-normal lengths, 28 tokens at the mean, or lines of made-up words.
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
PARTS = {  # name -> module, function, minutes on a GPU
    "correctness": ("gpu_correctness", "correctness", 3.0),
    "end-to-end": ("gpu_end_to_end", "end_to_end", 5.0),
    "training-base": ("gpu_training", "base", 3.0),
    "training-big": ("gpu_training", "big", 3.5),
    "compiled-base": ("gpu_training", "compiled_base", 3.0),
    "compiled-big": ("gpu_training", "compiled_big", 3.5),
    "profile": ("gpu_training", "profile", 1.0),
    "precision": ("gpu_training", "precisions", 1.5),
    "decoding": ("gpu_decoding", "decoding", 4.0),
    "peers": ("gpu_decoding", "peers", 3.0),
}
GROUPS = {"training": ["training-base", "training-big", "compiled-base", "compiled-big"]}

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is run."""

    device: str
    models: tuple[str, str] = ("base", "big")
    layers: int | None = None  # instead of the preset's, in encoder and decoder
    vocabulary: int = 37_000
    batch_tokens: int = 25_000
    max_tokens: tuple[int, ...] = (4_096, 12_500, 25_000, 50_000)
    updates: int = 20
    warmup: int = 4
    slots: tuple[int, ...] = (128, 256, 512)
    beams: tuple[int, ...] = (4, 1)
    sentences: int = 4_096
    rounds: int = 2
    pairs: int = 30_000  # of the text for the end-to-end part
    run_architecture: str = "transformer_base"
    run_updates: int = 30
    run_batch_tokens: int = 25_000

    @property
    def depth(self) -> dict[str, int]:
        """Settings of an architecture."""
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
                        help=f"of {', '.join([*PARTS, *GROUPS])}")  # fmt: skip
    parser.add_argument("--device", choices=SCALES, default="cuda")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all parts together")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="the report, to which this run is added")
    parser.add_argument("--run-part", nargs=3, help=argparse.SUPPRESS)  # in the process of a part
    arguments = parser.parse_args()
    if arguments.run_part:
        module, function, rows = arguments.run_part
        sys.exit(run_part(module, function, SCALES[arguments.device], Path(rows)))
    parts = [part for name in arguments.parts for part in GROUPS.get(name, [name])]
    sys.exit(run_all(list(dict.fromkeys(parts)), arguments.device, arguments.minutes, arguments.output))


def run_all(parts: list[str], device: str, minutes: float, output: Path) -> int:
    """Runs the parts one after the other; returns how many failed."""
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
    """Runs one part in a process of its own; returns its status, seconds and rows."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        command = [sys.executable, __file__, "--device", device, "--run-part", *PARTS[part][:2], str(rows)]
        root = str(BENCHMARKS.parent)
        paths = [str(BENCHMARKS), root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        # a session of its own, so that what the part has started ends with it
        process = subprocess.Popen(command, env=environment, start_new_session=True)
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
    """Prints each row of a part and adds it to the file `rows`; returns the number of wrong results, 1 on an error."""
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


def shown(value: object) -> str:
    """Four digits of a fraction, all of a whole number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
