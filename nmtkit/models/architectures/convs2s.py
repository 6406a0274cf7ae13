"""ConvS2S: "Convolutional Sequence to Sequence Learning" (Gehring et al. 2017). The code follows section 3."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.config import Config, option
from nmtkit.data.packed import Layout, Packed
from nmtkit.models.architectures.incremental import IncrementalArchitecture, IncrementalState
from nmtkit.models.architectures.interface import ARCHITECTURES, Vocabulary, check_odd, probability
from nmtkit.models.layers import module_list
from nmtkit.models.layers.attention import attention
from nmtkit.models.layers.attention_reference import attention_weights
from nmtkit.models.layers.convolution import PackedConvolution, WeightNormLinear
from nmtkit.models.layers.dropout import Dropout

# B sentences, S source tokens, T target tokens, M tokens of the longest source sentence, R hypotheses of a sentence;
# `embedding` is the width of the embeddings, `width` is the width of a block

WIDTHS = (512,) * 9 + (1024,) * 4 + (2048,) * 2  # widths of the blocks of the WMT'14 models
KERNELS = (3,) * 13 + (1,) * 2  # kernels of these blocks
HALF = math.sqrt(0.5)  # factor that gives a sum of two values the variance of one value (section 3.4)


@dataclass(frozen=True, kw_only=True)
class ConvS2SConfig(Config):
    """Settings of ConvS2S. The defaults give the WMT'14 models of section 4.2."""

    encoder_widths: tuple[int, ...] = option(WIDTHS, "width of each encoder block", min=1, max=65_536)
    encoder_kernels: tuple[int, ...] = option(KERNELS, "kernel of each encoder block, in tokens (odd)", min=1, max=1000)
    decoder_widths: tuple[int, ...] = option(WIDTHS, "width of each decoder block", min=1, max=65_536)
    decoder_kernels: tuple[int, ...] = option(KERNELS, "kernel of each decoder block, in tokens", min=1, max=1000)
    d_embedding: int = option(768, "width of embeddings, and of queries and keys", min=1, max=65_536)
    d_output: int = option(512, "width before the output projection", min=1, max=65_536)
    dropout: float = probability(0.2, "dropout on embeddings, the input of each block, and the output")
    max_positions: int = option(1024, "maximum length of a sentence in tokens", min=1, max=1_000_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        for side in ("encoder", "decoder"):
            widths, kernels = getattr(self, f"{side}_widths"), getattr(self, f"{side}_kernels")
            if not widths or len(widths) != len(kernels):
                raise ValueError(
                    f"--{side}-widths has {len(widths)} numbers, but --{side}-kernels has {len(kernels)}; "
                    "give one width and one kernel for every block"
                )
        check_odd("--encoder-kernels", *self.encoder_kernels)


PUBLISHED = ConvS2SConfig()


# 3.1 Position embeddings


class TokenEmbedding(nn.Module):
    """The sum of token embeddings and learned position embeddings, with dropout: [T, embedding]."""

    def __init__(self, config: ConvS2SConfig, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, config.d_embedding)
        self.positions = nn.Embedding(config.max_positions, config.d_embedding)
        nn.init.normal_(self.tokens.weight, std=0.1)  # section 3.5
        nn.init.normal_(self.positions.weight, std=0.1)
        self.dropout = Dropout(config.dropout)

    def forward(self, sentences: Packed, position: Tensor) -> Tensor:
        """Returns embeddings of tokens at `position` [T], from 0. Raises ValueError beyond the learned positions."""
        layout, limit = sentences.layout, self.positions.num_embeddings
        # max_length may be only an upper bound, so the exact lengths decide; they are read only if necessary, because
        # reading them waits for the device
        if layout.max_length > limit and int(layout.lengths.max()) > limit:
            raise ValueError(
                f"a sentence of {int(layout.lengths.max())} tokens is longer than the {limit} positions this model has "
                "learned; drop or split it, or train with a larger --max-positions"
            )
        return self.dropout(self.tokens(sentences.values) + self.positions(position))


# 3.2 Convolutional block structure; 3.5 Initialisation


def linear(width: int, output: int, dropout: float) -> WeightNormLinear:
    """Returns a layer for an input with dropout. Its initial weights keep the variance of the input (section 3.5).

    `dropout` is the probability of the dropout. The variance of the input is measured before the dropout.
    """
    return WeightNormLinear(width, output, math.sqrt((1 - dropout) / width))


class ConvolutionBlock(nn.Module):
    """Dropout, convolution, gated linear unit, attention (decoder only), residual sum: [T, width] -> [T, output]."""

    def __init__(self, config: ConvS2SConfig, width: int, output: int, kernel: int, decoder: bool) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout)
        # a gated linear unit halves the standard deviation, so the variance of its input is four times as large
        # (section 3.5)
        taps = WeightNormLinear(kernel * width, 2 * output, math.sqrt(4 * (1 - config.dropout) / (kernel * width)))
        self.convolution = PackedConvolution(taps, kernel, width=width, causal=decoder)
        self.residual = nn.Identity() if width == output else linear(width, output, 0)
        self.attention = MultiStepAttention(output, config.d_embedding) if decoder else None

    def forward(
        self, x: Tensor, layout: Layout, embedded: Tensor | None = None, state: IncrementalState | None = None
    ) -> Tensor:
        """Computes the block. In the decoder, `embedded` [T, embedding] are the target embeddings."""
        h = F.glu(self.convolution(self.dropout(x), layout, None if state is None else state.states))
        if self.attention is not None:
            assert embedded is not None and state is not None
            h = (h + self.attention(h, embedded, layout, state)) * HALF
        return (h + self.residual(x)) * HALF


