"""Means of weights: a running mean during training, and the mean of several checkpoints."""

import contextlib
import hashlib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from nmtkit.config.files import check_writable, checkpoint_of
from nmtkit.data import checkpoint_file
from nmtkit.data.checkpoint_file import Checkpoint
from nmtkit.jobs import progress
from nmtkit.models import checkpoint
from nmtkit.training import checkpoints
from nmtkit.training.metrics import Objective, conditions_of
from nmtkit.training.optimizers.interface import exchanged


@runtime_checkable
class AveragedWeights(Protocol):
    """Averages of the trained weights. A run validates and saves the averages instead of the trained weights."""

    def swapped(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which the model has the averages as its weights."""


class MovingAverage:
    """Running means of weights (Polyak & Juditsky 1992). A run with --ema-decay validates and saves these means.

    After every update, mean = decay x mean + (1 - decay) x weight. The decay grows from 0.1 to `decay`, so that early
    means stay close to the weights. torch's AveragedModel is not used, because its decay is constant and because it
    copies the module, but FSDP modules cannot be copied.
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self.weights = [weight.detach() for weight in weights.values()]
        self.means = [weight.clone() for weight in self.weights]

    def update(self, number: int) -> None:
        """Adds the weights after update `number`, counted from 1, to the means."""
        decay = min(self.decay, number / (number + 9))
        torch._foreach_lerp_(self.means, self.weights, 1 - decay)

    def restart(self) -> None:
        """Sets the means to the current weights."""
        torch._foreach_copy_(self.means, self.weights)

    def swapped(self) -> contextlib.AbstractContextManager[None]:
        """The context in which the model has the means as its weights. Afterwards, the weights are restored."""
        return exchanged(list(zip(self.weights, self.means, strict=True)))


# --- checkpoints (Vaswani et al. 2017, section 6.1) -------------------------------------------------------------------


def choose(inputs: Sequence[Path], *, last: int | None, best: int | None, metric: str) -> list[Path]:
    """Returns the checkpoints to average: all `inputs`, or checkpoints of one folder.

    `last` is the number of newest checkpoints to choose. `best` is the number of checkpoints with the best `metric` to
    choose. If `inputs` has several paths, the folder of a run stands for the best checkpoint of the run.

    Raises OSError, or ValueError if the choice and the inputs do not match.
    """
    if last is not None and best is not None:
        raise ValueError("--last and --best both choose the checkpoints; give only one")
    count = last if best is None else best
    if count is None:
        if len(inputs) == 1 and inputs[0].is_dir():
            raise ValueError(f"{inputs[0]} is a folder; choose its checkpoints with --last N or --best N")
        return [checkpoint_of(path) for path in inputs]
    if count < 1:
        raise ValueError(f"{'--last' if best is None else '--best'} is {count}; it must be at least 1")
    if len(inputs) > 1:
        raise ValueError(f"--last and --best choose among the checkpoints of one folder; {len(inputs)} paths are given")
    return last_of(inputs[0], count) if best is None else best_of(inputs[0], count, metric)


def write(paths: list[Path], output: Path) -> None:
    """Writes the average of these checkpoints to `output`. Raises OSError, and the same errors as `average`."""
    check_files(paths, output)
    check_writable(output)
    contents = average(paths)
    progress.begin(f"Writing {output.name}")
    checkpoint_file.save(output, contents)
    logging.getLogger("nmtkit").info("averaged into %s: %s", output, ", ".join(path.name for path in paths))


def scheduled(folder: Path) -> list[Path]:
    """Returns the checkpoints of a folder that were saved at the intervals of the run, oldest first."""
    return [path for path in _numbered(folder) if checkpoint_file.read(path, mmap=True).get("scheduled", False)]


def last_of(folder: Path, count: int) -> list[Path]:
    """Returns the newest `count` checkpoints that were saved at the regular intervals of the run.

    If there are no such checkpoints, chooses among all other checkpoints. These were saved at the end of the run, by
    --save-interval-minutes or at a signal. Raises OSError, or ValueError if there are fewer than `count` checkpoints.
    """
    at_intervals = scheduled(folder)
    paths = at_intervals or _numbered(folder)
    if len(paths) < count:
        kind = " that were saved at an interval" if at_intervals else ""
        raise ValueError(f"{folder} has {len(paths)} checkpoints{kind}, not {count}; give --last {len(paths)}")
    return paths[-count:]


def best_of(folder: Path, count: int, metric: str) -> list[Path]:
    """Returns the `count` checkpoints with the best validation scores, best first. Only finite scores count.

    If a resume has changed settings on which the scores depend (`conditions_of`), only scores with the newest settings
    count.

    `metric` is the name of a score, or name:max or name:min to set whether higher or lower is better. Raises OSError,
    or ValueError if fewer than `count` checkpoints have a score.
    """
    name, _, direction = metric.partition(":")
    if direction not in ("", "min", "max"):
        raise ValueError(f"--best-checkpoint-metric {metric}: {direction!r} is neither min nor max")
    scored: list[tuple[float, Path]] = []
    newest: tuple[str, ...] | None = None
    for path in reversed(_numbered(folder)):
        contents = checkpoint_file.read(path, mmap=True)
        scores, settings = contents.get("scores", {}), contents.get("run", {}).get("settings")
        if name in scores and math.isfinite(scores[name]):
            conditions = None if settings is None else conditions_of(name, settings)
            newest = newest if scored else conditions
            if conditions != newest:
                break
            higher = direction == "max" if direction else name in contents.get("maximized", ())
            scored.append((Objective(name, higher).value(scores), path))
    if len(scored) < count:
        raise ValueError(
            f"{folder} has {len(scored)} checkpoints with a validation {name}, not {count}; train with a larger "
            "--keep-best to keep more"
        )
    return [path for _, path in sorted(scored)[:count]]


def _numbered(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    paths = checkpoints.numbered(folder)
    if not paths:
        raise ValueError(f"{folder} holds no checkpoints (update_….pt)")
    return paths


def check_files(paths: list[Path], output: Path) -> None:
    """Raises ValueError if `output` is one of `paths`, or if two of `paths` lead to the same file."""
    for index, path in enumerate(paths):
        if os.path.realpath(output) == os.path.realpath(path):  # Path.resolve fails for a link to itself
            raise ValueError(f"--output {output} is one of the checkpoints to average, {path}; give another name")
        for other in paths[:index]:
            if os.path.realpath(path) == os.path.realpath(other):
                raise ValueError(f"{other} and {path} are the same file, which would count twice; remove one of them")


def average(paths: list[Path]) -> Checkpoint:
    """Returns a checkpoint with the mean of the weights and without training state.

    The sums are computed in fp32. Tensors of integers come from the file with the most updates. The shortlist comes
    from the first file that has a shortlist. Facts about the origin are kept if they are the same in all files. Files
    are mapped, not read as a whole, so that the memory holds only the sums and parts of the files.

    Raises OSError, or ValueError for a damaged file, for weights that are not finite, for 8-bit weights, and for a file
    whose model differs from the model of the first file.
    """
    for path in paths:
        if "scales" in checkpoint_file.read(path, mmap=True):
            raise ValueError(
                f"{path} has 8-bit weights, which are not averaged; average checkpoints of the run, then store the "
                "average in 8 bits: nmtkit export --format checkpoint --quantization int8"
            )
    first = checkpoint.load(paths[0], mmap=True)
    owner = checkpoint.tied_to(first["model"])
    sums: dict[str, Tensor] = {}  # tied weights are summed only once
    newest, shortlist, origin = -1, None, dict(first.get("origin", {}))
    progress.begin("Averaging", "checkpoints", len(paths))
    for path in paths:
        member = checkpoint.load(path, mmap=True)
        check_same_model(first, member, paths[0], path)
        checkpoint_file.check_values(member, path)
        for name in dict.fromkeys(owner.values()):
            tensor = member["model"][name]
            if not tensor.is_floating_point():
                if member["update"] > newest:
                    sums[name] = tensor.clone()
            elif name in sums:
                sums[name] += tensor
            else:
                sums[name] = tensor.to(torch.float32, copy=True)  # a copy, because the mapped file must not change
        newest, shortlist = max(newest, member["update"]), shortlist or member.get("shortlist")
        origin = dict(fact for fact in origin.items() if fact in member.get("origin", {}).items())
        progress.advance()
    for name, tensor in sums.items():
        if tensor.is_floating_point():
            sums[name] = tensor.div_(len(paths)).to(first["model"][name].dtype)
    copied = ("architecture", "config", "tokenizer", "plugins", "run")
    return {name: first[name] for name in copied if name in first} | {
        "model": {name: sums[owner[name]] for name in first["model"]},
        "update": newest,
        "averaged": [path.name for path in paths],
        **({"origin": origin} if origin else {}),
        **({} if shortlist is None else {"shortlist": {name: part.clone() for name, part in shortlist.items()}}),
    }


def check_same_model(first: Checkpoint, other: Checkpoint, first_path: Path, other_path: Path) -> None:
    """Raises ValueError if the architecture, config, tokenizer or parameter shapes of two checkpoints differ."""

    def facts(contents: Checkpoint) -> dict[str, Any]:
        tensors = contents["tokenizer"].items()
        digest = hashlib.sha256(b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in tensors))
        shapes = {f"parameter {name} of shape": tuple(tensor.shape) for name, tensor in contents["model"].items()}
        start = {"architecture": contents["architecture"], **contents["config"]}
        return start | {"different tokenizers,": digest.hexdigest()[:12]} | shapes

    before, now = facts(first), facts(other)
    for name in before | now:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{first_path} and {other_path} hold different models: {name} {before.get(name)} and {now.get(name)}"
            )
