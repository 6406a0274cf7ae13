"""ConvS2S: "Convolutional Sequence to Sequence Learning" (Gehring et al. 2017), in the order of its section 3."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.architectures.interface import ARCHITECTURES, Architecture, DecoderState, Vocabulary
from nmtkit.architectures.row_state import RowState
from nmtkit.layers.attention import attend_one, attention, attention_weights
from nmtkit.layers.convolution import PackedConvolution, WeightNormLinear
from nmtkit.layers.dropout import Dropout
from nmtkit.packed import Layout, Packed
from nmtkit.registry import option

# B sentences, S source tokens, T target tokens of all, E width of the embeddings, C of a block, N rows of a search

HALF = math.sqrt(0.5)  # keeps the variance of a sum of two (section 3.4)


@dataclass(frozen=True, kw_only=True)
class ConvS2SConfig:
    """The defaults are the WMT'14 models of section 4.2."""

    encoder_widths: tuple[int, ...] = option((512,) * 9 + (1024,) * 4 + (2048,) * 2, "width of each encoder block")
    encoder_kernels: tuple[int, ...] = option((3,) * 13 + (1,) * 2, "kernel of each encoder block, in tokens (odd)")
    decoder_widths: tuple[int, ...] = option((512,) * 9 + (1024,) * 4 + (2048,) * 2, "width of each decoder block")
    decoder_kernels: tuple[int, ...] = option((3,) * 13 + (1,) * 2, "kernel of each decoder block, in tokens")
    d_embedding: int = option(768, "width of embeddings, and of queries and keys")
    d_output: int = option(512, "width before the output projection")
    dropout: float = option(0.2, "dropout on embeddings, the input of each block, and the output")
    max_positions: int = option(1024, "longest sentence in tokens")

    def __post_init__(self) -> None:
        for side in ("encoder", "decoder"):
            widths, kernels = getattr(self, f"{side}_widths"), getattr(self, f"{side}_kernels")
            if not widths or len(widths) != len(kernels) or min(widths + kernels) < 1:
                raise ValueError(
                    f"{side}_widths {widths} and {side}_kernels {kernels} must be as many, and each at least 1"
                )
        if any(kernel % 2 == 0 for kernel in self.encoder_kernels):
            raise ValueError(f"encoder_kernels {self.encoder_kernels} must be odd, to have a token in their middle")
        for name in ("d_embedding", "d_output", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and less than 1")


PUBLISHED = ConvS2SConfig()


# 3.1 Position embeddings


class Embedding(nn.Module):
    """Token plus learned position embeddings, with dropout: T E."""

    def __init__(self, config: ConvS2SConfig, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, config.d_embedding)
        self.positions = nn.Embedding(config.max_positions, config.d_embedding)
        nn.init.normal_(self.tokens.weight, std=0.1)  # section 3.5
        nn.init.normal_(self.positions.weight, std=0.1)
        self.dropout = Dropout(config.dropout)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        return self.dropout(self.tokens(tokens) + self.positions(position))

    def of(self, sentences: Packed) -> Tensor:
        """Raises ValueError for a sentence longer than the positions learned."""
        layout, limit = sentences.layout, self.positions.num_embeddings
        if layout.max_length > limit and int(layout.lengths.max()) > limit:  # the first may be no more than a bound
            raise ValueError(
                f"a sentence of {int(layout.lengths.max())} tokens is longer than the {limit} positions this model has "
                "learned; drop or split it, or train with a larger --max-positions"
            )
        return self(sentences.values, layout.position_ids)


# 3.2 Convolutional block structure; 3.5 Initialisation


def linear(width: int, output: int, dropout: float) -> WeightNormLinear:
    """A layer that keeps the variance of an input of which dropout leaves 1 - dropout (section 3.5)."""
    return WeightNormLinear(width, output, math.sqrt((1 - dropout) / width))


class Block(nn.Module):
    """Dropout, convolution, gated linear unit, residual connection (section 3.2): T C' -> T C."""

    def __init__(self, config: ConvS2SConfig, width: int, output: int, kernel: int, causal: bool) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout)
        # a gated linear unit halves the deviation, hence the 4 (section 3.5)
        taps = WeightNormLinear(kernel * width, 2 * output, math.sqrt(4 * (1 - config.dropout) / (kernel * width)))
        self.convolution = PackedConvolution(taps, kernel, causal=causal)
        self.residual = nn.Identity() if width == output else linear(width, output, 0)
        self.state_shapes = ((self.convolution.reach, width),)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        return (self.gated(x, layout) + self.residual(x)) * HALF

    def gated(self, x: Tensor, layout: Layout) -> Tensor:
        return F.glu(self.convolution(self.dropout(x), layout))


# 3.3 Multi-step attention


