"""Facts that all exports share."""

import dataclasses
from pathlib import Path

import click
import numpy as np
import pytest
from builders import save_transformer, tiny_transformer

from nmtkit.cli.flags import flags
from nmtkit.models import checkpoint
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.models.formats.model_card import model_card, published_card
from nmtkit.models.formats.writing import BEAM, LENGTH_EXPONENT, SIZES, as_flag, check_expressible
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.rules import length_penalty


def test_the_search_of_exports_is_the_nearest_to_the_defaults() -> None:
    """The exponent is the slope of the logarithm of nmtkit's penalty, in least squares over 5 to 40 pieces."""
    lengths = np.arange(5, 41)
    penalties = [length_penalty(int(length), SearchOptions().lenpen, language_tokens=0) for length in lengths]
    slope, _ = np.polyfit(np.log(lengths), np.log(penalties), 1)
    assert pytest.approx(slope, abs=0.005) == LENGTH_EXPONENT
    assert SearchOptions().beam == BEAM


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    model = tiny_transformer(d_model=15, heads=2, d_key=7, d_value=7)
    with pytest.raises(ValueError, match="d_key 7, d_value 7"):
        check_expressible(model, Path("model.pt"), "Marian", SIZES, {})


@pytest.mark.parametrize(("layers", "title"), [(1, "# A translation model"), (0, "# A language model")])
def test_a_model_card_says_what_the_model_is_and_who_trained_it(layers: int, title: str, tmp_path: Path) -> None:
    contents = checkpoint.load(save_transformer(tmp_path / "model.pt", encoder_layers=layers))
    trained, imported = (model_card(contents | {"update": update}, "", prepared=True) for update in (7, 0))
    assert title in trained.split("\n") and ("translation" in trained) == (layers > 0)
    assert "Trained" in trained and "Trained" not in imported


def test_the_card_of_an_average_of_two_commits_names_their_repository(tmp_path: Path) -> None:
    contents = checkpoint.load(save_transformer(tmp_path / "model.pt"))
    contents |= {"origin": {"repository": "org/name", "license": "mit"}}  # the facts that both files share
    contents |= {"run": {"base_origin": {"repository": "org/base", "commit": "a" * 40}}}
    card = published_card(contents, None, "nmtkit generate", "checkpoint", license=None, scores=[])
    assert "`hf:org/name`" in card and "a" * 40 not in card


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
