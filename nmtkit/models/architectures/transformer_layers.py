"""The layers of the Transformer, in the order of section 3 of "Attention Is All You Need" (Vaswani et al. 2017)."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.models.architectures.transformer_config import ADDED_POSITIONS, TransformerConfig
from nmtkit.models.layers import is_unmodified, stacked_linear
from nmtkit.models.layers.attention import AttentionContext, RecurrentContext
from nmtkit.models.layers.attention_reference import AttentionSpec, HeadSplit
from nmtkit.models.layers.dropout import Dropout, add_and_norm
from nmtkit.models.layers.feed_forward import FeedForward
from nmtkit.models.layers.fixed_state import SSRU, AverageAttention, LightConvolution
from nmtkit.models.layers.quantization import RoundedLinear
from nmtkit.models.layers.relative_positions import Alibi, PositionTerms, RelativePositions, Rotary, sinusoids

# T target tokens, S source tokens (of all sentences, concatenated), D model width, H heads, K width of a query or key
# head, Kv width of a value head


Context = AttentionContext | RecurrentContext

# 3.1 Encoder and decoder stacks; models/layers/feed_forward.py has the networks of section 3.3


def norm_of(config: TransformerConfig, width: int | None = None) -> nn.Module:
    """Returns a norm for vectors of width `width`, or of the width of the model if `width` is None."""
    kind = nn.LayerNorm if config.norm == "layer" else nn.RMSNorm
    return kind(width or config.d_model, config.norm_eps)


class Layer(nn.Module):
    """A layer of the encoder, or of the decoder if `decoder` is true, with a residual connection around each sub-layer.

    `index` is the number of the layer, from 0. `scales` has the weight of the residual connection of each sub-layer, by
    name, if the weights are not 1.
    """

    def __init__(self, config: TransformerConfig, index: int, decoder: bool) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout)
        self.pre_norm = config.pre_norm
        self.scales: Mapping[str, Tensor | float] = {}
        self.self_attention = self_attention(config, index, causal=decoder)
        self.self_attention_norm = norm_of(config)
        self.cross_attention: CrossAttention | None = None
        if decoder and config.reads_source:
            self.cross_attention = CrossAttention(config)
            self.cross_attention_norm = norm_of(config)
        self.feed_forward: nn.Module | None = None
        if not decoder or config.decoder_ffn == "all":
            self.feed_forward = FeedForward(config.d_model, *config.inner)
            self.feed_forward_norm = norm_of(config)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = self.residual(x, "self_attention", context)
        if self.cross_attention is not None:
            x = self.residual(x, "cross_attention", context)
        return x if self.feed_forward is None else self.residual(x, "feed_forward")

    def residual(self, x: Tensor, name: str, *context: Context) -> Tensor:
        """Applies the sub-layer `name`: returns LayerNorm(scale * x + Dropout(Sublayer(x))) (sections 3.1, 5.4).

        The scale is 1, or comes from `scales`. With pre-norm, returns x + Dropout(Sublayer(LayerNorm(x))).
        """
        norm: nn.Module = getattr(self, f"{name}_norm")
        sublayer: nn.Module = getattr(self, name)
        if self.pre_norm:
            return x + self.dropout(sublayer(norm(x), *context))
        change = sublayer(x, *context)
        if self.scales:
            x = x * self.scales[name]
        if not (self.dropout.training or torch.is_grad_enabled()):
            return norm(x + change)
        if self.dropout.training and not is_unmodified(self.dropout, Dropout):
            return norm(x + self.dropout(change))
        return add_and_norm(x, change, norm, self.dropout.p if self.dropout.training else 0.0)


class EncoderLayer(Layer):
    """Self-attention (or a convolution), then a feed-forward network."""

    def __init__(self, config: TransformerConfig, index: int) -> None:
        super().__init__(config, index, decoder=False)


class DecoderLayer(Layer):
    """Self-attention over earlier tokens (or a replacement), attention over the source, and a feed-forward network.

    A language model has no attention over the source.
    """

    def __init__(self, config: TransformerConfig, index: int) -> None:
        super().__init__(config, index, decoder=True)


def self_attention(
    config: TransformerConfig, index: int, causal: bool
) -> "SelfAttention | AverageAttention | SSRU | LightConvolution":
    """Returns the self-attention of layer `index`, counted from 0, or its replacement. `causal` means a decoder."""
    kind = config.decoder_self_attention if causal else config.encoder_self_attention
    if kind == "attention":
        return SelfAttention(config, causal)
    if kind == "ssru":
        return SSRU(config.d_model, config.norm_eps if config.ssru_norm else None)
    if kind == "average":
        gates = config.average_gate, config.attention_bias, config.average_separate_gates
        return AverageAttention(config.d_model, config.inner if config.average_ffn else None, *gates)
    return LightConvolution(
        config.d_model,
        config.heads,
        config.kernel(index),
        causal=causal,
        dynamic=kind == "dynamicconv",
        dropout=config.attention_dropout,
        bias=config.attention_bias,
    )


# 3.2 Attention


class SelfAttention(nn.Module):
    """Multi-head attention of a sentence to itself (section 3.2.2). A single product gives queries, keys and values."""

    def __init__(self, config: TransformerConfig, causal: bool) -> None:
        super().__init__()
        self.position_terms: PositionTerms | None = None
        if config.positions == "alibi":
            self.position_terms = Alibi(config.heads)
        elif config.positions == "relative":
            self.position_terms = RelativePositions(
                config.max_distance, key_width=config.key_width, value_width=config.value_width
            )
        self.spec = AttentionSpec(causal, config.window, position_terms=self.position_terms)
        self.training_spec = replace(self.spec, dropout=config.attention_dropout)
        # queries T H K, keys T H K, values T H Kv; with --kv-heads, fewer heads of keys and values
        heads = config.heads, config.heads_of_keys, config.heads_of_keys
        self.split_heads = HeadSplit(heads, (config.key_width, config.key_width, config.value_width))
        self.turned_heads = config.heads + config.heads_of_keys
        self.qkv_proj = stacked_linear(config.d_model, self.split_heads.sizes, config.attention_bias)
        self.out_proj = nn.Linear(config.heads * config.value_width, config.d_model, bias=config.attention_bias)
        self.rotary = Rotary(config.key_width, config.rotary_base) if config.positions == "rotary" else None
        self.query_norm, self.key_norm = (norm_of(config, config.key_width) if config.qk_norm else None for _ in "qk")

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        spec, qkv = self.training_spec if self.training else self.spec, self.qkv_proj(x)
        if self.rotary is not None or self.query_norm is not None:
            qkv = self.with_norms_and_positions(qkv, context.positions)
        return self.out_proj(context.self_attention(qkv, self.split_heads, spec))

    def with_norms_and_positions(self, qkv: Tensor, positions: Tensor | int) -> Tensor:
        """Applies `qk_norm` and rotary positions to the queries and keys of a stacked projection.

        The input and the result hold queries, keys and values side by side, T H*(2K+Kv).
        """
        x = qkv
        if self.query_norm is not None and self.key_norm is not None:
            query, key, value = self.split_heads(qkv)
            query, key = self.query_norm(query), self.key_norm(key)
            x = torch.cat([part.flatten(1) for part in (query, key, value)], 1)
        if self.rotary is not None:
            if isinstance(positions, Tensor):
                positions = F.pad(positions, (0, len(qkv) - len(positions)))  # padding rows get position 0
            x = self.rotary(x, positions, self.turned_heads)
        return x.to(qkv.dtype)


class CrossAttention(nn.Module):
    """Multi-head attention of target tokens to the memory of their sentence."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.spec, self.training_spec = AttentionSpec(), AttentionSpec(dropout=config.attention_dropout)
        self.split_heads = HeadSplit([config.heads_of_keys] * 2, (config.key_width, config.value_width))
        self.q_proj = nn.Linear(config.d_model, self.heads * config.key_width, bias=config.attention_bias)
        self.kv_proj = stacked_linear(config.d_model, self.split_heads.sizes, config.attention_bias)
        self.out_proj = nn.Linear(self.heads * config.value_width, config.d_model, bias=config.attention_bias)
        self.query_norm, self.key_norm = (norm_of(config, config.key_width) if config.qk_norm else None for _ in "qk")

    def project(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Returns keys S H K and values S H Kv of the memory S D."""
        key, value = self.split_heads(self.kv_proj(memory))
        return (key if self.key_norm is None else self.key_norm(key).to(key.dtype)), value

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        query = self.q_proj(x).view(len(x), self.heads, -1)
        query = query if self.query_norm is None else self.query_norm(query).to(query.dtype)
        spec = self.training_spec if self.training else self.spec
        return self.out_proj(context.cross_attention(query, self.project, spec))


# modules that compute rows independently, or that ignore rows after the last token
ROW_WISE = (
    *(EncoderLayer, DecoderLayer, SelfAttention, SSRU, AverageAttention, CrossAttention, FeedForward),
    *(nn.ModuleList, nn.Linear, RoundedLinear, nn.LayerNorm, nn.RMSNorm, nn.Identity, Dropout),
    *(LightConvolution, Alibi, RelativePositions, nn.Embedding, nn.ParameterDict),
)


# 3.4 Embeddings, 3.5 Positional encoding


class Embedding(nn.Module):
    """Token embeddings times sqrt(d_model) plus positions, with dropout (sections 3.4, 3.5 and 5.4).

    Positions inside self-attention (rotary, relative, alibi) are not added to embeddings.
    """

    sinusoids: Tensor

    def __init__(self, config: TransformerConfig, tokens: nn.Embedding, zero_first: bool = False) -> None:
        super().__init__()
        self.config, self.zero_first = config, zero_first
        self.tokens = tokens
        self.scale = math.sqrt(config.d_model) if config.scale_embeddings else 1.0
        self.norm: nn.Module = norm_of(config) if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.positions: nn.Embedding | None = None
        if config.positions == "learned":
            self.positions = nn.Embedding(config.max_positions, config.d_model)
        elif config.positions in ADDED_POSITIONS:
            self.register_buffer("sinusoids", self.computed(1024), persistent=False)

    def forward(self, tokens: Tensor, position: Tensor | int, length: int) -> Tensor:
        """Returns the sums [T, D] of the embeddings of token ids [T] and of their position encodings.

        `position` has the position of each token [T], or is one integer, the position of all tokens. Every position
        must be below `length`, the size of the table of positions. With `zero_first` (`--zero-bos`), the embedding of
        the token at position 0 is zero, so the sum is the position encoding alone, if there is any.
        """
        x = self.tokens(tokens) * self.scale
        if self.zero_first and isinstance(position, Tensor):
            x = x.masked_fill((position == 0)[:, None], 0.0)
        elif self.zero_first and position == 0:
            x = torch.zeros_like(x)
        if self.config.positions in ADDED_POSITIONS:
            table = self.table(length)
            learned = self.positions  # must be called, because --quantize-aware rounds its weight in a call
            x = x + (table[position] if learned is None else learned(torch.as_tensor(position, device=x.device)))
        return self.dropout(self.norm(x))

    def computed(self, length: int) -> Tensor:
        return sinusoids(length, self.config.d_model, self.config.positions, self.config.position_offset)

    def table(self, length: int) -> Tensor:
        """Returns encodings of at least `length` positions. Raises ValueError if the model has learned fewer."""
        if self.positions is not None:
            limit = self.positions.num_embeddings
            if length > limit:
                raise ValueError(
                    f"a sentence of {length} tokens is longer than the {limit} positions this model has learned; "
                    "drop or split it, or train with a larger --max-positions or with sinusoidal positions"
                )
            return self.positions.weight
        if length > len(self.sinusoids):
            self.sinusoids = self.computed(2 * length).to(self.sinusoids)
        return self.sinusoids
