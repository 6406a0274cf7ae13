"""Small Transformers of all variants, and packed sentences, for the tests of the Transformer."""

from typing import Any

import pytest
import torch
from builders import tiny_transformer

from nmtkit.data.packed import Packed
from nmtkit.models.architectures import Vocabulary
from nmtkit.models.architectures.transformer import Transformer

SIZE = 19
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "pre-norm": {"pre_norm": True},
    "window": {"window": 3},
    "learned positions": {"positions": "learned", "max_positions": 20},
    "widths of their own": {"d_key": 3, "d_value": 5},
    "narrow heads of 3": {"heads": 3, "d_key": 4, "d_value": 4},
    "nothing shared": {"share_embeddings": False, "tie_output": False},
    "as Marian": {
        "activation": "swish",
        "attention_bias": True,
        "output_bias": True,
        "positions": "sinusoidal_halves",
    },
    "as M2M-100": {
        "pre_norm": True,
        "attention_bias": True,
        "positions": "sinusoidal_fairseq",
        "position_offset": 2,
    },
    "as mBART": {
        "pre_norm": True,
        "activation": "gelu",
        "attention_bias": True,
        "output_bias": True,
        "embedding_norm": True,
        "norm_eps": 0.01,
        "positions": "learned",
        "max_positions": 20,
    },
    "gated": {"activation": "swiglu", "scale_embeddings": False},
    "average attention": {"decoder_self_attention": "average"},
    "average attention, gate alone": {
        "decoder_self_attention": "average",
        "average_ffn": False,
        "attention_bias": True,
        "pre_norm": True,
    },
    "average attention, separate gates": {"decoder_self_attention": "average", "average_separate_gates": True},
    "average attention, network alone": {"decoder_self_attention": "average", "average_gate": False},
    "SSRU": {"decoder_self_attention": "ssru", "zero_bos": True},
    "SSRU with norms": {"decoder_self_attention": "ssru", "ssru_norm": True, "pre_norm": True},
    "no feed-forward networks": {"decoder_ffn": "none"},
    "tied layers": {"decoder_tied_layers": (5, 5)},
    "all layers tied": {"encoder_tied_layers": (1, 1), "decoder_tied_layers": (1, 1)},
    "rotary": {"positions": "rotary", "rotary_base": 100.0, "d_value": 3},
    "relative": {"positions": "relative", "max_distance": 3, "d_key": 5},
    "alibi": {"positions": "alibi", "heads": 3, "d_key": 4, "d_value": 4},
    "no positions": {"positions": "none"},
    "RMSNorm": {"norm": "rms", "pre_norm": True},
    "RMSNorm after the sub-layers": {"norm": "rms", "qk_norm": True},
    "norms of queries and keys": {"qk_norm": True, "positions": "rotary", "attention_bias": True},
    "multi-query attention": {"kv_heads": 1, "heads": 4, "d_key": 3, "d_value": 5},
    "grouped queries": {"kv_heads": 2, "heads": 4, "window": 5},
    "grouped queries, relative": {"kv_heads": 2, "heads": 4, "positions": "relative", "max_distance": 2},
    "grouped queries, alibi": {"kv_heads": 2, "heads": 4, "positions": "alibi", "qk_norm": True},
    "lightweight convolutions": {
        "encoder_self_attention": "lightconv",
        "decoder_self_attention": "lightconv",
        "kernels": (3, 4),
        "attention_bias": True,
    },
    "dynamic convolutions": {
        "encoder_self_attention": "dynamicconv",
        "decoder_self_attention": "dynamicconv",
        "kernels": (4, 2, 9),
        "heads": 4,
    },
    "convolutions in the encoder": {"encoder_self_attention": "lightconv"},
    "base width": {"base_width": 4, "pre_norm": True},
    "DeepNorm": {"residual": "deepnorm"},
    "Admin": {"residual": "admin", "decoder_tied_layers": (1, 1)},
}
variants = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)


def model_of(joint: bool = True, **changes: Any) -> Transformer:
    vocabulary = Vocabulary(source=SIZE if joint else SIZE + 4, target=SIZE, joint=joint)
    return tiny_transformer(vocabulary, seed=7, **{"encoder_layers": 2, **changes}).train()


def sentences(*lengths: int, seed: int = 1) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    return Packed.from_lists([torch.randint(3, SIZE, (length,), generator=generator).tolist() for length in lengths])
