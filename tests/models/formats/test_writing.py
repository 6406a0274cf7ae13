"""Facts that all exports share."""

import dataclasses

import click
import pytest

from nmtkit.cli.flags import flags
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.models.formats.writing import as_flag


@pytest.mark.parametrize("architecture", ARCHITECTURES.names())
def test_the_flags_of_an_advice_can_be_typed(architecture: str) -> None:
    """The advice of an export names the flags of `train` that give a value, such as an empty list."""
    preset = ARCHITECTURES[architecture].preset
    for field in dataclasses.fields(preset):
        if not field.metadata.get("is_flag", True):
            continue
        command = click.Command("train", params=flags(preset), callback=lambda **typed: typed)
        value = getattr(preset, field.name)
        typed = command.main(as_flag(field, (value,)).split(" "), standalone_mode=False)
        assert typed[field.name] == value
