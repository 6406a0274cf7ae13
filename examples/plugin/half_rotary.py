"""A Transformer with ScaleNorm (Nguyen and Salazar 2019), and rotary positions in half of each head.

Each head also has a learned temperature.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nmtkit.extend import (
    ARCHITECTURES,
    AttentionContext,
    SelfAttention,
    Transformer,
    TransformerConfig,
    Vocabulary,
    option,
)


@dataclass(frozen=True, kw_only=True)
class HalfRotaryConfig(TransformerConfig):
    positions: str = option("none", "Positions in addition to the rotary positions; must be none.")
    wavelengths: float = option(10_000.0, "Ratio of the longest to the shortest wavelength.", above=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions != "none" or self.decoder_self_attention != "attention":
            raise ValueError("transformer_half_rotary needs --positions none and --decoder-self-attention attention")
        if self.key_width % 4:
            raise ValueError(
                f"transformer_half_rotary needs heads whose width is a multiple of 4, not {self.key_width}"
            )


class ScaleNorm(nn.Module):
    """Divides each vector of T D by its Euclidean norm, and multiplies it by one learned number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(width**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.gain / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-5))


class HalfRotaryAttention(SelfAttention):
    """Rotates the first half of each query and key by its position; --positions rotary rotates the whole."""

    def __init__(self, config: HalfRotaryConfig, causal: bool) -> None:
        super().__init__(config, causal)
        pairs = config.key_width // 4
        self.frequencies = [config.wavelengths ** (-pair / pairs) for pair in range(pairs)]
        self.temperature = nn.Parameter(torch.zeros(config.heads))  # logarithm, for each head

    def turned(self, x: Tensor, positions: Tensor | int) -> Tensor:
        """Rotates the pairs of elements (i, i + K/4) of T H K. `positions` is T, or a number for all tokens."""
        angles = torch.as_tensor(positions, device=x.device)[..., None, None] * x.new_tensor(self.frequencies)
        first, second, rest = x.split([len(self.frequencies)] * 2 + [x.shape[-1] // 2], -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], -1)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        query, key, value = self.split_heads(self.qkv_proj(x))  # T H K, T H K, T H Kv
        scale = self.temperature.neg().exp().to(x.dtype)[:, None]
        parts = self.turned(query, context.positions) * scale, self.turned(key, context.positions), value
        qkv = torch.cat([part.flatten(1) for part in parts], 1)  # the layout of the projection
        spec = self.training_spec if self.training else self.spec
        return self.out_proj(context.self_attention(qkv, self.split_heads, spec))


@ARCHITECTURES.register("transformer_half_rotary", HalfRotaryConfig())
class HalfRotaryTransformer(Transformer):
    def __init__(self, config: HalfRotaryConfig, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        for layer in self.decoder:
            layer.self_attention = HalfRotaryAttention(config, True)
        for encoder_layer in self.encoder:
            encoder_layer.self_attention = HalfRotaryAttention(config, False)
        for module in list(self.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.LayerNorm):
                    setattr(module, name, ScaleNorm(config.d_model))
        self.apply(self.initialise)
