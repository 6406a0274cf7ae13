"""The mean of several checkpoints' weights (Vaswani et al. 2017, section 6.1)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmtkit import checkpoint
from nmtkit.checkpoint import Checkpoint


def last_of(folder: Path, count: int) -> list[Path]:
    """The newest `count` checkpoints of a run's folder. Raises OSError or ValueError when it has fewer."""
    paths = _numbered(folder)
    if len(paths) < count:
        raise ValueError(f"{folder}: {count} checkpoints asked for, {len(paths)} there; give --last {len(paths)}")
    return paths[-count:]


def best_of(folder: Path, count: int, metric: str) -> list[Path]:
    """The `count` checkpoints with the best validation scores, best first.

    Raises OSError, or ValueError when fewer have one.
    """
    scored = []
    for path in _numbered(folder):
        scores = checkpoint.load(path, mmap=True).get("scores", {})
        if metric in scores:
            scored.append((checkpoint.badness(metric, scores[metric]), path))
    if len(scored) < count:
        raise ValueError(
            f"{folder}: {count} checkpoints with a validation {metric} asked for, {len(scored)} there; "
            "train with a larger --keep-best to keep more"
        )
    return [path for _, path in sorted(scored)[:count]]


def _numbered(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder of checkpoints")
    paths = checkpoint.numbered(folder)
    if not paths:
        raise ValueError(f"{folder} holds no checkpoints (update_….pt)")
    return paths


def average(paths: list[Path]) -> Checkpoint:
    """A complete checkpoint, without training state, of the mean of the weights, summed in fp32.

    Files are mapped, one at a time, so that the memory needed is the sums' and what is being read of one file.

    Raises OSError, or ValueError for a file that is of another model than the first, naming the difference.
    """
    first = checkpoint.load(paths[0], mmap=True)
    owner = _owners(first["model"])
    sums = {name: _for_sum(tensor) for name, tensor in first["model"].items() if owner[name] == name}
    update = first["update"]
    for path in paths[1:]:
        other = checkpoint.load(path, mmap=True)
        check_same_model(first, other, paths[0], path)
        for name in sums:
            tensor = other["model"][name]
            if tensor.is_floating_point():
                sums[name] += tensor
            elif other["update"] > update:
                sums[name] = tensor.clone()
        update = max(update, other["update"])
    for name, tensor in sums.items():
        if tensor.is_floating_point():
            sums[name] = tensor.div_(len(paths)).to(first["model"][name].dtype)
    model = {name: sums[owner[name]] for name in first["model"]}
    kept = ("architecture", "config", "tokenizer", "plugins")
    return {name: first[name] for name in kept} | {
        "model": model,
        "update": update,
        "averaged": [path.name for path in paths],
    }


def _owners(model: dict[str, Tensor]) -> dict[str, str]:
    """For each name the first one of the same memory: tied weights are summed and written once."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    return {name: first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name) for name, tensor in model.items()}


def _for_sum(tensor: Tensor) -> Tensor:
    # a copy in any case: the file's own memory must not change
    return tensor.to(torch.float32, copy=True) if tensor.is_floating_point() else tensor.clone()


def check_same_model(one: Checkpoint, other: Checkpoint, one_path: Path, other_path: Path) -> None:
    """Raises ValueError unless both hold the same architecture, config, tokenizer and parameters."""
    difference = _difference(one, other)
    if difference:
        raise ValueError(f"{one_path} and {other_path} are of different models: {difference}")


def _difference(one: Checkpoint, other: Checkpoint) -> str | None:
    if one["architecture"] != other["architecture"]:
        return f"architecture {one['architecture']} and {other['architecture']}"
    configs = one["config"], other["config"]
    for name in {**configs[0], **configs[1]}:
        if configs[0].get(name) != configs[1].get(name):
            return f"{name} {configs[0].get(name)} and {configs[1].get(name)}"
    if not _equal(one["tokenizer"], other["tokenizer"]):
        return "their tokenizers"
    shapes = [{name: tuple(tensor.shape) for name, tensor in it["model"].items()} for it in (one, other)]
    for name in {**shapes[0], **shapes[1]}:
        if shapes[0].get(name) != shapes[1].get(name):
            return f"parameter {name} of shape {shapes[0].get(name)} and {shapes[1].get(name)}"
    return None


def _equal(one: Any, other: Any) -> bool:
    """Whether two tokenizer states, dicts of tensors and plain types, are the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    return bool(one == other)
