"""ByteNet against section 3 written out, one sentence at a time."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.data.packed import Packed
from nmtkit.models.architectures import Vocabulary
from nmtkit.models.architectures.bytenet import ByteNet, ByteNetConfig, ResidualBlock, unfold

CONFIG = ByteNetConfig(encoder_blocks=4, decoder_blocks=4, d_model=3, dilations=(1, 2, 4), dropout=0.0)


def model() -> ByteNet:
    torch.manual_seed(2)
    return ByteNet(CONFIG, Vocabulary(source=11, target=13, joint=False)).eval()


def residual(block: ResidualBlock, x: Tensor, dilation: int, causal: bool) -> Tensor:
    """L 2D -> L 2D (figure 3, left)."""
    y = block.conv1[2](F.relu(F.layer_norm(x, (6,), block.conv1[0].weight, block.conv1[0].bias)))
    y = F.relu(F.layer_norm(y, (3,), block.norm[0].weight, block.norm[0].bias))
    linear = block.conv2.linear
    weight = linear.weight.unflatten(1, (3, 3)).transpose(1, 2)
    pad = (2 * dilation, 0) if causal else (dilation, dilation)
    y = F.conv1d(F.pad(y.T[None], pad), weight, linear.bias, dilation=dilation)[0].T
    return x + block.conv3[2](F.relu(F.layer_norm(y, (3,), block.conv3[0].weight, block.conv3[0].bias)))


@pytest.mark.parametrize("target_length", [4, 9])  # within the 6 columns of the source, and beyond them
def test_features_are_those_of_the_paper(target_length: int) -> None:
    bytenet, source = model(), torch.tensor([3, 5, 2, 7, 8])
    target = torch.arange(1, 1 + target_length)
    x = F.pad(bytenet.source_embedding.weight[source], (0, 0, 0, math.ceil(1.2 * 5) - 5))
    for block, dilation in zip(bytenet.encoder, (1, 2, 4, 1), strict=True):
        x = residual(block, x, dilation, causal=False)
    columns = F.pad(x, (0, 0, 0, 5))[:target_length]
    x = bytenet.target_embedding.weight[target] + columns
    for block, dilation in zip(bytenet.decoder, (1, 2, 4, 1), strict=True):
        x = residual(block, x, dilation, causal=True)
    features = bytenet(Packed.from_lists([source.tolist()]), Packed.from_lists([target.tolist()]))
    torch.testing.assert_close(features, bytenet.final(x), rtol=1e-5, atol=1e-5)


def test_sources_are_unfolded_to_a_times_length_plus_b() -> None:
    source = Packed.from_lists([[1], [2, 3, 4, 5, 6]])
    wide = unfold(source.with_values(source.values[:, None].float()), 1.2, 1)
    assert wide.layout.lengths.tolist() == [3, 7]  # ceil(1.2) + 1, 6 + 1
    assert wide.values[:, 0].tolist() == [1, 0, 0, 2, 3, 4, 5, 6, 0, 0]


def test_a_step_costs_the_same_at_any_length() -> None:
    bytenet = model()
    state = bytenet.start(bytenet.encode(Packed.from_lists([[3, 4, 2]])), 2)
    sizes = set()
    for _ in range(6):
        bytenet.step(torch.tensor([3, 4]), state)
        sizes.add(sum(part.numel() for group in state.states.values() for part in group))
    assert len(sizes) == 1


def test_sources_are_never_cut() -> None:
    with pytest.raises(ValueError, match=r"--unfold-factor is 0\.9"):
        ByteNetConfig(unfold_factor=0.9)
