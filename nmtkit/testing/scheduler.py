"""Checks of a learning-rate scheduler."""

import json
from typing import Any

from nmtkit.architectures.contract import ContractError, described
from nmtkit.config import derive
from nmtkit.testing.checks import Check, require, require_all
from nmtkit.training.lr_schedulers import LR_SCHEDULERS, LRScheduler, RunInfo, learning_rate

UPDATES = (*range(1, 60), 100, 999, 1000, 1001, 4000, 10_000, 100_000)
SCORES = (3.0, 2.5, 2.6, 2.6, 2.6, 2.6, 2.4, 2.7, 2.7, 2.7)  # of validations, lower is better
RUN = range(1, 60)
LONGEST = 100_000  # updates of the run that a schedule is told


class SchedulerSubject:
    """A learning-rate scheduler under test: its registered name, and settings over its preset."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        self.settings = settings
        entry = LR_SCHEDULERS[name]
        self.config = derive(entry.preset, settings, f"lr-scheduler {name}")
        self.factory = entry.factory

    def __str__(self) -> str:
        return f"lr-scheduler {self.name}"

    def build(self) -> LRScheduler:
        scheduler: object = self.factory(self.config, RunInfo(d_model=512, max_update=LONGEST))
        require(
            isinstance(scheduler, LRScheduler),
            f"the factory of {self.name!r} returned {described(scheduler)}; it must return an LRScheduler",
        )
        assert isinstance(scheduler, LRScheduler)
        return scheduler


def check_scheduler(name: str, **settings: Any) -> None:
    """Raises ContractError unless the learning-rate scheduler passes all checks."""
    require_all(SCHEDULER_CHECKS, SchedulerSubject(name, settings))


def every_rate_is_a_finite_number_of_at_least_zero(subject: SchedulerSubject) -> None:
    scheduler = subject.build()
    rates = [learning_rate(scheduler, update) for update in UPDATES]
    require(any(rates), f"the learning rate of every update up to {UPDATES[-1]:,} is 0")


def a_rate_depends_on_its_update_alone(subject: SchedulerSubject) -> None:
    scheduler = subject.build()
    forwards = {update: learning_rate(scheduler, update) for update in UPDATES}
    for update in reversed(UPDATES):
        again = learning_rate(scheduler, update)
        require(
            again == forwards[update],
            f"lr({update}) is {again:g}, and was {forwards[update]:g} when asked before; it must be a function of the "
            "update, the config and what `observe` has seen: a resumed run asks for an update anew",
        )


def resume_is_exact(subject: SchedulerSubject) -> None:
    whole = subject.build()
    rates = {update: _after(whole, update) for update in RUN}
    for stop in (RUN[0], *RUN[::7]):
        before, after = subject.build(), subject.build()
        for update in range(1, stop + 1):
            _after(before, update)
        try:
            state = json.loads(json.dumps(before.state()))
        except (TypeError, ValueError) as error:
            raise ContractError(
                f"state() returned what is no plain type: {error}; return numbers, texts, lists"
            ) from None
        after.load_state(state)
        for update in range(stop + 1, RUN[-1] + 1):
            rate = _after(after, update)
            require(
                rate == rates[update],
                f"a run resumed after update {stop} has the rate {rate:g} at update {update}, where one that was not "
                f"has {rates[update]:g}; state() must return all that observe changes",
            )


def _after(scheduler: LRScheduler, update: int) -> float:
    """Returns the rate of an update, and lets the scheduler observe the validation that follows every third one."""
    rate = learning_rate(scheduler, update)
    if update % 3 == 0:
        scheduler.observe(SCORES[update // 3 % len(SCORES)])
    return rate


def a_run_without_width_or_end_works_or_is_refused(subject: SchedulerSubject) -> None:
    try:
        scheduler = subject.factory(subject.config, RunInfo(d_model=None, max_update=None))
    except ValueError:
        return
    learning_rate(scheduler, 1)


SCHEDULER_CHECKS: tuple[Check, ...] = (
    every_rate_is_a_finite_number_of_at_least_zero,
    a_rate_depends_on_its_update_alone,
    resume_is_exact,
    a_run_without_width_or_end_works_or_is_refused,
)
