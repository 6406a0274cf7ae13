"""The Transformer, in the order of section 3 of "Attention Is All You Need" (Vaswani et al. 2017)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import repeat
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nmtkit.data.packed import Layout, Packed
from nmtkit.models.architectures.interface import (
    ARCHITECTURES,
    Architecture,
    DecoderState,
    StaticState,
    Vocabulary,
    layer_index,
)
from nmtkit.models.architectures.transformer_config import PRESETS, TransformerConfig
from nmtkit.models.layers import compute_dtype, hooks_of, is_unmodified, stacked_linear
from nmtkit.models.layers.attention import AttentionContext, PackedContext, RecurrentContext
from nmtkit.models.layers.attention_reference import AttentionSpec, HeadSplit
from nmtkit.models.layers.dropout import Dropout, add_and_norm
from nmtkit.models.layers.feed_forward import FeedForward
from nmtkit.models.layers.fixed_state import SSRU, AverageAttention, RecurrentCache, StaticRecurrentCache
from nmtkit.models.layers.kv_cache import KVCache, MemoryCache
from nmtkit.models.layers.output_columns import fp32_logits
from nmtkit.models.layers.positions import sinusoids
from nmtkit.models.layers.prepack import kv_cache_dtype
from nmtkit.models.layers.quantization import RoundedLinear
from nmtkit.models.layers.shape_padding import pad_rows
from nmtkit.models.layers.static_kv_cache import CacheLengths, StaticKVCache, StaticMemory, StaticSizes

# B sentences or slots of a search, R hypotheses of each, N = B x R, S source tokens, T target tokens (of all sentences,
# concatenated), D model width, H heads, K width of a query or key head, Kv width of a value head


Context = AttentionContext | RecurrentContext

# 3.1 Encoder and decoder stacks; models/layers/feed_forward.py has the networks of section 3.3


class Layer(nn.Module):
    """Base class of encoder and decoder layers, with the residual connection around a sub-layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout)
        self.pre_norm = config.pre_norm

    def residual(self, x: Tensor, norm: nn.LayerNorm, sublayer: nn.Module, *context: Context) -> Tensor:
        """Returns LayerNorm(x + Dropout(Sublayer(x))) (sections 3.1, 5.4).

        With pre-norm, returns x + Dropout(Sublayer(LayerNorm(x))).
        """
        if self.pre_norm:
            return x + self.dropout(sublayer(norm(x), *context))
        change = sublayer(x, *context)
        if not (self.dropout.training or torch.is_grad_enabled()):
            return norm(x + change)
        if self.dropout.training and not is_unmodified(self.dropout, Dropout):
            return norm(x + self.dropout(change))
        return add_and_norm(x, change, norm, self.dropout.p if self.dropout.training else 0.0)


class EncoderLayer(Layer):
    """Self-attention, then a feed-forward network."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.self_attention = SelfAttention(config, causal=False)
        self.self_attention_norm = nn.LayerNorm(config.d_model, config.norm_eps)
        inner = config.d_ff, config.activation, config.activation_dropout
        self.feed_forward: nn.Module = FeedForward(config.d_model, *inner)
        self.feed_forward_norm = nn.LayerNorm(config.d_model, config.norm_eps)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = self.residual(x, self.self_attention_norm, self.self_attention, context)
        return self.residual(x, self.feed_forward_norm, self.feed_forward)


class DecoderLayer(Layer):
    """Self-attention over earlier tokens (or a replacement), attention over the source, and a feed-forward network.

    A language model has no attention over the source.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.self_attention = decoder_self_attention(config)
        self.self_attention_norm = nn.LayerNorm(config.d_model, config.norm_eps)
        self.cross_attention: CrossAttention | None = None
        if config.reads_source:
            self.cross_attention = CrossAttention(config)
            self.cross_attention_norm = nn.LayerNorm(config.d_model, config.norm_eps)
        self.feed_forward: nn.Module | None = None
        if config.decoder_ffn == "all":
            inner = config.d_ff, config.activation, config.activation_dropout
            self.feed_forward = FeedForward(config.d_model, *inner)
            self.feed_forward_norm = nn.LayerNorm(config.d_model, config.norm_eps)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = self.residual(x, self.self_attention_norm, self.self_attention, context)
        if self.cross_attention is not None:
            x = self.residual(x, self.cross_attention_norm, self.cross_attention, context)
        return x if self.feed_forward is None else self.residual(x, self.feed_forward_norm, self.feed_forward)


