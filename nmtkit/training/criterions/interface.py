"""The interface of criterions. A criterion maps a model and a batch to a summed loss and counts for the log."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nmtkit.config.registry import Registry
from nmtkit.data.packed import Batch
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.contract import ContractError, check_sums, described, evaluated

SMALL = 1e-4  # losses and counts below this value are not compared
MEAN = 0.2  # if a batch of twice the size increases a value by less than this share, the value is a mean


@dataclass(frozen=True, eq=False)
class Loss:
    """The summed loss of a micro-batch. The trainer divides the sum once, by the number of target tokens of the update.

    `counts` maps names to further sums for the log, without gradients. The entry "nll" is required. It is the negative
    log-likelihood of the target (natural logarithm), summed over tokens. Perplexity is computed from "nll".
    """

    sum: Tensor
    counts: dict[str, Tensor]


class Criterion(nn.Module, ABC):
    """A loss function. Registered factories are called as `factory(config, tokenizer)`.

    `passes` is the number of times that an update runs the model forward and backward on a batch, for example 2 for
    R-Drop. Estimates of costs use `passes`.
    """

    passes: float = 1.0

    @staticmethod
    def searched_candidates(config: Any) -> int:
        """Returns the number of translations of each source sentence that an update searches for.

        After the search, the decoder makes a forward and a backward pass over each translation. Estimates of costs
        count the search and these passes.
        """
        return 0

    @abstractmethod
    def compute_loss(self, model: Architecture, batch: Batch) -> Loss:
        """Returns sums over the tokens of `batch`, not means. The method may call the model several times."""

    def forward(self, model: Architecture, batch: Batch) -> Loss:
        """Returns `compute_loss` plus the auxiliary losses of the architecture. Each auxiliary loss is also logged."""
        model.auxiliary_losses()  # resets losses that an earlier pass may have left
        loss = self._checked(self.compute_loss(model, batch))
        total, counts = loss.sum, dict(loss.counts)
        for name, value in model.auxiliary_losses().items():
            total = total + value * batch.target_tokens
            counts[name] = value.detach() * batch.target_tokens
        return Loss(total, counts)

    def _checked(self, loss: object) -> Loss:
        """Returns `loss`. Raises ContractError if `loss` is not a summed loss with counts."""
        name = type(self).__name__
        if not isinstance(loss, Loss):
            raise ContractError(f"criterion {name} returned {described(loss)}; it must return Loss(sum, counts)")
        if not isinstance(loss.counts, dict) or "nll" not in loss.counts:
            counts = sorted(loss.counts) if isinstance(loss.counts, dict) else described(loss.counts)
            raise ContractError(
                f"criterion {name} returned counts {counts} without 'nll', the summed negative log-likelihood, which "
                "perplexity needs"
            )
        check_sums(f"criterion {name}", {"sum": loss.sum, **loss.counts})
        return loss


CRITERIONS: Registry[Criterion] = Registry("criterion", "--criterion")


def check_sum(criterion: Criterion, model: Architecture, pairs: Batch, twice: Batch) -> None:
    """Raises ContractError if the loss or a count is a mean, not a sum.

    `twice` contains all `pairs` two times. A sum must be twice as large for `twice` as for `pairs`.

    Both passes are in evaluation mode and without gradients. Afterwards, the old modes and the random state of the CPU
    are restored.
    """
    training = criterion.training
    criterion.eval()
    with evaluated(model):
        torch.manual_seed(1)
        once, double = criterion(model, pairs), criterion(model, twice)
    criterion.train(training)
    for name, single in {"sum": once.sum, **once.counts}.items():
        before, after = float(single), float(double.sum if name == "sum" else double.counts[name])
        if abs(before) > SMALL and abs(after / before - 1) < MEAN:
            raise ContractError(
                f"criterion {type(criterion).__name__}: {name!r} is {before:.4g} for a batch and {after:.4g} for "
                "twice the batch: this looks like a mean. Return the sum over tokens; the trainer divides by the "
                "target tokens of the whole update"
            )
