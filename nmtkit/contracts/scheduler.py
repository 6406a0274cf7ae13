"""Checks of a learning-rate scheduler."""

import json

from nmtkit.contracts.checks import Contract, Subject, checks_of, require
from nmtkit.models.architectures.contract import ContractError
from nmtkit.training.lr_schedulers import LR_SCHEDULERS, LRScheduler, RunInfo, learning_rate

UPDATES = (*range(1, 60), 100, 999, 1000, 1001, 4000, 10_000, 100_000)
SCORES = (3.0, 2.5, 2.6, 2.6, 2.6, 2.6, 2.4, 2.7, 2.7, 2.7)  # scores of validations, lower is better
RUN = range(1, 60)
LONGEST = 100_000  # number of updates in the whole run


def build(subject: Subject[LRScheduler]) -> LRScheduler:
    return subject.build(RunInfo(d_model=512, max_update=LONGEST))


def every_rate_is_a_finite_number_of_at_least_zero(subject: Subject[LRScheduler]) -> None:
    scheduler = build(subject)
    rates = [learning_rate(scheduler, update) for update in UPDATES]
    require(any(rates), f"the learning rate of every update up to {UPDATES[-1]:,} is 0")


def a_rate_depends_on_its_update_alone(subject: Subject[LRScheduler]) -> None:
    scheduler = build(subject)
    forwards = {update: learning_rate(scheduler, update) for update in UPDATES}
    for update in reversed(UPDATES):
        again = learning_rate(scheduler, update)
        require(
            again == forwards[update],
            f"lr({update}) is {again:g}, but the first call returned {forwards[update]:g}; the rate must be a function "
            "of the update, the config and the scores given to `observe`, because a resumed run calls lr again",
        )


def resume_is_exact(subject: Subject[LRScheduler]) -> None:
    whole = build(subject)
    rates = {update: _after(whole, update) for update in RUN}
    for stop in (RUN[0], *RUN[::7]):
        before, after = build(subject), build(subject)
        for update in range(1, stop + 1):
            _after(before, update)
        try:
            state = json.loads(json.dumps(before.state()))
        except (TypeError, ValueError) as error:
            raise ContractError(
                f"state() returned a value that a checkpoint cannot hold: {error}; return numbers, texts and lists"
            ) from None
        after.load_state(state)
        for update in range(stop + 1, RUN[-1] + 1):
            rate = _after(after, update)
            require(
                rate == rates[update],
                f"at update {update}, a run resumed after update {stop} has the rate {rate:g}, and an uninterrupted "
                f"run has {rates[update]:g}; state() must return everything that observe changes",
            )


def _after(scheduler: LRScheduler, update: int) -> float:
    """Returns the learning rate of an update. The scheduler gets a validation score after every third update."""
    rate = learning_rate(scheduler, update)
    if update % 3 == 0:
        scheduler.observe(SCORES[update // 3 % len(SCORES)])
    return rate


def a_run_without_width_or_end_works_or_is_refused(subject: Subject[LRScheduler]) -> None:
    try:
        scheduler = subject.build(RunInfo(d_model=None, max_update=None))
    except ValueError:
        return
    learning_rate(scheduler, 1)


check_scheduler = Contract(LR_SCHEDULERS, LRScheduler, checks_of(__name__))
