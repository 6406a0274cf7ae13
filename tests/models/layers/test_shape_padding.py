"""Padding rows against the same model without padding rows."""

import pytest
import torch
from builders import tiny_transformer

from nmtkit.data.packed import Packed
from nmtkit.models.architectures import transformer, transformer_layers
from nmtkit.models.layers.attention import AttentionContext
from nmtkit.models.layers.shape_padding import STEPS, pad_rows


def test_few_row_counts_are_left_and_few_rows_are_padding() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        sizes = {rows: len(pad_rows(torch.ones(rows, 2))) for rows in range(1, 5000)}
    assert all(rows <= even <= rows * (1 + 1 / STEPS) for rows, even in sizes.items())
    assert len({even for rows, even in sizes.items() if rows > 2048}) <= STEPS * 1.3
    assert len({even for rows, even in sizes.items() if 3900 < rows <= 4096}) <= 8


@pytest.mark.parametrize("why", ["fp32", "no gradients"])
def test_fp32_and_inference_get_no_padding_rows(why: str) -> None:
    x = torch.ones(1001, 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=why != "fp32"), torch.set_grad_enabled(why != "no gradients"):
        assert pad_rows(x) is x


@pytest.mark.parametrize("longest", [9, 300])  # batched products; torch's own kernel
@pytest.mark.parametrize("settings", [{}, {"pre_norm": True}, {"window": 4}, {"positions": "learned"}])
def test_padding_rows_change_no_feature_and_no_gradient(
    settings: dict[str, object], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformer(**settings, dropout=0.0)
    generator = torch.Generator().manual_seed(1)
    lengths = [longest, *torch.randint(1, 9, (20,), generator=generator).tolist()]
    sides = [[torch.randint(3, 20, (n,), generator=generator).tolist() for n in lengths] for _ in range(2)]
    source, target = (Packed.from_lists(side) for side in sides)
    counts: list[int] = []

    def results() -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            features = model(source, target).float()
        weight = torch.linspace(-1, 1, features.numel()).view(features.shape)
        return [features, *torch.autograd.grad((features * weight).sum(), list(model.parameters()), allow_unused=True)]

    plain = results()
    padding = 5  # rows

    def padded(x: torch.Tensor) -> torch.Tensor:
        counts.append(len(x))
        return torch.nn.functional.pad(x, (0, 0, 0, padding))

    monkeypatch.setattr(transformer, "pad_rows", padded)
    for ours, theirs in zip(results(), plain, strict=True):
        if theirs is not None:
            assert (ours - theirs).norm() <= 0.02 * theirs.norm() + 1e-6
    assert len(counts) == 3


def test_layers_of_a_plug_in_get_no_padding_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Counting(transformer_layers.SelfAttention):
        def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
            seen.append(len(x))
            return super().forward(x, context)

    monkeypatch.setattr(transformer, "pad_rows", lambda x: torch.nn.functional.pad(x, (0, 0, 0, 5)))
    model = tiny_transformer()
    sentences = Packed.from_lists([[3, 4, 5], [6, 7, 8, 9]])
    model(sentences, sentences)
    assert seen == []
    attention = model.encoder[0].self_attention
    attention.__class__ = Counting
    model(sentences, sentences)
    assert seen == [7]
