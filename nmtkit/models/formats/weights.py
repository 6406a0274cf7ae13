"""Collects the weights of an imported model and makes a checkpoint of these weights."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nmtkit.data.checkpoint_file import Checkpoint
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models.architectures.transformer_config import TransformerConfig
from nmtkit.models.building import (
    NoInitialisation,
    build,
    load_weights,
    to_checkpoint,
    vocabulary_of,
    without_memory,
)
from nmtkit.models.formats.vocabulary import HIDDEN, IdTable

ARCHITECTURE = "transformer_base"  # preset in ARCHITECTURES, which the settings of an imported model override


class Weights:
    """Tensors of a file by name. `take` returns a tensor of one or two dimensions in fp32, and records its name.

    The methods raise ValueError if a tensor is missing or has an unexpected shape or type. The message names the file
    and the tensor.
    """

    def __init__(self, tensors: dict[str, Tensor], path: Path) -> None:
        self.tensors, self.path = tensors, path
        self.taken: set[str] = set()

    def take(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise ValueError(f"{self.path} has no weights {name}; it may be incomplete, or a different kind of model")
        tensor = self.tensors[name]
        if not torch.is_tensor(tensor) or not tensor.is_floating_point() or tensor.dim() not in (1, 2):
            kind = (
                f"of type {tensor.dtype} and shape {list(tensor.shape)}" if torch.is_tensor(tensor) else "not a tensor"
            )
            raise ValueError(
                f"{self.path}: {name} is {kind}; weights are vectors and matrices of floating-point numbers. Quantized "
                "models cannot be imported"
            )
        self.taken.add(name)
        return tensor.float()

    def first_name(self, *names: str) -> str:
        """Returns the first name of `names` that is in the file. If none is in the file, returns `names[0]`."""
        return next((name for name in names if name in self.tensors), names[0])

    def matrix(self, *names: str) -> Tensor:
        """Returns the matrix `first_name(*names)`."""
        name = self.first_name(*names)
        matrix = self.take(name)
        if matrix.dim() != 2:
            raise ValueError(f"{self.path}: {name} has shape {list(matrix.shape)}; a matrix is expected")
        return matrix

    def rows(self, rows: list[int], *names: str) -> Tensor:
        """Returns the given rows of the matrix `first_name(*names)`."""
        return self.select(self.matrix(*names), rows, self.first_name(*names))

    def select(self, table: Tensor, rows: list[int], name: str) -> Tensor:
        """Returns the given rows of `table`. Raises ValueError naming `name` if `table` has too few rows."""
        if max(rows) >= len(table):
            raise ValueError(f"{self.path}: the vocabulary has ids up to {max(rows)}, but {name} has {len(table)} rows")
        return table[rows]

    def output_bias(self, name: str, table: IdTable) -> Tensor:
        """Returns the output bias `name` (zeros if missing) in the order of `table`, with HIDDEN at its hidden ids."""
        bias = torch.zeros(len(table.rows))
        if name in self.tensors:
            bias = self.select(self.take(name).flatten(), table.rows, name)
        bias[table.hidden] = HIDDEN
        return bias

    def check_equal(self, names: Sequence[str], setting: str) -> None:
        """Raises ValueError if tensors differ although they are the same parameter according to `setting`."""
        present = [name for name in names if name in self.tensors]
        for name in present[1:]:
            if not torch.equal(self.take(present[0]), self.take(name)):
                raise ValueError(f"{self.path} has {setting}, but different weights: {present[0]} and {name}")

    def check_all_taken(self, ignored: str = "") -> None:
        """Raises ValueError if a tensor was not taken, unless its whole name matches the pattern `ignored`."""
        rest = sorted(name for name in self.tensors.keys() - self.taken if not re.fullmatch(ignored, name))
        if rest:
            more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
            raise ValueError(
                f"{self.path} has weights {rest[0]}{more}, which do not belong to a model with its settings"
            )

    def layers(
        self, names: Mapping[str, Sequence[str]], convert: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> dict[str, Tensor]:
        """Returns the parameters of nmtkit's layers. `names` is the result of `LayerNames.of`.

        `convert` changes a tensor of the file before the tensors of a parameter are concatenated.
        """
        tensors: dict[str, Tensor] = {}
        for ours, theirs in names.items():
            parts = [convert(self.take(name)) for name in theirs]
            if len({part.shape[1:] for part in parts}) > 1:
                shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in zip(theirs, parts, strict=True))
                raise ValueError(f"{self.path} has weights whose shapes do not match: {shapes}")
            tensors[ours] = torch.cat(parts)
        return tensors

    def learned_positions(self, config: TransformerConfig, prefix: str = "") -> dict[str, Tensor]:
        """Returns learned positions, without the first rows of a table (up to the padding id), which are unused."""
        tensors: dict[str, Tensor] = {}
        for side, stack in (("source", "encoder"), ("target", "decoder")) if config.positions == "learned" else ():
            table = self.matrix(f"{prefix}{stack}.embed_positions.weight")
            tensors[f"{side}_embedding.positions.weight"] = table[max(0, len(table) - config.max_positions) :]
        return tensors


def transformer_checkpoint(
    config: TransformerConfig, tokenizer: Tokenizer, weights: dict[str, Tensor], path: Path
) -> Checkpoint:
    """Returns the checkpoint of a Transformer. Raises ValueError for wrong shapes and non-finite values."""
    with without_memory():
        expected = build(ARCHITECTURE, config, vocabulary_of(tokenizer)).state_dict()
    for name, tensor in weights.items():
        if name not in expected or tensor.shape != expected[name].shape:
            wanted = list(expected[name].shape) if name in expected else "no such weights"
            raise ValueError(
                f"{path}: the weights do not match the settings: {name} of nmtkit has shape {list(tensor.shape)}, but "
                f"the settings describe {wanted}"
            )
        if not tensor.isfinite().all():
            raise ValueError(f"{path} is damaged: {name} of nmtkit has values that are not finite")
    with NoInitialisation():
        model = build(ARCHITECTURE, config, vocabulary_of(tokenizer))
    load_weights(model, weights, f"{path}: the weights do not match the settings")
    return to_checkpoint(model.eval(), ARCHITECTURE, config, tokenizer, [], 0)
