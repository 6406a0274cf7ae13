"""Prepares a run before its first update: tests which micro-batches fit into memory, and compiles the model."""

import logging
from collections.abc import Sequence

import torch

from nmtkit.data.corpora.dropping import RowNumbers
from nmtkit.jobs import distributed
from nmtkit.training.loader import BatchLoader
from nmtkit.training.optimizers import state_bytes
from nmtkit.training.plan import RunPlan
from nmtkit.training.trainer import Trainer

IDLE_SHARE = 0.1  # a warning is shown if processes are idle for more than this share of the time
SPARE_MEMORY = 0.05  # share of the memory of a GPU that an automatic --max-tokens leaves free

log = logging.getLogger("nmtkit")


def prepare_model(plan: RunPlan, trainer: Trainer, loader: BatchLoader) -> None:
    """Fits micro-batches into the memory, compiles the model if asked, and warns about idle processes."""
    if plan.fits_max_tokens:
        fit_max_tokens(trainer, loader)
        log.info("micro-batches of up to %s tokens fit", f"{loader.max_tokens:,}")
    if plan.job.run.compile:
        trainer.compile(loader.batch(loader.largest_micro_batch(), 0))
    if trainer.device.type == "cuda" and not plan.fits_max_tokens:
        probe_memory(trainer, loader)
    idle = loader.idle_share()
    if idle > IDLE_SHARE and distributed.is_rank_zero():
        log.warning(
            f"the {distributed.world_size()} processes are idle {100 * idle:.0f} % of the time: an update of "
            f"{plan.batch_tokens:,} tokens has too few micro-batches of up to {loader.max_tokens:,} tokens for an even "
            f"division; give --max-tokens {plan.even_max_tokens(loader.max_tokens)}, or a larger --batch-tokens"
        )


def fit_max_tokens(trainer: Trainer, loader: BatchLoader) -> None:
    """Halves `loader.max_tokens` until the micro-batches fit into the memory of every process, with some memory left.

    Tries the micro-batch with the most tokens and the micro-batch with the most sentences. Raises ValueError if not
    even the longest sentence fits. With fsdp, every pass needs all processes, so `probe_memory` makes a single attempt.
    """
    if is_sharded(trainer):
        return probe_memory(trainer, loader)
    while not all(distributed.all_gather_object(fits(trainer, loader, loader.extreme_micro_batches(), SPARE_MEMORY))):
        longest = max(loader.sampler.max_lengths)  # a smaller --max-tokens is not possible
        if loader.max_tokens <= longest:
            raise ValueError(
                f"not even a sentence of {longest} tokens fits into the memory of {trainer.device}; choose a smaller "
                "model, add --gradient-checkpointing, or drop the longest sentences in preprocess"
            )
        loader.max_tokens = max(longest, loader.max_tokens // 2)


def probe_memory(trainer: Trainer, loader: BatchLoader) -> None:
    """Tries the largest micro-batch. If it does not fit, raises ValueError with a --max-tokens that fits."""
    pairs = loader.largest_micro_batch()
    fitting = len(pairs)
    while fitting and not fits(trainer, loader, [pairs[:fitting]]):
        message = f"--max-tokens {loader.max_tokens} does not fit into the memory of {trainer.device}"
        if is_sharded(trainer):  # there is a single attempt, because every pass needs all processes
            raise ValueError(f"{message}; try half this value")
        fitting //= 2
    if fitting == len(pairs):
        return
    if fitting:
        raise ValueError(f"{message}; {loader.tokens_of(pairs[:fitting])} fits")
    raise ValueError(
        f"not even one sentence pair fits into the memory of {trainer.device} together with the model; choose a "
        "smaller model, or --optimizer adafactor"
    )


def is_sharded(trainer: Trainer) -> bool:
    return trainer.job.run.parallel == "fsdp" and distributed.world_size() > 1


def fits(trainer: Trainer, loader: BatchLoader, micro_batches: Sequence[RowNumbers], spare: float = 0.0) -> bool:
    """Returns whether the device has enough memory for the forward and backward pass of each micro-batch.

    During the passes, memory for the optimizer state is reserved. The share `spare` of the memory of a GPU is reserved,
    too, because micro-batches of later epochs may be larger.
    """
    occupied = []
    try:
        if trainer.device.type == "cuda":
            size = int(spare * torch.cuda.get_device_properties(trainer.device).total_memory)
            occupied.append(torch.empty(size, dtype=torch.uint8, device=trainer.device))
        occupied.append(torch.empty(missing_state_bytes(trainer), dtype=torch.uint8, device=trainer.device))
        for pairs in micro_batches:
            trainer.trial_pass(loader.batch(pairs, 0))
        return True
    except torch.OutOfMemoryError:
        pass  # Python frees the exception, and the tensors that its frames hold, only after this block
    occupied.clear()
    trainer.engine.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return False


def missing_state_bytes(trainer: Trainer) -> int:
    """Returns the bytes of optimizer state that the first update will allocate. A resumed run already has the state."""
    component = trainer.job.components["optimizer"]
    expected = state_bytes(component.name, component.config, trainer.optimizer.param_groups)
    values = [value for entries in trainer.optimizer.state.values() for value in entries.values()]
    return max(0, expected - sum(value.nbytes for value in values if isinstance(value, torch.Tensor)))
