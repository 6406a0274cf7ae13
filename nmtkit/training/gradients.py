"""All gradients in flat buffers: cleared, summed over processes, measured and scaled in a few large operations.

This is `--parallel ddp`: every process has the whole model. It stands in for DistributedDataParallel, whose contract
differs from ours in three places: gradients here are summed, not averaged over ranks; a rank may have fewer slices than
another, or none; and a layer that an update leaves out has no gradient on any rank. As there, the sum of one bucket
runs while the backward pass still computes the next.
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nmtkit import distributed

BUCKET_BYTES = 25 * 2**20


class Bucket:
    """Neighbouring parameters whose gradients are one stretch of memory."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        first = parameters[0]
        size = sum(parameter.numel() for parameter in parameters)
        self.flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.parameters = parameters
        self.waiting = 0  # gradients of this update still to come
        offset = 0
        for parameter in parameters:
            parameter.grad = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()


class Gradients:
    """Owns `.grad` of the parameters that are trained. One update: `clear`, backward passes, `reduce`.

    Before the last backward pass of an update call `arm`, so that its sums begin as soon as gradients are there.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.trained = {name: it for name, it in model.named_parameters() if it.requires_grad}
        self.buckets: list[Bucket] = []
        group: list[nn.Parameter] = []
        size = 0
        # the last parameters get their gradients first
        for parameter in reversed(self.trained.values()):
            bytes_ = parameter.numel() * parameter.element_size()
            if group and (size + bytes_ > BUCKET_BYTES or parameter.dtype != group[0].dtype):
                self.buckets.append(Bucket(group))
                group, size = [], 0
            group.append(parameter)
            size += bytes_
        if not group and not self.buckets:
            raise ValueError("no parameter is left to train; freeze fewer of them")
        self.buckets.append(Bucket(group))
        self.armed = False
        self.launched = 0  # buckets whose sum has begun; they begin in order, on every rank
        self.works: list[Any] = []
        if distributed.world_size() > 1:
            for bucket in self.buckets:
                for parameter in bucket.parameters:
                    parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._arrived(bucket))

    def clear(self) -> None:
        for bucket in self.buckets:
            bucket.flat.zero_()

    def mark_nonfinite(self, value: Tensor) -> None:
        """Adds a scalar to one gradient: 0, or what is not finite, so that every rank sees it after `reduce`."""
        self.buckets[-1].flat[0].add_(value)

    def arm(self) -> None:
        """The next backward pass is this update's last here."""
        self.armed = distributed.world_size() > 1
        for bucket in self.buckets:
            bucket.waiting = len(bucket.parameters)

    def _arrived(self, bucket: Bucket) -> None:
        if not self.armed:
            return
        bucket.waiting -= 1
        while self.launched < len(self.buckets) and self.buckets[self.launched].waiting == 0:
            self._launch()

    def _launch(self) -> None:
        self.works.append(dist.all_reduce(self.buckets[self.launched].flat, async_op=True))
        self.launched += 1

    def reduce(self) -> None:
        """Waits until every gradient is the sum over all ranks; those without a backward pass give zeros."""
        if distributed.world_size() > 1:
            while self.launched < len(self.buckets):
                self._launch()
            for work in self.works:
                work.wait()
        self.works, self.launched, self.armed = [], 0, False

    def norm(self) -> Tensor:
        """The 2-norm of all gradients, in fp32; not finite when any gradient is not."""
        flats = [bucket.flat for bucket in self.buckets]
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(flats)).float())

    def scale(self, factor: Tensor | float) -> None:
        torch._foreach_mul_([bucket.flat for bucket in self.buckets], factor)

    # --- whole tensors: all of them are, see `Shards` -----------------------------------------------------------------

    def whole(self, name: str, share: Tensor) -> Tensor:
        return share

    def part(self, name: str, whole: Tensor) -> Tensor:
        return whole

    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.model.load_state_dict(weights)

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
