"""The training step: forward and backward over micro-batches, gradient clipping, the optimizer, the running mean."""

import contextlib
import copy
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.criterions import Criterion
from nmtkit.layers.adapters import adapters_in
from nmtkit.layers.packed import Batch
from nmtkit.processes import distributed
from nmtkit.training import precision as precisions
from nmtkit.training.config import JobConfig
from nmtkit.training.loader import BatchLoader, Update
from nmtkit.training.lr_schedulers import LRScheduler, learning_rate
from nmtkit.training.optimizers import OPTIMIZERS
from nmtkit.training.parallel import ReplicatedModel, ShardedModel
from nmtkit.training.parameters import embedding_names, parameter_groups

log = logging.getLogger("nmtkit")

SPARE_MEMORY = 0.05  # share of a GPU's memory that an automatic --max-tokens leaves


@dataclass(frozen=True, eq=False)
class StepMetrics:
    """Metrics of one update. Tensors stay on the device; reading one synchronises."""

    number: int  # of the update, counted from 1
    pairs: npt.NDArray[np.int64]  # of the whole update, as are all numbers below but two
    source_tokens: int
    target_tokens: int
    own_target_tokens: int  # of this rank's micro-batches
    lr: float
    sums: dict[str, Tensor]  # of this rank's micro-batches: "loss" and the criterion's counts
    norm: Tensor  # of the gradient, before clipping
    finite: Tensor  # bool; when false the update was skipped, on every rank


