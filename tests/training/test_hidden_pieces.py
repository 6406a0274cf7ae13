"""Pieces with an output bias of -10,000, which an imported model cannot produce, in the targets of a fine-tuning."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import log_records, save_tiny_transformer
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.config import derive
from nmtkit.data import checkpoint_file
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.models.building import build, vocabulary_of
from nmtkit.training.initial_weights import start_from

BIAS = "output_projection.bias"
FLAGS = ["--device", "cpu", "--precision", "fp32", "--threads", "1", "--metrics", "none", "--max-update", "1"]
FLAGS += ["--batch-tokens", "2000", "--lr", "1e-30", "--lr-scheduler", "fixed", "--validate-first"]


def hide(path: Path, ids: list[int]) -> torch.Tensor:
    """Gives the pieces `ids` of a checkpoint the bias -10,000, and all others a bias from -0.5 to 0.5."""
    contents = checkpoint_file.read(path)
    bias = torch.linspace(-0.5, 0.5, len(contents["model"][BIAS]))
    bias[ids] = -1e4
    contents["model"][BIAS] = bias
    checkpoint_file.save(path, contents)
    return bias


def train(data: Path, base: Path, folder: Path, *more: str) -> str:
    words = ["train", str(data), *FLAGS, "--finetune-from", str(base), "--save-dir", str(folder), *more]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return " ".join(result.stderr.split())


@pytest.fixture
def hidden(mirror_data: Path, tmp_path: Path) -> dict[str, Any]:
    """A checkpoint in which four pieces are hidden: three are in the targets, two of them in the training set."""
    dataset = Dataset.open(mirror_data)
    size = dataset.tokenizer.target_size
    counts = {name: np.bincount(dataset[name].target.ids, minlength=size) for name in ("train", "valid")}
    in_train = [int(id) for id in np.flatnonzero(counts["train"]) if id > 10][:2]
    absent = [int(id) for id in np.flatnonzero(counts["train"] + counts["valid"] == 0) if id > 10][:2]
    path = save_tiny_transformer(tmp_path / "base.pt", dataset.tokenizer, output_bias=True)
    bias = hide(path, [*in_train, *absent])
    return {"path": path, "bias": bias, "used": in_train, "absent": absent, "counts": counts, "dataset": dataset}


def test_hidden_pieces_of_the_data_are_named_and_learned(
    hidden: dict[str, Any], mirror_data: Path, tmp_path: Path
) -> None:
    said = train(mirror_data, hidden["path"], tmp_path / "run")
    names = hidden["dataset"].tokenizer.target_pieces(hidden["used"])
    total = 0
    for name, id in zip(names, hidden["used"], strict=True):
        count = int(hidden["counts"]["train"][id] + hidden["counts"]["valid"][id])
        total += count
        assert f"{name} ({count:,})" in said
    assert f"{total:,} times" in said and "train and valid" in said
    after = checkpoint_file.read(tmp_path / "run/last.pt")["model"][BIAS]
    visible = [float(x) for x in hidden["bias"] if x > -1e3]
    mean = sum(visible) / len(visible)
    torch.testing.assert_close(after[hidden["used"]], torch.full((2,), mean), atol=1e-3, rtol=0)
    torch.testing.assert_close(after[hidden["absent"]], torch.full((2,), mean - 20), atol=1e-2, rtol=0)
    others = torch.ones(len(after), dtype=torch.bool)
    others[[*hidden["used"], *hidden["absent"]]] = False
    assert torch.equal(after[others], hidden["bias"][others])
    # without raised biases, label smoothing alone adds 0.1 x 4 x 10,000 / 330 = 12 to the loss
    first = log_records(tmp_path / "run", "valid")[0]
    assert first["loss"] < 10


@pytest.mark.slow
def test_adapters_keep_the_bias_and_the_pieces_are_named(
    hidden: dict[str, Any], mirror_data: Path, tmp_path: Path
) -> None:
    said = train(mirror_data, hidden["path"], tmp_path / "run", "--adapter-rank", "2")
    names = hidden["dataset"].tokenizer.target_pieces(hidden["used"])
    assert all(f"{name} (" in said for name in names) and "--adapter-rank" in said


def test_a_model_without_hidden_pieces_has_no_warning(mirror_data: Path, tmp_path: Path) -> None:
    tokenizer = Dataset.open(mirror_data).tokenizer
    path = save_tiny_transformer(tmp_path / "base.pt", tokenizer, output_bias=True)
    assert "cannot produce" not in train(mirror_data, path, tmp_path / "run")


def test_new_pieces_are_visible_although_hidden_pieces_spell_them(tmp_path: Path) -> None:
    lines = ["the dog sees the cat", "the cat sees the house", "the house is here"]
    old = Tokenizer(train_model(lines, 285))
    new = Tokenizer(train_model([*lines, "dogdog dogdog dogdog sees dogdog"], 290))
    path = save_tiny_transformer(tmp_path / "base.pt", old, output_bias=True)
    before = hide(path, list(range(265, old.target_size)))
    preset = derive(ARCHITECTURES["transformer_tiny"].preset, checkpoint_file.read(path)["config"], "test")
    model = build("transformer_tiny", preset, vocabulary_of(new))
    start_from(model, "transformer_tiny", preset, new, path)
    known = set(old.target_pieces(range(old.target_size)))
    ids = [id for id, piece in enumerate(new.target_pieces(range(new.target_size))) if piece not in known]
    assert ids and bool((before[265:] == -1e4).all())
    assert model.state_dict()[BIAS][ids].abs().max() <= 0.5
