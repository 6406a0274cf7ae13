"""The Transformer, in the order of section 3 of "Attention Is All You Need" (Vaswani et al. 2017)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nmtkit.architectures.interface import ARCHITECTURES, Architecture, DecoderState, StaticState, Vocabulary
from nmtkit.architectures.transformer_state import TransformerState
from nmtkit.layers.attention import attention, attention_weights
from nmtkit.layers.dropout import Dropout
from nmtkit.layers.kv_cache import attend_rows
from nmtkit.layers.logits import logits_of
from nmtkit.layers.prepack import kv_cache_dtype
from nmtkit.layers.residual import add_and_norm
from nmtkit.layers.static_kv_cache import CacheLengths, CacheStep, StaticKVCache
from nmtkit.packed import Layout, Packed
from nmtkit.registry import option

# B sentences, S source tokens, T target tokens (of all sentences, end to end), D model width, H heads,
# K width of one query or key head, V width of one value head, N = B x beams rows of a search


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The columns of Table 3, and what later work has added."""

    encoder_layers: int = option(6, "layers of the encoder (N in Table 3)")
    decoder_layers: int = option(6, "layers of the decoder")
    d_model: int = option(512, "width of every sub-layer's output (section 3.1)")
    d_ff: int = option(2048, "inner width of the feed-forward networks (section 3.3)")
    heads: int = option(8, "attention heads (section 3.2.2)")
    d_key: int | None = option(None, "width of one head's queries and keys; none: d_model / heads")
    d_value: int | None = option(None, "width of one head's values; none: d_model / heads")
    dropout: float = option(0.1, "dropout on each sub-layer's output and on the summed embeddings (section 5.4)")
    attention_dropout: float = option(0.0, "dropout on attention weights")
    activation_dropout: float = option(0.0, "dropout after the ReLU")
    positions: Literal["sinusoidal", "learned"] = option("sinusoidal", "position encoding (section 3.5)")
    max_positions: int = option(1024, "longest sentence in tokens, with learned positions")
    pre_norm: bool = option(False, "normalise before each sub-layer instead of after it")
    window: int | None = option(None, "self-attention sees only a neighbourhood of this size (section 4, r); none: all")
    share_embeddings: bool = option(True, "one matrix for both embeddings and the output, given a joint vocabulary")
    encoder_layerdrop: float = option(0.0, "probability that an update leaves out an encoder layer")
    decoder_layerdrop: float = option(0.0, "probability that an update leaves out a decoder layer")
    gradient_checkpointing: bool = option(False, "recompute layers in the backward pass, to save memory")

    def __post_init__(self) -> None:
        for name in (
            "encoder_layers",
            "decoder_layers",
            "d_model",
            "d_ff",
            "heads",
            "d_key",
            "d_value",
            "max_positions",
            "window",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name in ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0 and less than 1")
        if self.d_model % self.heads and (self.d_key is None or self.d_value is None):
            raise ValueError(
                f"d_model {self.d_model} is not a multiple of heads {self.heads}; "
                "give --d-key and --d-value to set them apart"
            )

    @property
    def key_width(self) -> int:
        return self.d_key or self.d_model // self.heads

    @property
    def value_width(self) -> int:
        return self.d_value or self.d_model // self.heads


BASE = TransformerConfig()
BIG = replace(BASE, d_model=1024, d_ff=4096, heads=16, dropout=0.3)


# 3.1 Encoder and decoder stacks


class Residual(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))) (sections 3.1 and 5.4), or, pre-norm, x + Dropout(Sublayer(LayerNorm(x)))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)
        self.pre_norm = config.pre_norm

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            return x + self.dropout(sublayer(self.norm(x)))
        return add_and_norm(x, sublayer(x), self.norm, self.dropout.p, self.training)

    def input(self, x: Tensor) -> Tensor:
        """What the sub-layer sees of x."""
        return self.norm(x) if self.pre_norm else x


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config, causal=False)
        self.feed_forward = FeedForward(config)
        self.attention_residual = Residual(config)
        self.feed_forward_residual = Residual(config)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        x = self.attention_residual(x, lambda y: self.attention(y, layout))
        return self.feed_forward_residual(x, self.feed_forward)

    def maps(self, x: Tensor, layout: Layout) -> Tensor:
        """Attention weights B H L L of the layer, given its input."""
        return self.attention.weights(self.attention_residual.input(x), layout)


