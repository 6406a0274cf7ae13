"""The registered criterions (`--criterion`)."""

from nmtkit.training.criterions.interface import CRITERIONS, Criterion, Loss

# CRITERIONS, Criterion and Loss come first, because the files of the criterions import them from here.
# isort: split
from nmtkit.training.criterions import cross_entropy, distillation, expected_reward, guided_alignment

__all__ = ["CRITERIONS", "Criterion", "Loss", "cross_entropy", "distillation", "expected_reward", "guided_alignment"]
