"""Optimizers by name: `--optimizer`."""

from nmtkit.optimizers import adafactor, adam, sgd
from nmtkit.optimizers.interface import OPTIMIZERS, ParameterGroups

__all__ = ["OPTIMIZERS", "ParameterGroups", "adafactor", "adam", "sgd"]
