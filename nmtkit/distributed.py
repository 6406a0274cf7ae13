"""Rank, world size, sums and barriers; no-ops on one process. This module knows no model."""

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def launched() -> bool:
    """Whether a launcher (torchrun, or ours) started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(device: torch.device, timeout_minutes: float) -> None:
    """Meets the other processes that the launcher's environment announces. Collectives run on gloo for CPU tensors
    and on NCCL for CUDA's; each gives up after the time-out."""
    if not launched() or dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=timeout_minutes))


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Which of this machine's processes we are, hence which of its devices is ours."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process is the one that writes files and talks."""
    return rank() == 0


def all_sum(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def barrier() -> None:
    if world_size() > 1:
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
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values
