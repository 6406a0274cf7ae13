"""Attention within a sliding window by blocks, against all scores behind a mask."""

import pytest
import torch

from nmtkit.data.packed import Layout
from nmtkit.models.layers.attention import BACKENDS, attention, backend
from nmtkit.models.layers.attention_cpu import sliding_window_attention
from nmtkit.models.layers.attention_reference import AttentionSpec, reference_attention

H, K, V = 2, 4, 6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 2, 5, 32, 40])
@pytest.mark.parametrize("lengths", [[1], [16], [33, 1, 70, 7], [48, 48]])
def test_blocks_equal_the_mask_forward_and_backward(lengths: list[int], window: int, causal: bool) -> None:
    torch.manual_seed(0)
    layout = Layout.of(torch.tensor(lengths))
    inputs = [torch.randn(layout.tokens, H, width, dtype=torch.float64, requires_grad=True) for width in (K, K, V)]
    right = reference_attention(*inputs, layout, layout, AttentionSpec(causal, window))
    ours = sliding_window_attention(*inputs, layout, layout, AttentionSpec(causal, window))
    torch.testing.assert_close(ours.double(), right, atol=1e-6, rtol=1e-5)
    weight = torch.randn_like(right)
    wanted = torch.autograd.grad((right * weight).sum(), inputs)
    gradients = torch.autograd.grad((ours * weight).sum(), inputs)
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, atol=2e-6, rtol=1e-5)


def test_dropout_falls_on_the_weights_of_a_window() -> None:
    """If all values are one, each result is the sum of its weights: one on average, and exactly one without dropout."""
    torch.manual_seed(0)
    layout = Layout.of(torch.tensor([200, 100]))
    query, key, ones = torch.randn(300, H, K), torch.randn(300, H, K), torch.ones(300, H, 1)
    whole = sliding_window_attention(query, key, ones, layout, layout, AttentionSpec(window=8))
    torch.testing.assert_close(whole, torch.ones(300, H, 1))
    dropped = sliding_window_attention(query, key, ones, layout, layout, AttentionSpec(window=8, dropout=0.5))
    assert abs(dropped.mean().item() - 1) < 0.1
    assert dropped.std() > 0.2


def test_long_sentences_with_a_window_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = "cpu", torch.float32, 64, 64
    assert backend(*shape, 129, 0.0, window=32) == "sliding_window"
    assert backend(*shape, 129, 0.1, window=32) == "sliding_window"
    assert backend(*shape, 128, 0.0, window=32) == "bmm"
    assert backend(*shape, 255, 0.0, window=64) == "bmm"
    assert backend(*shape, 256, 0.0, window=64) == "sliding_window"
    assert backend(*shape, 256, 0.0, window=64, compiling=True) == "reference"
    assert backend("cuda", *shape[1:], 256, 0.0, window=64, capability=(9, 0)) == "sdpa"
    layout, equal_layout = (Layout.of(torch.tensor([300])) for _ in range(2))
    x = torch.randn(300, H, K)
    spec = AttentionSpec(causal=True, window=10)
    in_blocks = attention(x, x, x, layout, layout, spec)
    torch.testing.assert_close(in_blocks, reference_attention(x, x, x, layout, layout, spec))
    monkeypatch.setitem(
        BACKENDS, "sliding_window", None
    )  # keys with another layout are refused, even if the layouts are equal
    torch.testing.assert_close(attention(x, x, x, layout, equal_layout, spec), in_blocks)
