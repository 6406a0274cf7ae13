"""Checks that a criterion returns sums. A run with a criterion of a plug-in begins with `check_sum`."""

import torch

from nmtkit.data.packed import Batch
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.contract import ContractError
from nmtkit.training.criterions.interface import Criterion

SMALL = 1e-4  # losses and counts below this value are not compared
MEAN = 0.2  # if a batch of twice the size increases a value by less than this share, the value is a mean


def check_sum(criterion: Criterion, model: Architecture, pairs: Batch, twice: Batch) -> None:
    """Raises ContractError if the loss or a count is a mean, not a sum.

    `twice` contains all `pairs` two times. A sum must be twice as large for `twice` as for `pairs`.

    Both passes are in evaluation mode and without gradients. Modes and random numbers are restored.
    """
    modes = criterion.training, model.training
    criterion.eval()
    model.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        once, double = criterion(model, pairs), criterion(model, twice)
    criterion.train(modes[0])
    model.train(modes[1])
    for name, single in {"sum": once.sum, **once.counts}.items():
        before, after = float(single), float(double.sum if name == "sum" else double.counts[name])
        if abs(before) > SMALL and abs(after / before - 1) < MEAN:
            raise ContractError(
                f"criterion {type(criterion).__name__}: {name!r} is {before:.4g} for a batch and {after:.4g} for "
                "twice the batch: this looks like a mean. Return the sum over tokens; the trainer divides by the "
                "target tokens of the whole update"
            )
