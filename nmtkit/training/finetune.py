"""Starting from another run's weights, also with another vocabulary: rows of the same piece keep their numbers."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nmtkit import checkpoint
from nmtkit.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.data.tokenizer import Tokenizer

Side = Literal["source", "target"]


def vocabulary_axes(architecture: str, config: Any, vocabulary: Vocabulary) -> dict[str, dict[int, Side]]:
    """For each entry of the model's state the axes that count pieces, and whose.

    Found by comparing shapes with models of a larger vocabulary, which are never allocated.
    """

    def shapes(source: int, target: int) -> dict[str, torch.Size]:
        with torch.device("meta"):
            changed = Vocabulary(source=source, target=target, joint=vocabulary.joint)
            model = ARCHITECTURES[architecture].factory(config, changed)
        return {name: tensor.shape for name, tensor in model.state_dict().items()}

    source, target = vocabulary.source, vocabulary.target
    now = shapes(source, target)
    grown: dict[Side, dict[str, torch.Size]] = {"source": shapes(source + 1, target + vocabulary.joint)}
    if not vocabulary.joint:
        grown["target"] = shapes(source, target + 1)
    return {
        name: {
            axis: side
            for side, others in grown.items()
            for axis, size in enumerate(shape)
            if others[name][axis] != size
        }
        for name, shape in now.items()
    }


def start_from(
    model: Architecture, architecture: str, config: Any, vocabulary: Vocabulary, tokenizer: Tokenizer, path: Path
) -> dict[Side, int]:
    """Copies the weights of a checkpoint; pieces that it does not know keep their fresh ones.

    Gives how many pieces of each vocabulary were found. Raises ValueError for a model of other shapes.
    """
    contents = checkpoint.load(path, mmap=True)
    if contents["architecture"] != architecture and not _same_factory(contents["architecture"], architecture):
        raise ValueError(f"{path} is a {contents['architecture']}, not a {architecture}; give the same --arch")
    old = Tokenizer.from_state(contents["tokenizer"])
    rows: dict[Side, tuple[Tensor, Tensor]] = {
        "source": _same_pieces(source_pieces(tokenizer), source_pieces(old)),
        "target": _same_pieces(target_pieces(tokenizer), target_pieces(old)),
    }
    axes = vocabulary_axes(architecture, config, vocabulary)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name not in contents["model"]:
                raise ValueError(f"{path} has no parameter {name}; its config differs from this model's")
            _copy(tensor, contents["model"][name], axes[name], rows, f"{path}: {name}")
    return {side: len(found[0]) for side, found in rows.items()}


def _same_factory(one: str, other: str) -> bool:
    """Two presets of one architecture have the same parameters, given the same shapes."""
    return one in ARCHITECTURES and ARCHITECTURES[one].factory is ARCHITECTURES[other].factory


def _copy(new: Tensor, old: Tensor, axes: dict[int, Side], rows: dict[Side, tuple[Tensor, Tensor]], place: str) -> None:
    fixed = [axis for axis in range(new.dim()) if axis not in axes]
    if new.dim() != old.dim() or any(new.shape[axis] != old.shape[axis] for axis in fixed):
        raise ValueError(f"{place} has shape {tuple(old.shape)}, this model's {tuple(new.shape)}")
    if not axes:
        new.copy_(old)
        return
    assert len(axes) == 1, f"{place} counts pieces on two axes"
    ((axis, side),) = axes.items()
    into, out_of = rows[side]
    new.index_copy_(axis, into.to(new.device), old.index_select(axis, out_of).to(new))


def _same_pieces(new: list[str], old: list[str]) -> tuple[Tensor, Tensor]:
    """Rows of the new vocabulary whose piece the old one has, and its rows there."""
    place = {piece: row for row, piece in enumerate(old)}
    pairs = [(row, place[piece]) for row, piece in enumerate(new) if piece in place]
    into, out_of = zip(*pairs, strict=True)
    return torch.tensor(into), torch.tensor(out_of)


def source_pieces(tokenizer: Tokenizer) -> list[str]:
    return tokenizer.source_pieces(range(tokenizer.source_size))


def target_pieces(tokenizer: Tokenizer) -> list[str]:
    return tokenizer.target_pieces(range(tokenizer.target_size))