def decoder_self_attention(config: TransformerConfig) -> "SelfAttention | AverageAttention | SSRU":
    if config.decoder_self_attention == "ssru":
        return SSRU(config.d_model, config.norm_eps if config.ssru_norm else None)
    if config.decoder_self_attention == "average":
        inner = (config.d_ff, config.activation, config.activation_dropout) if config.average_ffn else None
        gates = config.average_gate, config.attention_bias, config.average_separate_gates
        return AverageAttention(config.d_model, inner, *gates)
    return SelfAttention(config, causal=True)


# 3.2 Attention


class SelfAttention(nn.Module):
    """Multi-head attention of a sentence to itself (section 3.2.2). A single product gives queries, keys and values."""

    def __init__(self, config: TransformerConfig, causal: bool) -> None:
        super().__init__()
        self.spec = AttentionSpec(causal, config.window)
        self.training_spec = replace(self.spec, dropout=config.attention_dropout)
        # queries T H K, keys T H K, values T H Kv
        self.split_heads = HeadSplit(config.heads, (config.key_width, config.key_width, config.value_width))
        self.qkv_proj = stacked_linear(config.d_model, self.split_heads.sizes, config.attention_bias)
        self.out_proj = nn.Linear(config.heads * config.value_width, config.d_model, bias=config.attention_bias)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        spec = self.training_spec if self.training else self.spec
        return self.out_proj(context.self_attention(self.qkv_proj(x), self.split_heads, spec))


class CrossAttention(nn.Module):
    """Multi-head attention of target tokens to the memory of their sentence."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.spec, self.training_spec = AttentionSpec(), AttentionSpec(dropout=config.attention_dropout)
        self.split_heads = HeadSplit(config.heads, (config.key_width, config.value_width))
        self.q_proj = nn.Linear(config.d_model, self.heads * config.key_width, bias=config.attention_bias)
        self.kv_proj = stacked_linear(config.d_model, self.split_heads.sizes, config.attention_bias)
        self.out_proj = nn.Linear(self.heads * config.value_width, config.d_model, bias=config.attention_bias)

    def project(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Returns keys S H K and values S H Kv of the memory S D."""
        return self.split_heads(self.kv_proj(memory))

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        query = self.q_proj(x).view(len(x), self.heads, -1)
        spec = self.training_spec if self.training else self.spec
        return self.out_proj(context.cross_attention(query, self.project, spec))


# modules that compute rows independently, or that ignore rows after the last token
ROW_WISE = (
    *(EncoderLayer, DecoderLayer, SelfAttention, SSRU, AverageAttention, CrossAttention, FeedForward),
    *(nn.ModuleList, nn.Linear, RoundedLinear, nn.LayerNorm, nn.Identity, Dropout),
)


# 3.4 Embeddings, 3.5 Positional encoding


