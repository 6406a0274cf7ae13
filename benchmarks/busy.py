"""The cost of waiting threads: training and decoding under several wait policies of OpenMP, alone and on busy cores.

    python benchmarks/busy.py --arch transformer_tiny --seconds 5 --turns 3

Each measurement is a process of its own, since a policy is read when torch is loaded: it makes updates of one batch, or
translates one batch by beam search, with two threads, for some seconds. Busy: beside it one process for each core does
nothing but count, for as long as the measurement takes. Measurements take turns. Prints medians in target tokens per
second, and each policy's ratio to OpenMP's own default, which spins for a few milliseconds.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

POLICIES: dict[str, dict[str, str]] = {
    "default": {},
    "watched": {},  # what the commands do: see nmtkit/processes/openmp.py
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spin 100": {"GOMP_SPINCOUNT": "100"},
    "spin 1000": {"GOMP_SPINCOUNT": "1000"},
    "spin 10000": {"GOMP_SPINCOUNT": "10000"},
}
OURS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SENTENCES, LENGTH = 60, 15
VOCABULARY = 8000
WARM_UP = 2.5  # seconds, in which the watch looks twice


def training(arch: str) -> Callable[[], int]:
    """Returns a function that makes an update and returns its target tokens."""
    import torch

    from nmtkit.architectures import ARCHITECTURES, Vocabulary
    from nmtkit.layers.losses import output_cross_entropy
    from nmtkit.layers.packed import Layout, Packed

    sizes = Vocabulary(source=VOCABULARY, target=VOCABULARY, joint=True)
    model = ARCHITECTURES[arch].factory(ARCHITECTURES[arch].preset, sizes).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(3, VOCABULARY, (SENTENCES * LENGTH,))

    def update() -> int:
        batch = Packed(tokens, Layout.of(torch.full((SENTENCES,), LENGTH)))
        with torch.autocast("cpu", torch.bfloat16):
            loss = output_cross_entropy(model.output_projection, model(batch, batch), tokens, 0.1)[0]
        (loss / len(tokens)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return len(tokens)

    return update


def decoding(arch: str) -> Callable[[], int]:
    """Returns a function that translates a batch by beam search and returns its target tokens."""
    import torch

    from nmtkit.architectures import ARCHITECTURES, Vocabulary
    from nmtkit.layers.packed import Layout, Packed
    from nmtkit.search.decoding import beam_search
    from nmtkit.search.options import SearchOptions
    from nmtkit.translation.translator import prepare

    sizes = Vocabulary(source=VOCABULARY, target=VOCABULARY, joint=True)
    model = prepare(ARCHITECTURES[arch].factory(ARCHITECTURES[arch].preset, sizes).eval(), "cpu", "auto")
    options = SearchOptions(beam=4, min_len=LENGTH, max_len_a=0.0, max_len_b=LENGTH)
    tokens = torch.randint(3, VOCABULARY, (SENTENCES * LENGTH,))
    source = Packed(tokens, Layout.of(torch.full((SENTENCES,), LENGTH)))

    def translate() -> int:
        beam_search([model], source, options)
        return len(tokens)

    return translate


def child(arguments: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.watch:
        from nmtkit.processes import openmp

        openmp.start()
    work = {"train": training, "generate": decoding}[arguments.child](arguments.arch)
    warm = time.perf_counter() + WARM_UP
    while time.perf_counter() < warm:
        work()
    tokens, started = 0, time.perf_counter()
    while time.perf_counter() - started < arguments.seconds:
        tokens += work()
    print(tokens / (time.perf_counter() - started))


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """The context in which `count` processes count; they end by themselves after ten minutes."""
    code = "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(arguments: argparse.Namespace, job: str, policy: str, busy: bool) -> float:
    """Returns target tokens per second."""
    environment = {name: value for name, value in os.environ.items() if name not in OURS} | POLICIES[policy]
    command = [sys.executable, __file__, "--child", job, "--arch", arguments.arch]
    command += ["--seconds", str(arguments.seconds), "--threads", str(arguments.threads)]
    command += ["--watch"] if policy == "watched" else []
    with busy_cores(len(os.sched_getaffinity(0)) if busy else 0):
        return float(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="transformer_tiny")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--jobs", default="train,generate")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--loads", default="idle,busy")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--watch", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments)
    names = arguments.policies.split(",")
    print(f"{arguments.arch}, {arguments.threads} threads, {arguments.turns} turns of {arguments.seconds:g} s")
    for job in arguments.jobs.split(","):
        for load in arguments.loads.split(","):
            speeds: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(arguments.turns):
                for name in names:
                    speeds[name].append(measure(arguments, job, name, load == "busy"))
            reference = statistics.median(speeds[names[0]])
            for name in names:
                median = statistics.median(speeds[name])
                row = f"{job:10}{load:6}{name:12}{median:>10.0f} tok/s {median / reference:>7.2f} x"
                print(row, " ".join(f"{speed:.0f}" for speed in speeds[name]), flush=True)


if __name__ == "__main__":
    main()
