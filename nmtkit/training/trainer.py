"""The training step: forward and backward passes over micro-batches, gradient clipping, the optimizer step."""

import contextlib
import copy
import hashlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nmtkit.data.packed import Batch
from nmtkit.jobs import distributed
from nmtkit.models.architectures import Architecture
from nmtkit.models.layers.adapters import adapters_in
from nmtkit.training import precision as precisions
from nmtkit.training.averaging import AveragedWeights, MovingAverage
from nmtkit.training.config import JobConfig
from nmtkit.training.criterions import Criterion
from nmtkit.training.loader import Update
from nmtkit.training.lr_schedulers import LRScheduler, learning_rate
from nmtkit.training.optimizers import OPTIMIZERS, parameter_names
from nmtkit.training.parallel import ReplicatedModel, ShardedModel
from nmtkit.training.parameters import embedding_names, parameter_groups

log = logging.getLogger("nmtkit")


@dataclass(frozen=True, eq=False)
class StepMetrics:
    """Metrics of one update. Tensors stay on the device; reading a tensor waits for the device."""

    number: int  # number of the update, counted from 1
    pairs: npt.NDArray[np.int64]  # indices of all pairs of the update
    target_tokens: int  # total of all ranks
    own_target_tokens: int  # total of the micro-batches of this rank
    lr: float
    sums: dict[str, Tensor]  # "loss" and the counts of the criterion, totals of the micro-batches of this rank
    norm: Tensor  # norm of the gradient of the whole update, before clipping
    finite: Tensor  # bool; if False, every rank has skipped the update


