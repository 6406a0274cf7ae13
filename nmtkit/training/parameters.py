"""Chooses the trained parameters of a run, their groups, their weight decays and their initial values.

Settings select parameters by patterns of names, such as `encoder.*`, like the patterns of file names in a shell.
"""

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nmtkit import checkpoint, models
from nmtkit.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.config import derive
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.layers import adapters
from nmtkit.training.new_pieces import Group, check_relative, groups_of, means
from nmtkit.training.optimizers import ParameterGroups
from nmtkit.training.run_config import RunConfig

Side = Literal["source", "target"]

log = logging.getLogger("nmtkit")


def freeze(model: nn.Module, patterns: Sequence[str]) -> int:
    """Excludes parameters from training (`requires_grad` becomes false). Returns the number of frozen values.

    A parameter is excluded if its name matches one of the shell patterns, such as `encoder.*`. Raises ValueError for a
    pattern that matches no name.
    """
    names = dict(model.named_parameters())
    for pattern in patterns:
        for name in _matching(names, pattern, "--freeze"):
            names[name].requires_grad_(False)
    return sum(parameter.numel() for parameter in names.values() if not parameter.requires_grad)


def choose_trained(model: Architecture, run: RunConfig) -> int:
    """Adds adapters or freezes parameters in place, as `run` specifies. Returns the number of frozen values."""
    if run.adapter_rank:
        alpha = run.adapter_alpha or run.adapter_rank
        adapters.adapt(model, run.adapter_rank, alpha, run.adapter_layers, model.output_projection)
    return freeze(model, run.freeze)


