"""The table of pairs of features in PAIRS.md names tests that exist, and no pair is empty."""

import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_every_pair_of_the_table_has_tests_that_exist() -> None:
    rows = [line.split("|")[1:-1] for line in (TESTS / "PAIRS.md").read_text().splitlines() if line.startswith("|")][2:]
    assert len(rows) > 25
    for features, other, tests in rows:
        named = re.findall(r"`(\S+?)::(\w+)`", tests)
        assert named, f"{features} with {other}: no test"
        for file, name in named:
            assert re.search(rf"^def {name}\(", text_of(TESTS / file), re.MULTILINE), f"{file} has no {name}"
