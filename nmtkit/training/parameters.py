"""Chooses the trained parameters of a run, their groups and their weight decays.

Settings select parameters by patterns of names, such as `encoder.*`, like the patterns of file names in a shell.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nmtkit.config.files import portable_name
from nmtkit.data import checkpoint_file
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models import building, checkpoint
from nmtkit.models.architectures import Architecture
from nmtkit.models.layers import adapters
from nmtkit.training.optimizers import ParameterGroups
from nmtkit.training.run_config import RunConfig


def freeze(model: nn.Module, patterns: Sequence[str]) -> int:
    """Excludes parameters from training (`requires_grad` becomes false). Returns the number of all frozen weights.

    A parameter is excluded if its name matches one of the shell patterns, such as `encoder.*`. Raises ValueError for a
    pattern that matches no name.
    """
    names = dict(model.named_parameters())
    for pattern in patterns:
        for name in _matching(names, pattern, "--freeze"):
            names[name].requires_grad_(False)
    return sum(parameter.numel() for parameter in names.values() if not parameter.requires_grad)


def choose_trained(model: Architecture, run: RunConfig) -> int:
    """Adds adapters or freezes parameters in place, as `run` specifies. Returns the number of all frozen weights."""
    if run.adapter_rank:
        alpha = run.adapter_alpha or run.adapter_rank
        adapters.adapt(model, run.adapter_rank, alpha, run.adapter_layers, model.output_projection)
    return freeze(model, run.freeze)


def adapters_of(model: Architecture, tokenizer: Tokenizer, run: RunConfig, base: Path) -> dict[str, Any]:
    """Returns the facts about adapters that a checkpoint stores. data/checkpoint_file.py explains the format.

    `base` is the checkpoint from which the model has started. Raises ValueError unless `base` is a complete model with
    the same tokenizer and equal weights.
    """
    path = Path(os.path.realpath(base))
    contents = checkpoint.dequantized(checkpoint_file.read(path), path)
    if "adapters" in contents:
        raise ValueError(f"{base} holds adapters; merge them: nmtkit average-checkpoints {base} --output merged.pt")
    if building.tokenizer_of(contents, base).fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"adapters do not change the embeddings of {base}, but the dataset has a different vocabulary; preprocess "
            f"with --tokenizer-from {base}"
        )
    state = model.state_dict()
    for name, tensor in contents["model"].items():
        if name not in state or not torch.equal(state[name].cpu(), tensor.to(state[name].dtype)):
            raise ValueError(f"adapters need the weights of {base}, but {name} differs here; use the same settings")
    rank, layers = run.adapter_rank, list(run.adapter_layers)
    assert rank is not None
    facts = {"rank": rank, "alpha": float(run.adapter_alpha or rank), "layers": layers}
    return {"base": portable_name(path), "fingerprint": checkpoint_file.fingerprint(contents), **facts}


def parameter_groups(
    trained: Mapping[str, nn.Parameter], rules: Sequence[str], embeddings: Collection[str]
) -> ParameterGroups:
    """Returns the trained parameters in groups by kind and by weight decay, as optimizers/interface.py describes them.

    The first of the `rules` ("pattern=decay") that matches the name of a parameter sets its weight decay. Without a
    match, vectors (biases, gains of norms) have no weight decay, and other parameters have the weight decay of the
    optimizer. Raises ValueError for an invalid rule and for a rule that matches no parameter.
    """
    decays = [decay_rule(rule) for rule in rules]
    for pattern, _ in decays:
        _matching(trained, pattern, "--weight-decay-for")
    groups: dict[tuple[str, float | None], list[str]] = {}
    for name, parameter in trained.items():
        kind = _kind(parameter, name in embeddings)
        by_kind = 0.0 if kind == "vectors" else None
        decay = next((value for pattern, value in decays if fnmatchcase(name, pattern)), by_kind)
        groups.setdefault((kind, decay), []).append(name)
    kinds = [kind for kind, _ in groups]
    return [
        {
            "name": kind if kinds.count(kind) == 1 or decay is None else f"{kind}, weight decay {decay:g}",
            "params": [trained[name] for name in names],
            "param_names": names,
        }
        | ({} if decay is None else {"weight_decay": decay})
        for (kind, decay), names in groups.items()
    ]


def _kind(parameter: nn.Parameter, embedding: bool) -> str:
    if parameter.dim() < 2:
        return "vectors"
    return "embeddings" if embedding else "matrices" if parameter.dim() == 2 else "tensors"


def embedding_names(model: Architecture) -> set[str]:
    """Returns the parameter names of the output projection and of all embeddings (of pieces and of positions)."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    parameters = {id(parameter) for table in (*tables, model.output_projection) for parameter in table.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in parameters}


def _matching(names: Mapping[str, Any], pattern: str, flag: str) -> list[str]:
    matching = [name for name in names if fnmatchcase(name, pattern)]
    if not matching:
        raise ValueError(f"{flag} {pattern} matches no parameter; known: {', '.join(names)}")
    return matching


def decay_rule(rule: str) -> tuple[str, float]:
    pattern, _, value = rule.rpartition("=")
    try:
        decay = float(value)
    except ValueError:
        decay = -1.0
    if not pattern or not 0 <= decay < float("inf"):
        raise ValueError(f"--weight-decay-for {rule!r} is not PATTERN=NUMBER with a number of at least 0")
    return pattern, decay
