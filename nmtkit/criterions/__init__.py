"""Criterions by name: `--criterion`."""

from nmtkit.criterions import cross_entropy, expected_reward, r_drop
from nmtkit.criterions.interface import CRITERIONS, Criterion, Loss, with_auxiliary

__all__ = ["CRITERIONS", "Criterion", "Loss", "cross_entropy", "expected_reward", "r_drop", "with_auxiliary"]