class DecoderLayer(nn.Module):
    """Self-attention over the tokens so far, attention over the source, then a feed-forward network."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config, causal=True)
        self.cross_attention = CrossAttention(config)
        self.feed_forward = FeedForward(config)
        self.attention_residual = Residual(config)
        self.cross_attention_residual = Residual(config)
        self.feed_forward_residual = Residual(config)

    def forward(self, x: Tensor, layout: Layout, memory: Tensor, memory_layout: Layout) -> Tensor:
        x = self.attention_residual(x, lambda y: self.attention(y, layout))
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention(y, layout, *self.cross_attention.project(memory), memory_layout)
        )
        return self.feed_forward_residual(x, self.feed_forward)

    def maps(self, x: Tensor, layout: Layout, memory: Tensor, memory_layout: Layout) -> tuple[Tensor, Tensor]:
        """Self-attention weights B H L L and cross-attention weights B H L M of the layer, given its input."""
        own = self.attention.weights(self.attention_residual.input(x), layout)
        x = self.attention_residual(x, lambda y: self.attention(y, layout))
        return own, self.cross_attention.weights(self.cross_attention_residual.input(x), layout, memory, memory_layout)

    def step(self, x: Tensor, state: TransformerState, index: int) -> Tensor:
        """The layer's output [N, D] for the newest token of each row of a search; `index` is the layer's."""
        x = self.attention_residual(x, lambda y: self.attention.step(y, state, index))
        x = self.cross_attention_residual(x, lambda y: self.cross_attention.step(y, state, index))
        return self.feed_forward_residual(x, self.feed_forward)

    def static_step(self, x: Tensor, step: CacheStep, index: int) -> Tensor:
        """The same, in a cache that never changes shape."""
        own, cross = self.attention, self.cross_attention
        x = self.attention_residual(x, lambda y: own.out_proj(step.attend(index, *own.project(y))))
        x = self.cross_attention_residual(
            x, lambda y: cross.out_proj(step.attend_memory(index, cross.q_proj(y).unflatten(-1, (cross.heads, -1))))
        )
        return self.feed_forward_residual(x, self.feed_forward)


# 3.2 Attention


class SelfAttention(nn.Module):
    """Multi-head attention of a sentence to itself (section 3.2.2); one product makes queries, keys and values."""

    def __init__(self, config: TransformerConfig, causal: bool) -> None:
        super().__init__()
        self.heads, self.widths = config.heads, (config.key_width, config.key_width, config.value_width)
        self.causal, self.window, self.dropout = causal, config.window, config.attention_dropout
        self.qkv_proj = nn.Linear(config.d_model, self.heads * sum(self.widths), bias=False)
        self.out_proj = nn.Linear(self.heads * config.value_width, config.d_model, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries T H K, keys T H K, values T H V."""
        sizes = [self.heads * width for width in self.widths]
        query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv_proj(x).split(sizes, -1))
        return query, key, value

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        attended = attention(
            *self.project(x),
            layout,
            layout,
            causal=self.causal,
            window=self.window,
            dropout=self.dropout,
            training=self.training,
        )
        return self.out_proj(attended.flatten(1))

    def step(self, x: Tensor, state: TransformerState, index: int) -> Tensor:
        query, key, value = self.project(x)
        return self.out_proj(attend_rows(query, *state.cache.append(index, key, value), state.own_mask))

    def weights(self, x: Tensor, layout: Layout) -> Tensor:
        """What each token attends to: B H L L."""
        query, key, _ = self.project(x)
        return attention_weights(query, key, layout, layout, causal=self.causal, window=self.window)


class CrossAttention(nn.Module):
    """Multi-head attention of target tokens to the memory of their sentence."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.attention_dropout
        self.widths = config.key_width, config.value_width
        self.q_proj = nn.Linear(config.d_model, self.heads * config.key_width, bias=False)
        self.kv_proj = nn.Linear(config.d_model, self.heads * sum(self.widths), bias=False)
        self.out_proj = nn.Linear(self.heads * config.value_width, config.d_model, bias=False)

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys S H K and values S H V of the memory S D."""
        sizes = [self.heads * width for width in self.widths]
        key, value = (part.unflatten(-1, (self.heads, -1)) for part in self.kv_proj(memory).split(sizes, -1))
        return key, value

    def forward(self, x: Tensor, layout: Layout, key: Tensor, value: Tensor, memory_layout: Layout) -> Tensor:
        query = self.q_proj(x).unflatten(-1, (self.heads, -1))
        attended = attention(query, key, value, layout, memory_layout, dropout=self.dropout, training=self.training)
        return self.out_proj(attended.flatten(1))

    def step(self, x: Tensor, state: TransformerState, index: int) -> Tensor:
        query = self.q_proj(x).unflatten(-1, (self.heads, -1))
        return self.out_proj(attend_rows(query, *state.cross[index], state.memory_mask))

    def weights(self, x: Tensor, layout: Layout, memory: Tensor, memory_layout: Layout) -> Tensor:
        """What each target token attends to: B H L M."""
        query = self.q_proj(x).unflatten(-1, (self.heads, -1))
        key, _ = self.project(memory)
        return attention_weights(query, key, layout, memory_layout, causal=False, window=None)


