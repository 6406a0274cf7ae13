"""One update: forward and backward over this rank's slices, the sum over ranks, clipping, the optimizer's step."""

import contextlib
import copy
import hashlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nmtkit import distributed
from nmtkit.architectures import Architecture
from nmtkit.criterions import Criterion
from nmtkit.lr_schedulers import LRScheduler
from nmtkit.optimizers import OPTIMIZERS
from nmtkit.packed import Batch
from nmtkit.training import precision as precisions
from nmtkit.training.config import JobConfig
from nmtkit.training.ema import MovingAverage
from nmtkit.training.gradients import Gradients
from nmtkit.training.loader import Update
from nmtkit.training.parameters import parameter_groups

if TYPE_CHECKING:
    from nmtkit.training.sharded import Shards

log = logging.getLogger("nmtkit")


@dataclass(frozen=True, eq=False)
class StepMetrics:
    """What one update did, still on the device: reading a tensor waits for it."""

    number: int  # of the update, counted from 1
    pairs: npt.NDArray[np.int64]  # of the whole update, as all below but the sums
    source_tokens: int
    target_tokens: int
    own_tokens: int  # target tokens of this rank's slices
    lr: float
    sums: dict[str, Tensor]  # this rank's: "loss" and the criterion's counts
    norm: Tensor  # of the gradient, before clipping
    finite: Tensor  # bool; when false the update was skipped, on every rank


