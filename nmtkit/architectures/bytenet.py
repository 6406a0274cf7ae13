"""ByteNet: "Neural Machine Translation in Linear Time" (Kalchbrenner et al. 2016), in the order of its section 3."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from nmtkit.architectures.interface import ARCHITECTURES, Architecture, DecoderState, Vocabulary
from nmtkit.architectures.row_state import RowState
from nmtkit.layers.convolution import PackedConvolution
from nmtkit.layers.dropout import Dropout
from nmtkit.packed import Layout, Packed
from nmtkit.registry import option

# S source tokens, M columns of the unfolded source, T target tokens of all sentences, D inner width of a block (the
# stream between blocks is 2D wide), N rows of a search


@dataclass(frozen=True, kw_only=True)
class ByteNetConfig:
    """The defaults are the English-German model of section 6.2, on characters (`preprocess --model-type char`)."""

    encoder_blocks: int = option(30, "residual blocks of the encoder")
    decoder_blocks: int = option(30, "residual blocks of the decoder")
    d_model: int = option(800, "inner width of a block; between blocks it is twice that (section 3.6)")
    encoder_kernel: int = option(3, "kernel of the encoder's convolutions, in tokens (odd)")
    decoder_kernel: int = option(3, "kernel of the decoder's masked convolutions, in tokens")
    dilations: tuple[int, ...] = option((1, 2, 4, 8, 16), "dilation of each block of a set; sets repeat (section 3.5)")
    unfold_factor: float = option(1.2, "columns of the source representation per source token (equation 2, a)")
    unfold_extra: int = option(0, "further columns of the source representation (equation 2, b)")
    dropout: float = option(0.0, "dropout on embeddings and on what each block adds")

    def __post_init__(self) -> None:
        for name in ("encoder_blocks", "decoder_blocks", "d_model", "encoder_kernel", "decoder_kernel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.encoder_kernel % 2 == 0:
            raise ValueError(f"encoder_kernel is {self.encoder_kernel}; it must be odd, to have a token in its middle")
        if not self.dilations or min(self.dilations) < 1:
            raise ValueError(f"dilations are {self.dilations}; give at least one, each at least 1")
        if not 1 <= self.unfold_factor < math.inf or self.unfold_extra < 0:
            raise ValueError(
                f"unfold_factor {self.unfold_factor} must be at least 1, and unfold_extra {self.unfold_extra} "
                "at least 0, lest source tokens be cut off"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and less than 1")


PUBLISHED = ByteNetConfig()


# 3.2 Dynamic unfolding


def unfolded(source: Packed, factor: float, extra: int) -> Packed:
    """Values [S, …] stretched to ceil(factor |s|) + extra columns a sentence, the new ones zero (equation 2)."""
    lengths = source.layout.lengths
    layout = Layout.of((lengths * factor).ceil().long() + extra)
    inside = layout.position_ids < lengths[layout.segment_ids]
    column = source.layout.cu_seqlens.long()[layout.segment_ids] + torch.where(inside, layout.position_ids, 0)
    return Packed(torch.where(inside[:, None], source.values[column], 0), layout)


# 3.4 Masked convolutions, 3.5 Dilation, 3.6 Residual blocks


class Block(nn.Module):
    """Figure 3, left: 1x1, dilated and 1x1 convolution from 2D to D to 2D, each behind a layer norm and a ReLU.

    `depth` is the number of blocks of its stack: what the block adds at first is that much smaller.
    """

    def __init__(self, config: ByteNetConfig, kernel: int, dilation: int, causal: bool, depth: int) -> None:
        super().__init__()
        inner = config.d_model
        self.narrow = nn.Sequential(nn.LayerNorm(2 * inner), nn.ReLU(), nn.Linear(2 * inner, inner))
        self.norm = nn.Sequential(nn.LayerNorm(inner), nn.ReLU())
        taps = nn.Linear(kernel * inner, inner)
        self.convolution = PackedConvolution(taps, kernel, dilation=dilation, causal=causal)
        last = nn.Linear(inner, 2 * inner)
        for parameter in last.parameters():
            parameter.data.div_(depth)
        self.widen = nn.Sequential(nn.LayerNorm(inner), nn.ReLU(), last)
        self.dropout = Dropout(config.dropout)
        self.state_shapes = ((self.convolution.reach, inner),)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        y = self.convolution(self.norm(self.narrow(x)), layout)
        return x + self.dropout(self.widen(y))

    def step(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of N rows: x N 2D, and the inputs its kernel looks back on, N reach D."""
        y, past = self.convolution.step(self.norm(self.narrow(x)), past)
        return x + self.dropout(self.widen(y)), past


