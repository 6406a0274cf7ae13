"""Declares config fields, and rules for combinations of flags.

A single declaration of a field sets the default, help text, limits, flag and TOML key.
"""

import dataclasses
import functools
import operator
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

# the use of a path by a command; "start": a run reads the path at its start and not when it resumes
Access = Literal["read", "start", "write"]
LARGEST = 10**12  # limit for fields that declare no limit; products of larger numbers can overflow 64 bits
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
    checkpoint: bool = False,
    access: Access | None = None,
    finetuning: Literal["refused", "adapts", "free"] = "refused",
) -> Any:
    """Declares a config field, which is also a flag and a TOML key. A field with the default `...` is required.

    `min` and `max` are inclusive limits, `above` and `below` are exclusive limits. The limits of a tuple apply to every
    item. None is always allowed. NaN, infinity and numbers beyond the declared limits (by default `LARGEST`) are not
    allowed. `help` states the unit. `flag` replaces the name of the flag ("-s/--source-lang"), and `metavar` replaces
    the name of its value on the help page. `section` starts a new heading on the help page. A `repeatable` flag adds
    one item to a tuple each time, and the item may contain commas. A field with choices has the type
    `Literal["a", "b"]`. The path of a `checkpoint` may be the folder of a run (`checkpoint_of` in files.py). `access`
    says whether a command reads or writes the path. The command checks the path before it loads anything.

    `finetuning` is for fields of architectures. It says if --finetune-from accepts a value that differs from the
    checkpoint. "free": the field does not change the output of a trained model, or only through the shapes of its
    parameters. "adapts": the output changes, but training adapts the model, so a warning is enough. "refused": a model
    with another value is a different function.
    """
    metadata = {"help": help, "min": min, "max": max, "above": above, "below": below}
    metadata |= {"flag": flag, "metavar": metavar, "section": section, "repeatable": repeatable}
    access = access or ("read" if checkpoint else None)
    metadata |= {"checkpoint": checkpoint, "access": access, "finetuning": finetuning}
    if default is ...:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base class of configs. Raises ValueError if a field is outside the limits that its `option` declares.

    A subclass that compares fields with each other overrides `__post_init__` and first calls the method of this class.
    """

    def __post_init__(self) -> None:
        check_limits(self)


def check_limits(config: Any) -> None:
    """Raises ValueError for the first field outside its limits, with the flag, the value and the limits."""
    kind: Any = type(config)
    for field, limits in _limits(kind):
        value = getattr(config, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            # NaN is outside all limits, because a comparison with NaN is always false
            unmet = [name for name, bound in limits.items() if not LIMITS[name][1](number, bound)]
            if unmet:
                named = [name for name in LIMITS if field.metadata.get(name) is not None or name in unmet]
                words = " and ".join(f"{LIMITS[name][0]} {limits[name]:,}" for name in named)
                raise ValueError(f"{flag_of(field)} is {number}; it must be {words}")


@functools.lru_cache(256)  # every call of `Model.translate` makes configs
def _limits(cls: Any) -> list[tuple[dataclasses.Field[Any], dict[str, float]]]:
    """Returns the limits of each field of a config class. Undeclared limits are -`LARGEST` and `LARGEST`."""
    result = []
    for field in dataclasses.fields(cls):
        declared = {name: bound for name in LIMITS if (bound := field.metadata.get(name)) is not None}
        lower = {} if "above" in declared else {"min": -LARGEST}
        result.append((field, lower | ({} if "below" in declared else {"max": LARGEST}) | declared))
    return result


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Returns the long flag of a config field."""
    declared = field.metadata.get("flag")
    return declared.split("/")[-1] if declared else flag_name(field.name)


def field_types(cls: Any) -> Mapping[str, Any]:
    """Returns the annotated type of each field by field name, in order of declaration."""
    return _field_types(cls)


@functools.lru_cache(256)  # reading annotations takes a tenth of a millisecond
def _field_types(cls: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def check_no_collisions(configs: Mapping[str, Any]) -> None:
    """Raises ValueError if two configs declare the same field. The message names the titles, the keys of `configs`."""
    owner: dict[str, str] = {}  # field -> title
    for title, config in configs.items():
        for field in dataclasses.fields(config):
            if field.name in owner:
                raise ValueError(f"{owner[field.name]} and {title} both declare {flag_name(field.name)}; rename one")
            owner[field.name] = title


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

    `given` are the flags that the user typed. `on` are the flags that have an effect. For example, `--diverse-groups 1`
    is given but not on, because 1 is the default. If a flag is given, one of its `needs` must be on. If a flag is on,
    none of its `excludes` may be given.
    """
    for rule in rules:
        if rule.flag in given and rule.needs and not set(rule.needs) & set(on):
            raise ValueError(f"{rule.flag} does nothing without {' or '.join(rule.needs)}")
        for other in rule.excludes:
            if rule.flag in on and other in given:
                because = f": {rule.reason}" if rule.reason else ""
                raise ValueError(f"{rule.flag} and {other} cannot be combined{because}")


def changed_flags(config: Any) -> set[str]:
    """Returns the flags of the fields that differ from their default. Leaves out fields that are not flags."""
    fields = dataclasses.fields(config)
    flags = (field for field in fields if field.metadata.get("is_flag", True))
    return {flag_of(field) for field in flags if getattr(config, field.name) != field.default}