class Embedding(nn.Module):
    """Token embeddings times sqrt(d_model) plus positions, with dropout (sections 3.4, 3.5 and 5.4)."""

    sinusoids: Tensor

    def __init__(self, config: TransformerConfig, tokens: nn.Embedding, zero_first: bool = False) -> None:
        super().__init__()
        self.config, self.zero_first = config, zero_first
        self.tokens = tokens
        self.scale = math.sqrt(config.d_model) if config.scale_embeddings else 1.0
        self.norm: nn.Module = nn.LayerNorm(config.d_model, config.norm_eps) if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.positions: nn.Embedding | None = None
        if config.positions == "learned":
            self.positions = nn.Embedding(config.max_positions, config.d_model)
        else:
            self.register_buffer("sinusoids", self.computed(1024), persistent=False)

    def forward(self, tokens: Tensor, position: Tensor | int, length: int) -> Tensor:
        """Returns the sums [T, D] of the embeddings of token ids [T] and of their position encodings.

        `position` has the position of each token [T], or is the position of all tokens. Every position must be below
        `length`, the size of the table of positions. With `zero_first` (`--zero-bos`), the embedding of the token at
        position 0 is zero, so the sum is the position encoding alone.
        """
        x = self.tokens(tokens) * self.scale
        if self.zero_first and isinstance(position, Tensor):
            x = x.masked_fill((position == 0)[:, None], 0.0)
        elif self.zero_first and position == 0:
            x = torch.zeros_like(x)
        return self.dropout(self.norm(x + self.table(length)[position]))

    def computed(self, length: int) -> Tensor:
        return sinusoids(length, self.config.d_model, self.config.positions, self.config.position_offset)

    def table(self, length: int) -> Tensor:
        """Returns encodings of at least `length` positions. Raises ValueError beyond the learned positions."""
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


# The whole model


