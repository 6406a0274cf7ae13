"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017, figure 1): the model and its search steps."""

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nmtkit.data.packed import Layout, Packed
from nmtkit.models.architectures.interface import ARCHITECTURES, Architecture, DecoderState, Vocabulary, layer_index
from nmtkit.models.architectures.transformer_config import ADDED_POSITIONS, PRESETS, TransformerConfig
from nmtkit.models.architectures.transformer_layers import (
    ROW_WISE,
    Context,
    CrossAttention,
    DecoderLayer,
    Embedding,
    EncoderLayer,
    Layer,
    norm_of,
)
from nmtkit.models.layers import compute_dtype, hooks_of, is_unmodified, module_list
from nmtkit.models.layers.attention import PackedContext
from nmtkit.models.layers.attention_reference import SplitHeads
from nmtkit.models.layers.fixed_state import RecurrentCache, StaticRecurrentCache
from nmtkit.models.layers.kv_cache import KVCache, MemoryCache
from nmtkit.models.layers.output_columns import fp32_logits
from nmtkit.models.layers.prepack import kv_cache_dtype
from nmtkit.models.layers.residual_scales import deepnorm, use_admin, use_deepnorm
from nmtkit.models.layers.shape_padding import pad_rows
from nmtkit.models.layers.static_kv_cache import CacheLengths, StaticKVCache, StaticMemory, StaticSizes

# B sentences or slots of a search, R hypotheses of each, N = B x R, S source tokens, T target tokens (of all sentences,
# concatenated), D model width, H heads, K width of a query or key head, Kv width of a value head

L = TypeVar("L", EncoderLayer, DecoderLayer)
PROFILED_SENTENCES, PROFILED_TOKENS = 32, 16  # number and length of the random sentences for `--residual admin`


def stack(kind: type[L], config: TransformerConfig, numbers: Sequence[int]) -> Sequence[L]:
    """Returns a list with a layer for each entry of `numbers`. Equal entries get the same layer (tied weights)."""
    layers = {number: kind(config, numbers.index(number)) for number in dict.fromkeys(numbers)}
    return module_list(layers[number] for number in numbers)