class Trainer:
    """A model with its criterion, optimizer and learning-rate schedule. `step` makes an update.

    The random numbers of an update depend on (seed, update, micro-batch) and never on the rank. The updates are
    therefore the same with any number of processes.
    """

    def __init__(
        self,
        job: JobConfig,
        model: Architecture,
        criterion: Criterion,
        scheduler: LRScheduler,
        device: torch.device,
        adapters: dict[str, Any] | None = None,
        schedule_start: int = 0,
    ) -> None:
        """Builds the optimizer and prepares the model for one or several processes.

        `adapters` describes the adapters of the model, if there are any (data/checkpoint_file.py). Then only the
        adapters are saved. `schedule_start` is the update after which the learning-rate schedule begins.
        """
        self.job = job
        self.device = device
        self.precision = precisions.resolve(job.run.precision, device)
        self.model = model
        self.criterion = criterion
        self.scheduler = scheduler
        self.adapters = adapters
        self.engine = self._parallelize()
        weights = self.engine.parameters
        self.ema = MovingAverage(weights, job.run.ema_decay) if job.run.ema_decay else None
        component = job.components["optimizer"]
        groups = parameter_groups(weights, job.run.weight_decay_for, embedding_names(model))
        for group in groups:
            scale = model.learning_rate_scale(group["name"].partition(",")[0])
            group |= {"lr_scale": scale} if scale != 1 else {}
        self.optimizer = OPTIMIZERS[component.name].factory(component.config, groups)
        of_optimizer = self.optimizer if isinstance(self.optimizer, AveragedWeights) else None
        if self.ema and of_optimizer:
            raise ValueError(f"--optimizer {component.name} averages the weights itself; leave out --ema-decay")
        self.averages = self.ema or of_optimizer  # validated and saved instead of the trained weights
        self.configured = _group_settings(self.optimizer)  # settings of the groups, from the flags of this run
        self.transforms_pairs = bool(job.chosen("transforms"))
        self.loss_scale = precisions.LossScale(self.precision, device)
        self.schedule_start = schedule_start
        self.done = 0  # number of updates, including skipped updates
        self.lr: float | None = None  # learning rate of the last update

    def _parallelize(self) -> ReplicatedModel:
        if self.job.run.parallel == "ddp" or distributed.world_size() == 1:
            return ReplicatedModel(self.model, self.criterion, self.device)
        narrow = self.device.type == "cuda" and self.precision != "fp32"
        gathered_dtype = precisions.DTYPES[self.precision] if narrow else None
        return ShardedModel(self.model, self.criterion, self.device, gathered_dtype)

    # --- an update --------------------------------------------------------------------------------------------------

    def step(self, update: Update) -> StepMetrics:
        """Makes update number `done` + 1. Raises ValueError if a micro-batch does not fit into memory."""
        number = self.done + 1
        seed = self.job.run.seed
        self.model.train()
        self.criterion.train()
        self.engine.zero_grad()
        self.model.begin_update(torch.Generator().manual_seed(seed_of(seed, number, -1)))
        of_rank = sum(batch.target_tokens for _, batch in update.micro_batches)
        tokens = update.target_tokens
        # transforms change the number of tokens, and a rank transforms only its own pairs: add the counts of all ranks
        if self.transforms_pairs:
            tokens = int(distributed.all_reduce(torch.tensor(of_rank)))
        sums: dict[str, Tensor] = {}
        for index, batch in update.micro_batches:
            torch.manual_seed(seed_of(seed, number, index))
            try:
                with self.engine.gradient_sync(last=batch is update.micro_batches[-1][1]):
                    self._forward_backward(batch, tokens, sums)
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"out of memory in update {number}, in a micro-batch of {batch.source.layout.tokens} source and "
                    f"{batch.target_tokens} target tokens; lower --max-tokens, which does not change the updates"
                ) from error
        distributed.heartbeat(number)
        self.lr = lr = learning_rate(self.scheduler, number - self.schedule_start)
        norm, finite = self._optimizer_step(lr)
        if self.ema:
            self.ema.update(number)
        self.done = number
        return StepMetrics(number, update.pairs, tokens, of_rank, lr, sums, norm, finite)

    def _forward_backward(self, batch: Batch, tokens: int, sums: dict[str, Tensor]) -> None:
        """Adds the gradients of a micro-batch, and adds its loss and counts to `sums`.

        A micro-batch without target tokens is a dummy and adds nothing.
        """
        dummy = not batch.target_tokens  # a dummy gets the weight 0, because its auxiliary losses might not be 0
        with precisions.autocast(self.precision, self.device):
            loss, counts = self.engine.loss(batch)
        distributed.advance()
        weight = 0.0 if dummy else self.loss_scale.value / tokens
        # A non-finite loss can have finite gradients. `loss * 0` is then NaN, and every rank skips the update.
        (loss * (weight + loss.detach() * 0)).backward()
        for name, value in {} if dummy else {"loss": loss.detach(), **counts}.items():
            sums[name] = sums[name] + value if name in sums else value

    def _optimizer_step(self, lr: float) -> tuple[Tensor, Tensor]:
        """Clips the gradients and makes the optimizer step, or skips the step if a gradient is not finite.

        Returns the norm of the gradient and whether the norm is finite. Waits for a GPU only if the optimizer, such as
        Muon, does not read `found_inf`.
        """
        norm = self.engine.gradient_norm() / self.loss_scale.value
        finite = norm.isfinite()
        factor = 1 / self.loss_scale.value
        if self.job.run.clip_norm:
            factor = factor * (self.job.run.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.job.run.clip_norm or self.loss_scale.active:
            torch._foreach_mul_(self.engine.gradients(), factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            # Fused optimizers read `found_inf` on the device and skip the step if it is not 0.
            self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.step()
        elif finite:
            self.optimizer.step()
        self.loss_scale.update(finite)
        return norm, finite

    # --- before the first update ------------------------------------------------------------------------------------

    def compile(self, batch: Batch) -> None:
        """Compiles the model for batches of any shape and runs the compiled model on `batch`.

        If this compilation fails, logs the reason and trains without compilation. If a later compilation fails, torch
        logs the reason and does not compile the affected part of the model.
        """
        started = time.monotonic()
        torch._dynamo.config.optimize_ddp = False  # prevents a split of the graph at the gradient buckets
        self.model.compile(dynamic=True)
        try:
            with distributed.long_operation():
                self.trial_pass(batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler can raise any class of exception
            self.model._compiled_call_impl = None
            self.engine.zero_grad()
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            log.warning("the model is not compiled: %s", reason)
        else:
            torch._dynamo.config.suppress_errors = True
            log.info("compiled the model in %.0f s", time.monotonic() - started)

    def trial_pass(self, batch: Batch) -> None:
        """Makes a forward and a backward pass without an update. Weights and random numbers of updates stay the same.

        The gradients are set to zero afterwards.
        """
        self.model.train()
        self.criterion.train()
        with self.engine.gradient_sync(last=False):
            with precisions.autocast(self.precision, self.device):
                loss, _ = self.engine.loss(batch)
            loss.backward()
        self.engine.zero_grad()

    # --- weights and state ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """The context in which the model has the weights for validation (with `averages`, the averages)."""
        with self.averages.swapped() if self.averages else contextlib.nullcontext(), self.engine.unsharded():
            yield

    def weights(self) -> dict[str, Tensor]:
        """Returns the weights to save, by name: the averages if there are any, otherwise the trained weights.

        If the model has adapters, the result has only the adapters. The result is complete on rank 0. Every rank must
        call this method.
        """
        chosen = adapters_in if self.adapters else dict
        if self.averages is None:
            return chosen(self.engine.state_dict())
        with self.averages.swapped():
            return copy.deepcopy(chosen(self.engine.state_dict()))

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.engine.load_state_dict(weights)

    def state_dict(self) -> dict[str, Any]:
        """Returns the training state without `weights()`. Tensors are stored by parameter name, never by position.

        The result is complete on rank 0. Every rank must call this method.
        """
        gather = self.engine.gather
        state: dict[str, Any] = {
            "optimizer": self._optimizer_state(),
            "scheduler": self.scheduler.state(),
            "lr": self.lr,
            "schedule_start": self.schedule_start,
            "loss_scale": self.loss_scale.state_dict(),
        }
        if self.averages:
            weights = {name: gather(name, weight.detach()) for name, weight in self.engine.parameters.items()}
            # if the optimizer makes the averages, its weights are useless without its state
            owner = state if self.ema else state["optimizer"]
            owner["weights"] = weights
        return state

    def load_state_dict(self, state: dict[str, Any], done: int) -> None:
        """Restores the training state after update `done`. Call `load_weights` first.

        The resumed run may add or remove --ema-decay. With --reset-optimizer, the run may train different parameters.
        A checkpoint of a run with averages has two weights for each trained parameter: the average and the weight of
        the optimizer. A parameter that was trained before and is trained now gets the weight of the optimizer, unless
        the optimizer has made the averages and is reset. Any other parameter keeps the weight that `load_weights` has
        loaded. Raises ValueError if the optimizer state is for different parameters.
        """
        saved = dict(state.get("weights", {}))
        if not self.job.run.reset_optimizer:
            self._load_optimizer(state["optimizer"])
            saved |= state["optimizer"].get("weights", {})
        if not self.job.run.reset_lr_scheduler:
            self.scheduler.load_state(state["scheduler"])
        self.lr = state["lr"]
        self.loss_scale.load_state_dict(state["loss_scale"])
        if self.ema:
            self.ema.restart()  # the loaded weights are the means
        with torch.no_grad():
            for name, parameter in self.engine.parameters.items():
                if name in saved:
                    parameter.copy_(self.engine.shard(name, saved[name]))
        self.done = done

    def _optimizer_state(self) -> dict[str, Any]:
        """Returns the settings of each group, and the state of each parameter by name."""
        groups = parameter_names(self.optimizer, self.engine.parameters)
        names = [name for group in groups for name in group]
        state = {
            names[index]: {key: self.engine.gather(names[index], value) for key, value in entries.items()}
            for index, entries in self.optimizer.state_dict()["state"].items()
        }
        settings = zip(groups, _group_settings(self.optimizer), self.configured, strict=True)
        return {
            "state": state,
            "groups": [
                {"parameters": group, "settings": current, "configured": configured}
                for group, current, configured in settings
            ],
        }

    def _load_optimizer(self, saved: dict[str, Any]) -> None:
        """Loads the optimizer state. Flags that differ from the saved flags override the saved settings."""
        groups = parameter_names(self.optimizer, self.engine.parameters)
        before = [group["parameters"] for group in saved["groups"]]
        if before != groups:
            raise ValueError(
                f"the saved optimizer has different parameter groups from this run: {_difference(before, groups)}; "
                "resume with the same --freeze and --weight-decay-for, or with --reset-optimizer"
            )
        state = self.optimizer.state_dict()
        names = [name for group in groups for name in group]
        state["state"] = {
            index: {key: self.engine.shard(name, value) for key, value in saved["state"][name].items()}
            for index, name in enumerate(names)
            if name in saved["state"]
        }
        for group, old, now in zip(state["param_groups"], saved["groups"], self.configured, strict=True):
            changed = {name: value for name, value in now.items() if old["configured"].get(name) != value}
            group.update(old["settings"] | changed)
        self.optimizer.load_state_dict(state)


def _group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the settings of each parameter group, such as learning rate and weight decay."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def _difference(saved: list[list[str]], current: list[list[str]]) -> str:
    """Describes how two lists of parameter groups differ. A group is the list of the names of its parameters."""
    before, now = ({name for group in groups for name in group} for groups in (saved, current))
    differences = [(sorted(before - now), "only in the checkpoint"), (sorted(now - before), "only in this run")]
    parts = [f"{len(names)} {where}, such as {names[0]}" for names, where in differences if names]
    return ", ".join(parts) or f"groups of {list(map(len, saved))} and {list(map(len, current))} parameters"


def seed_of(seed: int, update: int, micro_batch: int) -> int:
    """Returns a seed for the generators of torch. Different arguments give different seeds."""
    digest = hashlib.blake2b(f"{seed} {update} {micro_batch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
