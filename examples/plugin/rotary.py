"""A Transformer with RMSNorm, rotary positions (Su et al. 2021), and a learned temperature for each attention head."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nmtkit.extend import (
    ARCHITECTURES,
    AttentionContext,
    Embedding,
    SelfAttention,
    Transformer,
    TransformerConfig,
    Vocabulary,
    option,
)


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(TransformerConfig):
    rotary_base: float = option(10_000.0, "Ratio of the longest to the shortest wavelength.", above=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions != "sinusoidal" or self.decoder_self_attention != "attention":
            raise ValueError("transformer_rotary has its own positions and attention; leave out the flags for others")
        if self.key_width % 2:
            raise ValueError(f"transformer_rotary needs heads of even width, not {self.key_width}")


class RotaryEmbedding(Embedding):
    """Token embeddings without positions. Keeps the angles of the tokens, by which `rotate` turns queries and keys."""

    def forward(self, tokens: Tensor, position: Tensor | int, length: int) -> Tensor:
        config, device = self.config, tokens.device
        assert isinstance(config, RotaryConfig)
        exponent = torch.arange(0, config.key_width, 2, device=device) / config.key_width
        position = torch.as_tensor(position, device=device).expand(len(tokens))  # one number if all are equal
        angles = position[:, None] * config.rotary_base**-exponent  # T K/2
        self.cos, self.sin = angles.cos()[:, None], angles.sin()[:, None]
        return self.dropout(self.norm(self.tokens(tokens) * self.scale))

    def rotate(self, x: Tensor) -> Tensor:
        """Turns each pair of elements (i, i + K/2) of the heads T H K by the angle of its token."""
        first, second = x.chunk(2, -1)
        cos, sin = self.cos.to(x), self.sin.to(x)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class RotaryAttention(SelfAttention):
    def __init__(self, config: RotaryConfig, causal: bool, embedding: RotaryEmbedding) -> None:
        super().__init__(config, causal)
        self.embedding = [embedding]  # in a list, so that it is not a submodule of every layer
        self.temperature = nn.Parameter(torch.zeros(config.heads))  # logarithm, for each head

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        query, key, value = self.split_heads(self.qkv_proj(x))  # T H K, T H K, T H Kv
        rotate, scale = self.embedding[0].rotate, self.temperature.neg().exp().to(x.dtype)
        parts = rotate(query) * scale[:, None], rotate(key), value
        qkv = torch.cat([part.flatten(1) for part in parts], 1)  # the layout of the projection
        spec = self.training_spec if self.training else self.spec
        return self.out_proj(context.self_attention(qkv, self.split_heads, spec))


@ARCHITECTURES.register("transformer_rotary", RotaryConfig())
class RotaryTransformer(Transformer):
    def __init__(self, config: RotaryConfig, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        self.target_embedding = target = RotaryEmbedding(config, self.target_embedding.tokens, config.zero_bos)
        for layer in self.decoder:
            layer.self_attention = RotaryAttention(config, True, target)
        if config.reads_source:  # a language model has no encoder
            self.source_embedding = source = RotaryEmbedding(config, self.source_embedding.tokens)
            for encoder_layer in self.encoder:
                encoder_layer.self_attention = RotaryAttention(config, False, source)
        for module in list(self.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.LayerNorm):
                    setattr(module, name, nn.RMSNorm(config.d_model, config.norm_eps))
        self.apply(self.initialise)
