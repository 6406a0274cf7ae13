"""A model is the same after a checkpoint, and checkpoints that cannot be read are refused with a reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TINY_CONFIGS, save_tiny_transformer, tiny_model, tiny_tokenizer, tiny_transformer

from nmtkit.config import derive
from nmtkit.data import checkpoint_file
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models import building
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.models.architectures.interface import parameter_count


@pytest.fixture(scope="module")
def contents() -> checkpoint_file.Checkpoint:
    lines = [f"the {word} sees a {other}" for word in ("cat", "dog", "cow") for other in ("house", "tree")]
    tokenizer = Tokenizer(train_model(lines, vocab_size=290))
    model = tiny_transformer(building.vocabulary_of(tokenizer), d_model=8, d_ff=16)
    return building.to_checkpoint(model, "transformer_tiny", model.config, tokenizer, [], 3)


def written(folder: Path, contents: checkpoint_file.Checkpoint, **changes: Any) -> Path:
    checkpoint_file.save(folder / "c.pt", {**contents, **changes})
    return folder / "c.pt"


def test_a_model_read_back_computes_the_same(tmp_path: Path, contents: checkpoint_file.Checkpoint) -> None:
    model, tokenizer = building.from_checkpoint(written(tmp_path, contents))
    again, _ = building.from_checkpoint(written(tmp_path, contents, model=model.state_dict()))
    source, target = Packed.from_lists([[5, 6, 2], [7, 2]]), Packed.from_lists([[1, 9], [1]])
    assert not model.training
    assert torch.equal(model(source, target), again(source, target))
    assert parameter_count(model) == sum(p.numel() for p in set(model.parameters()))
    assert tokenizer.source_size == 290


def test_a_plugin_that_is_not_loaded_is_named_with_its_flag(
    tmp_path: Path, contents: checkpoint_file.Checkpoint
) -> None:
    path = written(tmp_path, contents, architecture="my_rnn", plugins=["mine.py"])
    with pytest.raises(ValueError, match=r"'my_rnn' .*--plugin mine\.py"):
        building.from_checkpoint(path)


def test_an_architecture_nobody_knows_lists_the_known(tmp_path: Path, contents: checkpoint_file.Checkpoint) -> None:
    with pytest.raises(ValueError, match=r"architecture 'my_rnn'; .*transformer"):
        building.from_checkpoint(written(tmp_path, contents, architecture="my_rnn"))


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Path, contents: checkpoint_file.Checkpoint) -> None:
    path = written(tmp_path, contents, config={**contents["config"], "d_ff": 32})
    with pytest.raises(ValueError, match=r"c\.pt .*architecture 'transformer_tiny'"):
        building.from_checkpoint(path)


def test_a_setting_of_another_version_is_named(tmp_path: Path, contents: checkpoint_file.Checkpoint) -> None:
    path = written(tmp_path, contents, config={**contents["config"], "future": 1})
    with pytest.raises(ValueError, match=r"c\.pt: transformer_tiny .*'future'"):
        building.from_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: {name: value.long() for name, value in weights.items()}, "is of type torch.int64"),
        (lambda weights: dict(list(weights.items())[1:]), "Missing key"),
        (lambda weights: {**weights, "extra": torch.zeros(1)}, "Unexpected key"),
        (lambda weights: {name: value[..., :1] for name, value in weights.items()}, "size mismatch.*and .* more$"),
    ],
)
def test_weights_of_another_model_are_refused_in_one_line(
    tmp_path: Path, contents: checkpoint_file.Checkpoint, change: Any, message: str
) -> None:
    path = written(tmp_path, contents, model=change(contents["model"]))
    with pytest.raises(ValueError, match=message) as caught:
        building.from_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": {"joint.model": torch.arange(9, dtype=torch.uint8)}}, "no valid tokenizer"),
        ({"tokenizer": {"other": torch.zeros(1)}}, "no valid tokenizer"),
        ({"config": {"heads": 10**30}}, "heads"),
        ({"config": {"heads": 2.0}}, "2.0 is not"),
        ({"config": {"d_model": float("nan")}}, "nan is not"),
    ],
)
def test_a_checkpoint_whose_parts_lie_is_refused(
    tmp_path: Path, contents: checkpoint_file.Checkpoint, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"c.pt.*{message}"):
        building.from_checkpoint(written(tmp_path, contents, **changes))


@pytest.mark.parametrize("name", sorted(TINY_CONFIGS))
def test_a_loaded_model_has_the_weights_of_its_checkpoint_and_the_buffers_of_a_fresh_one(name, tmp_path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(name, building.vocabulary_of(tokenizer))
    config = derive(ARCHITECTURES[name].preset, TINY_CONFIGS[name], "test")
    checkpoint_file.save(tmp_path / "model.pt", building.to_checkpoint(model, name, config, tokenizer, [], 1))
    loaded, _ = building.from_checkpoint(tmp_path / "model.pt")
    for (key, value), (other_key, other) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert key == other_key and torch.equal(value, other)
    for (key, value), (other_key, other) in zip(model.named_buffers(), loaded.named_buffers(), strict=True):
        assert key == other_key and torch.equal(value, other)


def test_loading_draws_no_random_numbers(tmp_path) -> None:
    path = save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer())
    before = torch.random.get_rng_state()
    building.from_checkpoint(path)
    assert torch.equal(torch.random.get_rng_state(), before)
