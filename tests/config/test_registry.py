"""A registry has one factory for each name, and its errors name a solution."""

import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from builders import ThingConfig

from nmtkit.config.plugins import load_plugin, plugin_module
from nmtkit.config.registry import Registry
from nmtkit.training.lr_schedulers import LR_SCHEDULERS


def test_an_unknown_name_lists_the_known_ones_and_mentions_plug_ins() -> None:
    things: Registry[Any] = Registry("thing", "--thing")
    things.register("one", ThingConfig())(dict)
    things.register("two", ThingConfig())(dict)
    with pytest.raises(ValueError, match=r"'three'.*one, two.*--plugin FILE"):
        things["three"]


def test_a_name_registered_twice_is_an_error() -> None:
    things: Registry[Any] = Registry("thing", "--thing")
    things.register("one", ThingConfig())(dict)
    for other in (dict, list):
        with pytest.raises(ValueError, match=r"'one' .*builtins\.dict"):
            things.register("one", ThingConfig())(other)


def test_a_factory_defined_anew_in_the_same_place_replaces_the_older_one() -> None:
    things: Registry[Any] = Registry("thing", "--thing")
    cell = "@things.register('one', preset)\nclass One: pass\n"
    notebook = {"__name__": "__main__", "things": things, "preset": ThingConfig()}
    exec(cell, notebook)
    first = things["one"].factory
    exec(cell, notebook)
    assert things["one"].factory is notebook["One"] is not first
    with pytest.raises(ValueError, match=r"registered twice; __main__\.One"):
        exec(cell, notebook | {"__name__": "elsewhere"})
    assert things["one"].factory is notebook["One"]


def test_a_plug_in_that_was_imported_by_its_name_can_be_loaded_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tmp_path / "own_rates.py"
    plugin.write_text(
        "from dataclasses import dataclass\n"
        "from nmtkit.training.lr_schedulers import LR_SCHEDULERS\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Config: pass\n"
        "@LR_SCHEDULERS.register('own_rates', Config())\n"
        "class OwnRates: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(LR_SCHEDULERS, "entries", dict(LR_SCHEDULERS.entries))
    importlib.import_module("own_rates")
    load_plugin(str(plugin))
    assert LR_SCHEDULERS["own_rates"].factory is sys.modules[plugin_module(str(plugin))].OwnRates


def test_a_field_without_help_cannot_be_registered() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Silent:
        width: int = field(default=1)

    with pytest.raises(TypeError, match=r"Silent\.width has no help"):
        Registry[Any]("thing", "--thing").register("one", Silent())
