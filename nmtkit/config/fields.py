"""Declares the fields of configs: default, help text, limits, flag and TOML key of a setting, on one line."""

import dataclasses
import operator
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LARGEST = 10**12  # limit of a number that declares no other: larger sizes are mistakes, and overflow 64 bits downstream
LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "min": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "max": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def option(
    default: Any,
    help: str,
    *,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    below: float | None = None,
    flag: str | None = None,
    metavar: str | None = None,
    section: str | None = None,
    repeatable: bool = False,
) -> Any:
    """Declares a config field that is also a command-line flag and a TOML key; `...` for a default makes it required.

    `min` and `max` are inclusive limits of a number, `above` and `below` exclusive ones; of a tuple they limit every
    item. None always passes; NaN, infinity and numbers beyond `LARGEST` never do. `help` states the unit where there
    is one. `flag` overrides the flag's name ("-s/--source-lang"), `metavar` how its value is shown, and `section`
    begins a new heading on the help page. A `repeatable` flag of a tuple gives one item each time, which may hold
    commas. Choices are the field's type: `Literal["a", "b"]`.
    """
    metadata = {"help": help, "min": min, "max": max, "above": above, "below": below}
    metadata |= {"flag": flag, "metavar": metavar, "section": section, "repeatable": repeatable}
    if default is ...:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base class of configs. Construction raises ValueError for a field outside the limits that its `option` declares.

    A subclass that must also compare fields with each other overrides `__post_init__` and calls this one first.
    """

    def __post_init__(self) -> None:
        check_limits(self)


def check_limits(config: Any) -> None:
    """Raises ValueError for the first field of `config` outside its declared limits, naming flag, value and limits."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            declared = {name: bound for name in LIMITS if (bound := field.metadata.get(name)) is not None}
            lower = {} if "above" in declared else {"min": -LARGEST}
            limits = lower | ({} if "below" in declared else {"max": LARGEST}) | declared
            unmet = [name for name, bound in limits.items() if not LIMITS[name][1](number, bound)]  # NaN meets none
            if unmet:
                named = [name for name in LIMITS if name in declared or name in unmet]
                words = " and ".join(f"{LIMITS[name][0]} {limits[name]:,}" for name in named)
                raise ValueError(f"{flag_of(field)} is {number}; it must be {words}")


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Returns the long flag of a config field."""
    declared = field.metadata.get("flag")
    return declared.split("/")[-1] if declared else flag_name(field.name)


def field_types(cls: type) -> dict[str, Any]:
    """Returns the annotated type of each field by name, in order of declaration."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def check_no_collisions(configs: Mapping[str, Any]) -> None:
    """Raises ValueError when two components (title -> config) declare one field, hence one flag, naming both."""
    owner: dict[str, str] = {}
    for title, config in configs.items():
        for field in dataclasses.fields(config):
            if field.name in owner:
                raise ValueError(f"{owner[field.name]} and {title} both declare {flag_name(field.name)}; rename one")
            owner[field.name] = title
