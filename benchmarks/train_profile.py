"""Where an update's time goes on a CPU: self times of torch's operations, by kind.

    nmtkit preprocess … --vocab-size 10000 --destdir data-bin
    python benchmarks/train_profile.py data-bin --arch transformer_base transformer_tiny --updates 6

Updates are those of `train_speed.py`, in bf16. The profiler itself costs some per cent; shares are of what it sees.
"""

import argparse
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from train_speed import chosen_batches, nmtkit_contestant

from nmtkit.data.binarized import Dataset

KINDS = {  # of the first that is in the name
    "products": ("mm", "linear"),
    "copies and casts": ("copy_", "clone"),
    "gathers": ("index", "embedding", "gather", "scatter"),
    "layer norms": ("layer_norm",),
    "random numbers": ("random_",),
    "softmaxes": ("softmax",),
    "bitwise masks": ("bitwise",),
    "ReLU": ("relu", "threshold"),
    "optimizer": ("fused",),
    "fills": ("fill_", "zero"),
    "sums": ("sum", "amax"),
    "adds and products by element": ("add", "mul", "sub", "div"),
}


def kind_of(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "the rest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a dataset that nmtkit preprocess wrote")
    parser.add_argument("--arch", nargs="+", default=["transformer_base", "transformer_tiny"])
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=0, help="also print so many single operations")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dataset = Dataset.open(arguments.data)
    batches = chosen_batches(dataset, arguments.batch_tokens, arguments.updates)
    for arch in arguments.arch:
        contestant = nmtkit_contestant(arch, arch, dataset, 0.1, torch.bfloat16)
        contestant.update(batches[0])  # the first update allocates
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            seconds = [contestant.update(batch)[0] for batch in batches]
        averages = recorded.key_averages()
        total = sum(event.self_cpu_time_total for event in averages)
        times: Counter[str] = Counter()
        for event in averages:
            times[kind_of(event.key)] += event.self_cpu_time_total
        tokens = sum(batch.target_tokens for batch in batches)
        print(f"{arch}: {sum(seconds):.2f} s for {len(batches)} updates, {tokens / sum(seconds):,.0f} target tok/s")
        for kind, time in times.most_common():
            print(f"  {kind:32}{time / 1e3:10.1f} ms{time / total:8.1%}")
        if arguments.rows:
            print(averages.table(sort_by="self_cpu_time_total", row_limit=arguments.rows, max_name_column_width=60))


if __name__ == "__main__":
    main()
