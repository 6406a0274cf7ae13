"""A flag without effect is an error."""

from dataclasses import dataclass, field

import pytest

from nmtkit.config import Config, FlagRule, changed_flags, check_flags, option

RULES = (
    FlagRule("--top-k", needs=("--sampling", "--format jsonl")),
    FlagRule("--sampling", excludes=("--beam",), reason="chance"),
)


@pytest.mark.parametrize(
    ("given", "on", "message"),
    [
        ({"--top-k"}, {"--top-k"}, "^--top-k .*--sampling or --format jsonl$"),
        ({"--top-k", "--sampling"}, {"--top-k"}, "^--top-k does nothing without"),  # --sampling has its default
        (
            {"--sampling", "--beam"},
            {"--sampling"},
            "^--sampling and --beam .*: chance$",
        ),
    ],
)
def test_a_flag_without_effect_is_named(given: set[str], on: set[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_flags(RULES, given, on)


@pytest.mark.parametrize(
    ("given", "on"),
    [
        (set(), set()),
        ({"--top-k", "--format jsonl"}, {"--top-k", "--format jsonl"}),
        (set(), {"--top-k"}),
        ({"--sampling", "--beam"}, {"--beam"}),
        ({"--sampling"}, {"--sampling", "--beam"}),
    ],
)
def test_flags_with_an_effect_pass(given: set[str], on: set[str]) -> None:
    check_flags(RULES, given, on)


def test_only_flags_that_differ_from_their_default_count_as_changed() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Search(Config):
        beam: int = option(5, "Beam.")
        min_len: int = option(1, "Length.", flag="-m/--minimum")
        configs: tuple[int, ...] = field(default=(), metadata={"is_flag": False})

    assert changed_flags(Search(beam=5)) == set()
    assert changed_flags(Search(beam=4, min_len=2, configs=(1,))) == {"--beam", "--minimum"}
