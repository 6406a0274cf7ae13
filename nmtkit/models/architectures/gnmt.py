"""GNMT: "Google's Neural Machine Translation System" (Wu et al. 2016). The code follows the order of section 3."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nmtkit.config import Config, option
from nmtkit.data.packed import Layout, Packed
from nmtkit.models.architectures.incremental import IncrementalArchitecture, IncrementalState
from nmtkit.models.architectures.interface import ARCHITECTURES, Vocabulary, probability
from nmtkit.models.layers import module_list
from nmtkit.models.layers.dropout import Dropout
from nmtkit.models.layers.recurrent import AdditiveAttention, AttentionLSTM, BidirectionalLSTM, LayerStates, PackedLSTM

# S source tokens, T target tokens, D model width


@dataclass(frozen=True, kw_only=True)
class GNMTConfig(Config):
    """The defaults are the settings of the WMT models of section 8, which have a vocabulary of 32,000 pieces."""

    encoder_layers: int = option(
        8, "LSTM layers of the encoder, including the bidirectional layer at the bottom", min=1, max=1000
    )
    decoder_layers: int = option(8, "LSTM layers of the decoder", min=1, max=1000)
    d_model: int = option(1024, "cells of each LSTM layer, and width of the embeddings", min=1, max=65_536)
    d_attention: int = option(1024, "hidden width of the attention function", min=1, max=65_536)
    dropout: float = probability(0.2, "dropout on the input of each LSTM layer (section 8.3)")
    initial_range: float = option(
        0.04,
        "initial parameters are uniform between minus and plus this number (section 8.3)",
        min=0,
        finetuning="free",
    )


PUBLISHED = GNMTConfig()


# 3.1 Residual connections


class ResidualStack(nn.Module):
    """The LSTM layers above the bottom layer.

    The second of these layers and all later layers have residual connections (equation 6).

    `context` is the width of the attention context, which every layer of the decoder reads (section 3, figure 1).
    """

    def __init__(self, config: GNMTConfig, widths: list[int], context: int = 0) -> None:
        super().__init__()
        self.layers = module_list(PackedLSTM(width + context, config.d_model) for width in widths)
        self.dropout = Dropout(config.dropout)

    def forward(
        self, x: Tensor, layout: Layout, context: Tensor | None = None, states: LayerStates | None = None
    ) -> Tensor:
        for index, layer in enumerate(self.layers):
            y = layer(self.dropout(x if context is None else torch.cat([x, context], -1)), layout, states)
            x = x + y if index else y
        return x


# The whole model (figure 1)


@ARCHITECTURES.register("gnmt", PUBLISHED)
@ARCHITECTURES.register(
    "gnmt_small",
    # with the published range, narrow layers initially pass on almost no information about the source
    replace(PUBLISHED, encoder_layers=4, decoder_layers=4, d_model=256, d_attention=256, initial_range=0.14),
)
class GNMT(IncrementalArchitecture):
    """A deep residual LSTM encoder and decoder.

    The query of the attention is the output of the bottom decoder layer for the previous token. Every decoder layer
    reads the context, so that the upper layers can run in parallel (section 3). The bottom layer of the encoder is
    bidirectional (section 3.2). Residual connections start at the third layer of encoder and decoder. Decoder states
    start at zero.
    """

    def __init__(self, config: GNMTConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        width = config.d_model
        self.source_embedding = nn.Embedding(vocabulary.source, width)
        self.target_embedding = nn.Embedding(vocabulary.target, width)
        self.dropout = Dropout(config.dropout)
        self.bottom_encoder = BidirectionalLSTM(width, width)
        above = config.encoder_layers - 1
        self.encoder = ResidualStack(config, [2 * width, *[width] * above][:above])
        memory_width = width if above else 2 * width
        attention = AdditiveAttention(width, memory_width, config.d_attention)
        self.bottom_decoder = AttentionLSTM(width, width, attention, memory_width)
        widths = [width] * (config.decoder_layers - 1)
        self.decoder = ResidualStack(config, widths, context=memory_width)
        self.output_projection = nn.Linear(width, vocabulary.target)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -config.initial_range, config.initial_range)

    def encode(self, source: Packed) -> Packed:
        """Returns the output of the top encoder layer and the keys of the attention: [S, D + d_attention].

        With a single encoder layer, the result is [S, 2D + d_attention].
        """
        x = self.dropout(self.source_embedding(source.values))
        x = self.encoder(self.bottom_encoder(x, source.layout), source.layout)
        return source.with_values(self.bottom_decoder.with_keys(x))

    def stateful_layers(self) -> Iterable[nn.Module]:
        return self.bottom_decoder, *self.decoder.layers

    def extract_features(self, target_input: Packed, state: IncrementalState) -> Tensor:
        layout = target_input.layout
        x = self.dropout(self.target_embedding(target_input.values))
        bottom = state.attend(self.bottom_decoder, x, layout)
        return self.decoder(bottom.output, layout, bottom.context, state.states)
