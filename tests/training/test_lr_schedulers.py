"""Schedules against arithmetic done by hand."""

import math
import re

import pytest

from nmtkit.config import derive
from nmtkit.training.lr_schedulers import LR_SCHEDULERS, LRScheduler, RunInfo, learning_rate


def schedule(name: str, max_update: int | None = 1000, d_model: int | None = 512, **settings: object) -> LRScheduler:
    entry = LR_SCHEDULERS[name]
    return entry.factory(derive(entry.preset, settings, "test"), RunInfo(d_model=d_model, max_update=max_update))


@pytest.mark.parametrize(
    ("update", "expected"),
    # equation 3 with d_model 512 and 4000 updates of warm-up: 512^-0.5 = 0.0441942
    [
        (1, 0.0441942 / 252982.2),
        (4000, 0.0441942 / 63.2456),
        (16000, 0.0441942 / 126.491),
        (10**6, 0.0441942 / 1000),
    ],
)
def test_inverse_sqrt_is_equation_3(update: int, expected: float) -> None:
    assert schedule("inverse_sqrt").lr(update) == pytest.approx(expected, rel=1e-5)


def test_a_given_rate_is_the_peak_at_the_end_of_warm_up() -> None:
    rates = schedule("inverse_sqrt", lr=0.005, warmup_updates=2000, d_model=None)
    assert rates.lr(2000) == pytest.approx(0.005)
    assert rates.lr(1000) == pytest.approx(0.0025)
    assert rates.lr(8000) == pytest.approx(0.0025)


def test_the_papers_rate_needs_a_width() -> None:
    with pytest.raises(ValueError, match="give --lr"):
        schedule("inverse_sqrt", d_model=None)


def test_fixed_stays_after_warm_up() -> None:
    rates = schedule("fixed", lr=0.1, warmup_updates=4)
    assert [rates.lr(update) for update in (1, 2, 4, 5, 500)] == pytest.approx([0.025, 0.05, 0.1, 0.1, 0.1])


def test_cosine_goes_down_half_a_period() -> None:
    rates = schedule("cosine", lr=1.0, end_lr=0.2, warmup_updates=10, max_update=110)
    assert rates.lr(10) == pytest.approx(1.0)
    assert rates.lr(60) == pytest.approx(0.6)
    assert rates.lr(35) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)
    assert rates.lr(110) == rates.lr(500) == pytest.approx(0.2)


def test_polynomial_is_a_straight_line_by_default() -> None:
    rates = schedule("polynomial", lr=1.0, warmup_updates=0, decay_updates=100)
    assert [rates.lr(update) for update in (25, 50, 100, 200)] == pytest.approx([0.75, 0.5, 0, 0])
    assert schedule("polynomial", lr=1.0, warmup_updates=0, decay_updates=100, power=2.0).lr(50) == pytest.approx(0.25)


@pytest.mark.parametrize("name", ["cosine", "polynomial"])
def test_a_decay_needs_an_end(name: str) -> None:
    with pytest.raises(ValueError, match="--max-update"):
        schedule(name, max_update=None)
    with pytest.raises(ValueError, match="during the warm-up"):
        schedule(name, max_update=10, warmup_updates=10)


def test_warmup_stable_decay_is_constant_until_its_last_share() -> None:
    rates = schedule("warmup_stable_decay", max_update=100, lr=0.01, warmup_updates=10, decay_share=0.2)
    assert [rates.lr(update) for update in (1, 10, 50, 80)] == pytest.approx([0.001, 0.01, 0.01, 0.01])
    assert [rates.lr(update) for update in (90, 95, 100, 101)] == pytest.approx([0.005, 0.0025, 0, 0])


def test_a_decay_during_the_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match=r"update 8, .*10 updates"):
        schedule("warmup_stable_decay", max_update=10, warmup_updates=10)
    with pytest.raises(ValueError, match="--max-update"):
        schedule("warmup_stable_decay", max_update=None)


def test_step_shrinks_every_so_many_updates() -> None:
    rates = schedule("step", lr=1.0, lr_shrink=0.1, lr_step_updates=5, warmup_updates=0)
    assert [rates.lr(update) for update in (1, 5, 6, 10, 11)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])


def test_plateau_shrinks_when_validation_does_not_improve_and_resumes() -> None:
    rates = schedule("plateau", lr=1.0, lr_shrink=0.5, lr_patience=2, min_lr=0.3)
    for score in (3.0, 2.0, 2.5, 1.9, 2.0):
        rates.observe(score)
    assert rates.lr(1) == 1.0
    resumed = schedule("plateau", lr=1.0, lr_shrink=0.5, lr_patience=2, min_lr=0.3)
    resumed.load_state(rates.state())
    resumed.observe(1.9)
    assert resumed.lr(1) == 0.5
    resumed.observe(9.0)
    resumed.observe(9.0)
    assert resumed.lr(1) == 0.3


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_never_the_best_of_a_plateau(score: float) -> None:
    rates = schedule("plateau", lr=1.0, lr_shrink=0.5, lr_patience=2)
    for each in (score, 3.0, 2.0, 1.0):
        rates.observe(each)
    assert rates.lr(1) == 1.0


class Wrong(LRScheduler):
    def __init__(self, rate: object) -> None:
        self.rate = rate

    def lr(self, update: int) -> float:
        return self.rate  # type: ignore[return-value]


@pytest.mark.parametrize("rate", [None, math.nan, math.inf, -0.1, "0.1", True])
def test_a_schedule_that_returns_no_rate_is_named_with_what_it_returned(rate: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Wrong returned {rate!r} ")):
        learning_rate(Wrong(rate), 7)
    assert learning_rate(Wrong(0), 7) == 0.0


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("inverse_sqrt", {"lr": 0.0}),
        ("inverse_sqrt", {"warmup_updates": 0}),
        ("inverse_sqrt", {"lr": 1.0, "lr_factor": 2.0}),
        ("fixed", {"warmup_updates": -1}),
        ("cosine", {"end_lr": 1.0}),
        ("step", {"lr_shrink": 1.5}),
        ("plateau", {"lr_patience": 0}),
    ],
)
def test_settings_out_of_range_are_refused(name: str, setting: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="--"):
        schedule(name, **setting)
