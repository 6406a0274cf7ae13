"""Every number that a user can set has limits, which exclude NaN, infinity and absurd sizes."""

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Any

import click
import pytest

from nmtkit.cli import COMMANDS, main
from nmtkit.cli.command import message_of
from nmtkit.cli.generate_config import GenerateConfig
from nmtkit.cli.score import ScoreConfig
from nmtkit.config import derive, field_types
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.serving.config import ServeConfig
from nmtkit.training.config import REGISTRIES
from nmtkit.training.run_config import RunConfig
from nmtkit.translation.options import DeviceOptions, TranslatorOptions
from nmtkit.translation.search.options import SearchOptions

ABSURD = (math.nan, math.inf, -math.inf, 10**30, -(10**30))


def configs() -> Iterator[tuple[str, Any]]:
    for registry in REGISTRIES.values():
        for name, entry in registry.entries.items():
            yield f"{registry.flag} {name}", entry.preset
    for config in (
        RunConfig(),
        SearchOptions(),
        TranslatorOptions(),
        DeviceOptions(),
        GenerateConfig(),
        ScoreConfig(),
        ServeConfig(),
    ):
        yield type(config).__name__, config
    yield "PreprocessConfig", PreprocessConfig


def numeric(hint: Any) -> Any:
    """Returns int or float if values of this type are or contain such numbers, else None."""
    if hint in (int, float):
        return hint
    return next((kind for part in typing.get_args(hint) if (kind := numeric(part))), None)


def is_list(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple or any(is_list(part) for part in typing.get_args(hint))


NUMBERS = [
    (title, config, field)
    for title, config in configs()
    for field in dataclasses.fields(config)
    if numeric(field_types(config if isinstance(config, type) else type(config))[field.name])
]
IDS = [f"{title} {field.name}" for title, _, field in NUMBERS]


@pytest.mark.parametrize(("title", "config", "field"), NUMBERS, ids=IDS)
def test_no_setting_takes_an_absurd_number(title: str, config: Any, field: dataclasses.Field) -> None:
    hint = field_types(config if isinstance(config, type) else type(config))[field.name]
    required = {"source_lang": "en", "target_lang": "de", "destdir": "out", "train": ["a"]}
    others = required if config is PreprocessConfig else {}
    low = [field.metadata[name] for name in ("min", "above") if field.metadata[name] is not None]
    assert low, f"{title}: {field.name} declares no lower limit"
    for number in (*ABSURD, *((-1,) if low[0] >= 0 else ())):
        value = float(number) if numeric(hint) is float else number
        with pytest.raises(ValueError, match=r"must be|is not"):
            derive(config, others | {field.name: [value] if is_list(hint) else value}, "run.toml")
    for wrong in ("1", True, None if type(None) not in typing.get_args(hint) else "x", [[]]):
        with pytest.raises(ValueError, match="is not"):
            derive(config, others | {field.name: wrong}, "run.toml")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_number_of_a_command_that_is_no_config_is_bounded(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    for parameter in command.params:
        kind = parameter.type
        assert not isinstance(kind, click.types.FloatParamType), f"{name} {parameter.opts}"
        if isinstance(kind, click.types.IntParamType):
            assert isinstance(kind, click.IntRange) and kind.min is not None and kind.max is not None, parameter.opts


@pytest.mark.parametrize(("name", "has_batches"), [("generate", True), ("train", True), ("inspect", False)])
def test_a_lack_of_memory_names_the_flag_that_makes_batches_smaller(name: str, has_batches: bool) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    for error in (MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory")):
        message = message_of(error, command)
        assert message is not None and ("--max-tokens" in message) == has_batches
