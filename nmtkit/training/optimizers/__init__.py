"""The registered optimizers (`--optimizer`)."""

from nmtkit.training.optimizers.interface import OPTIMIZERS, ParameterGroups, parameter_names, state_bytes

# registers the optimizers, in the order of the help text of --optimizer
from nmtkit.training.optimizers import elementwise, adafactor, muon  # noqa: F401  # isort: skip

__all__ = ["OPTIMIZERS", "ParameterGroups", "parameter_names", "state_bytes"]
