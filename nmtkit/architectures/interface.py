"""The interface of an architecture: `encode` and `decode`, an output projection, and for search `start` and `step`.

A new architecture subclasses `Architecture`, sets `self.output_projection`, and defines `encode` and `decode`; it then
trains with every criterion and decodes in every mode. `PrefixState` runs `decode` over the whole prefix at every step:
right for any left-to-right decoder, and slow. An architecture that can go on from its last step overrides `start` and
`step`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from nmtkit.layers.packed import Layout, Packed
from nmtkit.layers.static_kv_cache import CacheLengths
from nmtkit.registry import Registry

# B sentences or slots of a search, R hypotheses (rows) of each, N = B x R, S source tokens, T target tokens, L and M
# tokens of the longest target and source, H heads, D model width, V target vocabulary


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Sizes of the vocabularies; `joint` when both sides share one, and may share embeddings."""

    source: int
    target: int
    joint: bool


class Architecture(nn.Module, ABC):
    """A sequence-to-sequence model. Registered factories are called as `factory(config, vocabulary)`."""

    output_projection: nn.Module  # features [T, D] -> logits [T, V]; an nn.Linear gets the fused projection-and-loss
    max_source_positions: int | None = None  # longest sentence it can read, in tokens; None: any length
    max_target_positions: int | None = None

    @property
    def find_unused_parameters(self) -> bool:
        """Whether a training pass may leave parameters out, as LayerDrop does; DistributedDataParallel must know."""
        return False

    @abstractmethod
    def encode(self, source: Packed) -> Packed:
        """Returns the memory of source ids [S]: values [S, …] on a layout of the same sentences.

        The layout may hold another number of tokens than the source's.
        """

    @abstractmethod
    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        """Returns features [T, D], a token's from the memory of its sentence and the tokens up to it alone."""

    def forward(self, source: Packed, target_input: Packed) -> Tensor:
        """Returns the features [T, D] of every target token, teacher-forced; `output_projection` follows."""
        return self.decode(self.encode(source), target_input)

    def auxiliary_losses(self) -> dict[str, Tensor]:
        """Returns and drops losses by name, per target token, of the forward passes in training since the last call.

        Several passes count by their mean. The base class of criterions adds these losses to every criterion's.
        """
        return {}

    def begin_update(self, generator: torch.Generator) -> None:
        """Draws what must be alike in all micro-batches of an update, such as which layers to drop (LayerDrop).

        A trainer calls it before the first micro-batch, with a CPU generator seeded by (seed, update), so on all ranks
        alike.
        """

    def attention_weights(self, source: Packed, target_input: Packed) -> dict[str, list[Tensor]]:
        """Returns attention weights by kind ("encoder", "decoder", "cross"), one tensor B H L M for each layer.

        Queries L by keys M, zero beyond a sentence's end. Raises ValueError where there is no attention to show.
        """
        raise ValueError(f"{type(self).__name__} has no attention to show")

    def forward_with_attention(
        self, source: Packed, target_input: Packed, layer: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns features [T, D], and the cross-attention weights B H L M of a decoder layer, with gradients.

        `layer` counts from 1; None takes that of `layer_index`. The weights are None where this update leaves the layer
        out. Raises ValueError for a layer that does not exist, or an architecture without attention.
        """
        raise ValueError(f"{type(self).__name__} has no cross-attention to supervise")

    def start(self, memory: Packed, beams: int) -> "DecoderState":
        """Returns the state before the first token of `beams` hypotheses for each of the memory's B sentences.

        Rows are sentence-major: row n belongs to sentence n // beams.
        """
        return PrefixState(memory, beams)

    def step(self, tokens: Tensor, state: "DecoderState") -> Tensor:
        """Appends `tokens` [N] to the N hypotheses; returns the logits [N, V] of their next tokens.

        The logits are the caller's, who may overwrite them.
        """
        assert isinstance(state, PrefixState)
        prefixes, memory = state.append(tokens)
        features = self.decode(memory, prefixes)
        return self.output_projection(features[prefixes.layout.cu_seqlens[1:].long() - 1])

    @property
    def supports_static_decoding(self) -> bool:
        """Whether `static_start` and `static_step` are there, with which a GPU searches in CUDA graphs."""
        return False

    def static_start(self, slots: int, beams: int, capacity: int, memory_capacity: int) -> "StaticState":
        """Returns a state of `slots` empty slots, whose tensors never change shape.

        It has room for `capacity` tokens of each hypothesis, bos included, and `memory_capacity` of a source, on whose
        layout the memory must lie.
        """
        raise NotImplementedError(f"{type(self).__name__} does not decode statically")

    def static_step(self, tokens: Tensor, position: Tensor, state: "StaticState", lengths: CacheLengths) -> Tensor:
        """Makes a `step` with slot b at position[b] [B]. Logits are in fp32. The method must not wait for the device.

        Shapes are to depend on the state and on `lengths` alone, the most positions that any slot has come to.
        """
        raise NotImplementedError(f"{type(self).__name__} does not decode statically")


def layer_index(layer: int | None, layers: int) -> int:
    """Returns the index of a decoder layer, counted from 1; None is that by whose cross-attention words are aligned.

    It is the last layer but one (Garg et al. 2019, "Jointly Learning to Align and Translate"), of two layers the last.
    """
    if layer is not None and layer > layers:
        raise ValueError(f"there is no cross-attention in decoder layer {layer}; the last is {layers}")
    if layer is None:
        return layers - 2 if layers > 2 else layers - 1
    return layer - 1


class DecoderState(Protocol):
    """The state of a search between two steps. Its methods change it in place."""

    beams: int

    @abstractmethod
    def reorder(self, beam_index: Tensor) -> None:
        """Row n goes on from row beam_index[n], which is of the same sentence: N, int64."""

    @abstractmethod
    def drop_finished(self, sentences: Tensor) -> None:
        """Keeps only these sentences (indices, ascending) of those in the search."""

    @abstractmethod
    def insert(self, slots: Tensor, memory: Packed) -> None:
        """Replaces the sentences in `slots` (indices) by those of `memory`, at their beginning."""


class StaticState(Protocol):
    """The state of a search over a fixed number of slots. Its methods change tensors in place, and no shape."""

    @property
    def nbytes(self) -> int: ...

    def reorder(self, beam_index: Tensor, lengths: CacheLengths) -> None:
        """Row r of slot b goes on from its row beam_index[b, r]: B R, int64."""

    def insert(self, slots: Tensor, memory: Packed) -> None:
        """Replaces whatever was in `slots` (indices) by the sentences of `memory`, at their beginning."""


class PrefixState(DecoderState):
    """The tokens so far and nothing derived from them: every step decodes the whole prefix again."""

    def __init__(self, memory: Packed, beams: int) -> None:
        self.beams = beams
        self.memories = list(memory.split())
        rows = len(self.memories) * beams
        self.prefixes = torch.empty(rows, 0, dtype=torch.int64, device=memory.values.device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=memory.values.device)

    def append(self, tokens: Tensor) -> tuple[Packed, Packed]:
        """Appends `tokens` [N]; returns the prefixes, packed, and the memory of each row."""
        if not len(self.lengths) or int(self.lengths.max()) == self.prefixes.shape[1]:
            self.prefixes = torch.nn.functional.pad(self.prefixes, (0, 1))
        self.prefixes[torch.arange(len(tokens), device=tokens.device), self.lengths] = tokens
        self.lengths = self.lengths + 1
        prefixes = Packed.from_padded(self.prefixes[:, : int(self.lengths.max())], Layout.of(self.lengths))
        memories = [memory for memory in self.memories for _ in range(self.beams)]
        lengths = torch.tensor([len(memory) for memory in memories], device=tokens.device)
        return prefixes, Packed(torch.cat(memories), Layout.of(lengths))

    def reorder(self, beam_index: Tensor) -> None:
        self.prefixes, self.lengths = self.prefixes[beam_index], self.lengths[beam_index]

    def drop_finished(self, sentences: Tensor) -> None:
        rows = (sentences[:, None] * self.beams + torch.arange(self.beams, device=sentences.device)).flatten()
        self.memories = [self.memories[index] for index in sentences.tolist()]
        self.prefixes, self.lengths = self.prefixes[rows], self.lengths[rows]

    def insert(self, slots: Tensor, memory: Packed) -> None:
        for slot, values in zip(slots.tolist(), memory.split(), strict=True):
            self.memories[slot] = values
            self.lengths[slot * self.beams : (slot + 1) * self.beams] = 0


ARCHITECTURES: Registry[Architecture] = Registry("architecture", "--arch")


def parameter_count(model: nn.Module) -> int:
    """Returns the number of trainable numbers, a shared one counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
