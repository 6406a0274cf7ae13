"""What an optimizer is here: a `torch.optim.Optimizer` over parameter groups; the trainer sets the learning rate."""

from typing import Any

from torch.optim import Optimizer

from nmtkit.registry import Registry

ParameterGroups = list[dict[str, Any]]  # each with "params", and what differs from the optimizer's defaults

# Registered factories are called as `factory(config, parameter_groups)`.
OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", "--optimizer")
