"""Computes the plan of a run: its settings, with the device, precision and batch size for this machine.

The run, its dry run, the cost estimate and the memory probe take device, precision, processes, threads and batch size
from the same plan, so that they all describe the same run.
"""

import logging
import math
import os
from dataclasses import dataclass, replace

import numpy as np
import torch

from nmtkit.data.dataset.batching import BatchSampler, DirectionSampling
from nmtkit.data.dataset.binarized import Split
from nmtkit.data.directions import Direction, epoch_weights, named_weights
from nmtkit.jobs import distributed
from nmtkit.jobs.threads import usable_cores
from nmtkit.models.layers.shape_padding import limit_product_caches
from nmtkit.training import precision as precisions
from nmtkit.training.config import JobConfig
from nmtkit.training.run_config import RunConfig

log = logging.getLogger("nmtkit")

MAX_TOKENS = 4096  # default number of tokens of a micro-batch on a CPU, and of an update for each process
# Largest ratio of micro-batch size to (update size / number of processes). The ratio is above 1 because sentences do
# not divide evenly: if there were one micro-batch more than processes, all processes would need a second pass.
SHARE_MARGIN = 1.1
EMPTY_EPOCH = 1e-6  # largest probability that sampling leaves an epoch without pairs


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A job with the size of an update in tokens, and the device, precision and processes of the run."""

    job: JobConfig
    device: torch.device  # device of this process
    precision: str  # fp32, bf16 or fp16
    world_size: int  # number of processes on all machines
    # tokens of the larger side of a micro-batch; on a GPU without --max-tokens, the first value that is tried
    max_tokens: int
    threads: int | None  # CPU threads of this process; None: the default of torch

    @property
    def batch_tokens(self) -> int:
        """Tokens of the larger side of an update, over all processes."""
        assert self.job.run.batch_tokens is not None
        return self.job.run.batch_tokens

    @property
    def fits_max_tokens(self) -> bool:
        """Whether the memory probe may lower `max_tokens` until micro-batches fit, instead of raising an error."""
        return self.job.run.max_tokens is None and self.device.type == "cuda"

    def even_max_tokens(self, max_tokens: int) -> int:
        """Returns a --max-tokens of at most `max_tokens` with which each process gets the same number of micro-batches.

        The numbers are the same only if sentences divide almost evenly (see `SHARE_MARGIN`).
        """
        rounds = math.ceil(self.batch_tokens / max_tokens / self.world_size)
        return min(max_tokens, _share(self.batch_tokens, rounds * self.world_size))

    def updates(
        self, updates_per_epoch: int | None, done: int = 0, epoch: int = 0, index: int = 0
    ) -> tuple[int | None, bool]:
        """Returns the number of updates of the whole run (None: unknown), and whether the number is an estimate.

        The lengths of epochs differ by one or two updates. The estimate uses the mean length of the finished epochs.
        The run has made `done` updates, and its next update is number `index` of `epoch`.
        """
        config = self.job.run
        if config.max_epoch is None or updates_per_epoch is None:
            return config.max_update, False
        before = done - index  # number of updates of the finished epochs
        per_epoch = before / epoch if epoch else updates_per_epoch
        by_epochs = max(done, before + round((config.max_epoch - epoch) * per_epoch))
        if config.max_update is not None and config.max_update <= by_epochs:
            return config.max_update, False
        return by_epochs, epoch < config.max_epoch

    def configure_torch(self) -> None:
        """Sets the threads and, on a GPU, the arithmetic of torch for the whole process."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.device.type == "cpu":
            limit_product_caches()
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TensorFloat-32: 10 bits of mantissa, much faster than fp32
        if self.job.run.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads this variable when it starts
            torch.use_deterministic_algorithms(True)

    def sampler(self, split: Split) -> BatchSampler:
        """Returns the sampler of the updates of each epoch.

        Raises ValueError for a pair that exceeds --batch-tokens, and if there are fewer batches than --overfit-batches.
        """
        lengths = split.source.lengths, split.target.lengths
        run = self.job.run
        return BatchSampler(
            *lengths, self.batch_tokens, run.seed, repeated=run.overfit_batches, sampling=sampling_of(run, split)
        )


def sampling_of(config: RunConfig, split: Split) -> DirectionSampling | None:
    """Returns the sampling of the directions (language pairs) of a training set, or None if epochs have all pairs once.

    Raises ValueError for a dataset of one direction, an unknown direction, and weights with which an epoch may have no
    pairs. (The loader would skip such an epoch, its validation and its checkpoint.)
    """
    if config.sampling_temperature is None and not config.sampling_weights:
        return None
    setting = "--sampling-weights" if config.sampling_weights else "--sampling-temperature"
    if not split.directions:
        raise ValueError(f"{setting} needs a dataset of many directions, which preprocess --corpora makes")
    counts = split.direction_counts()
    typed_weights = named_weights(config.sampling_weights, split.directions, "--sampling-weights")
    for number in typed_weights:
        if not counts[number]:
            raise ValueError(f"--sampling-weights: the training set has no pairs of {split.directions[number]}")
    weights = epoch_weights(counts, config.sampling_temperature, typed_weights)
    if np.prod((1 - np.minimum(weights, 1)) ** np.array(counts)) > EMPTY_EPOCH:
        raise ValueError(
            f"--sampling-weights {','.join(config.sampling_weights)} gives an epoch "
            f"{np.dot(weights, counts):.3g} pairs on average, so that an epoch may have none; give larger weights"
        )
    return DirectionSampling(split.direction_index, np.array(weights))


