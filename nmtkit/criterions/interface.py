"""What a criterion is: a model and a batch in, a summed loss and what to log out."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from nmtkit.architectures import Architecture
from nmtkit.packed import Batch
from nmtkit.registry import Registry


@dataclass(frozen=True, eq=False)
class Loss:
    """A slice's share of the loss of an update; the trainer divides once, by the update's target tokens.

    `counts` are further sums to log by name, without gradient. "nll" (of the target, natural logarithm, summed over
    tokens) is always there: perplexity comes from it.
    """

    sum: Tensor
    counts: dict[str, Tensor]


class Criterion(nn.Module, ABC):
    """What to minimise. Registered factories are called as `factory(config, tokenizer)`."""

    @abstractmethod
    def forward(self, model: Architecture, batch: Batch) -> Loss:
        """Sums over the tokens of `batch`, never averages. May call the model several times."""


def with_auxiliary(loss: Loss, model: Architecture) -> Loss:
    """`loss` and the auxiliary losses of the model's last forward pass, which are also logged by name."""
    auxiliary = model.auxiliary_losses()
    total = loss.sum
    for value in auxiliary.values():
        total = total + value
    return Loss(total, loss.counts | {name: value.detach() for name, value in auxiliary.items()})


CRITERIONS: Registry[Criterion] = Registry("criterion", "--criterion")
