"""Mixture of experts: "Outrageously Large Neural Networks" (Shazeer et al. 2017), section 5.3 and appendix E.

And the same layer in the Transformer, in place of its feed-forward networks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from nmtkit.architectures.interface import ARCHITECTURES, Architecture, DecoderState, Vocabulary
from nmtkit.architectures.row_state import RowState
from nmtkit.architectures.transformer import Transformer, TransformerConfig
from nmtkit.layers.dropout import Dropout
from nmtkit.layers.experts import Experts, pop_auxiliary_losses
from nmtkit.layers.recurrent import PackedLSTM
from nmtkit.layers.recurrent_attention import AttentiveLSTM, ProductAttention
from nmtkit.packed import Layout, Packed
from nmtkit.registry import option

# S source tokens, T target tokens of all sentences, D width between layers, A of the attention, N rows of a search


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """The layer of section 2, alike in both models."""

    experts: int = option(2048, "experts of each mixture layer")
    active_experts: int = option(2, "experts each token is sent to (k); with groups, so many of each of k groups")
    expert_groups: int | None = option(16, "groups of experts, chosen by a gate before (appendix B); none: one level")
    importance_weight: float = option(0.01, "weight of the loss on unequal importance of experts (section 4)")
    load_weight: float = option(0.01, "weight of the loss on unequal load of experts (appendix A)")

    def __post_init__(self) -> None:
        groups = self.expert_groups
        if groups is not None and (groups < 1 or self.experts % groups):
            raise ValueError(f"expert_groups is {groups}; it must divide experts, {self.experts}")
        most = min(groups, self.experts // groups) if groups else self.experts
        if not 0 < self.active_experts < most:
            raise ValueError(
                f"active_experts is {self.active_experts}; it must be at least 1, and less than there are experts to "
                f"choose from, {most}"
            )
        for name in ("importance_weight", "load_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")

    def layer(self, width: int, hidden: int, dropout: float = 0.0) -> Experts:
        weights = self.importance_weight, self.load_weight
        return Experts(width, hidden, self.experts, self.active_experts, self.expert_groups, *weights, dropout)


# Appendix E: between LSTM layers


@dataclass(frozen=True, kw_only=True)
class MoEConfig(GateConfig):
    """The defaults are the WMT'14 models with 2,048 experts: two experts of each of two groups (appendix E).

    How many groups there were, appendix E does not say: 16 are those of appendix C.1, one for each GPU. The flat models
    with 32 experts send a token to 4.
    """

    encoder_layers: int = option(3, "LSTM layers of the encoder, the bidirectional one at the bottom included")
    decoder_layers: int = option(2, "LSTM layers of the decoder")
    d_model: int = option(512, "width of embeddings and of every layer's output (even)")
    d_hidden: int = option(2048, "cells of each LSTM layer, projected to d_model")
    d_expert: int = option(2048, "hidden width of an expert")
    dropout: float = option(0.4, "dropout on the output of embeddings, LSTM and mixture layers")
    initial_range: float | None = option(
        None, "parameters but those of experts start uniform within this; none: torch's ranges, and embeddings of 0.1"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_expert < 1:
            raise ValueError(f"d_expert is {self.d_expert}; it must be at least 1")
        for name in ("encoder_layers", "decoder_layers"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} is {getattr(self, name)}; experts stand between 2 layers or more")
        if self.d_model < 2 or self.d_model % 2 or self.d_hidden <= self.d_model:
            raise ValueError(
                f"d_model {self.d_model} must be even, and d_hidden {self.d_hidden}, which is projected to it, larger"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and less than 1")


PUBLISHED = MoEConfig()


@ARCHITECTURES.register("moe", PUBLISHED)
@ARCHITECTURES.register(
    "moe_small",
    replace(
        PUBLISHED,
        experts=16,
        expert_groups=None,
        d_expert=512,
        d_model=256,
        d_hidden=512,
        dropout=0.2,
        initial_range=0.14,
    ),
)
class MoE(Architecture):
    """A GNMT of few layers, with experts below the top layer of either stack, and a residual connection around every
    LSTM and mixture layer. Mixture outputs pass through a sigmoid. Only the decoder's bottom layer reads the context.

    The paper's translation models balance their gates strictly (appendix F); here they are the noisy ones of section 2,
    whose losses do that, in two levels where there are thousands of experts. The directions of the bottom layer share
    d_model, since "all of the layers" are 512 wide; by this reading a step takes 73 million multiplications and
    additions (output layer left out), where the paper counts 85, so some layer may have been wider.
    """

    def __init__(self, config: MoEConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        width, hidden = config.d_model, config.d_hidden
        self.width = width
        self.source_embedding = nn.Embedding(vocabulary.source, width)
        self.target_embedding = nn.Embedding(vocabulary.target, width)
        nn.init.normal_(self.source_embedding.weight, std=0.1)
        nn.init.normal_(self.target_embedding.weight, std=0.1)
        self.forwards = PackedLSTM(width, hidden, projection=width // 2)
        self.backwards = PackedLSTM(width, hidden, projection=width // 2, reverse=True)
        encoder = nn.ModuleList(PackedLSTM(width, hidden, projection=width) for _ in range(config.encoder_layers - 1))
        decoder = nn.ModuleList(PackedLSTM(width, hidden, projection=width) for _ in range(config.decoder_layers - 1))
        self.encoder, self.decoder = cast(Sequence[PackedLSTM], encoder), cast(Sequence[PackedLSTM], decoder)
        self.encoder_experts = config.layer(width, config.d_expert)
        self.decoder_experts = config.layer(width, config.d_expert)
        attention = ProductAttention(width, width, width)
        self.bottom_decoder = AttentiveLSTM(width, hidden, attention, width, projection=width)
        self.dropout = Dropout(config.dropout)
        self.output_projection = nn.Linear(width, vocabulary.target)
        self.target_tokens = 0
        if config.initial_range is not None:
            for name, parameter in self.named_parameters():
                if "experts" not in name:  # their gates start at zero
                    nn.init.uniform_(parameter, -config.initial_range, config.initial_range)

    def mixed(self, x: Tensor, experts: Experts) -> Tensor:
        return x + self.dropout(experts(x).sigmoid())

    def encode(self, source: Packed) -> Packed:
        """Values S (D + A): the top encoder layer, and what the attention's scores need of it."""
        layout = source.layout
        x = self.dropout(self.source_embedding(source.values))
        x = x + self.dropout(torch.cat([self.forwards(x, layout), self.backwards(x, layout)], -1))
        x = self._stack(x, layout, self.encoder, self.encoder_experts)
        return source.with_values(torch.cat([x, self.bottom_decoder.attention.keys(x)], -1))

    def _stack(self, x: Tensor, layout: Layout, layers: Sequence[PackedLSTM], experts: Experts) -> Tensor:
        for layer in layers:
            if layer is layers[-1]:
                x = self.mixed(x, experts)
            x = x + self.dropout(layer(x, layout))
        return x

    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        return self._decode(memory, target_input)[0]

    def _decode(self, memory: Packed, target_input: Packed) -> tuple[Tensor, Tensor]:
        """Features T D and attention weights B L S."""
        layout = target_input.layout
        self.target_tokens = layout.tokens
        x = self.dropout(self.target_embedding(target_input.values))
        values, keys = (memory.with_values(part) for part in memory.values.split(self.width, -1))
        read = self.bottom_decoder(x, layout, values, keys)
        x = x + self.dropout(read.output)
        return self._stack(x, layout, self.decoder, self.decoder_experts), read.weights

    def auxiliary_losses(self) -> dict[str, Tensor]:
        return pop_auxiliary_losses(self, self.target_tokens)

    def start(self, memory: Packed, beams: int) -> RowState:
        layers = {f"layer {index}": layer.state_shapes for index, layer in enumerate(self.decoder)}
        return RowState(memory, beams, {"bottom": self.bottom_decoder.state_shapes, **layers})

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        assert isinstance(state, RowState)
        values, keys = state.memory.split(self.width, -1)
        x = self.dropout(self.target_embedding(tokens))
        read, state.rows["bottom"] = self.bottom_decoder.step(x, state.rows["bottom"], values, keys, state.valid)
        x = x + self.dropout(read.output)
        for index, layer in enumerate(self.decoder):
            if layer is self.decoder[-1]:
                x = self.mixed(x, self.decoder_experts)
            y, state.rows[f"layer {index}"] = layer.step(x, state.rows[f"layer {index}"])
            x = x + self.dropout(y)
        return self.output_projection(x)

    def attention_weights(self, source: Packed, target_input: Packed) -> dict[str, list[Tensor]]:
        weights = self._decode(self.encode(source), target_input)[1]
        return {"cross": [(weights * target_input.layout.mask[..., None])[:, None]]}


