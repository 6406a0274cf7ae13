"""Contract checks of plug-ins, for use in pytest and `nmtkit check`. Our own components pass the same checks.

    from nmtkit.contracts import check_architecture

    def test_gru() -> None:
        check_architecture("gru", width=8)

Each `check_…` takes a registered name and settings that override its preset. If a check fails, it raises ContractError,
which is a ValueError. The message lists the failed checks, with returned and expected values. `check_….checks` lists
all checks.
"""

from collections.abc import Sequence
from typing import Any

from nmtkit.config.plugins import is_own
from nmtkit.contracts.architecture import check_architecture
from nmtkit.contracts.callback import check_callback
from nmtkit.contracts.checks import Contract
from nmtkit.contracts.criterion import check_criterion
from nmtkit.contracts.engine import check_engine
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
    "check_engine",
    "check_logits_processor",
    "check_metric",
    "check_optimizer",
    "check_scheduler",
    "check_transform",
]

CONTRACTS: tuple[Contract[Any], ...] = (
    check_architecture,
    check_criterion,
    check_optimizer,
    check_scheduler,
    check_callback,
    check_metric,
    check_transform,
    check_logits_processor,
    check_engine,
)


def components(names: Sequence[str]) -> list[tuple[Contract[Any], str]]:
    """Returns the contract and the name of each component in `names`. Without names, takes all components of plug-ins.

    Raises ValueError for an unknown name, and if there is nothing to check.
    """
    known = [(contract, name) for contract in CONTRACTS for name in contract.registry.names()]
    of_plugins = [(contract, name) for contract, name in known if not is_own(contract.registry[name].factory)]
    for name in names:
        if not any(name == other for _, other in known):
            listed = ", ".join(other for _, other in of_plugins) or "none"
            raise ValueError(
                f"no component is called {name!r}; components of plug-ins: {listed}. Is --plugin FILE missing?"
            )
    chosen = [(contract, name) for contract, name in known if name in names] if names else of_plugins
    if not chosen:
        kinds = ", ".join(contract.registry.kind for contract in CONTRACTS)
        raise ValueError(f"no plug-in has registered a component that can be checked ({kinds}); add --plugin FILE")
    return chosen
