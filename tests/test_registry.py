"""Names, configs and the flags and TOML they become."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from nmtkit.cli.flags import flags
from nmtkit.config import (
    COMMAND_LINE,
    check_no_collisions,
    convert,
    derive,
    option,
    split_settings,
    to_dict,
    to_toml,
)
from nmtkit.config import Config as BaseConfig
from nmtkit.plugins import load_plugin
from nmtkit.registry import Registry

HERE = Path("here")


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    width: int = option(4, "width, in units", min=1)
    rate: float | None = option(None, "rate per update", above=0, below=1)
    kind: Literal["old", "new"] = option("old", "which kind")
    betas: tuple[float, ...] = option((0.9, 0.98), "decay rates")
    fast: bool = option(False, "be fast")
    folder: Path = option(HERE, "where")
    files: tuple[Path, ...] = option((), "which")
    tags: tuple[str | None, ...] = option((), "what")


@dataclass(frozen=True, kw_only=True)
class Needy(BaseConfig):
    source_lang: str = option(..., "from which language", flag="-s/--source-lang", metavar="LANG", section="Files")
    workers: int | None = option(None, "processes", min=1, section="Running")


def test_an_unknown_name_lists_the_known_ones_and_mentions_plug_ins() -> None:
    things: Registry[Any] = Registry("thing", "--thing")
    things.register("one", Config())(dict)
    things.register("two", Config())(dict)
    with pytest.raises(ValueError, match=r"unknown thing 'three'; known: one, two.*--plugin FILE"):
        things["three"]


def test_a_name_registered_twice_is_an_error() -> None:
    things: Registry[Any] = Registry("thing", "--thing")
    things.register("one", Config())(dict)
    for other in (dict, list):
        with pytest.raises(ValueError, match=r"thing 'one' is registered twice; builtins\.dict has it"):
            things.register("one", Config())(other)


def test_a_factory_defined_anew_in_the_same_place_replaces_the_older_one() -> None:
    things: Registry[Any] = Registry("thing", "--thing")
    cell = "@things.register('one', preset)\nclass One: pass\n"
    notebook = {"__name__": "__main__", "things": things, "preset": Config()}
    exec(cell, notebook)
    first = things["one"].factory
    exec(cell, notebook)
    assert things["one"].factory is notebook["One"] is not first
    with pytest.raises(ValueError, match=r"registered twice; __main__\.One has it"):
        exec(cell, notebook | {"__name__": "elsewhere"})
    assert things["one"].factory is notebook["One"]


def test_a_field_without_help_cannot_be_registered() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Silent:
        width: int = field(default=1)

    with pytest.raises(TypeError, match=r"Silent\.width has no help"):
        Registry[Any]("thing", "--thing").register("one", Silent())


def test_two_components_with_one_flag_are_both_named() -> None:
    with pytest.raises(ValueError, match="optimizer adam and architecture mine both declare --width"):
        check_no_collisions({"optimizer adam": Config(), "architecture mine": Config()})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {}),
        (["--width", "7"], {"width": 7}),
        (["--rate", "0.5"], {"rate": 0.5}),
        (["--rate", "none"], {}),
        (["--kind", "new"], {"kind": "new"}),
        (["--betas", "0.9, 0.999"], {"betas": (0.9, 0.999)}),
        (["--fast"], {"fast": True}),
        (["--no-fast"], {"fast": False}),
        (["--folder", "a/b"], {"folder": Path("a/b")}),
        (["--files", "a/b, c"], {"files": (Path("a/b"), Path("c"))}),
        (["--tags", ""], {"tags": (None,)}),
        (["--tags", "<x>,,<y>"], {"tags": ("<x>", None, "<y>")}),
    ],
)
def test_flags_parse_to_the_fields_types(arguments: list[str], expected: dict[str, Any]) -> None:
    seen: dict[str, Any] = {}
    command = click.Command("c", params=list(flags(Config(), "Thing")), callback=lambda **given: seen.update(given))
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert {name: value for name, value in seen.items() if value is not None} == expected


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
        with pytest.raises(ValueError, match="an item of the list is empty"):
            convert(text, hint, text=True)


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


def test_limits_are_checked_wherever_a_value_comes_from() -> None:
    for width, most in ((0, "$"), (-1, "$"), (10**30, " and at most 1,000,000,000,000$")):
        with pytest.raises(ValueError, match=f"--width is {width}; it must be at least 1{most}"):
            Config(width=width)
    for rate in (0.0, 1, float("nan"), float("inf"), -0.5):
        with pytest.raises(ValueError, match=r"--rate is .*; it must be above 0 and below 1"):
            derive(Config(), {"rate": rate}, "run.toml")
    with pytest.raises(ValueError, match=r"--betas is 1e\+30; it must be at most 1,000,000,000,000"):
        derive(Config(), {"betas": [0.9, 10**30]}, "run.toml")
    assert Config(rate=None).rate is None


def test_a_flag_may_have_a_short_form_a_metavar_a_heading_and_no_default() -> None:
    language, workers = flags(Needy, "Other")
    assert language.opts == ["-s", "--source-lang"] and language.metavar == "LANG" and language.required
    assert (language.section, workers.section) == ("Files", "Running")  # type: ignore[attr-defined]
    assert "default" not in language.help and "[default: none]" in workers.help  # type: ignore[operator]
    assert derive(Needy, {"source_lang": "en"}, COMMAND_LINE) == Needy(source_lang="en")
    with pytest.raises(ValueError, match=r"^--workers is 0;"):
        derive(Needy, {"source_lang": "en", "workers": 0}, COMMAND_LINE)


def test_derive_names_the_place_of_an_unknown_setting_and_of_a_wrong_value() -> None:
    with pytest.raises(ValueError, match=r"run\.toml has no setting 'wdith'; did you mean 'width'\?"):
        derive(Config(), {"wdith": 3}, "run.toml")
    with pytest.raises(ValueError, match=r"run\.toml: width: 'wide' is not a whole number"):
        derive(Config(), {"width": "wide"}, "run.toml")
    with pytest.raises(ValueError, match=r"run\.toml: --width is 0; it must be at least 1"):
        derive(Config(), {"width": 0}, "run.toml")


def test_dashes_and_underscores_are_alike_in_toml() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Two(Config):
        two_words: int = option(1, "a number")

    assert derive(Two(), {"two-words": 3}, "run.toml") == derive(Two(), {"two_words": 3}, "run.toml")


def test_a_config_survives_toml_and_plain_types() -> None:
    config = Config(
        width=3, rate=2.5e-9, kind="new", betas=(0.1,), fast=True, folder=Path('odd "name"\\\n'), tags=(None, "a")
    )
    assert derive(Config(), to_dict(config), "plain") == config
    assert derive(Config(), tomllib.loads(to_toml({"thing": to_dict(config)}))["thing"], "toml") == config
    assert derive(Config(rate=0.5), tomllib.loads(to_toml({"t": to_dict(Config())}))["t"], "toml") == Config()


def test_a_plugin_file_is_imported_once_and_a_missing_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import nmtkit.registry as r\nr.loaded = getattr(r, 'loaded', 0) + 1\n")
    load_plugin(str(path))
    load_plugin(str(path))
    from nmtkit import registry

    assert registry.loaded == 1  # type: ignore[attr-defined]
    with pytest.raises(FileNotFoundError, match=r"gone\.py"):
        load_plugin(str(tmp_path / "gone.py"))


def test_settings_are_split_over_config_classes_by_field_or_flag() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Corpus:
        train: tuple[str, ...] = option((), "corpora", flag="--train-pref")
        width: int = option(1, "a field that Config has too")

    given = {"width": 3, "train-pref": ["a"], "source_lang": "en", "kind": "new", "wdith": 4}
    own, needy, corpus, unknown = split_settings(given, Config, Needy, Corpus)
    assert own == {"width": 3, "kind": "new"}
    assert needy == {"source_lang": "en"}
    assert corpus == {"train": ["a"]}
    assert unknown == {"wdith": 4}
