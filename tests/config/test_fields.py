"""A field declares its limits once, and they apply to values from every source."""

import pytest
from builders import ThingConfig

from nmtkit.config import check_no_collisions, derive


def test_two_components_with_one_flag_are_both_named() -> None:
    with pytest.raises(ValueError, match=r"adam .*mine .*--width"):
        check_no_collisions({"optimizer adam": ThingConfig(), "architecture mine": ThingConfig()})


def test_limits_are_checked_wherever_a_value_comes_from() -> None:
    for width, most in ((0, "$"), (-1, "$"), (10**30, " and at most 1,000,000,000,000$")):
        with pytest.raises(ValueError, match=f"--width is {width}; .*1{most}"):
            ThingConfig(width=width)
    for rate in (0.0, 1, float("nan"), float("inf"), -0.5):
        with pytest.raises(ValueError, match=r"--rate is .*0 .*1"):
            derive(ThingConfig(), {"rate": rate}, "run.toml")
    with pytest.raises(ValueError, match=r"--betas is 1e\+30; .*1,000,000,000,000"):
        derive(ThingConfig(), {"betas": [0.9, 10**30]}, "run.toml")
    assert ThingConfig(rate=None).rate is None
