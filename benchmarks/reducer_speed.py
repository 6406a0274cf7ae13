"""The reduction of gradients beside torch's DistributedDataParallel: two gloo processes on this machine.

    python benchmarks/reducer_speed.py --arch transformer_base --vocabulary 10000

Both contestants make the same updates in turn: forward and backward of one slice a rank, gradients to sums (DDP: means)
over the ranks, their norm, clipping, a step of fused Adam. Each update is made with and without the sums, and what
the sums cost is the difference. Prints medians by the clock and in the CPU seconds of rank 0, and checks that both
have the same gradients.
"""

import argparse
import contextlib
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nmtkit.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.layers.losses import output_cross_entropy
from nmtkit.packed import Layout, Packed
from nmtkit.training.gradients import BUCKET_BYTES, Gradients
from nmtkit.training.launch import free_port

SENTENCE = 16  # tokens


class Step(nn.Module):
    """Model and loss in one module, as DistributedDataParallel wants them."""

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        packed = Packed(tokens, Layout.of(torch.full((len(tokens) // SENTENCE,), SENTENCE)))
        with torch.autocast("cpu", torch.bfloat16):
            loss = output_cross_entropy(self.model.output_projection, self.model(packed, packed), tokens, 0.1)[0]
        return loss / len(tokens)


class Contestant:
    def __init__(self, arch: str, vocabulary: int) -> None:
        torch.manual_seed(0)
        sizes = Vocabulary(source=vocabulary, target=vocabulary, joint=True)
        self.step: nn.Module = Step(ARCHITECTURES[arch].factory(ARCHITECTURES[arch].preset, sizes).train())
        self.optimizer = torch.optim.Adam(self.step.parameters(), lr=1e-5, fused=True)

    def gradient(self) -> Tensor:
        return torch.cat([it.grad.flatten() for it in self.step.parameters() if it.grad is not None])


class Ours(Contestant):
    def __init__(self, arch: str, vocabulary: int) -> None:
        super().__init__(arch, vocabulary)
        self.gradients = Gradients(self.step)

    def update(self, tokens: Tensor, sums: bool) -> None:
        self.gradients.clear()
        if sums:
            self.gradients.arm()
        self.step(tokens).backward()
        if sums:
            self.gradients.reduce()
        self.gradients.scale((1 / (self.gradients.norm() + 1e-6)).clamp(max=1.0))
        self.optimizer.step()


class Theirs(Contestant):
    def __init__(self, arch: str, vocabulary: int) -> None:
        super().__init__(arch, vocabulary)
        size = BUCKET_BYTES // 2**20
        self.step = DistributedDataParallel(self.step, bucket_cap_mb=size, gradient_as_bucket_view=True)

    def update(self, tokens: Tensor, sums: bool) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        assert isinstance(self.step, DistributedDataParallel)
        with contextlib.nullcontext() if sums else self.step.no_sync():
            (self.step(tokens) * dist.get_world_size()).backward()
        nn.utils.clip_grad_norm_(self.step.parameters(), 1.0)
        self.optimizer.step()


def process(rank: int, port: int, arguments: argparse.Namespace) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contestants: dict[str, Any] = {
        "nmtkit": Ours(arguments.arch, arguments.vocabulary),
        "DistributedDataParallel": Theirs(arguments.arch, arguments.vocabulary),
    }
    tokens = torch.randint(3, arguments.vocabulary, (arguments.tokens,), generator=torch.Generator().manual_seed(rank))
    wall: dict[tuple[str, bool], list[float]] = {}
    computed: dict[tuple[str, bool], list[float]] = {}
    for turn in range(arguments.turns + 1):
        for sums in (True, False):
            for name, contestant in contestants.items():
                torch.manual_seed(turn)
                dist.barrier()
                started, start = time.perf_counter(), time.process_time()
                contestant.update(tokens, sums)
                dist.barrier()
                if turn:  # the first allocates
                    wall.setdefault((name, sums), []).append(time.perf_counter() - started)
                    computed.setdefault((name, sums), []).append(time.process_time() - start)
            if turn == 0 and sums:
                one, other = (contestant.gradient() for contestant in contestants.values())
                assert float((one - other).norm() / one.norm()) < 1e-3, "the contestants disagree"
    if rank == 0:
        report(arguments, contestants, wall, computed)
    dist.destroy_process_group()


def report(arguments: argparse.Namespace, names: Any, wall: Any, computed: Any) -> None:
    print(f"{arguments.arch}, {arguments.tokens} tokens a rank, {arguments.turns} turns, torch {torch.__version__}")
    print(f"{'medians':26}{'update, s':>12}{'of it sums':>12}{'update, CPU s':>16}{'of it sums':>12}")
    for name in names:
        figures = []
        for seconds in (wall, computed):
            sums = [with_ - without for with_, without in zip(seconds[name, True], seconds[name, False], strict=True)]
            figures += [statistics.median(seconds[name, True]), statistics.median(sums)]
        print(f"{name:26}{figures[0]:>12.3f}{figures[1]:>12.3f}{figures[2]:>16.3f}{figures[3]:>12.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="transformer_base")
    parser.add_argument("--vocabulary", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=256, help="of a rank's slice, each side")
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    mp.spawn(process, args=(free_port(), arguments), nprocs=2)


if __name__ == "__main__":
    main()
