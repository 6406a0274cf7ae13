"""Shapes and parameter counts of the presets of the Transformer: Table 3 of the paper, and the students of Mozilla."""

from dataclasses import replace

import pytest
import torch

from nmtkit.models.architectures import ARCHITECTURES, Vocabulary
from nmtkit.models.architectures.interface import parameter_count
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import BASE, BIG, TransformerConfig

# layers of encoder and decoder, width and inner width of Mozilla's students; millions of parameters with 32,000 entries
STUDENTS = {
    "student_tiny": (6, 2, 256, 1536, 17),
    "student_base_memory": (6, 4, 384, 1536, 31),
    "student_base": (6, 2, 512, 2048, 43),
    "student_12_1": (12, 1, 512, 2048, 58),
}


@pytest.mark.parametrize("name", STUDENTS)
def test_students_have_their_shapes_and_sizes(name: str) -> None:
    *shape, millions = STUDENTS[name]
    config = ARCHITECTURES[name].preset
    assert [config.encoder_layers, config.decoder_layers, config.d_model, config.d_ff] == shape
    encoder, decoder, width, inner = shape
    attention, network = 4 * width**2 + 4 * width, 2 * width * inner + width + inner  # weights and biases
    weights = encoder * (attention + network + 4 * width)  # and two norms
    weights += decoder * (2 * width**2 + width + attention + network + 6 * width)  # SSRU, and three norms
    weights += 32_000 * width + 32_000  # one matrix for both embeddings and the output, and the output bias
    with torch.device("meta"):
        model = ARCHITECTURES[name].factory(config, Vocabulary(source=32_000, target=32_000, joint=True))
    assert parameter_count(model) == weights
    assert round(weights / 1e6) == millions


def test_presets_have_the_shapes_they_are_known_by() -> None:
    shapes = {
        name: (c.encoder_layers, c.decoder_layers, c.d_model, c.d_ff, c.heads, c.dropout)
        for name, c in ((name, ARCHITECTURES[name].preset) for name in ARCHITECTURES.names())
        if isinstance(c, TransformerConfig)
    }
    assert shapes["transformer_tiny"] == (4, 4, 128, 256, 4, 0.1)
    assert shapes["transformer_iwslt_de_en"] == (6, 6, 512, 1024, 4, 0.3)
    assert shapes["transformer_base"] == (6, 6, 512, 2048, 8, 0.1)
    assert shapes["transformer_big"] == (6, 6, 1024, 4096, 16, 0.3)
    assert shapes["transformer_big_en_fr"] == (6, 6, 1024, 4096, 16, 0.1)


# Table 3: name of the row, changes to the base model, millions of parameters in the paper
TABLE_3: list[tuple[str, TransformerConfig, int]] = [
    ("base", BASE, 65),
    ("(B) d_k 16", replace(BASE, d_key=16), 58),
    ("(B) d_k 32", replace(BASE, d_key=32), 60),
    ("(C) N 2", replace(BASE, encoder_layers=2, decoder_layers=2), 36),
    ("(C) N 4", replace(BASE, encoder_layers=4, decoder_layers=4), 50),
    ("(C) N 8", replace(BASE, encoder_layers=8, decoder_layers=8), 80),
    ("(C) d_model 256", replace(BASE, d_model=256, d_key=32, d_value=32), 28),
    ("(C) d_model 1024", replace(BASE, d_model=1024, d_key=128, d_value=128), 168),
    ("(C) d_ff 1024", replace(BASE, d_ff=1024), 53),
    ("(C) d_ff 4096", replace(BASE, d_ff=4096), 90),
    ("big", BIG, 213),
]


def test_parameter_counts_match_table_3() -> None:
    print(f"\n{'row of Table 3':18}{'paper':>8}{'ours':>9}   (millions, 37,000 joint entries)")
    far = []
    for name, config, published in TABLE_3:
        with torch.device("meta"):
            count = parameter_count(Transformer(config, Vocabulary(source=37_000, target=37_000, joint=True))) / 1e6
        print(f"{name:18}{published:8}{count:9.2f}")
        if abs(count - published) > max(3, 0.03 * published):
            far.append(name)
    assert not far