class Transformer(Architecture):
    """The model of figure 1. Without encoder layers, the decoder alone is a language model of the target side.

    With `share_embeddings` and a joint vocabulary, the source and the target embedding share one matrix. With
    `tie_output`, the target embedding and the output projection share one matrix (section 3.4).
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
        self.encoder = stack(EncoderLayer, config, config.encoder_tied_layers or range(config.encoder_layers))
        self.decoder = stack(DecoderLayer, config, config.decoder_tied_layers or range(config.decoder_layers))
        # the last sum of a pre-norm stack is not normalised yet
        norm = config.pre_norm and config.reads_source
        self.encoder_norm = norm_of(config) if norm else nn.Identity()
        self.decoder_norm = norm_of(config) if config.pre_norm else nn.Identity()
        self.output_projection = nn.Linear(config.d_model, vocabulary.target, bias=config.output_bias)
        if config.tie_output:
            self.output_projection.weight = target.weight
        if config.positions == "learned":
            self.max_source_positions = config.max_positions if config.reads_source else None
            self.max_target_positions = config.max_positions
        self.dropped: frozenset[int] = frozenset()  # indices of the layers that this update skips, encoder layers first
        # False for dropped layers, encoder layers first; a tensor, so that a compiled model can read it
        self.register_buffer("kept", torch.ones(config.encoder_layers + config.decoder_layers).bool(), persistent=False)
        self.apply(self.initialise)
        self.initialise_scales()

    def initialise_scales(self) -> None:
        """Sets the weights of the residual connections, for --residual deepnorm or admin."""
        config, stacks = self.config, (self.encoder, self.decoder)
        if config.residual == "deepnorm":
            factors = deepnorm(encoder_layers=config.encoder_layers, decoder_layers=config.decoder_layers)
            for layers, (alpha, beta) in zip(stacks, factors, strict=True):
                use_deepnorm(layers, alpha=alpha, beta=beta)
        elif config.residual == "admin":
            self.eval()
            for layers in stacks:
                if layers:
                    use_admin(layers, config.d_model, self.profile)
            self.train()

    def profile(self) -> None:
        """Computes the features of random sentences, so that hooks can measure variances."""
        length = min(PROFILED_TOKENS, self.max_target_positions or PROFILED_TOKENS)
        generator = torch.Generator().manual_seed(0)

        def words(embedding: nn.Embedding) -> Packed:
            size = PROFILED_SENTENCES, length
            return Packed.from_lists(torch.randint(embedding.num_embeddings, size, generator=generator).tolist())

        source = words(self.source_embedding.tokens if self.reads_source else self.target_embedding.tokens)
        self(source, words(self.target_embedding.tokens))

    def initialise(self, module: nn.Module) -> None:
        """Draws embeddings and an untied output projection from N(0, 1 / d_model). Biases are zero.

        Embeddings that are multiplied by sqrt(d_model) then have variance 1. Other linear layers have Xavier weights.
        """
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
        if not self.reads_source:  # the memory of a language model has one position of width 0 for each sentence
            lengths = torch.ones_like(layout.lengths)
            return Packed(
                self.target_embedding.tokens.weight.new_zeros(len(lengths), 0), Layout(lengths, 1, len(lengths))
            )
        x = self._pad(self.source_embedding(source.values, layout.position_ids, layout.max_length))
        for index, layer in enumerate(self.encoder):
            x = self._run(layer, index, x, context)
        return source.with_values(self.encoder_norm(x)[: layout.tokens])

    def _decode(self, target_input: Packed, contexts: Iterable[PackedContext]) -> Tensor:
        layout = target_input.layout
        x = self._pad(self.target_embedding(target_input.values, layout.position_ids, layout.max_length))
        for index, (layer, context) in enumerate(zip(self.decoder, contexts, strict=False), len(self.encoder)):
            x = self._run(layer, index, x, context)
        return self.features(x)[: layout.tokens]

    def features(self, x: Tensor) -> Tensor:
        """Returns features [T, D] for the last layer's output [T, D]. With `base_width`, features are also scaled."""
        x = self.decoder_norm(x)
        return x if self.config.base_width is None else x * self.config.width_ratio**-0.5

    def learning_rate_scale(self, kind: str) -> float:
        """Returns the factor on the learning rate with `base_width` (Yang et al. 2021, table 8), or 1 without it.

        The factor of matrices inside layers is proportional to 1 / width. Embeddings are multiplied by sqrt(d_model),
        and features by 1 / sqrt(width) before the output projection. So the factor of embeddings is proportional to
        1 / sqrt(width), and an update of Adam changes embeddings and logits equally at any width.
        """
        powers = {"matrices": -1.0, "tensors": -1.0, "embeddings": -0.5}
        return self.config.width_ratio ** powers.get(kind, 0.0)

    def _pad(self, x: Tensor) -> Tensor:
        """Appends padding rows (`pad_rows`), unless the padding might change the result of experts or of a hook."""
        padded = pad_rows(x) if torch.is_grad_enabled() else x
        if padded is x:
            return x
        parts = chain(self.encoder, self.decoder, (self.encoder_norm, self.decoder_norm))
        modules = (module for part in parts for module in part.modules())
        ignored = all(type(module) in ROW_WISE and is_unmodified(module, type(module)) for module in modules)
        return padded if ignored else x

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

    def _no_keys(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Returns zeros S H K and S H Kv: the unused keys and values of the memory of a language model."""
        size = len(memory), self.config.heads_of_keys
        return memory.new_zeros(*size, self.config.key_width), memory.new_zeros(*size, self.config.value_width)

    # --- search -------------------------------------------------------------------------------------------------------

    def _projections(self) -> list[SplitHeads]:
        """Returns a function for each decoder layer, which computes the keys and values of a memory."""
        attentions = (layer.cross_attention for layer in self.decoder)
        return [self._no_keys if attention is None else attention.project for attention in attentions]

    def start(self, memory: Packed, beams: int) -> MemoryCache:
        config, projections, attention = self.config, self._projections(), self.decoder[0].cross_attention
        dtype = kv_cache_dtype(self.output_projection if attention is None else attention.q_proj)
        if config.decoder_self_attention != "attention":
            return RecurrentCache(memory, beams, projections, heads=config.heads, width=config.state_width, dtype=dtype)
        distances = config.positions in ("relative", "alibi")
        return KVCache(
            memory, beams, projections, heads=config.heads, window=config.window, needs_distances=distances, dtype=dtype
        )

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        assert isinstance(state, MemoryCache)
        tokens, position = state.advance(tokens)  # N, or B if all rows of a sentence are equal
        x = self.target_embedding(tokens, position, state.steps)
        for layer, context in zip(self.decoder, state.layers, strict=True):
            x = layer(x, context)
        logits: Tensor = self.output_projection(self.features(x))
        return logits if len(logits) == state.rows else logits.repeat_interleave(state.beams, 0)

    @property
    def supports_static_decoding(self) -> bool:
        """Whether search may replay a recorded CUDA graph instead of calling the methods of the model.

        False if a subclass overrides a decoding method, or if a user has registered a hook: a replayed graph calls
        neither. Hooks of torch itself do no harm: the hooks of FSDP have gathered the parameters before a search
        begins, and the graph records the operations in the hooks of weight normalisation.
        """
        attentions = [layer.cross_attention for layer in self.decoder if layer.cross_attention is not None]
        unchanged = [getattr(type(self), name) is getattr(Transformer, name) for name in ("decode", "start", "step")]
        unchanged += [type(attention).project is CrossAttention.project for attention in attentions]
        hooks = (hook for module in self.modules() for hook in hooks_of(module))
        return all(unchanged) and all(getattr(hook, "__module__", "").startswith("torch.") for hook in hooks)

    def static_start(self, slots: int, beams: int, capacity: int, memory_capacity: int) -> StaticMemory:
        config, weight = self.config, self.target_embedding.tokens.weight
        if config.positions in ADDED_POSITIONS:
            self.target_embedding.table(capacity)  # the table must grow now, because recorded steps use its address
        sizes = StaticSizes(
            heads=config.heads_of_keys,
            widths=(config.key_width, config.value_width),
            slots=slots,
            beams=beams,
            capacity=capacity,
            memory_capacity=memory_capacity,
            dtype=compute_dtype(weight),
            device=weight.device,
        )
        if config.decoder_self_attention != "attention":
            return StaticRecurrentCache(self._projections(), sizes, config.state_width)
        return StaticKVCache(self._projections(), sizes, config.window)

    def static_step(self, tokens: Tensor, position: Tensor, state: StaticMemory, lengths: CacheLengths) -> Tensor:
        x = self.target_embedding(tokens, position[:, None].expand(-1, state.beams).flatten(), state.capacity)
        for layer, context in zip(self.decoder, state.advance(position, lengths), strict=True):
            x = layer(x, context)
        return fp32_logits(self.output_projection, self.features(x))


for name, preset in PRESETS.items():
    ARCHITECTURES.register(name, preset)(Transformer)
