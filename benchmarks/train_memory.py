"""What holds the resident memory of a training on a CPU, after some numbers of updates.

    python benchmarks/train_memory.py data-bin --arch transformer_tiny --at 1 40 400 2000

Makes updates as `nmtkit train` does, without validation. Prints megabytes: what is resident in all, and of it files
(libraries and the dataset, which the system can drop), code that oneDNN has generated, and the rest, anonymous; what
malloc has given out and what it keeps for later; weights, gradients and the optimizer's state; and what is resident
after malloc_trim. The environment is left as it is: MALLOC_ARENA_MAX, ONEDNN_PRIMITIVE_CACHE_CAPACITY.
"""

import argparse
import ctypes
import gc
from pathlib import Path

MB = 1 << 20


class Mallinfo2(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo2


def resident() -> dict[str, int]:
    """Returns bytes by kind, of /proc/self/smaps."""
    kinds = {"file": 0, "generated code": 0, "anonymous": 0}
    kind = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            path = fields[5] if len(fields) > 5 else ""
            kind = "file" if path.startswith("/") else "generated code" if "x" in fields[1] else "anonymous"
        elif fields[0] == "Rss:":
            kinds[kind] += int(fields[1]) * 1024
        elif fields[0] == "Anonymous:" and kind == "file":  # written pages of libraries
            kinds["file"] -= int(fields[1]) * 1024
            kinds["anonymous"] += int(fields[1]) * 1024
    return kinds


def report(when: str, held: int) -> None:
    kinds, malloc = resident(), libc.mallinfo2()
    total = sum(kinds.values())
    gc.collect()
    libc.malloc_trim(0)
    after = sum(resident().values())
    row = [total, *kinds.values(), malloc.uordblks + malloc.hblkhd, malloc.fordblks, held, after]
    print(f"{when:>14}", *(f"{value / MB:>10,.0f}" for value in row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a dataset that nmtkit preprocess wrote")
    parser.add_argument("--arch", default="transformer_tiny")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--at", type=int, nargs="+", default=[1, 40, 400], help="updates to look after")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    columns = "resident", "files", "code", "anonymous", "malloc", "kept free", "weights …", "trimmed"
    print(f"{'':14}", *(f"{name:>10}" for name in columns))
    report("Python", 0)
    import torch

    report("import torch", 0)

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
    loader = BatchLoader(split, sampler, arguments.batch_tokens, 0, 1, device)
    size = sum(weight.numel() * 4 for weight in trainer.engine.parameters.values())
    report("model", size)
    for update in loader.updates(Position(0, 0)):
        trainer.step(update)
        if trainer.done in arguments.at:
            report(f"update {trainer.done}", 4 * size)  # weights, gradients, two moments
        if trainer.done >= max(arguments.at):
            break
    loader.close()


if __name__ == "__main__":
    main()
