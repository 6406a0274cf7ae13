"""Criterions by name: `--criterion`."""

from nmtkit.criterions.interface import CRITERIONS, Criterion, Loss

# what a criterion imports from here must stand above the criterions
# isort: split
from nmtkit.criterions import cross_entropy, expected_reward, guided_alignment

__all__ = ["CRITERIONS", "Criterion", "Loss", "cross_entropy", "expected_reward", "guided_alignment"]
