"""Conditions between flags, so that no flag is accepted and then ignored."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from nmtkit.config.fields import flag_of


@dataclass(frozen=True)
class FlagRule:
    """A condition between flags: `flag` does something only beside one of `needs`, and nothing beside `excludes`.

    Names are flags as users write them, perhaps with a value ("--format jsonl"), or other facts ("several --sys").
    """

    flag: str
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    reason: str = ""  # ends the message of `excludes`


def check_flags(rules: Collection[FlagRule], given: Collection[str], on: Collection[str]) -> None:
    """Raises ValueError for the first rule that is broken, so that no flag is accepted and ignored.

    `given` are the names that the user wrote, `on` those in effect: `--groups 1` is given, and on only if 1 is not its
    default. A given flag needs one that is on; a flag that is on excludes given ones.
    """
    for rule in rules:
        if rule.flag in given and rule.needs and not set(rule.needs) & set(on):
            raise ValueError(f"{rule.flag} does nothing without {' or '.join(rule.needs)}")
        for other in rule.excludes:
            if rule.flag in on and other in given:
                because = f": {rule.reason}" if rule.reason else ""
                raise ValueError(f"{rule.flag} and {other} cannot be combined{because}")


def changed_flags(config: Any) -> set[str]:
    """Returns the flags of those fields of `config` that differ from their default."""
    fields = dataclasses.fields(config)
    return {flag_of(field) for field in fields if getattr(config, field.name) != field.default}
