"""A registry has one factory for each name, and its errors say what to do."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from builders import ThingConfig

from nmtkit.registry import Registry


def test_an_unknown_name_lists_the_known_ones_and_mentions_plug_ins() -> None:
    things: Registry[Any] = Registry("thing", "--thing")
    things.register("one", ThingConfig())(dict)
    things.register("two", ThingConfig())(dict)
    with pytest.raises(ValueError, match=r"unknown thing 'three'; known: one, two.*--plugin FILE"):
        things["three"]


def test_a_name_registered_twice_is_an_error() -> None:
    things: Registry[Any] = Registry("thing", "--thing")
    things.register("one", ThingConfig())(dict)
    for other in (dict, list):
        with pytest.raises(ValueError, match=r"thing 'one' is registered twice; builtins\.dict has this name"):
            things.register("one", ThingConfig())(other)


def test_a_factory_defined_anew_in_the_same_place_replaces_the_older_one() -> None:
    things: Registry[Any] = Registry("thing", "--thing")
    cell = "@things.register('one', preset)\nclass One: pass\n"
    notebook = {"__name__": "__main__", "things": things, "preset": ThingConfig()}
    exec(cell, notebook)
    first = things["one"].factory
    exec(cell, notebook)
    assert things["one"].factory is notebook["One"] is not first
    with pytest.raises(ValueError, match=r"registered twice; __main__\.One has this name"):
        exec(cell, notebook | {"__name__": "elsewhere"})
    assert things["one"].factory is notebook["One"]


def test_a_field_without_help_cannot_be_registered() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Silent:
        width: int = field(default=1)

    with pytest.raises(TypeError, match=r"Silent\.width has no help"):
        Registry[Any]("thing", "--thing").register("one", Silent())
