"""Names of layers in nmtkit's Transformer and in fairseq. transformers uses the names of fairseq."""

from torch import Tensor

from nmtkit.models.architectures.transformer_config import TransformerConfig
from nmtkit.models.formats.weights import Weights

# A layer of nmtkit -> the layers of fairseq whose weights it concatenates.
LAYER = {
    "self_attention.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.out_proj": ("self_attn.out_proj",),
    "self_attention_norm": ("self_attn_layer_norm",),
    "feed_forward.fc1": ("fc1",),
    "feed_forward.fc2": ("fc2",),
    "feed_forward_norm": ("final_layer_norm",),
}
CROSS_ATTENTION = {
    "cross_attention.q_proj": ("encoder_attn.q_proj",),
    "cross_attention.kv_proj": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross_attention.out_proj": ("encoder_attn.out_proj",),
    "cross_attention_norm": ("encoder_attn_layer_norm",),
}


def layer_names(stack: str) -> list[tuple[str, tuple[str, ...]]]:
    """Returns the names of the parts of an encoder or decoder layer in nmtkit and in fairseq."""
    return list((LAYER if stack == "encoder" else LAYER | CROSS_ATTENTION).items())


def stacks(weights: Weights, config: TransformerConfig, prefix: str = "") -> dict[str, Tensor]:
    """Returns the encoder and decoder weights under nmtkit's names, without token embeddings and output projection."""
    tensors: dict[str, Tensor] = {}
    for side, stack, depth in (
        ("source", "encoder", config.encoder_layers),
        ("target", "decoder", config.decoder_layers),
    ):
        if config.positions == "learned":  # the first rows, up to the padding id, are unused
            table = weights.matrix(f"{prefix}{stack}.embed_positions.weight")
            tensors[f"{side}_embedding.positions.weight"] = table[max(0, len(table) - config.max_positions) :]
        if config.embedding_norm:
            weights.stack(tensors, f"{side}_embedding.norm", [f"{prefix}{stack}.layernorm_embedding"])
        if config.pre_norm:
            weights.stack(tensors, f"{stack}_norm", [f"{prefix}{stack}.layer_norm"])
        for index in range(depth):
            for ours, theirs in layer_names(stack):
                parts = [f"{prefix}{stack}.layers.{index}.{part}" for part in theirs]
                weights.stack(tensors, f"{stack}.{index}.{ours}", parts)
    return tensors
