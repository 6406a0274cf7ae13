"""The registered optimizers (`--optimizer`)."""

from nmtkit.training.optimizers.interface import OPTIMIZERS, ParameterGroups, parameter_names, state_bytes

# in the order of the help text of --optimizer
from nmtkit.training.optimizers import elementwise, adafactor, muon, lion, schedule_free  # isort: skip

__all__ = [
    "OPTIMIZERS",
    "ParameterGroups",
    "adafactor",
    "elementwise",
    "lion",
    "muon",
    "parameter_names",
    "schedule_free",
    "state_bytes",
]
