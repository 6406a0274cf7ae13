"""Sums of gradients over processes: two gloo processes on this machine, by DistributedDataParallel and by FSDP2.

    python benchmarks/reducer_speed.py --arch transformer_base --vocabulary 10000

Contestants make the same updates in turn: forward and backward of one micro-batch a rank, gradients summed over the
ranks, their norm, clipping, a step of fused Adam. `ddp` and `fsdp` are those of `nmtkit train`; `one process` makes no
sums; `replicate` is FSDP2's replicated form. Prints medians by the clock and of rank 0's CPU seconds, after checking
that all but `one process` have the same gradients.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from nmtkit.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.criterions import Criterion, Loss
from nmtkit.layers.losses import output_cross_entropy
from nmtkit.layers.packed import Batch, Layout, Packed
from nmtkit.processes import distributed
from nmtkit.training.parallel import ReplicatedModel, ShardedModel, local_shard, sharded_layers

SENTENCE = 16  # tokens
CPU = torch.device("cpu")


class CrossEntropy(Criterion):
    def compute_loss(self, model: Architecture, batch: Batch) -> Loss:
        features = model(batch.source, batch.target_input)
        return Loss(output_cross_entropy(model.output_projection, features, batch.target_output, 0.1)[0], {})


class ReplicateModel(ShardedModel):
    """`replicate` in place of `fully_shard`; its gradients are made anew by every backward pass."""

    def __init__(self, model: Architecture, criterion: Criterion) -> None:
        self.model, self.loss = model, nn.ModuleList([model, criterion])
        self.loss.forward = lambda batch: (criterion(model, batch).sum, {})  # type: ignore[method-assign]
        mesh = init_device_mesh("cpu", (distributed.world_size(),))
        for module in (*sharded_layers(model), model):
            replicate(module, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.parameters = {name: nn.Parameter(local_shard(value)) for name, value in model.named_parameters()}

    def zero_grad(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        for name, value in self.model.named_parameters():
            assert value.grad is not None
            self.parameters[name].grad = local_shard(value.grad)
        return [value.grad for value in self.parameters.values() if value.grad is not None]

    def gradient_norm(self) -> Tensor:
        return ReplicatedModel.gradient_norm(self)


class Contestant:
    def __init__(self, name: str, arch: str, vocabulary: int) -> None:
        torch.manual_seed(0)
        sizes = Vocabulary(source=vocabulary, target=vocabulary, joint=True)
        model = ARCHITECTURES[arch].factory(ARCHITECTURES[arch].preset, sizes)
        self.engine: ReplicatedModel
        if name == "fsdp":
            self.engine = ShardedModel(model, CrossEntropy(), CPU)
        elif name == "replicate":
            self.engine = ReplicateModel(model, CrossEntropy())
        else:
            self.engine = ReplicatedModel(model, CrossEntropy(), CPU)
        if name == "one process":
            self.engine.loss = self.engine.loss.module  # without DistributedDataParallel
        model.train()
        self.optimizer = torch.optim.Adam(self.engine.parameters.values(), lr=1e-5, fused=True)

    def update(self, batch: Batch) -> float:
        """Makes an update and returns the norm of its gradient."""
        self.engine.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.engine.loss(batch)[0] / batch.target_tokens
        loss.backward()
        norm = self.engine.gradient_norm()
        torch._foreach_mul_(self.engine.gradients(), (1 / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        return float(norm)


def process(rank: int, port: int, arguments: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    names = arguments.only.split(",")
    contestants = {name: Contestant(name, arguments.arch, arguments.vocabulary) for name in names}
    tokens = torch.randint(3, arguments.vocabulary, (arguments.tokens,), generator=torch.Generator().manual_seed(rank))
    packed = Packed(tokens, Layout.of(torch.full((len(tokens) // SENTENCE,), SENTENCE)))
    wall: dict[str, list[float]] = {name: [] for name in names}
    computed: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(arguments.turns + 1):
        norms = {}
        for name, contestant in contestants.items():
            torch.manual_seed(turn)
            dist.barrier()
            started, start = time.perf_counter(), time.process_time()
            norms[name] = contestant.update(Batch(packed, packed, tokens, len(tokens), tokens[:0]))
            dist.barrier()
            if turn:  # the first allocates
                wall[name].append(time.perf_counter() - started)
                computed[name].append(time.process_time() - start)
        if turn == 0:
            sums = [norm for name, norm in norms.items() if name != "one process"]
            assert max(sums) - min(sums) < 1e-2 * max(sums), f"the contestants disagree: {norms}"
    if rank == 0:
        print(f"{arguments.arch}, {len(tokens)} tokens a rank, {arguments.turns} turns, torch {torch.__version__}")
        print(f"{'an update':16}{'median, s':>12}{'least, s':>12}{'CPU s':>12}")
        for name in names:
            figures = statistics.median(wall[name]), min(wall[name]), statistics.median(computed[name])
            print(f"{name:16}" + "".join(f"{figure:>12.4f}" for figure in figures))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="transformer_base")
    parser.add_argument("--vocabulary", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=256, help="of a rank's micro-batch, each side")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", default="ddp,fsdp,replicate,one process", help="comma-separated names of contestants")
    arguments = parser.parse_args()
    mp.spawn(process, args=(distributed.free_port(), arguments), nprocs=2)


if __name__ == "__main__":
    main()