def trained_directions(config: RunConfig, split: Split) -> list[Direction]:
    """Returns the directions of a training set that have pairs in an epoch."""
    sampling = sampling_of(config, split)
    weights = [1.0] * len(split.directions) if sampling is None else sampling.weights.tolist()
    return [
        direction
        for direction, count, weight in zip(split.directions, split.direction_counts(), weights, strict=True)
        if count and weight
    ]


def resolve(
    job: JobConfig, world_size: int, resumed_batch_tokens: int | None = None, estimate: bool = False
) -> RunPlan:
    """Returns the plan of `job` with `world_size` processes.

    A resumed run keeps its initial batch size, unless --batch-tokens is given. Logs a warning if --update-freq asks for
    a different size. Raises ValueError for a device or a precision that this machine does not have. For an `estimate`,
    the machine does not need the device.
    """
    config = job.run
    device = torch.device("cuda") if estimate and config.device == "cuda" else device_of(config)
    if config.deterministic and device.type == "cpu":
        raise ValueError("--deterministic is for GPUs; on a CPU, runs with the same --threads are always equal")
    tokens = config.batch_tokens or resumed_batch_tokens
    max_tokens = config.max_tokens or MAX_TOKENS
    asked = (config.update_freq or 1) * max_tokens * world_size
    if tokens is None:
        tokens = asked
    elif config.update_freq and tokens != asked and distributed.is_rank_zero():
        log.warning(
            f"a resumed run keeps its updates of {tokens:,} tokens; --update-freq {config.update_freq} would make "
            f"updates of {asked:,} tokens, for which a new --save-dir is needed"
        )
    if config.max_tokens is None:
        share = _share(tokens, world_size)
        max_tokens = share if device.type == "cuda" else min(max_tokens, share)
    run = replace(config, batch_tokens=tokens, update_freq=None)
    threads = config.threads
    if threads is None and device.type == "cpu" and distributed.launched():
        threads = max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return RunPlan(
        job=replace(job, run=run),
        device=device,
        precision=precisions.resolve(config.precision, device),
        world_size=world_size,
        max_tokens=min(max_tokens, tokens),
        threads=threads,
    )


def _share(tokens: int, parts: int) -> int:
    """Returns a value of --max-tokens with which an update of `tokens` tokens has at most `parts` micro-batches."""
    return math.ceil(round(SHARE_MARGIN * tokens / parts, 6))


def device_of(config: RunConfig) -> torch.device:
    """Returns the device of this process. Makes a GPU the current device.

    Raises ValueError if a GPU is missing, or if the number of processes of torchrun is not --nproc-per-node.
    """
    check_launched(config)
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if config.device == "mps":
        if not torch.backends.mps.is_available():
            raise ValueError("--device mps: torch sees no Apple GPU here; give --device cpu")
        if distributed.launched() or (config.nproc_per_node or 1) > 1:
            raise ValueError("--device mps trains with one process; leave out --nproc-per-node")
        return torch.device("mps")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here; give --device cpu")
    gpus, rank = torch.cuda.device_count(), distributed.local_rank()
    needed = max(rank + 1, config.nproc_per_node or 1)
    if needed > gpus:
        raise ValueError(f"{needed} processes need a GPU each, but this machine has {gpus}; lower --nproc-per-node")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def processes_to_start(config: RunConfig) -> int:
    """Returns the number of processes that `nmtkit train` starts: 1 if a launcher has started this process.

    Raises ValueError if --nproc-per-node differs from the number of processes that the launcher has started.
    """
    if distributed.launched():
        check_launched(config)
        return 1
    if config.nproc_per_node is None and config.device not in ("cpu", "mps"):
        return max(1, torch.cuda.device_count())
    return config.nproc_per_node or 1


def check_launched(config: RunConfig) -> None:
    """Raises ValueError if the number of processes that torchrun started on this machine is not --nproc-per-node."""
    started = os.environ.get("LOCAL_WORLD_SIZE")
    if started is not None and config.nproc_per_node not in (None, int(started)):
        raise ValueError(
            f"--nproc-per-node {config.nproc_per_node} has no effect, because torchrun has started {started} processes "
            "on this machine; give this flag to torchrun, before -m nmtkit, or give --nproc-per-node none"
        )


def expected_world_size(config: RunConfig) -> int:
    """Returns the number of processes of the run. The launcher has started them, or `nmtkit train` will start them."""
    return int(os.environ.get("WORLD_SIZE") or processes_to_start(config))
