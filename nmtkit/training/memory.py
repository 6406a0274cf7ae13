"""Running out of memory: the largest planned slice is tried before the first update, and errors say what would fit."""

from collections.abc import Callable
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from nmtkit import distributed
from nmtkit.data.batching import BatchSampler, micro_batches
from nmtkit.data.binarized import Split
from nmtkit.training.loader import BatchLoader
from nmtkit.training.trainer import Trainer

UPDATES = 100  # of the plan, whose slices are looked at

Pairs = npt.NDArray[np.int64]


def largest_slice(split: Split, plan: BatchSampler, max_tokens: int) -> Pairs:
    """The pairs of the slice with most tokens on both sides among the first updates of the plan."""
    source, target = split.source.lengths, split.target.lengths
    cut = [
        part for pairs in islice(plan.epoch(0), UPDATES) for part in micro_batches(pairs, source, target, max_tokens)
    ]
    return max(cut, key=lambda pairs: int(source[pairs].sum()) + int(target[pairs].sum()))


def try_largest(trainer: Trainer, loader: BatchLoader) -> None:
    """Raises ValueError when the largest slice does not fit, with the --max-tokens that would."""
    split = loader.split
    pairs = largest_slice(split, loader.plan, loader.max_tokens)

    def attempt(count: int) -> None:
        trainer.warm_up(loader.batch(pairs[:count], 0))

    if trainer.job.run.parallel == "fsdp" and distributed.world_size() > 1:
        try:  # once: a process that tried again by itself would wait for the others
            return attempt(len(pairs))
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"--max-tokens {loader.max_tokens} does not fit into the memory of {trainer.device}; try half of it"
            ) from error
    fitting = most_that_fit(attempt, len(pairs))
    if fitting == len(pairs):
        return
    if fitting == 0:
        raise ValueError(
            f"not even one sentence pair fits into the memory of {trainer.device}: the model needs it; "
            "choose a smaller one, or --optimizer adafactor"
        )
    kept = pairs[:fitting]
    tokens = max(int(split.source.lengths[kept].sum()), int(split.target.lengths[kept].sum()))
    raise ValueError(
        f"--max-tokens {loader.max_tokens} does not fit into the memory of {trainer.device}; {tokens} would"
    )


def most_that_fit(attempt: Callable[[int], None], count: int) -> int:
    """The largest of count, count / 2, count / 4, … that `attempt` takes without running out of memory; 0 if none."""
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
