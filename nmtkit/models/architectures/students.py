"""Presets of small models that learn from large models (teachers), for fast translation on CPUs.

The sizes come from the students of Mozilla's translation models. The encoder is deep and the decoder is shallow,
because the encoder runs once for each sentence, and the decoder once for each token (Kim et al. 2019, Kasai et al.
2021). The decoder has SSRUs instead of self-attention. Marian supports all settings, so the weights can be exported.
"""

from dataclasses import replace

from nmtkit.models.architectures.interface import ARCHITECTURES
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import BASE

STUDENT_BASE = replace(
    BASE,
    decoder_layers=2,
    decoder_self_attention="ssru",
    attention_bias=True,
    output_bias=True,
    zero_bos=True,
    positions="sinusoidal_fairseq",
    norm_eps=1e-6,
)

for name, preset in (
    ("student_tiny", replace(STUDENT_BASE, d_model=256, d_ff=1536)),
    ("student_base_memory", replace(STUDENT_BASE, decoder_layers=4, d_model=384, d_ff=1536)),
    ("student_base", STUDENT_BASE),
    ("student_12_1", replace(STUDENT_BASE, encoder_layers=12, decoder_layers=1)),
):
    ARCHITECTURES.register(name, preset)(Transformer)
