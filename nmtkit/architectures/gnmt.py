"""GNMT: "Google's Neural Machine Translation System" (Wu et al. 2016), in the order of its section 3."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from nmtkit.architectures.interface import ARCHITECTURES, Architecture, DecoderState, Vocabulary
from nmtkit.architectures.row_state import RowState
from nmtkit.layers.dropout import Dropout
from nmtkit.layers.recurrent import PackedLSTM
from nmtkit.layers.recurrent_attention import AdditiveAttention, AttentiveLSTM
from nmtkit.packed import Layout, Packed
from nmtkit.registry import option

# S source tokens, T target tokens of all sentences, D width of every layer, A of the attention, N rows of a search


@dataclass(frozen=True, kw_only=True)
class GNMTConfig:
    """The defaults are the WMT models of section 8; their 32,000 word pieces are the data's business."""

    encoder_layers: int = option(8, "LSTM layers of the encoder, the bidirectional one at the bottom included")
    decoder_layers: int = option(8, "LSTM layers of the decoder")
    d_model: int = option(1024, "cells of each LSTM layer, and width of the embeddings")
    d_attention: int = option(1024, "hidden width of the attention function")
    dropout: float = option(0.2, "dropout on the input of each LSTM layer (section 8.3)")
    initial_range: float = option(0.04, "parameters start uniform within plus and minus this (section 8.3)")

    def __post_init__(self) -> None:
        for name in ("encoder_layers", "decoder_layers", "d_model", "d_attention"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and less than 1")


PUBLISHED = GNMTConfig()


# 3.1 Residual connections


class Stack(nn.Module):
    """LSTM layers, each adding its input to its output from the layer `residual_from` on (equation 6).

    `context` widens the input of every layer: the decoder hands its attention context to each (section 3, figure 1).
    """

    def __init__(self, config: GNMTConfig, widths: list[int], residual_from: int, context: int = 0) -> None:
        super().__init__()
        layers = nn.ModuleList(PackedLSTM(width + context, config.d_model) for width in widths)
        self.layers = cast(Sequence[PackedLSTM], layers)
        self.residual_from = residual_from
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, layout: Layout, context: Tensor | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            y = layer(self.input(x, context), layout)
            x = x + y if index >= self.residual_from else y
        return x

    def step(self, x: Tensor, context: Tensor, state: RowState) -> Tensor:
        """The next token of N rows: x N D, context N D -> N D."""
        for index, layer in enumerate(self.layers):
            y, state.rows[f"layer {index}"] = layer.step(self.input(x, context), state.rows[f"layer {index}"])
            x = x + y if index >= self.residual_from else y
        return x

    def input(self, x: Tensor, context: Tensor | None) -> Tensor:
        return self.dropout(x if context is None else torch.cat([x, context], -1))


# 3.2 Bi-directional encoder for the first layer


class Bidirectional(nn.Module):
    """Two LSTM layers that read the sentence from either end, side by side: S D -> S 2D (figure 3)."""

    def __init__(self, config: GNMTConfig) -> None:
        super().__init__()
        self.forwards = PackedLSTM(config.d_model, config.d_model)
        self.backwards = PackedLSTM(config.d_model, config.d_model, reverse=True)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        return torch.cat([self.forwards(x, layout), self.backwards(x, layout)], -1)


# The whole model (figure 1)


@ARCHITECTURES.register("gnmt", PUBLISHED)
@ARCHITECTURES.register(
    "gnmt_small",
    # in narrow layers the published range lets hardly any of the source through at first
    replace(PUBLISHED, encoder_layers=4, decoder_layers=4, d_model=256, d_attention=256, initial_range=0.14),
)
class GNMT(Architecture):
    """A deep residual LSTM encoder and decoder. The bottom decoder layer's output of the token before asks the
    attention, whose context goes to every decoder layer, so that the layers above may run ahead (section 3).

    Residual connections start at the third layer from the bottom, of either stack. Decoder states start at zero.
    """

    def __init__(self, config: GNMTConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        width = config.d_model
        self.source_embedding = nn.Embedding(vocabulary.source, width)
        self.target_embedding = nn.Embedding(vocabulary.target, width)
        self.dropout = Dropout(config.dropout)
        self.bottom_encoder = Bidirectional(config)
        above = config.encoder_layers - 1
        self.encoder = Stack(config, [2 * width, *[width] * above][:above], residual_from=1)
        memory = width if above else 2 * width
        attention = AdditiveAttention(width, memory, config.d_attention)
        self.bottom_decoder = AttentiveLSTM(width, width, attention, memory)
        self.decoder = Stack(config, [width] * (config.decoder_layers - 1), residual_from=1, context=memory)
        self.output_projection = nn.Linear(width, vocabulary.target)
        self.memory_width = memory
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -config.initial_range, config.initial_range)

    def encode(self, source: Packed) -> Packed:
        """Values S (D + A): the top encoder layer, and what the attention's scores need of it."""
        x = self.dropout(self.source_embedding(source.values))
        x = self.encoder(self.bottom_encoder(x, source.layout), source.layout)
        return source.with_values(torch.cat([x, self.bottom_decoder.attention.keys(x)], -1))

    def parts(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Values … D and keys … A of the memory."""
        return memory[..., : self.memory_width], memory[..., self.memory_width :]

    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        return self._decode(memory, target_input)[0]

    def _decode(self, memory: Packed, target_input: Packed) -> tuple[Tensor, Tensor]:
        """Features T D and attention weights B L S."""
        x = self.dropout(self.target_embedding(target_input.values))
        values, keys = (memory.with_values(part) for part in self.parts(memory.values))
        read = self.bottom_decoder(x, target_input.layout, values, keys)
        return self.decoder(read.output, target_input.layout, read.context), read.weights

    def start(self, memory: Packed, beams: int) -> RowState:
        layers = {f"layer {index}": layer.state_shapes for index, layer in enumerate(self.decoder.layers)}
        return RowState(memory, beams, {"bottom": self.bottom_decoder.state_shapes, **layers})

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        assert isinstance(state, RowState)
        values, keys = self.parts(state.memory)
        x = self.dropout(self.target_embedding(tokens))
        read, state.rows["bottom"] = self.bottom_decoder.step(x, state.rows["bottom"], values, keys, state.valid)
        return self.output_projection(self.decoder.step(read.output, read.context, state))

    def attention_weights(self, source: Packed, target_input: Packed) -> dict[str, list[Tensor]]:
        weights = self._decode(self.encode(source), target_input)[1]
        return {"cross": [(weights * target_input.layout.mask[..., None])[:, None]]}
