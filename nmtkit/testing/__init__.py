"""Contract checks for plug-ins, from pytest or `nmtkit check`. The package's own components pass the same ones.

    from nmtkit.testing import check_architecture

    def test_gru() -> None:
        check_architecture("gru", width=8)

Each function takes a registered name and settings over its preset, and raises ContractError, a ValueError, that says
which checks failed, what was returned and what is expected.
"""

from nmtkit.architectures.contract import ContractError
from nmtkit.testing.architecture import ARCHITECTURE_CHECKS, check_architecture
from nmtkit.testing.callback import CALLBACK_CHECKS, check_callback
from nmtkit.testing.criterion import CRITERION_CHECKS, check_criterion
from nmtkit.testing.metric import METRIC_CHECKS, check_metric
from nmtkit.testing.optimizer import OPTIMIZER_CHECKS, check_optimizer
from nmtkit.testing.scheduler import SCHEDULER_CHECKS, check_scheduler
from nmtkit.testing.transform import TRANSFORM_CHECKS, check_transform

__all__ = [
    "ARCHITECTURE_CHECKS",
    "CALLBACK_CHECKS",
    "CRITERION_CHECKS",
    "METRIC_CHECKS",
    "OPTIMIZER_CHECKS",
    "SCHEDULER_CHECKS",
    "TRANSFORM_CHECKS",
    "ContractError",
    "check_architecture",
    "check_callback",
    "check_criterion",
    "check_metric",
    "check_optimizer",
    "check_scheduler",
    "check_transform",
]
