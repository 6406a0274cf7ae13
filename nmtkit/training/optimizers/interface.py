"""Optimizers by name (`--optimizer`): factories of `torch.optim.Optimizer`. The trainer sets the learning rate.

A registered factory is called as `factory(config, groups)`. Each group is a dict for optimizers of torch:

    "name"          "matrices", "embeddings" (with the output projection), "vectors", or "tensors" (three or more axes).
                    If --weight-decay-for makes several groups of a kind, the name ends with the decay.
    "params"        parameters
    "param_names"   names of the parameters
    "weight_decay"  weight decay, if it differs from the weight decay of the optimizer (for example, 0 for vectors)

Before every step, the trainer sets "lr" of each group to the learning rate of the schedule, times "lr_scale" of the
group if present.
"""

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nmtkit.config.registry import Registry

ParameterGroups = list[dict[str, Any]]


class OptimizerRegistry(Registry[Optimizer]):
    """The registry of optimizers. `on_shards` holds the names of the optimizers that work on shards of parameters."""

    on_shards: frozenset[str] = frozenset()

    def register(
        self, name: str, preset: Any, works_on_shards: bool = False
    ) -> Callable[[Callable[..., Optimizer]], Callable[..., Optimizer]]:
        """Returns a decorator like `Registry.register`. --parallel fsdp rejects optimizers without `works_on_shards`.

        `works_on_shards` declares that a step on some rows of a parameter (with the same rows of its gradient and
        state) gives the same values as a step on the whole parameter. This is true, for example, for element-wise
        optimizers.
        """
        keep = super().register(name, preset)

        def declare(factory: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
            keep(factory)  # first, because this call raises an error if the name is taken
            self.on_shards = self.on_shards | {name} if works_on_shards else self.on_shards - {name}
            return factory

        return declare


OPTIMIZERS = OptimizerRegistry("optimizer", "--optimizer")


class DeviceSkippingOptimizer(Optimizer):
    """Base class of optimizers that skip a step without waiting for the device.

    If `found_inf`, a number on the device, is above 0, a step changes neither parameters nor state.
    """

    _step_supports_amp_scaling = True  # marks optimizers that read `found_inf`
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_parameter(parameter, parameter.grad, group)

    @abstractmethod
    def step_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Changes a parameter and its state. `group` has the settings of the group of the parameter."""


def unless_skipped(gradient: Tensor, found_inf: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the gradient and the number 1. If `found_inf` is above 0, returns zeros and the number 0: a skipped step.

    The number is a tensor on the device, so that no step waits for the device. The gradient is not multiplied by the
    number, because NaN times 0 is NaN.
    """
    applied = torch.ones((), device=gradient.device, dtype=gradient.dtype)
    if found_inf is None:
        return gradient, applied
    skipped = found_inf > 0
    return gradient.masked_fill(skipped, 0.0), applied.masked_fill(skipped, 0.0)


@contextlib.contextmanager
def exchanged(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """The context in which the two tensors of each pair have exchanged their values. Afterwards, both are restored."""

    def exchange() -> None:
        with torch.no_grad():
            for one, other in pairs:
                held = one.clone()
                one.copy_(other)
                other.copy_(held)

    exchange()
    try:
        yield
    finally:
        exchange()


def parameter_names(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Returns the names of the parameters in each group of an optimizer.

    The names come from "param_names" of a group, or else from `parameters`. If neither has a name for a tensor, for
    example for a tensor made by a plug-in, the name is the position of the tensor in the optimizer.
    """
    known = {id(parameter): name for name, parameter in parameters.items()}
    return [
        list(group.get("param_names", ()))
        or [known.get(id(tensor), f"group {number}, tensor {i}") for i, tensor in enumerate(group["params"])]
        for number, group in enumerate(optimizer.param_groups)
    ]


def state_bytes(optimizer: str, config: Any, groups: Iterable[Mapping[str, Any]]) -> int:
    """Returns the bytes of the state of an optimizer. An unknown optimizer is assumed to need as much as Adam."""
    momentum = 4 if getattr(config, "momentum", 0) else 0
    per_parameter = {"adafactor": 0, "lion": 4, "schedule_free_adamw": 12, "sgd": momentum}.get(optimizer, 8)
    total = 0
    for group in groups:
        # Muon has one momentum for matrices, and the two moments of AdamW for all other parameters.
        has_momentum = optimizer == "muon" and str(group.get("name")).startswith("matrices")
        total += (4 if has_momentum else per_parameter) * sum(parameter.numel() for parameter in group["params"])
    return total
