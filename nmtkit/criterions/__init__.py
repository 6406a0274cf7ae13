"""Criterions by name: `--criterion`."""

from nmtkit.criterions import cross_entropy, expected_reward, guided_alignment
from nmtkit.criterions.interface import CRITERIONS, Criterion, Loss

__all__ = ["CRITERIONS", "Criterion", "Loss", "cross_entropy", "expected_reward", "guided_alignment"]
