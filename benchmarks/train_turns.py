"""The trainers of two checkouts, update by update in turns: what a change to the training step costs or gains.

    git worktree add /tmp/before COMMIT
    python benchmarks/train_turns.py data-bin --before /tmp/before --arch transformer_tiny --rounds 60

Each checkout has a process with its own trainer, on the same seed and the same updates. One makes an update while the
other waits, A B, B A, …, so that what disturbs the machine for longer than an update disturbs both. Prints the median
over the rounds of each one's target tokens per second and of the ratio, with its quartiles, by the clock and per
core-second; and the losses of the last update, which differ when the updates do.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path


def child(arguments: argparse.Namespace) -> None:
    """Makes an update whenever a line comes in, and writes its seconds, core-seconds, target tokens and loss."""
    import torch

    from nmtkit.data.batching import BatchSampler
    from nmtkit.data.binarized import Dataset
    from nmtkit.training.config import JobTemplate
    from nmtkit.training.loader import BatchLoader, Position
    from nmtkit.training.setup import build_trainer

    torch.set_num_threads(arguments.threads)
    dataset, device = Dataset.open(arguments.data), torch.device("cpu")
    settings = {"batch_tokens": arguments.batch_tokens, "precision": arguments.precision, "device": "cpu"}
    job = JobTemplate.read(names={"architecture": arguments.arch}).job(settings)
    trainer = build_trainer(job, dataset.tokenizer, device, resumed=False)
    split = dataset["train"]
    sampler = BatchSampler(split.source.lengths, split.target.lengths, arguments.batch_tokens, seed=1)
    loader = BatchLoader(split, sampler, arguments.max_tokens or arguments.batch_tokens, 0, 1, device)
    batches = list(islice(sampler.epoch(0), arguments.updates))
    for number, _ in enumerate(sys.stdin):
        update = loader.update(Position(0, 0), batches[number % len(batches)], ends_epoch=False)
        start, cpu_start = time.perf_counter(), time.process_time()
        metrics = trainer.step(update)
        seconds, cores = time.perf_counter() - start, time.process_time() - cpu_start
        print(seconds, cores, metrics.target_tokens, float(metrics.sums["loss"]), flush=True)


def update(process: "subprocess.Popen[str]") -> list[float]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return [float(word) for word in process.stdout.readline().split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a dataset that nmtkit preprocess wrote")
    parser.add_argument("--before", type=Path, help="checkout to compare with")
    parser.add_argument("--after", type=Path, default=Path(__file__).resolve().parents[1], help="default: this one")
    parser.add_argument("--arch", default="transformer_tiny")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, help="of a micro-batch; default: the whole update")
    parser.add_argument("--updates", type=int, default=20, help="different ones, over and over")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments)
    if arguments.before is None:
        parser.error("--before is missing: the checkout to compare with")
    command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--child"]
    processes = {
        name: subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, path in (("before", arguments.before), ("after", arguments.after))
    }
    rounds = []
    for number in range(arguments.rounds + 1):
        order = list(processes)[:: 1 if number % 2 else -1]
        results = {name: update(processes[name]) for name in order}
        if number:  # the first update allocates
            rounds.append(results)
    print(
        f"{arguments.arch}, {arguments.precision}, {arguments.threads} threads, {arguments.batch_tokens} tokens "
        f"in micro-batches of {arguments.max_tokens or arguments.batch_tokens}, {arguments.rounds} rounds"
    )
    for index, kind in enumerate(("by the clock", "per core-second")):
        speeds = [[it[name][2] / it[name][index] for it in rounds] for name in processes]
        ratios = [after / before for before, after in zip(*speeds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        before, after = map(statistics.median, speeds)
        print(f"{kind:16} before {before:9,.0f}  after {after:9,.0f}  ratio {middle:.3f} ({low:.3f} to {high:.3f})")
    print("losses of the last update:", *(f"{name} {results[name][3]:.3f}" for name in processes))
    for process in processes.values():
        process.communicate()


if __name__ == "__main__":
    main()
