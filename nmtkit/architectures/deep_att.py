"""Deep-Att: "Deep Recurrent Models with Fast-Forward Connections for Neural Machine Translation" (Zhou et al. 2016)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.architectures.interface import ARCHITECTURES, Architecture, DecoderState, Vocabulary
from nmtkit.architectures.row_state import RowState
from nmtkit.layers.dropout import Dropout
from nmtkit.layers.recurrent import PackedLSTM
from nmtkit.layers.recurrent_attention import AdditiveAttention, AttentiveLSTM
from nmtkit.packed import Layout, Packed
from nmtkit.registry import option

# S source tokens, T target tokens of all sentences, H cells of a layer, E width of the embeddings, M of the memory,
# A of the attention, N rows of a search. f (4H) is a layer's feed-forward part, h (H) its recurrent output.


@dataclass(frozen=True, kw_only=True)
class DeepAttConfig:
    """The defaults are the models of section 4; their word vocabularies are the data's business.

    The hidden width of the attention and the range of the first weights are guesses, for want of a statement.
    """

    encoder_layers: int = option(9, "LSTM layers of each of the encoder's two columns")
    decoder_layers: int = option(7, "LSTM layers of the decoder")
    d_embedding: int = option(256, "width of the word embeddings")
    d_model: int = option(512, "cells of each LSTM layer")
    d_memory: int = option(1280, "width the encoder's output is reduced to before attention (section 3.2)")
    d_attention: int = option(512, "hidden width of the attention function")
    dropout: float = option(0.1, "dropout on the recurrent output each layer hands up (section 3.2, Dr)")
    initial_range: float | None = option(
        None, "parameters start uniform within plus and minus this; none: torch's ranges, and embeddings of 0.1"
    )

    def __post_init__(self) -> None:
        for name in ("encoder_layers", "decoder_layers", "d_embedding", "d_model", "d_memory", "d_attention"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and less than 1")


PUBLISHED = DeepAttConfig()


# 3.1 Deep topology: fast-forward connections


class FastForwardLSTM(nn.Module):
    """An LSTM layer that also hands up f, the sum before its gates without the recurrent part (section 3.1).

    f^k = W^k [Half(f^{k-1}), Dr(h^{k-1})], h^k = LSTM(f^k): from layer to layer, f runs through linear maps alone.
    Half takes the first half of f. The LSTM kernel keeps f to itself, so the rows that are handed up are computed
    again beside it.
    """

    def __init__(self, width: int, hidden: int, *, reverse: bool = False) -> None:
        super().__init__()
        self.recurrent = PackedLSTM(width, hidden, reverse=reverse)
        self.hidden = hidden
        self.state_shapes = self.recurrent.state_shapes

    def fed(self, x: Tensor, rows: int) -> Tensor:
        """The first `rows` of f, for input x."""
        weight, bias = self.recurrent.input_parameters
        return F.linear(x, weight[:rows], bias[:rows])


class Column(nn.Module):
    """Layers with fast-forward connections; `reverse` says of each which way it reads."""

    def __init__(self, config: DeepAttConfig, width: int, reverse: Sequence[bool]) -> None:
        super().__init__()
        hidden = config.d_model
        widths = [width, *[3 * hidden] * (len(reverse) - 1)]
        layers = nn.ModuleList(
            FastForwardLSTM(width, hidden, reverse=back) for width, back in zip(widths, reverse, strict=True)
        )
        self.layers = cast(Sequence[FastForwardLSTM], layers)
        self.hidden = hidden
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """The top layer's [f, h] for the bottom layer's input: 5H wide."""
        for layer in self.layers:
            h = layer.recurrent(x, layout)
            x = self.hand_up(layer, x, h)
        return x

    def step(self, x: Tensor, state: RowState) -> Tensor:
        for index, layer in enumerate(self.layers):
            h, state.rows[f"layer {index}"] = layer.recurrent.step(x, state.rows[f"layer {index}"])
            x = self.hand_up(layer, x, h)
        return x

    def hand_up(self, layer: FastForwardLSTM, x: Tensor, h: Tensor) -> Tensor:
        """[Half(f), Dr(h)] for the layer above, the whole [f, h] at the top."""
        if layer is self.layers[-1]:
            return torch.cat([layer.fed(x, 4 * self.hidden), h], -1)
        return torch.cat([layer.fed(x, 2 * self.hidden), self.dropout(h)], -1)


# 3.2 Network topology: interleaved encoder, interface, decoder


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
class DeepAtt(Architecture):
    """Two encoder columns of alternating directions, one starting forwards and one backwards; at their tops [f, h] of
    both is reduced to the memory. The decoder's bottom layer reads it by attention. Decoder states start at zero.

    Unknown words are replaced by alignment when decoding (section 3.3, PosUnk); `attention_weights` gives the
    alignment.
    """

    def __init__(self, config: DeepAttConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        hidden = config.d_model
        self.source_embedding = nn.Embedding(vocabulary.source, config.d_embedding)
        self.target_embedding = nn.Embedding(vocabulary.target, config.d_embedding)
        nn.init.normal_(self.source_embedding.weight, std=0.1)
        nn.init.normal_(self.target_embedding.weight, std=0.1)
        layers = range(config.encoder_layers)
        self.forwards_first = Column(config, config.d_embedding, [layer % 2 == 1 for layer in layers])
        self.backwards_first = Column(config, config.d_embedding, [layer % 2 == 0 for layer in layers])
        self.interface = nn.Linear(2 * 5 * hidden, config.d_memory, bias=False)
        attention = AdditiveAttention(hidden, config.d_memory, config.d_attention)
        self.bottom = AttentiveLSTM(config.d_embedding, hidden, attention, config.d_memory)
        above = [False] * (config.decoder_layers - 1)
        self.decoder = Column(config, 3 * hidden, above) if above else None
        self.dropout = Dropout(config.dropout)
        self.output_projection = nn.Linear(5 * hidden, vocabulary.target)
        self.hidden, self.memory_width = hidden, config.d_memory
        if config.initial_range is not None:
            for parameter in self.parameters():
                nn.init.uniform_(parameter, -config.initial_range, config.initial_range)

    def encode(self, source: Packed) -> Packed:
        """Values S (M + A): the interface, and what the attention's scores need of it."""
        x = self.source_embedding(source.values)
        tops = [column(x, source.layout) for column in (self.forwards_first, self.backwards_first)]
        e = self.interface(torch.cat(tops, -1))
        return source.with_values(torch.cat([e, self.bottom.attention.keys(e)], -1))

    def parts(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Values … M and keys … A of the memory."""
        return memory[..., : self.memory_width], memory[..., self.memory_width :]

    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        return self._decode(memory, target_input)[0]

    def _decode(self, memory: Packed, target_input: Packed) -> tuple[Tensor, Tensor]:
        """Features T 5H, which are [f, h] of the top layer, and attention weights B L S."""
        values, keys = (memory.with_values(part) for part in self.parts(memory.values))
        read = self.bottom(self.target_embedding(target_input.values), target_input.layout, values, keys)
        if self.decoder is None:
            return torch.cat([read.fed, read.output], -1), read.weights
        return self.decoder(self._above(read.fed, read.output), target_input.layout), read.weights

    def _above(self, f: Tensor, h: Tensor) -> Tensor:
        return torch.cat([f[..., : 2 * self.hidden], self.dropout(h)], -1)

    def start(self, memory: Packed, beams: int) -> RowState:
        above = self.decoder.layers if self.decoder is not None else ()
        layers = {f"layer {index}": layer.state_shapes for index, layer in enumerate(above)}
        return RowState(memory, beams, {"bottom": self.bottom.state_shapes, **layers})

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        assert isinstance(state, RowState)
        x, (values, keys) = self.target_embedding(tokens), self.parts(state.memory)
        read, state.rows["bottom"] = self.bottom.step(x, state.rows["bottom"], values, keys, state.valid)
        if self.decoder is None:
            return self.output_projection(torch.cat([read.fed, read.output], -1))
        return self.output_projection(self.decoder.step(self._above(read.fed, read.output), state))

    def attention_weights(self, source: Packed, target_input: Packed) -> dict[str, list[Tensor]]:
        weights = self._decode(self.encode(source), target_input)[1]
        return {"cross": [(weights * target_input.layout.mask[..., None])[:, None]]}
