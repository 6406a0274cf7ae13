"""Whether training in bf16 loses as fp32 does: loss curves of three fp32 seeds and of bf16 with the same seeds.

    python benchmarks/loss_curves.py data-bin                 # 300 updates of 1,024 tokens, transformer_tiny
    python benchmarks/loss_curves.py data-bin --seeds 1 2 3 --threads 2

Each curve is a run of `nmtkit train`; the table shows its training loss (negative log-likelihood, nats a token) over
each tenth of the run. The verdict compares a bf16 curve with the fp32 curve of its seed: same parameters at the start,
same batches, same dropout, so that they would be equal if rounding were; and with the range over the fp32 seeds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

TENTHS = 10
RECIPE = "--arch transformer_tiny --dropout 0.3 --lr 0.002 --warmup-updates 200 --log-interval 1 --metrics none"
QUIET = "--validate-interval none --save-interval none --save-interval-minutes none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the fp32 runs")
    parser.add_argument("--bf16-seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    curves = {}
    for precision, seeds in (("fp32", arguments.seeds), ("bf16", arguments.bf16_seeds)):
        for seed in seeds:
            curves[precision, seed] = curve(arguments, precision, seed)
            print(f"| {precision}, seed {seed} | " + " | ".join(f"{x:.3f}" for x in curves[precision, seed]) + " |")
    spread = [max(at) - min(at) for at in zip(*(curves["fp32", seed] for seed in arguments.seeds), strict=True)]
    print("| range of fp32 | " + " | ".join(f"{x:.3f}" for x in spread) + " |")
    for seed in arguments.bf16_seeds:
        apart = [a - b for a, b in zip(curves["bf16", seed], curves["fp32", seed], strict=True)]
        print(f"| bf16 - fp32, seed {seed} | " + " | ".join(f"{x:+.3f}" for x in apart) + " |")


def curve(arguments: argparse.Namespace, precision: str, seed: int) -> list[float]:
    """Returns the mean loss of each tenth of a run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "nmtkit", "train", str(arguments.data), "--save-dir", folder]
        command += [*RECIPE.split(), *QUIET.split(), "--precision", precision, "--seed", str(seed)]
        command += ["--max-update", str(arguments.updates), "--batch-tokens", str(arguments.batch_tokens)]
        command += ["--max-tokens", str(arguments.batch_tokens), "--threads", str(arguments.threads)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        lines = (Path(folder) / "log.jsonl").open(encoding="utf-8")
    losses = [record["nll"] for record in map(json.loads, lines) if record["kind"] == "train"]
    size = len(losses) // TENTHS
    return [sum(losses[i * size : (i + 1) * size]) / size for i in range(TENTHS)]


if __name__ == "__main__":
    main()