# The layer in the Transformer


@dataclass(frozen=True, kw_only=True)
class TransformerMoEConfig(TransformerConfig, GateConfig):
    """A Transformer whose feed-forward networks are mixtures of experts; each expert is `d_ff` wide."""

    experts: int = option(16, "experts of each mixture layer")
    expert_groups: int | None = option(None, "groups of experts, chosen by a gate before (appendix B); none: one level")

    def __post_init__(self) -> None:
        TransformerConfig.__post_init__(self)
        GateConfig.__post_init__(self)


TRANSFORMER = TransformerMoEConfig()


@ARCHITECTURES.register("transformer_moe", TRANSFORMER)
@ARCHITECTURES.register(
    "transformer_moe_tiny",
    replace(TRANSFORMER, encoder_layers=4, decoder_layers=4, d_model=128, d_ff=256, heads=4, experts=8),
)
class TransformerMoE(Transformer):
    """The Transformer with experts in place of every feed-forward network; no sigmoid behind them."""

    def __init__(self, config: TransformerMoEConfig, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        for layer in (*self.encoder, *self.decoder):
            layer.feed_forward = config.layer(config.d_model, config.d_ff, config.activation_dropout)
        self.target_tokens = 0

    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        self.target_tokens = target_input.layout.tokens
        return super().decode(memory, target_input)

    def auxiliary_losses(self) -> dict[str, Tensor]:
        return pop_auxiliary_losses(self, self.target_tokens)
