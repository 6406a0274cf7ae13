"""Checks of components, by name: how they are run, and what a failed one says."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nmtkit.architectures.contract import ContractError
from nmtkit.plugins import plugin_message

Check = Callable[[Any], None]  # of a component under test; raises an exception where it breaks the contract


@dataclass(frozen=True)
class Result:
    """The result of a check; without an error, it passed."""

    name: str
    error: Exception | None = None

    @property
    def reason(self) -> str:
        """Returns why it failed: the message, and of other errors than ContractError type and place too."""
        if self.error is None:
            return ""
        if isinstance(self.error, ContractError):
            return str(self.error)
        return plugin_message(self.error) or f"{type(self.error).__name__}: {self.error}"


def title(check: Check) -> str:
    """Returns a check's name for people."""
    return check.__name__.replace("_", " ")


def run_checks(checks: Sequence[Check], subject: Any) -> Iterator[Result]:
    """Yields the result of each check of the component under test, in order."""
    for check in checks:
        error = None
        try:
            check(subject)
        except Exception as raised:  # a plug-in raises any kind
            error = raised
        yield Result(title(check), error)


def require_all(checks: Sequence[Check], subject: Any) -> None:
    """Runs all checks. Raises ContractError that names those which failed, and why; its cause is the first error."""
    failed = [result for result in run_checks(checks, subject) if result.error is not None]
    if failed:
        reasons = "\n".join(f"  {result.name}: {result.reason}" for result in failed)
        raise ContractError(f"{subject}: {len(failed)} of {len(checks)} checks failed\n{reasons}") from failed[0].error


def require(condition: object, message: str) -> None:
    """Raises ContractError with the message unless the condition holds."""
    if not condition:
        raise ContractError(message)