def blocks(config: ByteNetConfig, count: int, kernel: int, causal: bool) -> Sequence[Block]:
    dilations = [config.dilations[index % len(config.dilations)] for index in range(count)]
    stack = nn.ModuleList(Block(config, kernel, dilation, causal, depth=count) for dilation in dilations)
    return cast(Sequence[Block], stack)


# 3.1 Encoder-decoder stacking, 3.3 Input embedding


@ARCHITECTURES.register("bytenet", PUBLISHED)
@ARCHITECTURES.register(
    "bytenet_small",
    replace(
        PUBLISHED, encoder_blocks=10, decoder_blocks=10, d_model=192, unfold_factor=1.5, unfold_extra=8, dropout=0.1
    ),
)
class ByteNet(Architecture):
    """A decoder of masked convolutions stacked on an encoder of convolutions: target token t sees column t of the
    source representation through the stack, and so the source at and around its own place, but no attention over it.

    The paper does not say how its weights begin. Here embeddings have a deviation of (2D)^-1/2, and the last weights
    of a block are divided by the number of blocks, so that a stack of any depth begins near the identity, as Zhang et
    al. (2019, "Fixup") ask of residual networks. It learns faster so: benchmarks/RESULTS.md.

    The paper stacks without saying how column and target embedding, both 2D wide, meet; here they are added. Beyond
    the last column the decoder goes on with the embedding alone (section 3.2).
    """

    def __init__(self, config: ByteNetConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.config = config
        width = 2 * config.d_model
        self.source_embedding = nn.Embedding(vocabulary.source, width)
        self.target_embedding = nn.Embedding(vocabulary.target, width)
        for embedding in (self.source_embedding, self.target_embedding):
            nn.init.normal_(embedding.weight, 0, width**-0.5)
        self.dropout = Dropout(config.dropout)
        self.encoder = blocks(config, config.encoder_blocks, config.encoder_kernel, causal=False)
        self.decoder = blocks(config, config.decoder_blocks, config.decoder_kernel, causal=True)
        # the stream is a sum that nothing has normalised yet; then the network's two last 1x1 convolutions
        self.top = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.output_projection = nn.Linear(width, vocabulary.target)

    def encode(self, source: Packed) -> Packed:
        """Values M 2D on a layout of M = a S + b columns."""
        embedded = source.with_values(self.dropout(self.source_embedding(source.values)))
        columns = unfolded(embedded, self.config.unfold_factor, self.config.unfold_extra)
        x = columns.values
        for block in self.encoder:
            x = block(x, columns.layout)
        return columns.with_values(x)

    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        layout = target_input.layout
        inside = layout.position_ids < memory.layout.lengths[layout.segment_ids]
        column = memory.layout.cu_seqlens.long()[layout.segment_ids] + torch.where(inside, layout.position_ids, 0)
        x = self.dropout(self.target_embedding(target_input.values))
        x = x + torch.where(inside[:, None], memory.values[column], 0)
        for block in self.decoder:
            x = block(x, layout)
        return self.top(x)

    def start(self, memory: Packed, beams: int) -> RowState:
        return RowState(memory, beams, {f"block {n}": block.state_shapes for n, block in enumerate(self.decoder)})

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        assert isinstance(state, RowState)
        place, lengths = state.advance(), state.lengths.repeat_interleave(state.beams)
        inside = place < lengths
        sentence = torch.arange(len(tokens), device=tokens.device) // state.beams
        column = state.memory[sentence, torch.where(inside, place, 0)]
        x = self.target_embedding(tokens) + torch.where(inside[:, None], column, 0)
        for index, block in enumerate(self.decoder):
            x, past = block.step(x, *state.rows[f"block {index}"])
            state.rows[f"block {index}"] = (past,)
        return self.output_projection(self.top(x))