# 3.3 Position-wise feed-forward networks


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2 (equation 2)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, config.d_ff)
        self.dropout = Dropout(config.activation_dropout)
        self.fc2 = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dropout(self.fc1(x).relu_()))


# 3.4 Embeddings, 3.5 Positional encoding


def sinusoids(positions: int, d_model: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) the cosine: positions x D, float32."""
    position = torch.arange(positions, dtype=torch.float64)[:, None]
    angle = position / 10000 ** (torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :d_model].float()


class Embedding(nn.Module):
    """Token embeddings times sqrt(d_model) plus positions, with dropout (sections 3.4, 3.5 and 5.4)."""

    sinusoids: Tensor

    def __init__(self, config: TransformerConfig, tokens: nn.Embedding) -> None:
        super().__init__()
        self.tokens = tokens
        self.scale = math.sqrt(config.d_model)
        self.dropout = Dropout(config.dropout)
        self.positions: nn.Embedding | None = None
        if config.positions == "learned":
            self.positions = nn.Embedding(config.max_positions, config.d_model)
        else:
            self.register_buffer("sinusoids", sinusoids(1024, config.d_model), persistent=False)

    def forward(self, tokens: Tensor, position: Tensor, length: int) -> Tensor:
        """Token ids T at their positions T, all of these below `length`: T D."""
        return self.dropout(self.tokens(tokens) * self.scale + self.table(length)[position])

    def table(self, length: int) -> Tensor:
        """Encodings of at least `length` positions. Raises ValueError beyond those learned."""
        if self.positions is not None:
            limit = self.positions.num_embeddings
            if length > limit:
                raise ValueError(
                    f"a sentence of {length} tokens is longer than the {limit} positions this model has learned; "
                    "drop or split it, or train with a larger --max-positions or with sinusoidal positions"
                )
            return self.positions.weight
        if length > len(self.sinusoids):
            table = sinusoids(2 * length, self.sinusoids.shape[1])
            self.sinusoids = table.to(self.sinusoids)
        return self.sinusoids


# The whole model


@ARCHITECTURES.register("transformer_big_en_fr", replace(BIG, dropout=0.1))
@ARCHITECTURES.register("transformer_big", BIG)
@ARCHITECTURES.register("transformer_base", BASE)
@ARCHITECTURES.register("transformer_iwslt_de_en", replace(BASE, d_ff=1024, heads=4, dropout=0.3))
@ARCHITECTURES.register(
    "transformer_tiny", replace(BASE, encoder_layers=4, decoder_layers=4, d_model=128, d_ff=256, heads=4)
)
class Transformer(Architecture):
    """Figure 1. With a joint vocabulary, both embeddings and the output projection are one matrix (section 3.4);
    with separate ones, or without `share_embeddings`, the target embedding and the output projection are.
    """

    output_projection: nn.Linear

    def __init__(self, config: TransformerConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.config = config
        target = nn.Embedding(vocabulary.target, config.d_model)
        shared = config.share_embeddings and vocabulary.joint
        source = target if shared else nn.Embedding(vocabulary.source, config.d_model)
        self.source_embedding = Embedding(config, source)
        self.target_embedding = Embedding(config, target)
        encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.encoder, self.decoder = cast(Sequence[EncoderLayer], encoder), cast(Sequence[DecoderLayer], decoder)
        # a pre-norm stack ends in a sum, which nothing has normalised yet
        self.encoder_norm = nn.LayerNorm(config.d_model) if config.pre_norm else nn.Identity()
        self.decoder_norm = nn.LayerNorm(config.d_model) if config.pre_norm else nn.Identity()
        self.output_projection = nn.Linear(config.d_model, vocabulary.target, bias=False)
        self.output_projection.weight = target.weight
        if config.positions == "learned":
            self.max_source_positions = self.max_target_positions = config.max_positions
        self.dropped: frozenset[nn.Module] = frozenset()
        self.apply(self.initialise)

    def initialise(self, module: nn.Module) -> None:
        """Embeddings from N(0, 1 / d_model), so that sqrt(d_model) times one has unit variance; Xavier elsewhere."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.Linear) and module is not self.output_projection:
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def find_unused_parameters(self) -> bool:
        return self.config.encoder_layerdrop > 0 or self.config.decoder_layerdrop > 0

    def begin_update(self, generator: torch.Generator) -> None:
        """Draws the layers that this update leaves out (LayerDrop, Fan et al. 2020)."""
        rated: list[tuple[nn.Module, float]] = [(layer, self.config.encoder_layerdrop) for layer in self.encoder]
        rated += [(layer, self.config.decoder_layerdrop) for layer in self.decoder]
        draws = torch.rand(len(rated), generator=generator).tolist()
        self.dropped = frozenset(layer for (layer, rate), draw in zip(rated, draws, strict=True) if draw < rate)

    def run(self, layer: nn.Module, x: Tensor, *rest: Tensor | Layout) -> Tensor:
        """A layer's output, or while training its input when this update drops the layer."""
        if self.training and layer in self.dropped:
            return x
        if self.training and self.config.gradient_checkpointing:
            return checkpoint(layer, x, *rest, use_reentrant=False)
        return layer(x, *rest)

    def encode(self, source: Packed) -> Packed:
        x = self.source_embedding(source.values, source.layout.position_ids, source.layout.max_length)
        for layer in self.encoder:
            x = self.run(layer, x, source.layout)
        return source.with_values(self.encoder_norm(x))

    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        layout = target_input.layout
        x = self.target_embedding(target_input.values, layout.position_ids, layout.max_length)
        for layer in self.decoder:
            x = self.run(layer, x, layout, memory.values, memory.layout)
        return self.decoder_norm(x)

    def start(self, memory: Packed, beams: int) -> TransformerState:
        projections = [layer.cross_attention.project for layer in self.decoder]
        dtype = kv_cache_dtype(self.decoder[0].attention.qkv_proj)
        return TransformerState(memory, beams, projections, self.config.heads, self.config.window, dtype)

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        assert isinstance(state, TransformerState)
        tokens, position, longest = state.advance(tokens)  # N, or B while the rows of a sentence are one
        x = self.target_embedding(tokens, position, longest)
        for index, layer in enumerate(self.decoder):
            x = layer.step(x, state, index)
        logits: Tensor = self.output_projection(self.decoder_norm(x))
        return logits if len(logits) == state.rows else logits.repeat_interleave(state.beams, 0)

    @property
    def supports_static_decoding(self) -> bool:
        """True unless a subclass decodes or steps in a way of its own. (FSDP's subclass does not.)"""
        return all(getattr(type(self), name) is getattr(Transformer, name) for name in ("decode", "step"))

    def static_start(self, slots: int, beams: int, capacity: int, source_capacity: int) -> StaticKVCache:
        self.target_embedding.table(capacity)  # not to grow, hence move, later
        attentions = [layer.cross_attention for layer in self.decoder]
        return StaticKVCache(
            len(attentions),
            self.config.heads,
            (self.config.key_width, self.config.value_width),
            slots=slots,
            beams=beams,
            capacity=capacity,
            source_capacity=source_capacity,
            window=self.config.window,
            project=lambda memory: torch.cat([attention.kv_proj(memory) for attention in attentions], 1),
            like=self.target_embedding.tokens.weight.detach(),
        )

    def static_step(self, tokens: Tensor, position: Tensor, state: StaticState, reach: CacheLengths) -> Tensor:
        assert isinstance(state, StaticKVCache)
        step = state.begin(position, reach)
        x = self.target_embedding(tokens, position[:, None].expand(-1, state.beams).flatten(), state.capacity)
        for index, layer in enumerate(self.decoder):
            x = layer.static_step(x, step, index)
        return logits_of(self.decoder_norm(x), self.output_projection)

    def attention_weights(self, source: Packed, target_input: Packed) -> dict[str, list[Tensor]]:
        maps: dict[str, list[Tensor]] = {"encoder": [], "decoder": [], "cross": []}
        layout = source.layout
        x = self.source_embedding(source.values, layout.position_ids, layout.max_length)
        for encoder_layer in self.encoder:
            maps["encoder"].append(encoder_layer.maps(x, layout) * layout.mask[:, None, :, None])
            x = encoder_layer(x, layout)
        memory, layout = self.encoder_norm(x), target_input.layout
        x = self.target_embedding(target_input.values, layout.position_ids, layout.max_length)
        for layer in self.decoder:
            for kind, weights in zip(("decoder", "cross"), layer.maps(x, layout, memory, source.layout), strict=True):
                maps[kind].append(weights * layout.mask[:, None, :, None])
            x = layer(x, layout, memory, source.layout)
        return maps
