"""Names, configs and the flags and TOML they become."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from nmtkit import registry
from nmtkit.registry import Registry, check_no_collisions, derive, flags, load_plugin, option, parse, plain, to_toml

HERE = Path("here")


@dataclass(frozen=True, kw_only=True)
class Config:
    width: int = option(4, "width, in units")
    rate: float | None = option(None, "rate per update")
    kind: Literal["old", "new"] = option("old", "which kind")
    betas: tuple[float, ...] = option((0.9, 0.98), "decay rates")
    fast: bool = option(False, "be fast")
    folder: Path = option(HERE, "where")

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width is {self.width}; it must be at least 1")


def test_an_unknown_name_lists_the_known_ones_and_mentions_plug_ins() -> None:
    things: Registry[Any] = Registry("thing", "--thing")
    things.register("one", Config())(dict)
    things.register("two", Config())(dict)
    with pytest.raises(ValueError, match=r"unknown thing 'three'; known: one, two.*--plugin FILE"):
        things["three"]


def test_a_name_registered_twice_is_an_error() -> None:
    things: Registry[Any] = Registry("thing", "--thing")
    things.register("one", Config())(dict)
    with pytest.raises(ValueError, match="thing 'one' is registered twice"):
        things.register("one", Config())


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
    ],
)
def test_flags_parse_to_the_fields_types(arguments: list[str], expected: dict[str, Any]) -> None:
    seen: dict[str, Any] = {}
    command = click.Command("c", params=list(flags(Config(), "Thing")), callback=lambda **given: seen.update(given))
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert {name: value for name, value in seen.items() if value is not None} == expected


@pytest.mark.parametrize(("text", "hint"), [("x", int), ("1.5", int), ("x", float | None), ("red", Literal["old"])])
def test_a_value_of_the_wrong_type_is_refused(text: str, hint: Any) -> None:
    with pytest.raises(ValueError, match=f"'{text}'"):
        parse(text, hint)


def test_derive_names_the_place_of_an_unknown_setting_and_of_a_wrong_value() -> None:
    with pytest.raises(ValueError, match=r"run\.toml has no setting 'wdith'; known: width"):
        derive(Config(), {"wdith": 3}, "run.toml")
    with pytest.raises(ValueError, match=r"run\.toml: width is 'wide'"):
        derive(Config(), {"width": "wide"}, "run.toml")
    with pytest.raises(ValueError, match="must be at least 1"):
        derive(Config(), {"width": 0}, "run.toml")


def test_a_config_survives_toml_and_plain_types() -> None:
    config = Config(width=3, rate=2.5e-9, kind="new", betas=(0.1,), fast=True, folder=Path('odd "name"\\\n'))
    assert derive(Config(), plain(config), "plain") == config
    assert derive(Config(), tomllib.loads(to_toml({"thing": plain(config)}))["thing"], "toml") == config
    assert derive(Config(rate=1.0), tomllib.loads(to_toml({"t": plain(Config())}))["t"], "toml") == Config()


def test_a_plugin_file_is_imported_once_and_a_missing_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import nmtkit.registry as r\nr.loaded = getattr(r, 'loaded', 0) + 1\n")
    load_plugin(str(path))
    load_plugin(str(path))
    assert registry.loaded == 1  # type: ignore[attr-defined]
    with pytest.raises(FileNotFoundError, match=r"gone\.py"):
        load_plugin(str(tmp_path / "gone.py"))
