"""Speed of two checkouts of nmtkit, measured in turns with whole commands: what a change costs or gains.

    git worktree add /tmp/before COMMIT
    python benchmarks/compare_checkouts.py --before /tmp/before --prefix data/train --valid data/val -s en -t de

Each checkout prepares the text and trains and decodes with its own code, A B A B …, on the same seed. Training speed is
read from the run's own log (target tokens per second, the first updates left out), decoding speed is pieces written per
second of the whole command less the time of a one-line command. Prints medians and the ratio after / before.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path


def nmtkit(checkout: Path, *arguments: str, stdin: Path | None = None, stdout: Path | None = None) -> float:
    """Runs one command with the code of `checkout` and returns its seconds. Raises CalledProcessError if it fails."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    started = time.perf_counter()
    with open(stdin or os.devnull) as read, open(stdout or os.devnull, "w") as write:
        command = [sys.executable, "-m", "nmtkit", *arguments]
        subprocess.run(command, env=environment, stdin=read, stdout=write, stderr=subprocess.PIPE, check=True)
    return time.perf_counter() - started


def train(checkout: Path, data: Path, save_dir: Path, arguments: argparse.Namespace, processes: int) -> float:
    """Returns target tokens per second of the second half of a short run."""
    shutil.rmtree(save_dir, ignore_errors=True)
    flags = ["--arch", arguments.arch, "--max-update", str(arguments.updates), "--log-interval", "1"]
    flags += ["--batch-tokens", str(arguments.batch_tokens), "--max-tokens", str(arguments.batch_tokens // processes)]
    flags += [
        "--validate-interval",
        "none",
        "--save-dir",
        str(save_dir),
        "--device",
        "cpu",
        "--nproc-per-node",
        str(processes),
    ]
    nmtkit(checkout, "train", str(data), *flags)
    records = [json.loads(line) for line in (save_dir / "log.jsonl").open(encoding="utf-8")]
    speeds = [record["tokens_per_second"] for record in records if record["kind"] == "train"]
    return statistics.median(speeds[len(speeds) // 2 :])


def decode(checkout: Path, model: Path, text: Path, folder: Path, flags: list[str]) -> float:
    """Returns words written per second, starting the command left out."""
    one, output = folder / "one.txt", folder / "output.txt"
    one.write_text(text.read_text().split("\n", 1)[0] + "\n")
    start = nmtkit(checkout, "generate", "--path", str(model), *flags, stdin=one)
    seconds = nmtkit(checkout, "generate", "--path", str(model), *flags, stdin=text, stdout=output)
    return len(output.read_text().split()) / (seconds - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout to compare with")
    parser.add_argument("--after", type=Path, default=Path(__file__).resolve().parents[1], help="default: this one")
    parser.add_argument("--prefix", required=True, help="training text, without its language")
    parser.add_argument("--valid", required=True, help="valid text, which is decoded too")
    parser.add_argument("-s", "--source-lang", required=True)
    parser.add_argument("-t", "--target-lang", required=True)
    parser.add_argument("--arch", default="transformer_tiny")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2], help="of training")
    parser.add_argument("--precisions", nargs="*", default=["fp32", "int8"], help="of decoding")
    parser.add_argument("--folder", type=Path, default=Path("compare"))
    arguments = parser.parse_args()
    checkouts = {"before": arguments.before.resolve(), "after": arguments.after.resolve()}
    figures: dict[str, dict[str, list[float]]] = {}
    for turn in range(arguments.turns):
        for name, checkout in checkouts.items():
            folder = arguments.folder.resolve() / name
            folder.mkdir(parents=True, exist_ok=True)
            data = folder / "data-bin"
            flags = ["-s", arguments.source_lang, "-t", arguments.target_lang, "--trainpref", arguments.prefix]
            flags += ["--validpref", arguments.valid, "--destdir", str(data), "--vocab-size", "10000"]
            seconds = {"preprocess, runs/s": 1 / nmtkit(checkout, "preprocess", *flags, "--overwrite")}
            for processes in arguments.processes:
                save_dir = folder / f"run-{processes}"
                speed = train(checkout, data, save_dir, arguments, processes)
                seconds[f"train, {processes} process(es), target tokens/s"] = speed
            for precision in arguments.precisions:
                text = Path(f"{arguments.valid}.{arguments.source_lang}")
                decoding = ["--precision", precision, "--max-len-b", "5", "--max-len-a", "1"]
                speed = decode(checkout, folder / "run-1" / "last.pt", text, folder, decoding)
                seconds[f"generate, {precision}, words/s"] = speed
            for kind, value in seconds.items():
                figures.setdefault(kind, {}).setdefault(name, []).append(value)
                print(f"turn {turn + 1} {name:>6}  {kind:<44}{value:>12,.2f}", flush=True)
    for kind, values in figures.items():
        before, after = (statistics.median(values[name]) for name in ("before", "after"))
        print(f"{kind:<44} before {before:>10,.2f}  after {after:>10,.2f}  after / before {after / before:.3f}")


if __name__ == "__main__":
    main()
