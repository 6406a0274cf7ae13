"""The registered optimizers (`--optimizer`)."""

from nmtkit.training.optimizers.interface import OPTIMIZERS, ParameterGroups, parameter_names, state_bytes

# in the order of the help text of --optimizer
from nmtkit.training.optimizers import elementwise, adafactor, muon  # isort: skip

__all__ = ["OPTIMIZERS", "ParameterGroups", "adafactor", "elementwise", "muon", "parameter_names", "state_bytes"]
