"""Two checkouts: what does a change cost or gain in training and decoding speed?

    git worktree add /tmp/before COMMIT
    python benchmarks/compare_checkouts.py --before /tmp/before --text m30k

commands  Each checkout prepares the text, trains and decodes with its own code, A B A B …, on the same seed. Training
          speed is read from the log of the run (target tokens per second, the median of the second half); decoding
          speed is words per second of the whole command, less the time of a command of one line.
updates   Each checkout has a process with its own trainer, on the same seed and the same data, of which one makes an
          update while the other waits, A B, B A, …, so that what disturbs the machine for longer than an update
          disturbs both. The ratio has quartiles. The losses of the last update show whether the updates are the same.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from harness import ROOT, Report, Row, Server, Workspace, answer, busy_cores, nmtkit, parser


def child(data: str, arch: str, precision: str, batch_tokens: int, threads: int) -> None:
    """Makes an update for each message; answers its seconds, core-seconds, target tokens and loss."""
    import torch
    from nmtkit.data.batching import BatchSampler
    from nmtkit.data.binarized import Dataset

    from nmtkit.training.config import JobTemplate
    from nmtkit.training.loader import BatchLoader, Position
    from nmtkit.training.setup import build_trainer

    torch.set_num_threads(threads)
    dataset, device = Dataset.open(Path(data)), torch.device("cpu")
    settings = {"batch_tokens": batch_tokens, "precision": precision, "device": "cpu"}
    job = JobTemplate.read(names={"architecture": arch}).job(settings)
    trainer = build_trainer(job, dataset.tokenizer, device, resumed=False)
    split = dataset["train"]
    sampler = BatchSampler(split.source.lengths, split.target.lengths, batch_tokens, seed=1)
    loader = BatchLoader(split, sampler, batch_tokens, 0, 1, device)
    batches = list(sampler.epoch(0))

    def update(number: int) -> list[float]:
        made = loader.update(Position(0, 0), batches[number % len(batches)], ends_epoch=False)
        start, cpu_start = time.perf_counter(), time.process_time()
        metrics = trainer.step(made)
        seconds, core_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        return [seconds, core_seconds, metrics.target_tokens, float(metrics.sums["loss"])]

    answer(update)


def updates(arguments: argparse.Namespace, workspace: Workspace, checkouts: dict[str, Path], report: Report) -> None:
    settings = [str(workspace.data), arguments.arch, arguments.precision, arguments.batch_tokens, arguments.threads]
    servers = {name: Server(__file__, settings, path, arguments.threads) for name, path in checkouts.items()}
    rounds: list[dict[str, list[float]]] = []
    for number in range(arguments.updates + 1):
        order = list(servers)[:: 1 if number % 2 else -1]
        rounds.append({name: servers[name].ask(number) for name in order})
    for server in servers.values():
        server.close()
    losses = {name: values[3] for name, values in rounds[-1].items()}
    rows: list[Row] = []
    for index, kind in enumerate(("by the clock", "per core-second")):
        speeds = {name: [values[name][2] / values[name][index] for values in rounds[1:]] for name in checkouts}
        ratios = [after / before for before, after in zip(speeds["before"], speeds["after"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row: Row = {"target tok/s": kind} | {name: statistics.median(values) for name, values in speeds.items()}
        rows.append(row | {"after / before": middle, "from": low, "to": high, "ratios": ratios})
    shown = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
    title = f"{arguments.arch}, {arguments.precision}, updates of {arguments.batch_tokens} tokens; last loss {shown}"
    report.table(title, rows)


def commands(arguments: argparse.Namespace, workspace: Workspace, checkouts: dict[str, Path], report: Report) -> None:
    figures: dict[str, dict[str, list[float]]] = {}
    for _ in range(arguments.rounds):
        for name, checkout in checkouts.items():
            for kind, speed in turn(arguments, workspace, checkout, workspace.folder / name).items():
                figures.setdefault(kind, {}).setdefault(name, []).append(speed)
    rows = []
    for kind, values in figures.items():
        row: Row = {"speed": kind} | {name: statistics.median(speeds) for name, speeds in values.items()}
        rows.append(row | {"after / before": row["after"] / row["before"], "rounds": list(values.values())})
    report.table(f"whole commands, {arguments.arch}, updates of {arguments.batch_tokens} tokens", rows)


def turn(arguments: argparse.Namespace, workspace: Workspace, checkout: Path, folder: Path) -> dict[str, float]:
    """Returns the speeds of all commands of one checkout."""
    folder.mkdir(exist_ok=True)
    text, data = workspace.file("test", 0), str(folder / "data-bin")
    files = [f"--{split}pref={workspace.prefix(split)}" for split in ("train", "valid")]
    pair = ["-s", workspace.pair[0], "-t", workspace.pair[1], "--vocab-size", str(workspace.vocab_size), "--overwrite"]
    done = nmtkit("preprocess", *pair, *files, "--destdir", data, checkout=checkout)
    speeds = {"preprocess, runs/s": 1 / done.seconds}
    for processes in (1, 2):
        save_dir = folder / f"run-{processes}-{time.time_ns()}"
        flags = ["--arch", arguments.arch, "--max-update", str(arguments.updates), "--log-interval", "1"]
        flags += ["--batch-tokens", str(arguments.batch_tokens), "--save-dir", str(save_dir), "--device", "cpu"]
        flags += ["--max-tokens", str(arguments.batch_tokens // processes), "--validate-interval", "none"]
        nmtkit("train", data, *flags, "--nproc-per-node", str(processes), checkout=checkout)
        records = [json.loads(line) for line in (save_dir / "log.jsonl").open(encoding="utf-8")]
        logged = [record["tokens_per_second"] for record in records if record["kind"] == "train"]
        key = "train, one process, target tokens/s" if processes == 1 else "train, two gloo processes, target tokens/s"
        speeds[key] = statistics.median(logged[len(logged) // 2 :])
    line, output = folder / "line.txt", folder / "output.txt"
    line.write_text(text.read_text().split("\n", 1)[0] + "\n")
    for precision in ("fp32", "int8"):
        flags = ["--path", str(save_dir / "last.pt"), "--precision", precision, "--max-len-a", "1", "--max-len-b", "5"]
        start = nmtkit("generate", *flags, stdin=line, stdout=output, checkout=checkout).seconds
        seconds = nmtkit("generate", *flags, stdin=text, stdout=output, checkout=checkout).seconds
        speeds[f"generate, {precision}, words/s"] = len(output.read_text().split()) / max(0.01, seconds - start)
    return speeds


def main() -> None:
    parts: dict[str, Any] = {"commands": commands, "updates": updates}
    flags = parser(__doc__, list(parts))
    flags.add_argument("--before", type=Path, help="checkout to compare with")
    flags.add_argument("--after", type=Path, default=ROOT, help="default: this one")
    flags.add_argument("--arch", default="transformer_tiny")
    flags.add_argument("--precision", default="bf16", help="of the part updates")
    flags.add_argument("--batch-tokens", type=int, default=4096)
    flags.add_argument("--updates", type=int, default=40, help="of each training")
    flags.add_argument("--child", help=argparse.SUPPRESS)
    arguments = flags.parse_args()
    if arguments.child:
        return child(*json.loads(arguments.child))
    if arguments.before is None:
        flags.error("--before is missing: the checkout to compare with")
    if arguments.quick:
        arguments.batch_tokens, arguments.updates, arguments.rounds = 400, 4, 1
    workspace, report = Workspace(arguments), Report(arguments)
    checkouts = {"before": arguments.before.resolve(), "after": arguments.after.resolve()}
    with busy_cores(arguments.busy):
        for part in arguments.parts:
            parts[part](arguments, workspace, checkouts, report)


if __name__ == "__main__":
    main()
