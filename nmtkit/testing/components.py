"""Which registered components there are to check, and by which checks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nmtkit.architectures import ARCHITECTURES
from nmtkit.criterions import CRITERIONS
from nmtkit.data.transforms import TRANSFORMS
from nmtkit.plugins import is_own
from nmtkit.registry import Registry
from nmtkit.testing.architecture import ARCHITECTURE_CHECKS, ArchitectureSubject
from nmtkit.testing.callback import CALLBACK_CHECKS, CallbackSubject
from nmtkit.testing.checks import Check, Result, run_checks
from nmtkit.testing.criterion import CRITERION_CHECKS, CriterionSubject
from nmtkit.testing.metric import METRIC_CHECKS, MetricSubject
from nmtkit.testing.optimizer import OPTIMIZER_CHECKS, OptimizerSubject
from nmtkit.testing.scheduler import SCHEDULER_CHECKS, SchedulerSubject
from nmtkit.testing.transform import TRANSFORM_CHECKS, TransformSubject
from nmtkit.training.callbacks import CALLBACKS
from nmtkit.training.lr_schedulers import LR_SCHEDULERS
from nmtkit.training.metrics import METRICS
from nmtkit.training.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class Kind:
    """A kind of component: its registry, what wraps one for its checks, and the checks."""

    registry: Registry[Any]
    subject: Callable[[str, dict[str, Any]], Any]
    checks: tuple[Check, ...]


KINDS = (
    Kind(ARCHITECTURES, ArchitectureSubject, ARCHITECTURE_CHECKS),
    Kind(CRITERIONS, CriterionSubject, CRITERION_CHECKS),
    Kind(OPTIMIZERS, OptimizerSubject, OPTIMIZER_CHECKS),
    Kind(LR_SCHEDULERS, SchedulerSubject, SCHEDULER_CHECKS),
    Kind(CALLBACKS, CallbackSubject, CALLBACK_CHECKS),
    Kind(METRICS, MetricSubject, METRIC_CHECKS),
    Kind(TRANSFORMS, TransformSubject, TRANSFORM_CHECKS),
)


def components(names: Sequence[str]) -> list[tuple[Kind, str]]:
    """Returns the components of these names, of any kind; without names, all that plug-ins have registered.

    Raises ValueError for a name that no kind has, and where there is nothing to check.
    """
    known = [(kind, name) for kind in KINDS for name in kind.registry.names()]
    theirs = [(kind, name) for kind, name in known if not is_own(kind.registry[name].factory)]
    for name in names:
        if not any(name == other for _, other in known):
            listed = ", ".join(other for _, other in theirs) or "none"
            raise ValueError(f"no component is called {name!r}; plug-ins have registered {listed}. Add --plugin FILE?")
    chosen = [(kind, name) for kind, name in known if name in names] if names else theirs
    if not chosen:
        kinds = ", ".join(kind.registry.kind for kind in KINDS)
        raise ValueError(f"no plug-in has registered a component that can be checked: {kinds}. Add --plugin FILE")
    return chosen


def results(kind: Kind, name: str) -> Iterator[Result]:
    """Yields the results of the checks of a component with its preset's settings."""
    return run_checks(kind.checks, kind.subject(name, {}))
