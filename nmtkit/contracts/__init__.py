"""Contract checks for plug-ins, for pytest and `nmtkit check`. The components of this package pass the same checks.

    from nmtkit.contracts import check_architecture

    def test_gru() -> None:
        check_architecture("gru", width=8)

Each `check_…` takes a registered name and settings that override its preset. If a check fails, it raises ContractError,
which is a ValueError. The message lists the failed checks, with returned and expected values. `check_….checks` lists
all checks.
"""

from nmtkit.contracts.architecture import check_architecture
from nmtkit.contracts.callback import check_callback
from nmtkit.contracts.criterion import check_criterion
from nmtkit.contracts.logits_processor import check_logits_processor
from nmtkit.contracts.metric import check_metric
from nmtkit.contracts.optimizer import check_optimizer
from nmtkit.contracts.scheduler import check_scheduler
from nmtkit.contracts.transform import check_transform
from nmtkit.models.architectures.contract import ContractError

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