class Transformer(Architecture):
    """The model of figure 1. Without encoder layers, the decoder alone is a language model of the target side.

    With a joint vocabulary and `share_embeddings`, both embeddings and the output projection share one matrix (section
    3.4). Otherwise only the target embedding and the output projection share a matrix. Without `tie_output`, the output
    projection has its own matrix.
    """

    output_projection: nn.Linear
    kept: Tensor

    def __init__(self, config: TransformerConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.config = config
        self.reads_source = config.reads_source
        target = nn.Embedding(vocabulary.target, config.d_model)
        if config.reads_source:
            shared = config.share_embeddings and vocabulary.joint
            source = target if shared else nn.Embedding(vocabulary.source, config.d_model)
            self.source_embedding = Embedding(config, source)
        self.target_embedding = Embedding(config, target, zero_first=config.zero_bos)
        encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        numbers = config.decoder_tied_layers or range(config.decoder_layers)
        layers = {number: DecoderLayer(config) for number in dict.fromkeys(numbers)}
        decoder = nn.ModuleList(layers[number] for number in numbers)
        self.encoder, self.decoder = cast(Sequence[EncoderLayer], encoder), cast(Sequence[DecoderLayer], decoder)
        # the output of a pre-norm stack is a sum that is not normalised
        norm = config.pre_norm and config.reads_source
        self.encoder_norm = nn.LayerNorm(config.d_model, config.norm_eps) if norm else nn.Identity()
        self.decoder_norm = nn.LayerNorm(config.d_model, config.norm_eps) if config.pre_norm else nn.Identity()
        self.output_projection = nn.Linear(config.d_model, vocabulary.target, bias=config.output_bias)
        if config.tie_output:
            self.output_projection.weight = target.weight
        if config.positions == "learned":
            self.max_source_positions = config.max_positions if config.reads_source else None
            self.max_target_positions = config.max_positions
        self.dropped: frozenset[int] = frozenset()  # indices of the layers that an update skips, encoder layers first
        # False for dropped layers, encoder layers first; a tensor, so that a compiled model can read it
        self.register_buffer("kept", torch.ones(config.encoder_layers + config.decoder_layers).bool(), persistent=False)
        self.apply(self.initialise)

    def initialise(self, module: nn.Module) -> None:
        """Draws embeddings from N(0, 1 / d_model), so scaled embeddings have variance 1. Other weights use Xavier."""
        if isinstance(module, nn.Embedding) or (module is self.output_projection and not self.config.tie_output):
            nn.init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.Linear) and module is not self.output_projection:
            nn.init.xavier_uniform_(module.weight)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    @property
    def find_unused_parameters(self) -> bool:
        return self.config.encoder_layerdrop > 0 or self.config.decoder_layerdrop > 0

    def begin_update(self, generator: torch.Generator) -> None:
        """Draws the layers that this update skips (LayerDrop, Fan et al. 2020)."""
        rates = [self.config.encoder_layerdrop] * len(self.encoder)
        rates += [self.config.decoder_layerdrop] * len(self.decoder)
        kept = torch.rand(len(rates), generator=generator) >= torch.tensor(rates)
        self.dropped = frozenset(index for index, keep in enumerate(kept.tolist()) if not keep)
        if self._compiled_call_impl is not None and self.find_unused_parameters:
            self.kept.copy_(kept, non_blocking=True)

    def encode(self, source: Packed) -> Packed:
        return self._encode(source, PackedContext(source.layout))

    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        context = PackedContext(target_input.layout, memory.with_values(self._pad(memory.values)))
        return self._decode(target_input, repeat(context))

    def forward_with_attention(
        self, source: Packed, target_input: Packed, layer: int | None
    ) -> tuple[Tensor, Tensor | None]:
        if not self.reads_source:
            return super().forward_with_attention(source, target_input, layer)
        memory, layout = self.encode(source), target_input.layout
        weights: dict[str, list[Tensor]] = {"cross": []}
        contexts = [PackedContext(layout, memory)] * len(self.decoder)
        contexts[layer_index(layer, len(contexts))] = PackedContext(layout, memory, weights)
        features = self._decode(target_input, contexts)
        return features, next(iter(weights["cross"]), None)

    def _encode(self, source: Packed, context: PackedContext) -> Packed:
        layout = source.layout
        if not self.reads_source:
            return self._empty_memory(layout.sentences)
        x = self._pad(self.source_embedding(source.values, layout.position_ids, layout.max_length))
        for index, layer in enumerate(self.encoder):
            x = self._run(layer, index, x, context)
        return source.with_values(self.encoder_norm(x)[: layout.tokens])

    def _decode(self, target_input: Packed, contexts: Iterable[PackedContext]) -> Tensor:
        layout = target_input.layout
        x = self._pad(self.target_embedding(target_input.values, layout.position_ids, layout.max_length))
        for index, (layer, context) in enumerate(zip(self.decoder, contexts, strict=False), len(self.encoder)):
            x = self._run(layer, index, x, context)
        return self.decoder_norm(x)[: layout.tokens]

    def _pad(self, x: Tensor) -> Tensor:
        """Appends padding rows (`pad_rows`), unless the padding might change the result of experts or of a hook."""
        padded = pad_rows(x) if torch.is_grad_enabled() else x
        if padded is x:
            return x
        parts = [self.encoder, self.decoder, self.encoder_norm, self.decoder_norm]
        modules = (module for part in parts for module in cast(nn.Module, part).modules())
        return (
            padded if all(type(module) in ROW_WISE and is_unmodified(module, type(module)) for module in modules) else x
        )

    def _run(self, layer: Layer, index: int, x: Tensor, context: Context) -> Tensor:
        """Returns the output of a layer, or x if training skips the layer. `index` counts encoder layers first.

        A compiled model also computes skipped layers, because a branch would need a compilation for each set of layers.
        """
        compiling = torch.compiler.is_compiling()
        if self.training and not compiling and index in self.dropped:
            return x
        if self.training and self.config.gradient_checkpointing:
            y = checkpoint(layer, x, context, use_reentrant=False)
        else:
            y = layer(x, context)
        drops = self.training and compiling and self.find_unused_parameters
        return torch.where(self.kept[index], y, x) if drops else y

    def attention_weights(self, source: Packed, target_input: Packed) -> dict[str, list[Tensor]]:
        encoder: dict[str, list[Tensor]] = {"self": []}
        decoder: dict[str, list[Tensor]] = {"self": [], "cross": []}
        memory = self._encode(source, PackedContext(source.layout, weights=encoder))
        self._decode(target_input, repeat(PackedContext(target_input.layout, memory, decoder)))
        kinds = {"encoder": encoder["self"], "decoder": decoder["self"], "cross": decoder["cross"]}
        return {kind: layers for kind, layers in kinds.items() if layers}  # a recurrent decoder has no self-attention

    def _empty_memory(self, sentences: int) -> Packed:
        """Returns the memory of a language model: one position of width 0 for each sentence."""
        values = self.target_embedding.tokens.weight.new_zeros(sentences, 0)
        lengths = torch.ones(sentences, dtype=torch.int64, device=values.device)
        return Packed(values, Layout(lengths, 1, sentences))

    def _no_keys(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Returns zeros S H K and S H Kv: the unused keys and values of the memory of a language model."""
        size = len(memory), self.config.heads
        return memory.new_zeros(*size, self.config.key_width), memory.new_zeros(*size, self.config.value_width)

    # --- search -------------------------------------------------------------------------------------------------------

    def start(self, memory: Packed, beams: int) -> MemoryCache:
        config, attentions = self.config, [layer.cross_attention for layer in self.decoder]
        projections = [self._no_keys if attention is None else attention.project for attention in attentions]
        dtype = kv_cache_dtype(self.output_projection if attentions[0] is None else attentions[0].q_proj)
        if config.decoder_self_attention != "attention":
            return RecurrentCache(memory, beams, projections, heads=config.heads, width=config.d_model, dtype=dtype)
        return KVCache(memory, beams, projections, heads=config.heads, window=config.window, dtype=dtype)

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        assert isinstance(state, MemoryCache)
        tokens, position = state.advance(tokens)  # N, or B if all rows of a sentence are equal
        x = self.target_embedding(tokens, position, state.steps)
        for layer, context in zip(self.decoder, state.layers, strict=True):
            x = layer(x, context)
        logits: Tensor = self.output_projection(self.decoder_norm(x))
        return logits if len(logits) == state.rows else logits.repeat_interleave(state.beams, 0)

    @property
    def supports_static_decoding(self) -> bool:
        """Whether search may replay a recorded CUDA graph instead of calling the methods of the model.

        False if a subclass overrides a decoding method, or if a user has registered a hook: a replayed graph calls
        neither. Hooks of torch itself do no harm: the hooks of FSDP have gathered the parameters before a search
        begins, and the graph records the operations in the hooks of weight normalisation.
        """
        cls = type(self)
        if any(getattr(cls, name) is not getattr(Transformer, name) for name in ("decode", "start", "step")):
            return False
        attentions = [layer.cross_attention for layer in self.decoder if layer.cross_attention is not None]
        if any(type(attention).project is not CrossAttention.project for attention in attentions):
            return False
        hooks = (hook for module in self.modules() for hook in hooks_of(module))
        return all(getattr(hook, "__module__", "").startswith("torch.") for hook in hooks)

    def static_start(self, slots: int, beams: int, capacity: int, memory_capacity: int) -> StaticMemory:
        self.target_embedding.table(capacity)  # the table must grow now, because recorded steps use its address
        weight, attentions = self.target_embedding.tokens.weight, [layer.cross_attention for layer in self.decoder]
        sizes = StaticSizes(
            layers=len(attentions),
            heads=self.config.heads,
            widths=(self.config.key_width, self.config.value_width),
            slots=slots,
            beams=beams,
            capacity=capacity,
            memory_capacity=memory_capacity,
            dtype=compute_dtype(weight),
            device=weight.device,
        )

        def project(memory: Tensor) -> Tensor:
            if not self.reads_source:
                return torch.cat([part.flatten(1) for part in self._no_keys(memory)] * len(attentions), 1)
            return torch.cat([attention.kv_proj(memory) for attention in attentions if attention is not None], 1)

        if self.config.decoder_self_attention != "attention":
            return StaticRecurrentCache(project, sizes, self.config.d_model)
        return StaticKVCache(project, sizes, self.config.window)

    def static_step(self, tokens: Tensor, position: Tensor, state: StaticState, lengths: CacheLengths) -> Tensor:
        assert isinstance(state, StaticMemory)
        x = self.target_embedding(tokens, position[:, None].expand(-1, state.beams).flatten(), state.capacity)
        for layer, context in zip(self.decoder, state.advance(position, lengths), strict=True):
            x = layer(x, context)
        return fp32_logits(self.output_projection, self.decoder_norm(x))


for name, preset in PRESETS.items():
    ARCHITECTURES.register(name, preset)(Transformer)
