"""Parameter counts of published configurations equal the published counts, or the counts by the paper's shapes."""

import pytest
import torch

from nmtkit.models.architectures import ARCHITECTURES, Vocabulary
from nmtkit.models.architectures.interface import parameter_count


def lstm(width: int, hidden: int, output: int = 0) -> int:
    """Weights of an LSTM layer, biases left out: gates, and a projection where its output is narrower."""
    return 4 * hidden * (width + (output or hidden)) + hidden * output


def gnmt_weights(vocabulary: int = 32_000, width: int = 1024) -> int:
    encoder = 2 * lstm(width, width) + lstm(2 * width, width) + 6 * lstm(width, width)
    return 3 * vocabulary * width + encoder + 8 * lstm(2 * width, width) + 2 * width**2


def deep_att_weights(source: int = 200_000, target: int = 80_000, hidden: int = 512) -> int:
    column = lstm(256, hidden) + 8 * lstm(3 * hidden, hidden)
    decoder = lstm(256 + 1280, hidden) + 6 * lstm(3 * hidden, hidden)
    joints = 10 * hidden * 1280 + 512 * (hidden + 1280) + 5 * hidden * target
    return 256 * (source + target) + 2 * column + decoder + joints


def convs2s_weights(vocabulary: int = 40_000, embedding: int = 768, output: int = 512) -> int:
    convolutions = 9 * 3 * 512 * 1024 + 3 * 512 * 2048 + 3 * 3 * 1024 * 2048 + 1024 * 4096 + 2048 * 4096
    residuals = 512 * 1024 + 1024 * 2048
    attentions = 2 * embedding * (9 * 512 + 4 * 1024 + 2 * 2048)
    ends = embedding * 512 + 2048 * embedding + embedding * 512 + 2048 * output
    tables = 2 * embedding * (vocabulary + 1024) + output * vocabulary
    return 2 * (convolutions + residuals) + attentions + ends + tables


def bytenet_weights(characters: int = 300, inner: int = 800) -> int:
    block = 2 * inner * inner + 3 * inner * inner + 2 * inner * inner
    return 60 * block + (2 * inner) ** 2 + 3 * 2 * inner * characters


def moe_weights(vocabulary: int = 32_000, width: int = 512) -> int:
    experts = 2 * 2048 * 2 * width * 2048
    layers = 2 * lstm(width, 2048, width // 2) + 3 * lstm(width, 2048, width) + lstm(2 * width, 2048, width)
    return 3 * vocabulary * width + experts + 2 * 2 * 2048 * width + layers + 2 * width**2


def transformer_moe_weights(vocabulary: int = 37_000, width: int = 512) -> int:
    mixtures = 12 * (16 * 2 * width * 2048 + 2 * 16 * width)
    return vocabulary * width + 18 * 4 * width**2 + mixtures


def neural_gpu_weights(vocabulary: int = 32_768, width: int = 512, layers: int = 2) -> int:
    units = 2 * layers * 3 * 9 * width**2  # encoder and decoder: U, U' and U'' of each unit
    tape = layers * 3 * (2 * 3) * width**2  # W, W' and W'': the two upper rows of a kernel meet the tape's row
    return units + tape + 3 * vocabulary * width


# name -> source and target vocabulary, millions of weights by the shapes, and millions that this or a later paper
# states (GNMT and the mixture: Shazeer et al. 2017, tables 2 and 3)
SIZES = {
    "gnmt": ((32_000, 32_000), gnmt_weights(), 278),
    "deep_att": ((200_000, 80_000), deep_att_weights(), None),
    "convs2s": ((40_000, 40_000), convs2s_weights(), None),
    "bytenet": ((300, 300), bytenet_weights(), None),
    "extended_neural_gpu": ((32_768, 32_768), neural_gpu_weights(), None),
    "moe": ((32_000, 32_000), moe_weights(), 8_700),
    "transformer_moe": ((37_000, 37_000), transformer_moe_weights(), None),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_match_the_published_or_derived_ones(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (source, target), weights, published = SIZES[name]
    entry = ARCHITECTURES[name]
    with torch.device("meta"):
        model = entry.factory(entry.preset, Vocabulary(source=source, target=target, joint=source == target))
    count = parameter_count(model)
    with capsys.disabled():
        stated = f"{published:,} M" if published else "no figure"
        shapes = f"by the paper's shapes {weights / 1e6:9.1f} M"
        print(f"\n{name:<16} {count / 1e6:9.1f} M   {shapes}   published {stated}", end="")
    assert weights <= count <= 1.004 * weights  # the shapes leave out biases, norms and gains
    if published:
        assert abs(count / 1e6 - published) < 0.03 * published
