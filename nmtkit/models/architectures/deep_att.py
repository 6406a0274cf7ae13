"""Deep-Att: "Deep Recurrent Models with Fast-Forward Connections for Neural Machine Translation" (Zhou et al. 2016)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nmtkit.config import Config, option
from nmtkit.data.packed import Layout, Packed
from nmtkit.models.architectures.incremental import IncrementalArchitecture, IncrementalState
from nmtkit.models.architectures.interface import ARCHITECTURES, Vocabulary, probability
from nmtkit.models.layers import module_list
from nmtkit.models.layers.dropout import Dropout
from nmtkit.models.layers.recurrent import AdditiveAttention, AttentionLSTM, LayerStates, PackedLSTM

# S source tokens, T target tokens. As in the paper, f is the feed-forward part of a layer and h its recurrent output; f
# is four times as wide as h.


@dataclass(frozen=True, kw_only=True)
class DeepAttConfig(Config):
    """The defaults are the settings of the model of section 4. The paper uses a vocabulary of words.

    The paper does not state the hidden width of the attention or the range of the initial weights.
    """

    encoder_layers: int = option(9, "LSTM layers of each of the two encoder columns", min=1, max=1000)
    decoder_layers: int = option(7, "LSTM layers of the decoder", min=1, max=1000)
    d_embedding: int = option(256, "width of the word embeddings", min=1, max=65_536)
    d_model: int = option(512, "cells of each LSTM layer", min=1, max=65_536)
    d_memory: int = option(
        1280, "width of the memory, to which the output of the encoder is reduced (section 3.2)", min=1, max=65_536
    )
    d_attention: int = option(512, "hidden width of the attention function", min=1, max=65_536)
    dropout: float = probability(0.1, "dropout on the recurrent output between layers (section 3.2, Dr)")
    initial_range: float | None = option(
        None,
        "initial parameters are uniform between minus and plus this number; none: the initial values of torch, and "
        "embeddings with a standard deviation of 0.1",
        min=0,
        finetuning="free",
    )


PUBLISHED = DeepAttConfig()


# 3.1 Deep topology: fast-forward connections


class FastForwardLayer(nn.Module):
    """One LSTM layer: [T, width] -> [T, gate_rows + hidden].

    The output is the first `gate_rows` values of W x + b, followed by h. W x + b is the input of the gates without the
    recurrent part. The LSTM of torch does not return W x + b, so these values are computed a second time.
    """

    def __init__(self, width: int, hidden: int, gate_rows: int, dropout: float, reverse: bool) -> None:
        super().__init__()
        self.gate_rows = gate_rows
        self.lstm = PackedLSTM(width, hidden, reverse=reverse)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, layout: Layout, states: LayerStates | None = None) -> Tensor:
        h = self.lstm(x, layout, states)
        return torch.cat([self.lstm.input_gates(x, self.gate_rows), self.dropout(h)], -1)


class FastForwardStack(nn.Module):
    """LSTM layers with fast-forward connections. `reverse[i]` is true if layer i runs backwards.

    f^k = W^k [Half(f^{k-1}), Dr(h^{k-1})], h^k = LSTM(f^k) (equation 5). Only linear maps connect f of one layer to f
    of the next. Half takes the first half of f, and Dr is dropout.
    """

    def __init__(self, config: DeepAttConfig, width: int, reverse: Sequence[bool]) -> None:
        super().__init__()
        hidden = config.d_model
        widths = [width, *[3 * hidden] * (len(reverse) - 1)]
        lower = [
            FastForwardLayer(width, hidden, 2 * hidden, config.dropout, backwards)
            for width, backwards in zip(widths[:-1], reverse[:-1], strict=True)
        ]
        top = FastForwardLayer(widths[-1], hidden, 4 * hidden, 0.0, reverse[-1])
        self.layers = module_list([*lower, top])

    def forward(self, x: Tensor, layout: Layout, states: LayerStates | None = None) -> Tensor:
        """Returns [f, h] of the top layer, [T, 5 hidden], for the input of the bottom layer."""
        for layer in self.layers:
            x = layer(x, layout, states)
        return x


# 3.2 Network topology: interleaved bidirectional encoder, interface, decoder


@ARCHITECTURES.register("deep_att", PUBLISHED)
@ARCHITECTURES.register(
    "deep_att_small",
    replace(
        PUBLISHED,
        encoder_layers=3,
        decoder_layers=3,
        d_model=256,
        d_memory=512,
        d_attention=256,
        dropout=0.2,
        initial_range=0.08,
    ),
)
class DeepAtt(IncrementalArchitecture):
    """Two encoder columns of alternating directions, an interface, and a decoder whose bottom layer has attention.

    One column starts forwards, the other backwards. The interface maps [f, h] of both top layers to the memory. Decoder
    states start at zero. Decoding uses `attention_weights` as alignments to replace unknown words (section 3.3,
    PosUnk).
    """

    def __init__(self, config: DeepAttConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        hidden = config.d_model
        self.source_embedding = nn.Embedding(vocabulary.source, config.d_embedding)
        self.target_embedding = nn.Embedding(vocabulary.target, config.d_embedding)
        nn.init.normal_(self.source_embedding.weight, std=0.1)
        nn.init.normal_(self.target_embedding.weight, std=0.1)
        layers = range(config.encoder_layers)
        self.forwards_first = FastForwardStack(config, config.d_embedding, [layer % 2 == 1 for layer in layers])
        self.backwards_first = FastForwardStack(config, config.d_embedding, [layer % 2 == 0 for layer in layers])
        self.interface = nn.Linear(2 * 5 * hidden, config.d_memory, bias=False)
        attention = AdditiveAttention(hidden, config.d_memory, config.d_attention)
        self.bottom_decoder = AttentionLSTM(config.d_embedding, hidden, attention, config.d_memory)
        above = [False] * (config.decoder_layers - 1)
        self.decoder = FastForwardStack(config, 3 * hidden, above) if above else None
        self.dropout = Dropout(config.dropout)
        self.output_projection = nn.Linear(5 * hidden, vocabulary.target)
        self.hidden = hidden
        if config.initial_range is not None:
            for parameter in self.parameters():
                nn.init.uniform_(parameter, -config.initial_range, config.initial_range)

    def encode(self, source: Packed) -> Packed:
        """Returns the output of the interface and the keys of the attention: [S, d_memory + d_attention]."""
        x = self.source_embedding(source.values)
        tops = [column(x, source.layout) for column in (self.forwards_first, self.backwards_first)]
        e = self.interface(torch.cat(tops, -1))
        return source.with_values(self.bottom_decoder.with_keys(e))

    def stateful_layers(self) -> Iterable[nn.Module]:
        return self.bottom_decoder, *(layer.lstm for layer in (self.decoder.layers if self.decoder is not None else ()))

    def extract_features(self, target_input: Packed, state: IncrementalState) -> Tensor:
        """Returns [f, h] of the top layer: [T, 5 hidden]."""
        layout = target_input.layout
        bottom = state.attend(self.bottom_decoder, self.target_embedding(target_input.values), layout)
        f, h = bottom.input_gates, bottom.output
        if self.decoder is None:
            return torch.cat([f, h], -1)
        return self.decoder(torch.cat([f[:, : 2 * self.hidden], self.dropout(h)], -1), layout, state.states)
