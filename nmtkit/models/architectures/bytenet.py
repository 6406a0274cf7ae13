"""ByteNet: "Neural Machine Translation in Linear Time" (Kalchbrenner et al. 2016). Comments name the sections."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nmtkit.config import Config, option
from nmtkit.data.packed import Layout, Packed
from nmtkit.models.architectures.incremental import IncrementalArchitecture, IncrementalState
from nmtkit.models.architectures.interface import ARCHITECTURES, Vocabulary, check_odd, probability
from nmtkit.models.layers import module_list
from nmtkit.models.layers.convolution import PackedConvolution
from nmtkit.models.layers.dropout import Dropout
from nmtkit.models.layers.layer_norm import LayerNorm
from nmtkit.models.layers.recurrent import LayerStates

# S source tokens, T target tokens, D inner width of a block (the d of the paper); values between blocks have width 2D


@dataclass(frozen=True, kw_only=True)
class ByteNetConfig(Config):
    """The defaults are the English-German model of section 6.2, on characters (`preprocess --model-type char`)."""

    encoder_blocks: int = option(30, "residual blocks of the encoder", min=1, max=1000)
    decoder_blocks: int = option(30, "residual blocks of the decoder", min=1, max=1000)
    d_model: int = option(
        800, "inner width of a block; values between blocks are twice as wide (section 3.6)", min=1, max=32_768
    )
    encoder_kernel: int = option(3, "kernel of the encoder's convolutions, in tokens (odd)", min=1, max=1000)
    decoder_kernel: int = option(3, "kernel of the decoder's masked convolutions, in tokens", min=1, max=1000)
    dilations: tuple[int, ...] = option(
        (1, 2, 4, 8, 16), "dilations of successive blocks, repeated for all blocks (section 3.5)", min=1, max=65_536
    )
    unfold_factor: float = option(
        1.2, "columns of the source representation per source token, rounded to 0.001 (a in equation 2)", min=1, max=100
    )
    unfold_extra: int = option(0, "further columns of the source representation (b in equation 2)", min=0, max=65_536)
    dropout: float = probability(0.0, "dropout on embeddings and on each block's output")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_odd("--encoder-kernel", self.encoder_kernel)
        if not self.dilations:
            raise ValueError("--dilations is empty; give at least one dilation")


PUBLISHED = ByteNetConfig()


# 3.2 Dynamic unfolding


def unfold(source: Packed, factor: float, extra: int) -> Packed:
    """Extends values [S, width] with zeros to ceil(factor n) + extra columns for a sentence of n tokens (equation 2).

    The factor is rounded to thousandths, so that host and device compute the same lengths with integers.
    """
    thousandths = round(1000 * factor)
    columns = [(length * thousandths + 999) // 1000 + extra for length in source.layout.host_lengths]
    lengths = (source.layout.lengths * thousandths + 999) // 1000 + extra
    layout = Layout(lengths, max(columns), sum(columns))
    inside = layout.position_ids < source.layout.lengths[layout.segment_ids]
    column = source.layout.cu_seqlens.long()[layout.segment_ids] + torch.where(inside, layout.position_ids, 0)
    return Packed(torch.where(inside[:, None], source.values[column], 0), layout)


# 3.4 Masked convolutions, 3.5 Dilation, 3.6 Residual blocks


class ResidualBlock(nn.Module):
    """Three convolutions (1x1, dilated, 1x1), each after a layer norm and a ReLU (figure 3, left): 2D -> D -> D -> 2D.

    The weights of the last convolution are divided by `depth`, the number of blocks of the stack.
    """

    def __init__(self, config: ByteNetConfig, kernel: int, dilation: int, causal: bool, depth: int) -> None:
        super().__init__()
        inner = config.d_model
        self.conv1 = nn.Sequential(LayerNorm(2 * inner), nn.ReLU(), nn.Linear(2 * inner, inner))
        self.norm = nn.Sequential(LayerNorm(inner), nn.ReLU())
        linear = nn.Linear(kernel * inner, inner)
        self.conv2 = PackedConvolution(linear, kernel, width=inner, dilation=dilation, causal=causal)
        last = nn.Linear(inner, 2 * inner)
        for parameter in last.parameters():
            parameter.data.div_(depth)
        self.conv3 = nn.Sequential(LayerNorm(inner), nn.ReLU(), last)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, layout: Layout, states: LayerStates | None = None) -> Tensor:
        y = self.conv2(self.norm(self.conv1(x)), layout, states)
        return x + self.dropout(self.conv3(y))


def residual_blocks(config: ByteNetConfig, count: int, kernel: int, causal: bool) -> Sequence[ResidualBlock]:
    dilations = [config.dilations[index % len(config.dilations)] for index in range(count)]
    return module_list(ResidualBlock(config, kernel, dilation, causal, depth=count) for dilation in dilations)


# 3.1 Encoder-decoder stacking, 3.3 Input embedding


@ARCHITECTURES.register("bytenet", PUBLISHED)
@ARCHITECTURES.register(
    "bytenet_small",
    replace(
        PUBLISHED, encoder_blocks=10, decoder_blocks=10, d_model=192, unfold_factor=1.5, unfold_extra=8, dropout=0.1
    ),
)
class ByteNet(IncrementalArchitecture):
    """A decoder of masked convolutions stacked on an encoder of convolutions, without attention.

    Target token t reads column t of the source representation. This column also depends on the columns around it.
    The paper does not say how the column and the target embedding, both 2D wide, are combined. Here they are added.
    After the last column, the decoder reads only the embedding (section 3.2).

    The paper does not state the initialisation. Here embeddings have a standard deviation of (2D)^-1/2, and the
    weights of the last convolution of a block are divided by the number of blocks. So a stack of any depth starts near
    the identity, as Zhang et al. (2019, "Fixup") recommend for residual networks. Models then learn faster
    (benchmarks/RESULTS.md).
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
        self.encoder = residual_blocks(config, config.encoder_blocks, config.encoder_kernel, causal=False)
        self.decoder = residual_blocks(config, config.decoder_blocks, config.decoder_kernel, causal=True)
        # norm of the output of the last block, then a 1x1 convolution; `output_projection` is the last 1x1 convolution
        self.final = nn.Sequential(LayerNorm(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.output_projection = nn.Linear(width, vocabulary.target)

    def encode(self, source: Packed) -> Packed:
        """Returns the source representation [columns, 2D]. n tokens have ceil(a n) + b columns (equation 2)."""
        embedded = source.with_values(self.dropout(self.source_embedding(source.values)))
        columns = unfold(embedded, self.config.unfold_factor, self.config.unfold_extra)
        x = columns.values
        for block in self.encoder:
            x = block(x, columns.layout)
        return columns.with_values(x)

    def stateful_layers(self) -> Iterable[nn.Module]:
        return [block.conv2 for block in self.decoder]

    def extract_features(self, target_input: Packed, state: IncrementalState) -> Tensor:
        layout = target_input.layout
        position, sentence = state.advance(layout), layout.segment_ids // state.beams
        inside = position < state.lengths[sentence]
        column = state.memory[sentence, torch.where(inside, position, 0)]
        x = self.dropout(self.target_embedding(target_input.values)) + torch.where(inside[:, None], column, 0)
        for block in self.decoder:
            x = block(x, layout, state.states)
        return self.final(x)
