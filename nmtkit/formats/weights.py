"""The weights of a model of another toolkit, each taken once, and the checkpoint that is made of them."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nmtkit.architectures.transformer import TransformerConfig
from nmtkit.checkpoint import Checkpoint
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.models import build, load_weights, to_checkpoint, vocabulary_of

ARCHITECTURE = "transformer_base"  # the name in ARCHITECTURES whose preset the settings are laid over


class Weights:
    """Tensors by name, in fp32 when taken. Raises ValueError naming the file and the tensor that is missing."""

    def __init__(self, tensors: dict[str, Tensor], path: Path) -> None:
        self.tensors, self.path = tensors, path
        self.taken: set[str] = set()

    def take(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise ValueError(f"{self.path} has no weights {name}; is it a model of another kind, or incomplete?")
        self.taken.add(name)
        return self.tensors[name].float()

    def optional(self, name: str) -> Tensor | None:
        return self.take(name) if name in self.tensors else None

    def first(self, *names: str) -> Tensor:
        """Returns the first that is there."""
        return self.take(next((name for name in names if name in self.tensors), names[0]))

    def rows(self, rows: list[int], *names: str) -> Tensor:
        """Returns these rows of the first that is there. Raises ValueError where it has fewer."""
        table = self.first(*names)
        if max(rows) >= len(table):
            raise ValueError(
                f"{self.path}: the vocabulary has ids up to {max(rows)}, and the embeddings have {len(table)} rows"
            )
        return table[rows]

    def check_equal(self, names: Sequence[str], setting: str) -> None:
        """Raises ValueError where several of these names are there, and differ: `setting` says that they are one."""
        there = [name for name in names if name in self.tensors]
        for name in there[1:]:
            if not torch.equal(self.take(there[0]), self.take(name)):
                raise ValueError(f"{self.path} has {setting}, and weights that differ: {there[0]} and {name}")

    def check_all_taken(self, beside: str = "") -> None:
        """Raises ValueError naming a tensor that was not taken, unless its whole name matches `beside`."""
        rest = sorted(name for name in self.tensors.keys() - self.taken if not re.fullmatch(beside, name))
        if rest:
            more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
            raise ValueError(
                f"{self.path} has weights {rest[0]}{more}, which the model that its settings describe does not have"
            )

    def copy(self, found: dict[str, Tensor], ours: str, theirs: str) -> None:
        """Puts weight and bias of the layer `theirs` under the name `ours`."""
        self.stack(found, ours, [theirs])

    def stack(self, found: dict[str, Tensor], ours: str, theirs: Sequence[str]) -> None:
        """Puts weights and biases of several layers, end to end, under one name."""
        for kind in ("weight", "bias"):
            found[f"{ours}.{kind}"] = torch.cat([self.take(f"{name}.{kind}") for name in theirs])


def transformer_checkpoint(config: TransformerConfig, tokenizer: Tokenizer, weights: dict[str, Tensor]) -> Checkpoint:
    """Returns the checkpoint of a Transformer. Raises ValueError naming a weight of another shape, or not finite."""
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise ValueError(f"the model has weights that are not finite (of what is {name} here); it is damaged")
    model = build(ARCHITECTURE, config, vocabulary_of(tokenizer))
    load_weights(model, weights, "the weights do not fit the settings")
    return to_checkpoint(model.eval(), ARCHITECTURE, config, tokenizer, [], 0)
