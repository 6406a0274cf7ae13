"""Mixture of experts: "Outrageously Large Neural Networks" (Shazeer et al. 2017), section 5.3 and appendix E.

`TransformerMoE` is a Transformer with the mixture layer of the paper instead of feed-forward networks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from nmtkit.config import option
from nmtkit.data.packed import Layout, Packed
from nmtkit.models.architectures.incremental import IncrementalArchitecture, IncrementalState
from nmtkit.models.architectures.interface import ARCHITECTURES, Vocabulary, probability
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import TransformerConfig
from nmtkit.models.layers import module_list
from nmtkit.models.layers.dropout import Dropout
from nmtkit.models.layers.experts import Experts, ExpertsConfig, pop_auxiliary_losses
from nmtkit.models.layers.recurrent import AttentionLSTM, BidirectionalLSTM, LayerStates, PackedLSTM, ProductAttention

# S source tokens, T target tokens, D model width

# The mixture layer between LSTM layers (appendix E)


@dataclass(frozen=True, kw_only=True)
class MoEConfig(ExpertsConfig):
    """The defaults are the settings of the WMT'14 models with 2,048 experts (appendix E).

    Two experts in each of two groups process a token. Appendix E does not state the number of groups; 16 is the number
    in appendix C.1, one group for each GPU. In the models with 32 experts and no groups, 4 experts process a token.
    """

    encoder_layers: int = option(
        3, "LSTM layers of the encoder, including the bidirectional layer at the bottom", min=2, max=1000
    )
    decoder_layers: int = option(2, "LSTM layers of the decoder", min=2, max=1000)
    d_model: int = option(512, "width of embeddings and of every layer's output (even)", min=2, max=65_536)
    d_hidden: int = option(2048, "cells of each LSTM layer, projected to d_model", min=3, max=65_536)
    d_expert: int = option(2048, "hidden width of an expert", min=1, max=65_536)
    dropout: float = probability(0.4, "dropout on the output of embeddings, LSTM and mixture layers")
    initial_range: float | None = option(
        None,
        "initial parameters (except experts) are uniform between minus and plus this number; none: the initial values "
        "of torch, and embeddings with a standard deviation of 0.1",
        min=0,
        finetuning="free",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_model % 2:
            raise ValueError(f"--d-model is {self.d_model}; it must be even, for the two directions of a layer")
        if self.d_hidden <= self.d_model:
            raise ValueError(f"--d-hidden is {self.d_hidden}; it must be above --d-model, {self.d_model}")


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
class MoE(IncrementalArchitecture):
    """A GNMT with few layers, and a layer of experts below the top layer of the encoder and of the decoder.

    Every LSTM and mixture layer has a residual connection. Mixture outputs pass through a sigmoid. Only the bottom
    layer of the decoder reads the attention context.

    The translation models of the paper have strictly balanced gates (appendix F). In this class, gates are noisy
    (section 2), and losses balance the gates. With `expert_groups`, there are two levels of gates. Each direction of
    the bottom layer has half of d_model, because in the paper "all of the layers" are 512 wide. With these widths, a
    step takes 73 million multiplications and additions without the output layer. The paper counts 85 million, so a
    layer of the paper is perhaps wider.
    """

    def __init__(self, config: MoEConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        width, hidden = config.d_model, config.d_hidden
        self.source_embedding = nn.Embedding(vocabulary.source, width)
        self.target_embedding = nn.Embedding(vocabulary.target, width)
        nn.init.normal_(self.source_embedding.weight, std=0.1)
        nn.init.normal_(self.target_embedding.weight, std=0.1)
        self.bottom_encoder = BidirectionalLSTM(width, hidden, projection=width // 2)
        encoder = [PackedLSTM(width, hidden, projection=width) for _ in range(config.encoder_layers - 1)]
        decoder = [PackedLSTM(width, hidden, projection=width) for _ in range(config.decoder_layers - 1)]
        self.encoder, self.decoder = module_list(encoder), module_list(decoder)
        self.encoder_experts = Experts(config, width, config.d_expert)
        self.decoder_experts = Experts(config, width, config.d_expert)
        attention = ProductAttention(width, width, width)
        self.bottom_decoder = AttentionLSTM(width, hidden, attention, width, projection=width)
        self.dropout = Dropout(config.dropout)
        self.output_projection = nn.Linear(width, vocabulary.target)
        if config.initial_range is not None:
            for name, parameter in self.named_parameters():
                if "experts" not in name:  # experts keep their initial values, which are 0 for gates
                    nn.init.uniform_(parameter, -config.initial_range, config.initial_range)

    def encode(self, source: Packed) -> Packed:
        """Returns the output of the top encoder layer and the keys of the attention: [S, 2D]."""
        x = self.dropout(self.source_embedding(source.values))
        x = x + self.dropout(self.bottom_encoder(x, source.layout))
        x = self.stack(x, source.layout, self.encoder, self.encoder_experts)
        return source.with_values(self.bottom_decoder.with_keys(x))

    def stack(
        self,
        x: Tensor,
        layout: Layout,
        layers: Sequence[PackedLSTM],
        experts: Experts,
        states: LayerStates | None = None,
    ) -> Tensor:
        for layer in layers:
            if layer is layers[-1]:
                x = x + self.dropout(experts(x).sigmoid())
            x = x + self.dropout(layer(x, layout, states))
        return x

    def stateful_layers(self) -> Iterable[nn.Module]:
        return self.bottom_decoder, *self.decoder

    def extract_features(self, target_input: Packed, state: IncrementalState) -> Tensor:
        layout = target_input.layout
        x = self.dropout(self.target_embedding(target_input.values))
        bottom = state.attend(self.bottom_decoder, x, layout)
        x = x + self.dropout(bottom.output)
        return self.stack(x, layout, self.decoder, self.decoder_experts, state.states)

    def auxiliary_losses(self) -> dict[str, Tensor]:
        return pop_auxiliary_losses(self)


# The mixture layer in the Transformer


@dataclass(frozen=True, kw_only=True)
class TransformerMoEConfig(TransformerConfig, ExpertsConfig):
    """A Transformer with mixtures of experts as feed-forward networks. An expert has the inner width `d_ff`."""

    experts: int = option(16, "experts of each mixture layer", min=2, max=65_536)
    expert_groups: int | None = option(
        None, "groups of experts, selected by a first gate (appendix B); none: a single gate", min=1, max=65_536
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.residual != "plain":
            raise ValueError(f"--residual {self.residual} is not defined for experts; leave out the flag")
        if self.activation != "relu":
            raise ValueError(f"experts compute with ReLU, not with --activation {self.activation}; leave out the flag")


TRANSFORMER = TransformerMoEConfig()


@ARCHITECTURES.register("transformer_moe", TRANSFORMER)
@ARCHITECTURES.register(
    "transformer_moe_tiny",
    replace(TRANSFORMER, encoder_layers=4, decoder_layers=4, d_model=128, d_ff=256, heads=4, experts=8),
)
class TransformerMoE(Transformer):
    """The Transformer with experts instead of feed-forward networks. Expert outputs do not pass through a sigmoid."""

    def __init__(self, config: TransformerMoEConfig, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        for layer in dict.fromkeys((*self.encoder, *self.decoder)):
            if layer.feed_forward is not None:
                layer.feed_forward = Experts(config, config.d_model, config.d_ff, config.activation_dropout)

    def auxiliary_losses(self) -> dict[str, Tensor]:
        return pop_auxiliary_losses(self)
