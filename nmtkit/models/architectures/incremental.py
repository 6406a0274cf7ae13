"""Base class of architectures that use the same decoder code for teacher forcing and for incremental decoding.

Teacher forcing runs the decoder over whole sentences. A step of a search runs the same code over sentences of one
token, and layers continue from the states in an `IncrementalState`.
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.data.packed import Layout, Packed
from nmtkit.models.architectures.interface import Architecture, DecoderState, layer_index
from nmtkit.models.layers import rows_of
from nmtkit.models.layers.recurrent import AttentionLSTM, AttentionLSTMOutput, LayerStates

# B sentences, T target tokens, M tokens of the longest source sentence, H heads, L tokens of the longest target
# sentence, R hypotheses of a sentence, N = B x R rows of a search, D width of the features


class IncrementalState(DecoderState):
    """States of decoder layers (LSTM states, the last inputs of convolutions), and the padded memory.

    `layers` are the layers with a state. The attribute `state_shapes` of a layer has the shapes of its state tensors
    without the dimension N. For teacher forcing, `layers` is None: every layer starts from zeros, and `packed_memory`
    is the memory. In a search, `packed_memory` is None, because sentences come and go.
    """

    def __init__(self, memory: Packed, beams: int, layers: Iterable[nn.Module] | None = None) -> None:
        self.beams = beams
        self.memory = memory.to_padded()  # [B, M, …]
        self.lengths = memory.layout.lengths
        rows = memory.layout.sentences * beams
        self.states: LayerStates = {
            layer: tuple(self.memory.new_zeros(rows, *shape) for shape in cast(Any, layer.state_shapes))
            for layer in layers or ()
        }
        self.packed_memory = memory if layers is None else None
        self.position = self.lengths.new_zeros(rows)  # [N]: number of tokens so far in each row
        self.recorded_weights: list[Tensor] | None = None  # if a list, it collects attention weights [B, H, L, M]

    def advance(self, layout: Layout) -> Tensor:
        """Counts the new tokens of each row. Returns the positions [T] of these tokens, from 0."""
        position = self.position[layout.segment_ids] + layout.position_ids
        self.position = self.position + layout.lengths
        return position

    @property
    def mask(self) -> Tensor:
        """True where the memory has a token: [B, M], bool."""
        return torch.arange(self.memory.shape[1], device=self.lengths.device) < self.lengths[:, None]

    def attend(self, layer: AttentionLSTM, x: Tensor, layout: Layout) -> AttentionLSTMOutput:
        """Runs a layer over x [T, width], and records the attention weights.

        `self.memory` must contain the keys, as returned by `AttentionLSTM.with_keys`.
        """
        result: AttentionLSTMOutput = layer(x, layout, self.memory, self.mask, self.states)
        if self.recorded_weights is not None:
            self.recorded_weights.append(result.weights[:, None])
        return result

    def reorder(self, beam_index: Tensor) -> None:
        self.states = {layer: tuple(part[beam_index] for part in parts) for layer, parts in self.states.items()}
        self.position = self.position[beam_index]

    def drop_finished(self, sentences: Tensor) -> None:
        self.lengths = self.lengths[sentences]
        self.memory = self.memory[sentences]
        self.reorder(rows_of(sentences, self.beams))

    def insert(self, slots: Tensor, memory: Packed) -> None:
        longest = max(self.memory.shape[1], memory.layout.max_length)
        self.memory = _lengthened(self.memory, longest).index_copy(0, slots, _lengthened(memory.to_padded(), longest))
        self.lengths = self.lengths.index_copy(0, slots, memory.layout.lengths)
        rows = rows_of(slots, self.beams)
        self.states = {
            layer: tuple(part.index_fill(0, rows, 0) for part in parts) for layer, parts in self.states.items()
        }
        self.position = self.position.index_fill(0, rows, 0)


def _lengthened(padded: Tensor, longest: int) -> Tensor:
    """Returns [B, M, …] padded with zeros to M = `longest`."""
    return F.pad(padded, (0, 0) * (padded.dim() - 2) + (0, longest - padded.shape[1]))


class IncrementalArchitecture(Architecture):
    """Base class of incremental models. A subclass defines `encode`, `extract_features` and `stateful_layers`."""

    @abstractmethod
    def extract_features(self, target_input: Packed, state: IncrementalState) -> Tensor:
        """Returns features [T, D] for the tokens `target_input`, which continue the rows of `state`."""

    @abstractmethod
    def stateful_layers(self) -> Iterable[nn.Module]:
        """Returns the layers of the decoder that have a state between steps. Each has the attribute `state_shapes`."""

    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        return self.extract_features(target_input, IncrementalState(memory, 1))

    def start(self, memory: Packed, beams: int) -> IncrementalState:
        return IncrementalState(memory, beams, self.stateful_layers())

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        assert isinstance(state, IncrementalState)
        layout = Layout(torch.ones_like(tokens), 1, len(tokens))
        return self.output_projection(self.extract_features(Packed(tokens, layout), state))

    def forward_with_attention(
        self, source: Packed, target_input: Packed, layer: int | None
    ) -> tuple[Tensor, Tensor | None]:
        features, weights = self._forward_recorded(source, target_input)
        if not weights:
            return super().forward_with_attention(source, target_input, layer)
        return features, weights[layer_index(layer, len(weights))]

    def attention_weights(self, source: Packed, target_input: Packed) -> dict[str, list[Tensor]]:
        _, weights = self._forward_recorded(source, target_input)
        if not weights:
            return super().attention_weights(source, target_input)
        queries = target_input.layout.mask[:, None, :, None]
        return {"cross": [layer * queries for layer in weights]}

    def _forward_recorded(self, source: Packed, target_input: Packed) -> tuple[Tensor, list[Tensor]]:
        """Returns the features and the cross-attention weights of each layer with cross-attention."""
        state = IncrementalState(self.encode(source), 1)
        state.recorded_weights = []
        return self.extract_features(target_input, state), state.recorded_weights