class Trainer:
    """A model with its criterion, optimizer and learning-rate schedule; `step` makes an update.

    Random numbers of an update are keyed by (seed, update, micro-batch), never by rank, so that any number of
    processes makes the same updates.
    """

    def __init__(
        self,
        job: JobConfig,
        model: Architecture,
        criterion: Criterion,
        scheduler: LRScheduler,
        device: torch.device,
        adapters: dict[str, Any] | None = None,
    ) -> None:
        """`adapters` are the facts of the model's, if it has any: then they alone are saved."""
        self.job = job
        self.device = device
        self.precision = precisions.resolve(job.run.precision, device)
        self.model = model
        self.criterion = criterion
        self.scheduler = scheduler
        self.adapters = adapters
        self.engine = self._parallelize()
        weights = self.engine.parameters
        self.ema = MovingAverage(list(weights.values()), job.run.ema_decay) if job.run.ema_decay else None
        component = job.components["optimizer"]
        groups = parameter_groups(weights, job.run.weight_decay_for, embedding_names(model))
        self.optimizer = OPTIMIZERS[component.name].factory(component.config, groups)
        self.hyperparameters = [
            {name: value for name, value in group.items() if name not in ("params", "param_names")}
            for group in self.optimizer.param_groups
        ]
        self.transforms_pairs = bool(job.chosen("transforms"))
        self.loss_scale = precisions.LossScale(self.precision, device)
        self.schedule_start = 0  # the update after which the learning-rate schedule begins
        self.done = 0  # updates, including skipped ones
        self.lr: float | None = None  # of the last update

    def _parallelize(self) -> ReplicatedModel:
        if self.job.run.parallel == "ddp" or distributed.world_size() == 1:
            return ReplicatedModel(self.model, self.criterion, self.device)
        narrow = self.device.type == "cuda" and self.precision != "fp32"
        gathered_dtype = precisions.DTYPES[self.precision] if narrow else None
        return ShardedModel(self.model, self.criterion, self.device, gathered_dtype)

    # --- an update --------------------------------------------------------------------------------------------------

    def step(self, update: Update) -> StepMetrics:
        """Makes update number `done` + 1. Raises ValueError when a micro-batch does not fit into memory."""
        number = self.done + 1
        seed = self.job.run.seed
        self.model.train()
        self.criterion.train()
        self.engine.zero_grad()
        self.model.begin_update(torch.Generator().manual_seed(seed_of(seed, number, -1)))
        own = sum(batch.target_tokens for _, batch in update.micro_batches)
        tokens = update.target_tokens
        if self.transforms_pairs:  # only the rank that made a micro-batch knows its tokens
            tokens = int(distributed.all_reduce(torch.tensor(own)))
        sums: dict[str, Tensor] = {}
        for index, batch in update.micro_batches:
            torch.manual_seed(seed_of(seed, number, index))
            try:
                with self.engine.gradient_sync(last=batch is update.micro_batches[-1][1]):
                    self._forward_backward(batch, tokens, sums)
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"out of memory in update {number}, in a micro-batch of {batch.source.layout.tokens} source and "
                    f"{batch.target_tokens} target tokens; lower --max-tokens, which leaves the updates as they are"
                ) from error
        distributed.heartbeat(number)
        self.lr = lr = learning_rate(self.scheduler, number - self.schedule_start)
        norm, finite = self._optimizer_step(lr)
        if self.ema:
            self.ema.update(number)
        self.done = number
        return StepMetrics(number, update.pairs, update.source_tokens, tokens, own, lr, sums, norm, finite)

    def _forward_backward(self, batch: Batch, tokens: int, sums: dict[str, Tensor]) -> None:
        """Adds the gradients of a micro-batch, and its loss and counts to `sums`; a dummy counts for nothing."""
        dummy = not batch.target_tokens  # its auxiliary losses may not be 0
        with precisions.autocast(self.precision, self.device):
            loss, counts = self.engine.loss(batch)
        weight = 0.0 if dummy else self.loss_scale.value / tokens
        # a loss that is not finite may have finite gradients; times NaN they are not, and every rank skips the update
        (loss * (weight + loss.detach() * 0)).backward()
        for name, value in {} if dummy else {"loss": loss.detach(), **counts}.items():
            sums[name] = sums[name] + value if name in sums else value

    def _optimizer_step(self, lr: float) -> tuple[Tensor, Tensor]:
        """Clips and steps, or skips when a gradient is not finite, without waiting for a GPU.

        Returns the gradient's norm and whether it is finite.
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
            # fused optimizers read this flag on the device, and leave parameters and state alone when it is set
            self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.step()
        elif finite:
            self.optimizer.step()
        self.loss_scale.update(finite)
        return norm, finite

    # --- before the first update ------------------------------------------------------------------------------------

    def compile(self, batch: Batch) -> None:
        """Compiles the model for batches of any shape and tries it on `batch`.

        When that fails, logs why and leaves the model as it was; when compilation fails later, torch logs it and runs
        what it could not compile as it is.
        """
        started = time.monotonic()
        torch._dynamo.config.optimize_ddp = False  # which would split the graph at the buckets of gradients
        self.model.compile(dynamic=True)
        try:
            with distributed.long_operation():
                self.warm_up(batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler raises any kind
            self.model._compiled_call_impl = None
            self.engine.zero_grad()
            reason = str(error).strip().splitlines() or [type(error).__name__]
            log.warning("the model is not compiled: %s", reason[0])
        else:
            torch._dynamo.config.suppress_errors = True
            log.info("compiled the model in %.0f s", time.monotonic() - started)

    def warm_up(self, batch: Batch) -> None:
        """Makes a forward and backward pass with as much memory taken as Adam's state needs; changes nothing."""
        reserved = [torch.empty_like(weight) for weight in self.engine.parameters.values() for _ in range(2)]
        self.model.train()
        self.criterion.train()
        with self.engine.gradient_sync(last=False):
            with precisions.autocast(self.precision, self.device):
                loss, _ = self.engine.loss(batch)
            loss.backward()
        del reserved
        self.engine.zero_grad()

    # --- weights and state ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """The context in which the model has the weights to validate: the running means, if there are any."""
        with self.ema.swapped() if self.ema else contextlib.nullcontext(), self.engine.unsharded():
            yield

    def weights(self) -> dict[str, Tensor]:
        """The `state_dict` to save: the running means, if there are any; of a model with adapters, the adapters.

        Whole on rank 0; every rank must call it.
        """
        chosen = adapters_in if self.adapters else dict
        if self.ema is None:
            return chosen(self.engine.state_dict())
        with self.ema.swapped():
            return copy.deepcopy(chosen(self.engine.state_dict()))

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.engine.load_state_dict(weights)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the run beside `weights()`. Whole on rank 0; every rank must call it."""
        gather = self.engine.gather
        state: dict[str, Any] = {}
        if self.ema:
            state["weights"] = [gather(name, weight.detach()) for name, weight in self.engine.parameters.items()]
        return state | {
            "optimizer": self._map_optimizer_state(self.optimizer.state_dict(), gather),
            "hyperparameters": self.hyperparameters,
            "scheduler": self.scheduler.state(),
            "lr": self.lr,
            "schedule_start": self.schedule_start,
            "loss_scale": self.loss_scale.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], done: int) -> None:
        """Goes on after update `done`; call `load_weights` first. Running means may begin or end here.

        Raises ValueError when the state is that of other parameters.
        """
        if not self.job.run.reset_optimizer:
            self._load_optimizer(state)
        if self.job.run.reset_lr_scheduler:
            self.schedule_start = done
        else:
            self.scheduler.load_state(state["scheduler"])
            self.schedule_start = state["schedule_start"]
        self.lr = state["lr"]
        self.loss_scale.load_state_dict(state["loss_scale"])
        parameters = self.engine.parameters
        weights = [self.engine.shard(*named) for named in zip(parameters, state.get("weights", ()), strict=False)]
        if self.ema:  # the weights that were loaded are the means
            self.ema.start_from(list(parameters.values()))
        if weights:
            with torch.no_grad():
                torch._foreach_copy_(list(parameters.values()), weights)
        self.done = done

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        """Loads the optimizer's state, but keeps hyper-parameters that this run sets otherwise than the saved one."""
        saved, own = (
            [group.get("param_names", len(group["params"])) for group in groups]
            for groups in (state["optimizer"]["param_groups"], self.optimizer.param_groups)
        )
        if saved != own:
            raise ValueError(
                f"the checkpoint's optimizer has other groups of parameters than this run: {_difference(saved, own)}; "
                "resume with the --freeze and --weight-decay-for of before, or with --reset-optimizer"
            )
        self.optimizer.load_state_dict(self._map_optimizer_state(state["optimizer"], self.engine.shard))
        for group, before, now in zip(
            self.optimizer.param_groups, state["hyperparameters"], self.hyperparameters, strict=True
        ):
            group.update({name: value for name, value in now.items() if before.get(name) != value})

    def _map_optimizer_state(self, state: dict[str, Any], function: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
        """Applies a function of (parameter name, tensor) to every tensor of an optimizer's `state_dict`.

        State of what is no parameter of the model, but a part of one, stays as it is: there are no shards of it.
        """
        names = {id(parameter): name for name, parameter in self.engine.parameters.items()}
        order = [names.get(id(parameter)) for group in self.optimizer.param_groups for parameter in group["params"]]
        mapped = {
            index: {
                key: function(name, value) if isinstance(value, Tensor) and (name := order[index]) else value
                for key, value in entries.items()
            }
            for index, entries in state["state"].items()
        }
        return state | {"state": mapped}


def _difference(saved: list[Any], own: list[Any]) -> str:
    """Returns in what two lists of groups, each its parameters' names or their number, differ."""
    names = [{name for group in groups if isinstance(group, list) for name in group} for groups in (saved, own)]
    only = [(sorted(names[0] - names[1]), "only there"), (sorted(names[1] - names[0]), "only here")]
    told = [f"{len(extra)} {where}, {extra[0]} for one" for extra, where in only if extra]
    sizes = [[len(group) if isinstance(group, list) else group for group in groups] for groups in (saved, own)]
    return ", ".join(told) or f"of {sizes[0]} and {sizes[1]} parameters"


class MovingAverage:
    """A running mean of weights, to validate with and to save (Polyak & Juditsky 1992).

    After every update mean = decay x mean + (1 - decay) x weight; the decay grows from 0.1, so that early means follow.
    torch's AveragedModel is not used: it copies the module, which FSDP's modules refuse, and has one decay.
    """

    def __init__(self, weights: Sequence[Tensor], decay: float) -> None:
        self.decay = decay
        self.weights = [weight.detach() for weight in weights]
        self.means = [weight.clone() for weight in self.weights]

    def update(self, number: int) -> None:
        """Takes in the weights after update `number`, counted from 1."""
        decay = min(self.decay, number / (number + 9))
        torch._foreach_lerp_(self.means, self.weights, 1 - decay)

    def start_from(self, weights: Sequence[Tensor]) -> None:
        torch._foreach_copy_(self.means, [weight.detach() for weight in weights])

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """The context in which the model's weights are the means."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for weight, mean in zip(self.weights, self.means, strict=True):
            held = weight.clone()
            weight.copy_(mean)
            mean.copy_(held)


def seed_of(seed: int, update: int, micro_batch: int) -> int:
    """Returns a seed for torch's generators that differs wherever one of the three does."""
    digest = hashlib.blake2b(f"{seed} {update} {micro_batch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def probe_memory(trainer: Trainer, loader: BatchLoader) -> None:
    """Tries the largest micro-batch. Raises ValueError when it does not fit, with the --max-tokens that would."""
    pairs = loader.largest_micro_batch()
    message = f"--max-tokens {loader.max_tokens} does not fit into the memory of {trainer.device}"

    def attempt(count: int) -> None:
        trainer.warm_up(loader.batch(pairs[:count], 0))

    if trainer.job.run.parallel == "fsdp" and distributed.world_size() > 1:
        try:  # once: a process that tried again by itself would wait for the others
            return attempt(len(pairs))
        except torch.OutOfMemoryError as error:
            raise ValueError(f"{message}; try half of it") from error
    fitting = largest_that_fits(attempt, len(pairs))
    if fitting == 0:
        raise ValueError(
            f"not even one sentence pair fits into the memory of {trainer.device}: the model needs it; "
            "choose a smaller one, or --optimizer adafactor"
        )
    if fitting < len(pairs):
        raise ValueError(f"{message}; {loader.tokens_of(pairs[:fitting])} would")


def fit_max_tokens(trainer: Trainer, loader: BatchLoader) -> None:
    """Lowers `loader.max_tokens` until its micro-batches fit into the memory of every process, with some to spare.

    The micro-batch of most tokens and that of most sentences are tried; while one does not fit, the limit is halved.
    Raises ValueError when not even the longest sentence fits. With fsdp, whose passes need all processes, there is one
    attempt: that of `probe_memory`.
    """
    if trainer.job.run.parallel == "fsdp" and distributed.world_size() > 1:
        return probe_memory(trainer, loader)
    while not all(distributed.all_gather_object(_fits(trainer, loader))):
        least = loader.longest_sentence()
        if loader.max_tokens <= least:
            raise ValueError(
                f"not even a sentence of {least} tokens fits into the memory of {trainer.device}; choose a smaller "
                "model, --gradient-checkpointing, or drop the longest sentences in preprocess"
            )
        loader.max_tokens = max(least, loader.max_tokens // 2)


def _fits(trainer: Trainer, loader: BatchLoader) -> bool:
    """Returns whether the extreme micro-batches leave `SPARE_MEMORY` free: later ones have other shapes."""
    spare = None
    try:
        if trainer.device.type == "cuda":
            size = SPARE_MEMORY * torch.cuda.get_device_properties(trainer.device).total_memory
            spare = torch.empty(int(size), dtype=torch.uint8, device=trainer.device)
        for pairs in loader.extreme_micro_batches():
            trainer.warm_up(loader.batch(pairs, 0))
        return True
    except torch.OutOfMemoryError:
        pass  # outside this block the exception, and with it what its frames hold, is gone
    del spare
    trainer.engine.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return False


def largest_that_fits(attempt: Callable[[int], None], count: int) -> int:
    """Returns the first of count, count / 2, count / 4, … that `attempt` takes without running out of memory, or 0."""
    while count:
        try:
            attempt(count)
            return count
        except torch.OutOfMemoryError:
            pass  # outside this block the exception, and with it what its frames hold, is gone
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        count //= 2
    return 0
