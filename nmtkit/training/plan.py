"""The plan of a run: what its settings come to on this machine.

The run itself, its dry run, the cost estimate and the memory probe all take device, precision, processes, threads and
batch size from here, so that none of them can see a different run.
"""

import math
import os
from dataclasses import dataclass, replace

import torch

from nmtkit.data.batching import BatchSampler
from nmtkit.data.binarized import Split
from nmtkit.layers.shape_padding import limit_product_caches
from nmtkit.processes import distributed
from nmtkit.training import precision as precisions
from nmtkit.training.config import JobConfig
from nmtkit.training.run_config import RunConfig

MAX_TOKENS = 4096  # of a micro-batch on a CPU, and of the updates of a run that is not told their size
# A process's micro-batch may be this much larger than its share of an update: sentences do not divide evenly, and a
# micro-batch more than there are processes would make all of them wait for another pass.
SHARE_MARGIN = 1.1


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A job with the size of an update in tokens, and where and how it runs."""

    job: JobConfig
    device: torch.device  # of this process
    precision: str  # fp32, bf16 or fp16
    world_size: int  # processes, over all machines
    max_tokens: int  # of a micro-batch, of the larger side; on a GPU the most to try, unless --max-tokens is given
    threads: int | None  # CPU threads of this process; None leaves torch's default

    @property
    def batch_tokens(self) -> int:
        """Tokens of an update, of the larger side, over all processes."""
        assert self.job.run.batch_tokens is not None
        return self.job.run.batch_tokens

    @property
    def fits_max_tokens(self) -> bool:
        """Whether the memory probe is to lower `max_tokens` until micro-batches fit, where it would refuse them."""
        return self.job.run.max_tokens is None and self.device.type == "cuda"

    def even_max_tokens(self, max_tokens: int) -> int:
        """Returns a --max-tokens of at most `max_tokens` with which all processes get equally many micro-batches."""
        rounds = math.ceil(self.batch_tokens / max_tokens / self.world_size)
        return min(max_tokens, _share(self.batch_tokens, rounds * self.world_size))

    def updates(
        self, updates_per_epoch: int | None, done: int = 0, epoch: int = 0, index: int = 0
    ) -> tuple[int | None, bool]:
        """Returns the updates of the whole run, None without an end, and whether that is an estimate from --max-epoch.

        Epochs differ by an update or two: once `done` updates are made, the next number `index` of `epoch`, those that
        have ended say how many they have.
        """
        config = self.job.run
        if config.max_epoch is None or updates_per_epoch is None:
            return config.max_update, False
        before = done - index  # updates of the epochs that have ended
        per_epoch = before / epoch if epoch else updates_per_epoch
        by_epochs = max(done, before + round((config.max_epoch - epoch) * per_epoch))
        if config.max_update is not None and config.max_update <= by_epochs:
            return config.max_update, False
        return by_epochs, epoch < config.max_epoch

    def configure_torch(self) -> None:
        """Sets what torch keeps for the whole process: threads, and on a GPU how it multiplies and adds."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.device.type == "cpu":
            limit_product_caches()
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TensorFloat-32: 10 bits of fraction, several times as fast
        if self.job.run.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it, and reads it at its start
            torch.use_deterministic_algorithms(True)

    def sampler(self, split: Split) -> BatchSampler:
        """Returns the batches of every epoch.

        Raises ValueError for a pair that exceeds --batch-tokens, and for fewer batches than --overfit-batches.
        """
        lengths = split.source.lengths, split.target.lengths
        return BatchSampler(*lengths, self.batch_tokens, self.job.run.seed, repeated=self.job.run.overfit_batches)


def resolve(
    job: JobConfig, world_size: int, resumed_batch_tokens: int | None = None, estimate: bool = False
) -> RunPlan:
    """Returns the plan of `job` with `world_size` processes.

    A resumed run keeps the batch size it was started with, unless --batch-tokens says otherwise. Raises ValueError for
    a device or a precision that this machine does not have. For an `estimate`, the machine need not have the device.
    """
    config = job.run
    device = torch.device("cuda") if estimate and config.device == "cuda" else device_of(config)
    if config.deterministic and device.type == "cpu":
        raise ValueError("--deterministic is for GPUs; on a CPU, runs with the same --threads are the same without it")
    tokens = config.batch_tokens or resumed_batch_tokens
    max_tokens = config.max_tokens or MAX_TOKENS
    if tokens is None:
        tokens = (config.update_freq or 1) * max_tokens * world_size
    if config.max_tokens is None:
        share = _share(tokens, world_size)
        max_tokens = share if device.type == "cuda" else min(max_tokens, share)
    run = replace(config, batch_tokens=tokens, update_freq=None)
    threads = config.threads
    if threads is None and device.type == "cpu" and distributed.launched():
        threads = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return RunPlan(
        job=replace(job, run=run),
        device=device,
        precision=precisions.resolve(config.precision, device),
        world_size=world_size,
        max_tokens=min(max_tokens, tokens),
        threads=threads,
    )


def _share(tokens: int, parts: int) -> int:
    """Returns the limit of a micro-batch that makes at most `parts` micro-batches of an update of `tokens`."""
    return math.ceil(round(SHARE_MARGIN * tokens / parts, 6))


def device_of(config: RunConfig) -> torch.device:
    """Returns this process's device, and makes it torch's current one. Raises ValueError when there is none."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here; give --device cpu")
    gpus, rank = torch.cuda.device_count(), distributed.local_rank()
    if max(rank + 1, config.nproc_per_node or 1) > gpus:
        raise ValueError(
            f"{max(rank + 1, config.nproc_per_node or 1)} processes on this machine need a GPU each, and it has "
            f"{gpus}; lower --nproc-per-node"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def processes_to_start(config: RunConfig) -> int:
    """Returns how many processes `nmtkit train` starts on this machine; 1 in a process that a launcher started."""
    if distributed.launched():
        return 1
    if config.nproc_per_node is None and config.device != "cpu":
        return max(1, torch.cuda.device_count())
    return config.nproc_per_node or 1


def expected_world_size(config: RunConfig) -> int:
    """Returns how many processes the run has, before they have met: those of the launcher, or those to start."""
    return int(os.environ.get("WORLD_SIZE") or processes_to_start(config))
