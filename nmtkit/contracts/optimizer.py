"""Checks of an optimizer, on a linear regression and in short runs."""

import copy

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nmtkit.contracts.checks import Contract, Subject, checks_of, require
from nmtkit.contracts.runs import resume_is_exact
from nmtkit.models.architectures.contract import described
from nmtkit.training.optimizers import OPTIMIZERS
from nmtkit.training.parameters import parameter_groups

RATES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # the loss must fall with at least one of these learning rates
# The state of a parameter may hold values of these types.
PLAIN = (int, float, bool, str, type(None), Tensor)


def build(subject: Subject[Optimizer], parameters: dict[str, nn.Parameter]) -> Optimizer:
    return subject.build(parameter_groups(parameters, (), ()))


class Regression:
    """A linear regression, solved by the optimizer under test."""

    def __init__(self, subject: Subject[Optimizer]) -> None:
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(64, 6, generator=generator)
        self.targets = self.inputs @ torch.randn(6, 4, generator=generator)
        self.layer = nn.Linear(6, 4)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        self.optimizer = build(subject, dict(self.layer.named_parameters()))

    def loss(self) -> Tensor:
        return (self.layer(self.inputs) - self.targets).square().mean()

    def step(self, rate: float, times: int = 1) -> "Regression":
        for _ in range(times):
            self.optimizer.zero_grad()
            self.loss().backward()
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        return self

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.layer.parameters()])


def every_parameter_is_in_a_group(subject: Subject[Optimizer]) -> None:
    task = Regression(subject)
    held = [parameter for group in task.optimizer.param_groups for parameter in group["params"]]
    missing = [name for name, value in task.layer.named_parameters() if not any(value is other for other in held)]
    require(
        not missing,
        f"{', '.join(missing)} are missing in param_groups; the factory must pass all its groups to the optimizer",
    )


def the_learning_rate_is_the_groups(subject: Subject[Optimizer]) -> None:
    slow, fast = (Regression(subject).step(rate, 2).weights() for rate in (1e-4, 1e-2))
    require(
        not torch.equal(slow, fast),
        'updates with learning rates 0.0001 and 0.01 are equal; the trainer sets group["lr"] before every step, so the '
        "step must read this rate",
    )


def the_loss_falls(subject: Subject[Optimizer]) -> None:
    first = Regression(subject).loss().item()
    losses = {rate: Regression(subject).step(rate, 40).loss().item() for rate in RATES}
    require(
        min(losses.values()) < 0.99 * first,
        f"40 updates must lower the loss of a linear regression with one of the learning rates; the loss went from "
        f"{first:.4f} to " + ", ".join(f"{loss:.4g} at lr {rate:g}" for rate, loss in losses.items()),
    )


def every_parameter_is_changed(subject: Subject[Optimizer]) -> None:
    before = dict(Regression(subject).layer.named_parameters())
    task = Regression(subject).step(1e-2, 3)
    same = [name for name, value in task.layer.named_parameters() if torch.equal(value, before[name])]
    require(not same, f"three updates do not change {', '.join(same)}")
    require(task.weights().isfinite().all(), "after three updates at lr 0.01, weights are not finite")


def a_gradient_of_zeros_is_taken(subject: Subject[Optimizer]) -> None:
    task = Regression(subject)
    for parameter in task.layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    task.optimizer.step()
    require(task.weights().isfinite().all(), "after an update with gradients of zeros, weights are not finite")


def its_state_survives_a_round_trip(subject: Subject[Optimizer]) -> None:
    whole = Regression(subject).step(1e-2, 6)
    first, second = Regression(subject).step(1e-2, 3), Regression(subject)
    state = first.optimizer.state_dict()
    for parts in state["state"].values():
        for key, value in parts.items():
            require(
                isinstance(value, PLAIN),
                f"state_dict holds {key!r}, {described(value)}; a checkpoint holds tensors, numbers and texts",
            )
    second.layer.load_state_dict(first.layer.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(state))
    second.step(1e-2, 3)
    require(
        torch.equal(whole.weights(), second.weights()),
        "an optimizer that loads the state_dict of another optimizer makes different updates; everything that step "
        "depends on must be in self.state[parameter] or in the groups",
    )


def a_shard_is_stepped_as_the_whole_where_declared(subject: Subject[Optimizer]) -> None:
    if subject.name not in OPTIMIZERS.on_shards:
        return
    generator = torch.Generator().manual_seed(3)
    start, *gradients = torch.randn(4, 8, 6, generator=generator).unbind()

    def stepped(rows: slice) -> Tensor:
        weight = nn.Parameter(start[rows].clone())
        optimizer = build(subject, {"weight": weight})
        for gradient in gradients:
            weight.grad = gradient[rows].clone()
            for group in optimizer.param_groups:
                group["lr"] = 1e-2
            optimizer.step()
        return weight.detach()

    parts = torch.cat([stepped(slice(0, 3)), stepped(slice(3, 8))])
    require(
        torch.allclose(stepped(slice(0, 8)), parts, rtol=1e-4, atol=1e-6),
        "the optimizer has works_on_shards=True, but updates of two parts of a matrix differ from the update of "
        "the whole matrix; leave out works_on_shards",
    )


check_optimizer = Contract(OPTIMIZERS, Optimizer, checks_of(__name__, resume_is_exact))