class Trainer:
    """A model and what changes it. Everything random in an update is drawn from (seed, update, slice)."""

    def __init__(
        self, job: JobConfig, model: Architecture, criterion: Criterion, scheduler: LRScheduler, device: torch.device
    ) -> None:
        self.job = job
        self.device = device
        self.precision = precisions.resolve(job.run.precision, device)
        self.model = model
        self.criterion = criterion
        self.scheduler = scheduler
        self.gradients = self._gradients()
        trained = self.gradients.trained
        self.average = MovingAverage(list(trained.values()), job.run.ema_decay) if job.run.ema_decay else None
        chosen = job.components["optimizer"]
        groups = parameter_groups(trained, job.run.weight_decay_for)
        self.optimizer = OPTIMIZERS[chosen.name].factory(chosen.config, groups)
        self.loss_scale = precisions.LossScale(self.precision, device)
        self.done = 0  # updates, skipped ones included

    def _gradients(self) -> "Gradients | Shards":
        """What holds the gradients, and with several processes sums them; moves the model to its device."""
        if self.job.run.parallel == "ddp" or distributed.world_size() == 1:
            return Gradients(self.model.to(self.device))
        from nmtkit.training.sharded import Shards  # what it imports takes a second

        gathered_type = precisions.type_of(self.precision) if self.device.type == "cuda" else None
        return Shards(self.model, self.device, gathered_type)

    def step(self, update: Update) -> StepMetrics:
        """Makes update number `done` + 1."""
        number = self.done + 1
        self.model.train()
        self.criterion.train()
        self.gradients.clear()
        self.model.begin_update(torch.Generator().manual_seed(key(self.job.run.seed, number, -1)))
        own = sum(batch.target_tokens for _, batch in update.batches)
        tokens = update.target_tokens
        if self.job.run.subword_alpha:  # segmented anew: only the rank that made a slice knows its tokens
            tokens = int(distributed.all_reduce(torch.tensor(own)))
        sums: dict[str, Tensor] = {}
        for place, (slice_number, batch) in enumerate(update.batches, 1):
            if place == len(update.batches):
                self.gradients.arm()
            torch.manual_seed(key(self.job.run.seed, number, slice_number))
            try:
                self._backward(batch, tokens, sums)
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"out of memory in update {number}, in a slice of {batch.source.layout.tokens} source and "
                    f"{batch.target_tokens} target tokens; lower --max-tokens, which leaves the updates as they are"
                ) from error
        distributed.heartbeat(number)
        self.gradients.reduce()
        lr = self.scheduler.lr(number)
        norm, finite = self._apply(lr)
        if self.average:
            self.average.update(number)
        self.done = number
        return StepMetrics(number, update.pairs, update.source_tokens, tokens, own, lr, sums, norm, finite)

    def _backward(self, batch: Batch, tokens: int, sums: dict[str, Tensor]) -> None:
        idle = not batch.target_tokens  # made in step with the other ranks; auxiliary losses may count its tokens
        weight = 0.0 if idle else self.loss_scale.value / tokens
        with precisions.autocast(self.precision, self.device):
            loss = self.criterion(self.model, batch)
        self.gradients.mark_nonfinite(loss.sum.detach() * 0)  # a loss that is not finite may have gradients that are
        (loss.sum * weight).backward()
        for name, value in {} if idle else {"loss": loss.sum.detach(), **loss.counts}.items():
            sums[name] = sums[name] + value if name in sums else value

    def compile(self, batch: Batch) -> None:
        """Has torch compile the model and tries it on `batch`; on failure says why and leaves the model as it was."""
        started = time.monotonic()
        self.model.compile()
        try:
            self.warm_up(batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler raises what it likes
            self.model._compiled_call_impl = None
            self.gradients.clear()
            reason = str(error).strip().splitlines() or [type(error).__name__]
            log.warning("the model is not compiled: %s", reason[0])
        else:
            log.info("compiled the model in %.0f s", time.monotonic() - started)

    def warm_up(self, batch: Batch) -> None:
        """Forward and backward of one slice, with as much memory taken as Adam's state will take; changes nothing."""
        reserved = [torch.empty_like(it) for it in self.gradients.trained.values() for _ in range(2)]
        self.model.train()
        self.criterion.train()
        with precisions.autocast(self.precision, self.device):
            loss = self.criterion(self.model, batch)
        loss.sum.backward()
        del reserved
        self.gradients.clear()

    def _apply(self, lr: float) -> tuple[Tensor, Tensor]:
        """Clips and steps, or skips when a gradient is not finite; without waiting for a GPU."""
        norm = self.gradients.norm() / self.loss_scale.value
        finite = norm.isfinite()
        factor = 1 / self.loss_scale.value
        if self.job.run.clip_norm:
            factor = factor * (self.job.run.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.job.run.clip_norm or self.loss_scale.active:
            self.gradients.scale(factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            # fused optimizers look at this flag, on the device, and leave parameters and state alone when it is set
            self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.step()
        elif finite:
            self.optimizer.step()
        self.loss_scale.update(finite)
        return norm, finite

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, the model has the weights to validate with and to save: the running means, if there are any."""
        with self.average.in_place() if self.average else contextlib.nullcontext(), self.gradients.gathered():
            yield

    def weights(self) -> dict[str, Tensor]:
        """The model's `state_dict` to save. Of this and of `state` rank 0 has the whole; all ranks are to call them."""
        if self.average is None:
            return self.gradients.weights()
        with self.average.in_place():
            return copy.deepcopy(self.gradients.weights())

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.gradients.load_weights(weights)

    def state(self) -> dict[str, Any]:
        """Beside the model, what the next update depends on."""
        names, whole = self._names(), self.gradients.whole
        state: dict[str, Any] = {}
        if self.average:
            state["weights"] = [whole(*it) for it in zip(self.gradients.trained, self.average.state(), strict=True)]
        optimizer = self.optimizer.state_dict()
        optimizer["state"] = {
            index: {key: whole(names[index], it) if isinstance(it, Tensor) else it for key, it in entries.items()}
            for index, entries in optimizer["state"].items()
        }
        return state | {
            "optimizer": optimizer,
            "scheduler": self.scheduler.state(),
            "loss_scale": self.loss_scale.state(),
        }

    def load_state(self, state: dict[str, Any], done: int) -> None:
        """After `load_weights`. Running means may begin or end here. Raises ValueError for other parameters."""
        of_both = state["optimizer"]["param_groups"], self.optimizer.param_groups
        saved, own = ([len(group["params"]) for group in groups] for groups in of_both)
        if saved != own:
            raise ValueError(
                f"the checkpoint's optimizer has groups of {saved} parameters, this run's has {own}; resume with the "
                "--freeze and --weight-decay-for of before, or --finetune-from it in another --save-dir"
            )
        names, part = self._names(), self.gradients.part
        entries = {
            index: {key: part(names[index], it) if isinstance(it, Tensor) else it for key, it in entries.items()}
            for index, entries in state["optimizer"]["state"].items()
        }
        self.optimizer.load_state_dict(state["optimizer"] | {"state": entries})
        self.scheduler.load_state(state["scheduler"])
        self.loss_scale.load_state(state["loss_scale"])
        raw = [part(*it) for it in zip(self.gradients.trained, state.get("weights", ()), strict=False)]
        if self.average:
            self.average.load_state(raw or self.average.state())
        elif raw:  # what was loaded are their means
            with torch.no_grad():
                torch._foreach_copy_(list(self.gradients.trained.values()), raw)
        self.done = done

    def _names(self) -> list[str]:
        """Of the optimizer's parameters, in its order."""
        names = {id(parameter): name for name, parameter in self.gradients.trained.items()}
        return [names[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]


def key(seed: int, update: int, slice_number: int) -> int:
    """A seed for torch's generators that differs wherever one of the three does."""
    digest = hashlib.blake2b(f"{seed} {update} {slice_number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