class Attention(nn.Module):
    """A decoder block's own attention: dot products of its state and the target embedding with the encoder's output,
    over sums of that output and the source embedding (equations 1 and 2). Memory values hold the two side by side.
    """

    def __init__(self, width: int, embedding: int) -> None:
        super().__init__()
        self.query_of = linear(width, embedding, 0)
        self.context = linear(embedding, width, 0)

    def query(self, h: Tensor, embedded: Tensor) -> Tensor:
        """T 1 E; the factor undoes the scaling of the attention layer, which the paper does not have."""
        query = (self.query_of(h) + embedded) * HALF
        return query[:, None] * math.sqrt(query.shape[-1])

    def scaled(self, context: Tensor, lengths: Tensor) -> Tensor:
        """The context T E brought to the block's width. A mean over m tokens has sqrt(1/m) of their deviation, which
        sqrt(m) restores (section 3.4); `lengths` T is m.
        """
        return self.context(context * lengths.sqrt()[:, None].to(context.dtype))

    def forward(self, h: Tensor, embedded: Tensor, layout: Layout, memory: Packed) -> Tensor:
        key, value = (part[:, None] for part in memory.values.chunk(2, -1))
        context = attention(self.query(h, embedded), key, value, layout, memory.layout)[:, 0]
        return self.scaled(context, memory.layout.lengths[layout.segment_ids])

    def step(self, h: Tensor, embedded: Tensor, state: RowState) -> Tensor:
        query = self.query(h, embedded).unflatten(0, (-1, state.beams))  # N 1 E -> B beams 1 E
        key, value = (part[:, :, None] for part in state.memory.chunk(2, -1))
        context = attend_one(query, key, value, state.valid).flatten(0, 1)[:, 0]
        return self.scaled(context, state.lengths.repeat_interleave(state.beams))


class DecoderBlock(Block):
    """A causal block that attends between its gate and its residual connection."""

    def __init__(self, config: ConvS2SConfig, width: int, output: int, kernel: int) -> None:
        super().__init__(config, width, output, kernel, causal=True)
        self.attention = Attention(output, config.d_embedding)

    def attend(self, x: Tensor, embedded: Tensor, layout: Layout, memory: Packed) -> Tensor:
        h = self.gated(x, layout)
        h = (h + self.attention(h, embedded, layout, memory)) * HALF
        return (h + self.residual(x)) * HALF

    def step(self, x: Tensor, embedded: Tensor, state: RowState, name: str) -> Tensor:
        taps, past = self.convolution.step(self.dropout(x), *state.rows[name])
        state.rows[name] = (past,)
        h = F.glu(taps)
        h = (h + self.attention.step(h, embedded, state)) * HALF
        return (h + self.residual(x)) * HALF


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
class ConvS2S(Architecture):
    """Figure 1: stacks of gated convolutions, with attention in every decoder block."""

    def __init__(self, config: ConvS2SConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.max_source_positions = self.max_target_positions = config.max_positions
        embedding, dropout = config.d_embedding, config.dropout
        self.source_embedding = Embedding(config, vocabulary.source)
        self.target_embedding = Embedding(config, vocabulary.target)
        widths = [config.encoder_widths[0], *config.encoder_widths]
        self.into_encoder = linear(embedding, widths[0], dropout)
        encoder = nn.ModuleList(
            Block(config, *shape, causal=False)
            for shape in zip(widths[:-1], widths[1:], config.encoder_kernels, strict=True)
        )
        self.encoder = cast(Sequence[Block], encoder)
        self.out_of_encoder = linear(widths[-1], embedding, 0)
        widths = [config.decoder_widths[0], *config.decoder_widths]
        self.into_decoder = linear(embedding, widths[0], dropout)
        decoder = nn.ModuleList(
            DecoderBlock(config, *shape) for shape in zip(widths[:-1], widths[1:], config.decoder_kernels, strict=True)
        )
        self.decoder = cast(Sequence[DecoderBlock], decoder)
        self.out_of_decoder = linear(widths[-1], config.d_output, 0)
        self.dropout = Dropout(dropout)
        self.output_projection = nn.Linear(config.d_output, vocabulary.target)
        nn.init.normal_(self.output_projection.weight, std=math.sqrt((1 - dropout) / config.d_output))
        nn.init.zeros_(self.output_projection.bias)

    def encode(self, source: Packed) -> Packed:
        """Values S 2E: keys z, and beside them z + e (equation 2)."""
        e = self.source_embedding.of(source)
        x = self.into_encoder(e)
        for block in self.encoder:
            x = block(x, source.layout)
        z = self.out_of_encoder(x)
        if z.requires_grad:
            # every attention sends its gradient here; the source embeddings are spared (section 3.4)
            z.register_hook(lambda gradient: gradient / len(self.decoder))
        return source.with_values(torch.cat([z, (z + e) * HALF], -1))

    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        layout = target_input.layout
        embedded = self.target_embedding.of(target_input)
        x = self.into_decoder(embedded)
        for block in self.decoder:
            x = block.attend(x, embedded, layout, memory)
        return self.dropout(self.out_of_decoder(x))

    def start(self, memory: Packed, beams: int) -> RowState:
        return RowState(memory, beams, {f"block {n}": block.state_shapes for n, block in enumerate(self.decoder)})

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        assert isinstance(state, RowState)
        embedded = self.target_embedding(tokens, state.advance())
        x = self.into_decoder(embedded)
        for index, block in enumerate(self.decoder):
            x = block.step(x, embedded, state, f"block {index}")
        return self.output_projection(self.dropout(self.out_of_decoder(x)))

    def attention_weights(self, source: Packed, target_input: Packed) -> dict[str, list[Tensor]]:
        memory, layout = self.encode(source), target_input.layout
        key = memory.values.chunk(2, -1)[0][:, None]
        embedded = self.target_embedding.of(target_input)
        x, maps = self.into_decoder(embedded), []
        for block in self.decoder:
            query = block.attention.query(block.gated(x, layout), embedded)
            weights = attention_weights(query, key, layout, memory.layout, causal=False, window=None)
            maps.append(weights * layout.mask[:, None, :, None])
            x = block.attend(x, embedded, layout, memory)
        return {"cross": maps}