# 3.3 Multi-step attention


class MultiStepAttention(nn.Module):
    """The attention of a decoder block (equations 1 and 2).

    A query is the state of the block plus the target embedding. A key is the output of the encoder, and a value is the
    output of the encoder plus the source embedding. The memory holds keys and values, concatenated.
    """

    def __init__(self, width: int, embedding: int) -> None:
        super().__init__()
        self.in_proj = linear(width, embedding, 0)
        self.out_proj = linear(embedding, width, 0)

    def forward(self, h: Tensor, embedded: Tensor, layout: Layout, state: IncrementalState) -> Tensor:
        query = (self.in_proj(h) + embedded) * HALF
        # T 1 embedding; the factor cancels the scaling in the attention kernels
        query = query[:, None] * math.sqrt(query.shape[-1])
        if state.packed_memory is None:
            keys, values = state.memory.chunk(2, -1)
            queries = query.unflatten(0, (-1, state.beams)).transpose(1, 2)  # N 1 embedding -> B 1 R embedding
            mask = state.mask[:, None, None]
            context = F.scaled_dot_product_attention(queries, keys[:, None], values[:, None], mask).flatten(0, 2)
            lengths = state.lengths.repeat_interleave(state.beams)
        else:
            source = state.packed_memory.layout
            key, value = (part[:, None] for part in state.packed_memory.values.chunk(2, -1))
            context = attention(query, key, value, layout, source)[:, 0]
            lengths = source.lengths[layout.segment_ids]
            if state.recorded_weights is not None:
                state.recorded_weights.append(attention_weights(query, key, layout, source))
        # a mean of m tokens has sqrt(1/m) times the standard deviation of a token; sqrt(m) corrects this (section 3.4)
        return self.out_proj(context * lengths.sqrt()[:, None].to(context.dtype))


# The whole model


@ARCHITECTURES.register("convs2s", PUBLISHED)
@ARCHITECTURES.register(
    "convs2s_small",
    replace(
        PUBLISHED,
        encoder_widths=(256,) * 4,
        encoder_kernels=(3,) * 4,
        decoder_widths=(256,) * 3,
        decoder_kernels=(3,) * 3,
        d_embedding=256,
        d_output=256,
    ),
)
class ConvS2S(IncrementalArchitecture):
    """The model of figure 1: stacks of gated convolutions, with attention in every decoder block."""

    def __init__(self, config: ConvS2SConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.max_source_positions = self.max_target_positions = config.max_positions
        embedding, dropout = config.d_embedding, config.dropout
        self.source_embedding = TokenEmbedding(config, vocabulary.source)
        self.target_embedding = TokenEmbedding(config, vocabulary.target)
        self.encoder_in_proj = linear(embedding, config.encoder_widths[0], dropout)
        self.encoder = blocks(config, config.encoder_widths, config.encoder_kernels, decoder=False)
        self.encoder_out_proj = linear(config.encoder_widths[-1], embedding, 0)
        self.decoder_in_proj = linear(embedding, config.decoder_widths[0], dropout)
        self.decoder = blocks(config, config.decoder_widths, config.decoder_kernels, decoder=True)
        self.decoder_out_proj = linear(config.decoder_widths[-1], config.d_output, 0)
        self.dropout = Dropout(dropout)
        self.output_projection = nn.Linear(config.d_output, vocabulary.target)
        nn.init.normal_(self.output_projection.weight, std=math.sqrt((1 - dropout) / config.d_output))
        nn.init.zeros_(self.output_projection.bias)

    def encode(self, source: Packed) -> Packed:
        """Returns keys z and values z + e (equation 2), concatenated: [S, 2 x embedding]."""
        e = self.source_embedding(source, source.layout.position_ids)
        x = self.encoder_in_proj(e)
        for block in self.encoder:
            x = block(x, source.layout)
        z = self.encoder_out_proj(x)
        if z.requires_grad:
            # this gradient is a sum over all decoder blocks, so it is divided by the number of blocks (section 3.4)
            z.register_hook(lambda gradient: gradient / len(self.decoder))
        return source.with_values(torch.cat([z, (z + e) * HALF], -1))

    def stateful_layers(self) -> Iterable[nn.Module]:
        return [block.convolution for block in self.decoder]

    def extract_features(self, target_input: Packed, state: IncrementalState) -> Tensor:
        layout = target_input.layout
        embedded = self.target_embedding(target_input, state.advance(layout))
        x = self.decoder_in_proj(embedded)
        for block in self.decoder:
            x = block(x, layout, embedded, state)
        return self.dropout(self.decoder_out_proj(x))


def blocks(
    config: ConvS2SConfig, widths: Sequence[int], kernels: Sequence[int], decoder: bool
) -> Sequence[ConvolutionBlock]:
    shapes = zip([widths[0], *widths[:-1]], widths, kernels, strict=True)
    return module_list(ConvolutionBlock(config, *shape, decoder) for shape in shapes)
