"""Rank, world size, sums and barriers; no-ops on one process. This module knows no model.

A launcher (torchrun, or `launch` here) starts the processes and describes them in the environment: RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, …
"""

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Which of this machine's processes we are, hence which of its devices is ours."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process is the one that writes files and talks."""
    return rank() == 0


def join(device: torch.device, timeout_minutes: float) -> None:
    """Meets the other processes that the launcher started. Collectives run on gloo for CPU tensors, else on NCCL."""
    if not launched() or dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=timeout_minutes))


def leave() -> None:
    """Parts from the other processes; all of them are to do so."""
    if dist.is_initialized():
        barrier()
        dist.destroy_process_group()


def all_sum(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def barrier() -> None:
    """Waits until every process is here."""
    all_sum(torch.zeros(1))


def from_first(value: Any) -> Any:
    """What rank 0 has, on every rank; a plain value."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def gather(value: Any) -> list[Any]:
    """Every rank's plain value, by rank, on every rank."""
    if world_size() == 1:
        return [value]
    values = []  # all_gather_object would go through the GPU under NCCL; a broadcast from each rank does not
    for source in range(world_size()):
        box = [value if source == rank() else None]
        dist.broadcast_object_list(box, src=source, device=torch.device("cpu"))
        values.append(box[0])
    return values


class Agreement:
    """The largest of all ranks' numbers, known at the next call, so that nobody waits for it."""

    def __init__(self) -> None:
        self.box = torch.zeros(1, dtype=torch.int64)
        self.work: Any = None

    def largest(self, value: int) -> int:
        """Gives the largest `value` of the call before, on every rank alike; of this call on a single process."""
        if world_size() == 1:
            return value
        agreed = 0
        if self.work is not None:
            self.work.wait()
            agreed = int(self.box)
        self.box = torch.tensor([value])
        self.work = dist.all_reduce(self.box, dist.ReduceOp.MAX, async_op=True)
        return agreed
