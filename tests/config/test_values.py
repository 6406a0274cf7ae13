"""Values from the command line, TOML and checkpoints become the types of config fields, or are refused."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from builders import NeedyConfig, ThingConfig

from nmtkit.config import convert, derive, option, split_settings, to_dict, to_toml


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("x", int), ("1.5", int), ("x", float | None), ("red", Literal["old"]), ("", Path), ("9" * 5000, int),
    ],
)  # fmt: skip
def test_a_text_of_the_wrong_type_is_refused(text: str, hint: Any) -> None:
    with pytest.raises(ValueError, match="' is not "):
        convert(text, hint, text=True)


@pytest.mark.parametrize("text", ["", " ", "a,,b", "a,"])
def test_an_empty_item_is_refused_where_it_means_nothing(text: str) -> None:
    for hint in (tuple[str, ...], tuple[Path, ...], tuple[float, ...]):
        with pytest.raises(ValueError, match=r"item .*is empty"):
            convert(text, hint, text=True)


@pytest.mark.parametrize("hint", [tuple[str, ...], tuple[Path, ...], tuple[float, ...], tuple[str | None, ...]])
def test_none_is_an_empty_list(hint: Any) -> None:
    assert convert("none", hint, text=True) == convert(" None ", hint, text=True) == ()
    assert convert("none", hint | None, text=True) is None


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1.0, int), (True, int), (1, bool), ("true", bool), (True, float), ("1", float), (1, Literal["1"]),
        (True, Literal[1]), ("", Path), (1, Path), ("a", tuple[str, ...]), ([1], tuple[str, ...]), (["a"], str),
        ({}, str), (None, int), ([None], tuple[str, ...]), (10**400, float),
    ],
)  # fmt: skip
def test_a_toml_value_of_the_wrong_type_is_refused(value: Any, hint: Any) -> None:
    with pytest.raises(ValueError, match=" is not "):
        convert(value, hint)


def test_derive_names_the_place_of_an_unknown_setting_and_of_a_wrong_value() -> None:
    with pytest.raises(ValueError, match=r"run\.toml .*'wdith'.*'width'"):
        derive(ThingConfig(), {"wdith": 3}, "run.toml")
    with pytest.raises(ValueError, match=r"run\.toml: width: 'wide'"):
        derive(ThingConfig(), {"width": "wide"}, "run.toml")
    with pytest.raises(ValueError, match=r"run\.toml: --width is 0"):
        derive(ThingConfig(), {"width": 0}, "run.toml")


def test_dashes_and_underscores_are_alike_in_toml() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Two(ThingConfig):
        two_words: int = option(1, "a number")

    assert derive(Two(), {"two-words": 3}, "run.toml") == derive(Two(), {"two_words": 3}, "run.toml")


def test_a_config_survives_toml_and_plain_types() -> None:
    config = ThingConfig(
        width=3, rate=2.5e-9, kind="new", betas=(0.1,), fast=True, folder=Path('odd "name"\\\n'), tags=(None, "a")
    )
    assert derive(ThingConfig(), to_dict(config), "plain") == config
    assert derive(ThingConfig(), tomllib.loads(to_toml({"thing": to_dict(config)}))["thing"], "toml") == config
    assert (
        derive(ThingConfig(rate=0.5), tomllib.loads(to_toml({"t": to_dict(ThingConfig())}))["t"], "toml")
        == ThingConfig()
    )


def test_settings_are_split_over_config_classes_by_field_or_flag() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Corpus:
        train: tuple[str, ...] = option((), "corpora", flag="--train-pref")
        width: int = option(1, "a field that ThingConfig has too")

    given = {"width": 3, "train-pref": ["a"], "source_lang": "en", "kind": "new", "wdith": 4}
    own, needy, corpus, unknown = split_settings(given, ThingConfig, NeedyConfig, Corpus)
    assert own == {"width": 3, "kind": "new"}
    assert needy == {"source_lang": "en"}
    assert corpus == {"train": ["a"]}
    assert unknown == {"wdith": 4}
