"""Contract checks for plug-ins, for pytest and `nmtkit check`. The components of this package pass the same checks.

    from nmtkit.testing import check_architecture

    def test_gru() -> None:
        check_architecture("gru", width=8)

Each `check_…` takes a registered name and settings that override its preset. If a check fails, it raises ContractError,
which is a ValueError. The message lists the failed checks, with returned and expected values. `check_….checks` lists
all checks.
"""

from nmtkit.architectures.contract import ContractError
from nmtkit.testing.architecture import check_architecture
from nmtkit.testing.callback import check_callback
from nmtkit.testing.criterion import check_criterion
from nmtkit.testing.logits_processor import check_logits_processor
from nmtkit.testing.metric import check_metric
from nmtkit.testing.optimizer import check_optimizer
from nmtkit.testing.scheduler import check_scheduler
from nmtkit.testing.transform import check_transform

__all__ = [
    "ContractError",
    "check_architecture",
    "check_callback",
    "check_criterion",
    "check_logits_processor",
    "check_metric",
    "check_optimizer",
    "check_scheduler",
    "check_transform",
]
