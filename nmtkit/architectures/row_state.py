"""Decoding state of models whose step needs a fixed amount of the past: recurrent cells, the lengths of a
convolution."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.architectures.interface import DecoderState
from nmtkit.packed import Packed

# B sentences, S memory tokens of the longest, N = B x beams rows of a search


Shapes = tuple[tuple[int, ...], ...]  # of the tensors under one name, without N


class RowState(DecoderState):
    """By name, tensors [N, …] that a step replaces, zero before the first token; beside them the memory, a rectangle.

    `shapes` gives what follows N in each of them. Reading and writing them is the model's business.
    """

    def __init__(self, memory: Packed, beams: int, shapes: Mapping[str, Shapes]) -> None:
        self.beams = beams
        self.memory = memory.to_padded()  # B S …
        self.lengths = memory.layout.lengths
        rows = memory.layout.sentences * beams
        self.rows: dict[str, tuple[Tensor, ...]] = {
            name: tuple(self.memory.new_zeros(rows, *shape) for shape in group) for name, group in shapes.items()
        }
        self.position = self.lengths.new_zeros(rows)  # N: tokens each row has been given

    def advance(self) -> Tensor:
        """The place N of each row's newest token, from 0; to be called once a step."""
        self.position = self.position + 1
        return self.position - 1

    @property
    def valid(self) -> Tensor:
        """Which cells of the memory exist: B S, bool."""
        return torch.arange(self.memory.shape[1], device=self.lengths.device) < self.lengths[:, None]

    def reorder(self, beam_index: Tensor) -> None:
        self.rows = {name: tuple(part[beam_index] for part in group) for name, group in self.rows.items()}
        self.position = self.position[beam_index]

    def drop_finished(self, sentences: Tensor) -> None:
        self.lengths = self.lengths[sentences]
        self.memory = self.memory[sentences]
        self.reorder(self._rows_of(sentences))

    def insert(self, slots: Tensor, memory: Packed) -> None:
        width = max(self.memory.shape[1], memory.layout.max_length)
        self.memory = _widened(self.memory, width).index_copy(0, slots, _widened(memory.to_padded(), width))
        self.lengths = self.lengths.index_copy(0, slots, memory.layout.lengths)
        fresh = self._rows_of(slots)
        self.rows = {name: tuple(part.index_fill(0, fresh, 0) for part in group) for name, group in self.rows.items()}
        self.position = self.position.index_fill(0, fresh, 0)

    def _rows_of(self, sentences: Tensor) -> Tensor:
        return (sentences[:, None] * self.beams + torch.arange(self.beams, device=sentences.device)).flatten()


def _widened(rectangle: Tensor, width: int) -> Tensor:
    """B S … with S grown to `width`; zeros in the new cells."""
    return F.pad(rectangle, (0, 0) * (rectangle.dim() - 2) + (0, width - rectangle.shape[1]))