def parameter_groups(
    trained: Mapping[str, nn.Parameter], rules: Sequence[str], embeddings: Collection[str]
) -> ParameterGroups:
    """Returns the trained parameters in groups by kind and by weight decay. optimizers.py describes the groups.

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


# --- weights of another run -------------------------------------------------------------------------------------------


def start_from(
    model: Architecture,
    architecture: str,
    config: Any,
    tokenizer: Tokenizer,
    path: Path,
    relative: str | None = None,
    partial: bool = False,
) -> dict[Side, int]:
    """Copies the weights of a checkpoint into the model. The vocabularies may differ.

    Pieces in the vocabulary of the checkpoint get their embeddings from the checkpoint. Other pieces start from means
    of old embeddings (see `new_pieces.py`). If `relative` is given, tokens of new languages start from the token of
    this language. If embeddings are separate in the checkpoint and joint in the model, target embeddings are used. The
    model also gets the shortlist of the checkpoint, unless the vocabularies differ.

    If `partial` is true, parameters that the checkpoint does not have, or has with another shape, keep their initial
    values. So a smaller model can start with a part of a larger model ("shrink and fine-tune", Shleifer and Rush 2020).

    Returns, for each side, the number of pieces that are also in the checkpoint. Raises ValueError for a model with
    different shapes, unless `partial` is true, and for a checkpoint without a parameter that fits.
    """
    contents = checkpoint.load(path)
    name = contents["architecture"]
    if name not in ARCHITECTURES or ARCHITECTURES[name].factory is not ARCHITECTURES[architecture].factory:
        raise ValueError(f"{path} is a {name}, not a {architecture}; give the same --arch")
    old_tokenizer = models.tokenizer_of(contents, path)
    old_config = derive(ARCHITECTURES[name].preset, contents["config"], f"{path}: {name}")
    old_sides = vocabulary_axes(name, old_config, models.vocabulary_of(old_tokenizer))
    sides = vocabulary_axes(architecture, config, models.vocabulary_of(tokenizer))
    if relative is not None:
        check_relative(tokenizer, old_tokenizer, relative)
    if tokenizer.fingerprint == old_tokenizer.fingerprint:
        model.shortlist = contents.get("shortlist")
    elif "shortlist" in contents:
        log.warning(
            "the shortlist of %s is left out, because the vocabularies differ; add one with nmtkit shortlist",
            path,
        )
    pieces, old_pieces = pieces_of(tokenizer), pieces_of(old_tokenizer)
    kept = {side: set(old_pieces[side]) for side in old_pieces}
    if tokenizer.joint:  # a shared matrix gets rows of both old vocabularies
        kept = dict.fromkeys(kept, kept["source"] | kept["target"])
    groups: dict[tuple[Side, Side], list[Group]] = {}
    state = model.state_dict()
    if partial:
        state = _fitting(state, contents["model"], sides, path)
    with torch.no_grad():
        for key, tensor in state.items():
            if key not in contents["model"]:
                raise ValueError(
                    f"{path} has no parameter {key}; its config differs from the config of this model; "
                    "--finetune-partial takes only the parameters that fit"
                )
            old = contents["model"][key]
            axes = sides[key]
            if not _fits(tensor, old, axes):
                raise ValueError(
                    f"{path}: {key} has shape {tuple(old.shape)}, but {tuple(tensor.shape)} in this model; "
                    "--finetune-partial takes only the parameters that fit"
                )
            if not axes:
                tensor.copy_(old)
            for axis, side in axes.items():
                old_side = old_sides[key][axis]
                rows, old_rows = same_pieces(pieces[side], old_pieces[old_side])
                tensor.index_copy_(axis, rows.to(tensor.device), old.index_select(axis, old_rows).to(tensor))
                new = [row for row, piece in enumerate(pieces[side]) if piece not in kept[old_side]]
                if new:
                    if (side, old_side) not in groups:
                        groups[side, old_side] = groups_of(tokenizer, old_tokenizer, side, old_side, relative)
                    initial = means(old, axis, [groups[side, old_side][row] for row in new])
                    tensor.index_copy_(axis, torch.tensor(new, device=tensor.device), initial.to(tensor))
    return {side: len(same_pieces(pieces[side], old_pieces[side])[0]) for side in pieces}


def _fits(tensor: Tensor, old: Tensor, vocabulary: Collection[int]) -> bool:
    """Returns whether both tensors have the same shape, without the dimensions of the vocabulary."""
    same = (tensor.shape[axis] == old.shape[axis] for axis in range(tensor.dim()) if axis not in vocabulary)
    return tensor.dim() == old.dim() and all(same)


def _fitting(
    state: Mapping[str, Tensor], old: Mapping[str, Tensor], sides: Mapping[str, Collection[int]], path: Path
) -> dict[str, Tensor]:
    """Returns the parameters that a checkpoint has with the same shape. Logs the number of the other parameters."""
    fitting = {key: tensor for key, tensor in state.items() if key in old and _fits(tensor, old[key], sides[key])}
    if not fitting:
        raise ValueError(f"--finetune-partial: {path} has no parameter with a name and a shape of this model")
    new = [key for key in state if key not in fitting]
    some = ", ".join(new[:3]) + (", …" if len(new) > 3 else "")
    log.info(
        "%d of %d parameters start with the values of %s%s",
        *(len(fitting), len(state), path, f"; these do not: {some}" if new else ""),
    )
    return fitting


def adapters_of(model: Architecture, tokenizer: Tokenizer, run: RunConfig, base: Path) -> dict[str, Any]:
    """Returns the facts about adapters that a checkpoint stores. checkpoint.py explains the format.

    `base` is the checkpoint from which the model has started. Raises ValueError unless `base` is a complete model with
    the same tokenizer and equal weights.
    """
    path = Path(os.path.realpath(base))
    contents = checkpoint.dequantized(checkpoint.read(path), path)
    if "adapters" in contents:
        raise ValueError(
            f"{base} holds adapters; merge them first: nmtkit average-checkpoints {base} --output merged.pt"
        )
    if models.tokenizer_of(contents, base).fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"adapters do not change the embeddings of {base}, but the dataset has a different vocabulary; preprocess "
            f"with --tokenizer-from {base}"
        )
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor.cpu(), contents["model"][name].to(tensor.dtype)):
            raise ValueError(f"adapters need the weights of {base}, but {name} differs here; use the same settings")
    rank, layers = run.adapter_rank, list(run.adapter_layers)
    assert rank is not None
    facts = {"rank": rank, "alpha": float(run.adapter_alpha or rank), "layers": layers}
    return {"base": str(path), "fingerprint": checkpoint.fingerprint(contents), **facts}


def load_embeddings(model: Architecture, tokenizer: Tokenizer, side: Side, path: Path) -> int:
    """Copies vectors of pieces from a text file into an embedding. Returns the number of known pieces in the file.

    The file has the format of word2vec, GloVe and fastText: each line has a piece and its numbers, separated by spaces.
    The first line may hold the counts of lines and numbers. Values are copied without scaling (the Transformer
    multiplies embeddings by sqrt(d_model)). Raises OSError, or ValueError for vectors of a different width, fields that
    are not numbers, and a file without a known piece.
    """
    pieces = pieces_of(tokenizer)[side]
    embedding = embedding_of(model, side, len(pieces))
    rows = {piece: row for row, piece in enumerate(pieces)}
    width = embedding.embedding_dim
    known: dict[int, Tensor] = {}
    with path.open(encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, 1):
                piece, *fields = line.rstrip().split(" ")
                if number == 1 and len(fields) == 1 and width != 1:
                    continue
                if len(fields) != width:
                    raise ValueError(f"line {number} has {len(fields)} numbers, but the embedding has width {width}")
                if piece in rows:
                    vector = torch.tensor([float(field) for field in fields])
                    if not vector.isfinite().all():
                        raise ValueError(f"line {number} has a number that is not finite")
                    known[rows[piece]] = vector
        except ValueError as error:  # includes UnicodeDecodeError
            raise ValueError(f"{path}: {error}") from error
    if not known:
        raise ValueError(f"{path} has no vector for any {side} piece, such as {pieces[-1]!r}; train vectors on pieces")
    with torch.no_grad():
        embedding.weight[list(known)] = torch.stack(list(known.values()))
    return len(known)


def embedding_of(model: Architecture, side: Side, pieces: int) -> nn.Embedding:
    """Returns the embedding of the vocabulary of a side. Raises ValueError if the model has no such embedding."""
    part = getattr(model, f"{side}_embedding", None)
    for module in part.modules() if isinstance(part, nn.Module) else ():
        if isinstance(module, nn.Embedding) and module.num_embeddings == pieces:
            return module
    raise ValueError(f"{type(model).__name__} has no {side}_embedding to load vectors into")


def vocabulary_axes(architecture: str, config: Any, vocabulary: Vocabulary) -> dict[str, dict[int, Side]]:
    """Returns, for each tensor of a model's state, the axes whose length is a vocabulary size, as {axis: side}.

    The function compares the shapes of models with different vocabulary sizes, without allocating their tensors. The
    side of a joint vocabulary is "source".
    """

    def shapes(source: int, target: int) -> dict[str, torch.Size]:
        with torch.device("meta"):
            changed = Vocabulary(source=source, target=target, joint=vocabulary.joint)
            model = models.build(architecture, config, changed)
        return {name: tensor.shape for name, tensor in model.state_dict().items()}

    source, target = vocabulary.source, vocabulary.target
    larger: dict[Side, dict[str, torch.Size]] = {"source": shapes(source + 1, target + vocabulary.joint)}
    if not vocabulary.joint:
        larger["target"] = shapes(source, target + 1)
    axes: dict[str, dict[int, Side]] = {}
    for name, shape in shapes(source, target).items():
        axes[name] = {
            axis: side
            for side, others in larger.items()
            for axis, size in enumerate(shape)
            if others[name][axis] != size
        }
        assert len(axes[name]) < 2, f"{name} has two axes whose length is a vocabulary size"
    return axes


def pieces_of(tokenizer: Tokenizer) -> dict[Side, list[str]]:
    return {
        "source": tokenizer.source_pieces(range(tokenizer.source_size)),
        "target": tokenizer.target_pieces(range(tokenizer.target_size)),
    }


def same_pieces(new: Sequence[str], old: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Returns the rows of the pieces that both vocabularies have: the rows in `new`, and the rows in `old`."""
    old_row = {piece: row for row, piece in enumerate(old)}
    pairs = [(row, old_row[piece]) for row, piece in enumerate(new) if piece in old_row]
    rows = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    return rows[:, 0], rows[:, 1]
