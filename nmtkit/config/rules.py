"""Rules for combinations of flags: a flag that would have no effect is an error."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from nmtkit.config.fields import flag_of


@dataclass(frozen=True)
class FlagRule:
    """A rule for a flag: `flag` needs one of `needs`, and cannot be combined with any of `excludes`.

    Each of these strings is a flag as users type it, with a value if the value matters ("--format jsonl"), or a fact
    about the command ("several --sys").
    """

    flag: str
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    reason: str = ""  # end of the message about `excludes`


def check_flags(rules: Collection[FlagRule], given: Collection[str], on: Collection[str]) -> None:
    """Raises ValueError for the first broken rule.

    `given` are the flags that the user typed. `on` are the flags that have an effect. For example, `--groups 1` is
    given but not on if 1 is the default. If a flag is given, one of its `needs` must be on. If a flag is on, none of
    its `excludes` may be given.
    """
    for rule in rules:
        if rule.flag in given and rule.needs and not set(rule.needs) & set(on):
            raise ValueError(f"{rule.flag} does nothing without {' or '.join(rule.needs)}")
        for other in rule.excludes:
            if rule.flag in on and other in given:
                because = f": {rule.reason}" if rule.reason else ""
                raise ValueError(f"{rule.flag} and {other} cannot be combined{because}")


def changed_flags(config: Any) -> set[str]:
    """Returns the flags of the fields that differ from their default."""
    fields = dataclasses.fields(config)
    return {flag_of(field) for field in fields if getattr(config, field.name) != field.default}
