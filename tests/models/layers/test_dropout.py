"""Dropout against its definition, and the fused residual connection against torch's operations."""

import pytest
import torch
from torch import nn

from nmtkit.models.layers.dropout import (
    MAX_P,
    PATTERNS,
    Dropout,
    add_and_norm,
    dropped,
    noise_for,
    threshold,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_dropout_drops_at_its_rate_and_keeps_the_mean(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    n = 400_000
    result = Dropout(p)(torch.ones(n, dtype=dtype)).double()
    deviation = (p * (1 - p) / n) ** 0.5
    assert abs((result == 0).double().mean() - p) < 5 * deviation
    kept = result[result != 0]
    assert kept.unique().numel() == 1
    assert abs(kept[0] - 1 / (1 - p)) < (0.004 if dtype == torch.bfloat16 else 1e-4) / (1 - p)


def test_each_lane_of_a_random_word_decides_alike_often() -> None:
    torch.manual_seed(2)
    ones = torch.ones(400_000, dtype=torch.bfloat16)
    drops = dropped(ones, noise_for(ones), 0.25) == 0
    rates = drops.view(-1, 4).double().mean(0)
    assert ((rates - 0.25).abs() < 0.01).all()
    # neighbours are independent: both are dropped at the square of the rate
    both = (drops[:-1] & drops[1:]).double().mean()
    assert abs(both - 0.0625) < 0.003


@pytest.mark.parametrize("p", [1e-9, 0.1, 1 / 3, 0.498, 0.4981, 0.5, 0.7, MAX_P])
def test_the_scale_inverts_the_exact_rate(p: float) -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    limit, scale = threshold(p, torch.bfloat16)
    drops = int((every.float() <= limit).sum())
    assert int((dropped(torch.ones_like(every), every, p) == 0).sum()) == drops
    assert abs(drops / (1 << 16) - p) <= 1 / (1 << 16)
    assert scale == (1 << 16) / ((1 << 16) - drops)


@pytest.mark.parametrize("p", [1e-9, 0.1, 1 / 3, 0.5, 0.7, MAX_P])
def test_in_fp32_the_rate_is_that_of_the_patterns_up_to_the_threshold(p: float) -> None:
    limit, scale = threshold(p, torch.float32)
    bits = int(torch.tensor(limit).abs().view(torch.int32))
    negative = PATTERNS[torch.float32][1] + 1  # with -0
    drops = negative - bits if limit < 0 else negative + bits + 1
    assert float(torch.tensor(limit)) == limit
    assert abs(drops / (1 << 32) - p) <= 1 / (1 << 32)
    assert scale == (1 << 32) / ((1 << 32) - drops)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 5)])
def test_what_is_kept_is_the_value_itself_not_finite_ones_too(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x = torch.randn(shape).to(dtype)
    x.view(-1)[:2] = torch.tensor([float("nan"), float("inf")])
    noise = noise_for(x)
    assert noise.shape == x.shape and noise.dtype == dtype
    limit, scale = threshold(0.5, dtype)
    expected = torch.where(noise <= limit, torch.zeros_like(x), x * scale)
    torch.testing.assert_close(dropped(x, noise, 0.5), expected, rtol=0, atol=0, equal_nan=True)


def test_dropout_of_nearly_all_takes_the_plain_path() -> None:
    torch.manual_seed(8)
    result = Dropout(0.999)(torch.ones(100_000))
    assert 0 < (result != 0).sum() < 200


def test_the_gradient_passes_where_the_value_did() -> None:
    torch.manual_seed(4)
    x = torch.randn(1000, requires_grad=True)
    result = Dropout(0.3)(x)
    weight = torch.randn(1000)
    (result * weight).sum().backward()
    assert x.grad is not None
    expected = torch.where(result == 0, torch.zeros(()), weight * threshold(0.3, torch.float32)[1])
    torch.testing.assert_close(x.grad, expected)


def test_the_seed_decides_the_mask() -> None:
    draws = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        draws.append(Dropout(0.5)(torch.ones(1000)))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_no_dropout_when_evaluating_or_at_zero() -> None:
    x = torch.randn(10)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x


def test_doubles_take_the_plain_path() -> None:
    torch.manual_seed(7)
    result = Dropout(0.5)(torch.ones(10_000, dtype=torch.float64))
    assert set(result.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_fused_residual_equals_the_plain_one(p: float) -> None:
    torch.manual_seed(0)
    norm = nn.LayerNorm(24)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    inputs = [torch.randn(50, 24, requires_grad=True) for _ in range(2)]
    weight = torch.randn(50, 24)

    def gradients(result: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad((result * weight).sum(), [*inputs, norm.weight, norm.bias]))

    torch.manual_seed(1)
    fused = add_and_norm(inputs[0], inputs[1], norm, p)
    torch.manual_seed(1)
    change = inputs[1].detach()
    kept = dropped(change, noise_for(change), p) != 0 if p else torch.ones(50, 24, dtype=torch.bool)
    scale = threshold(p, torch.float32)[1] if p else 1.0
    plain = norm(inputs[0] + inputs[1] * kept * scale)
    torch.testing.assert_close(fused, plain)
    for ours, theirs in zip(gradients(fused), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_residual_scales_by_the_exact_inverse_of_the_rate(dtype: torch.dtype) -> None:
    """With a large eps the norm is nearly linear, so the result shows the scale of the kept elements."""
    torch.manual_seed(4)
    norm = nn.LayerNorm(512, eps=1e6)
    x, change = torch.zeros(400, 512, dtype=dtype), torch.randn(400, 512).to(dtype)
    torch.manual_seed(1)
    result = add_and_norm(x, change, norm, 0.1).double()
    torch.manual_seed(1)
    kept = change.double().where(dropped(change, noise_for(change), 0.1) != 0, 0.0)
    kept -= kept.mean(1, keepdim=True)
    scale = 1000 * float((result.detach() * kept).sum() / kept.square().sum())
    assert scale == pytest.approx(1 / 0.9, rel=1e-4)  # a scale rounded to bf16 would be off by 0.16 %


def test_the_fused_residual_sums_gradients_of_weight_and_bias_in_fp32() -> None:
    torch.manual_seed(5)
    norm = nn.LayerNorm(16)
    x, change = torch.randn(2000, 16).bfloat16(), torch.randn(2000, 16).bfloat16()
    direction = torch.rand(2000, 16).bfloat16()  # positive: a sum in bf16 stops at 512 of 1,000
    add_and_norm(x, change, norm, 0.0).backward(direction)
    normed = nn.functional.layer_norm((x + change).double(), [16])
    assert norm.weight.grad is not None and norm.bias.grad is not None
    torch.testing.assert_close(norm.bias.grad.double(), direction.double().sum(0), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(norm.weight.grad.double(), (normed * direction.double()).sum(0), rtol=1e-3, atol=0.05)


class RMSNorm(nn.LayerNorm):
    """A norm of a plug-in with the parameters of a layer norm and another formula."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt() * self.weight


@pytest.mark.parametrize("norm", ["RMSNorm", "nn.RMSNorm", "no bias", "hook"])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_another_norm_is_called(p: float, norm: str) -> None:
    torch.manual_seed(0)
    modules = {
        "RMSNorm": RMSNorm(24),
        "nn.RMSNorm": nn.RMSNorm(24),
        "no bias": nn.LayerNorm(24, bias=False),
        "hook": nn.LayerNorm(24),
    }
    module = modules[norm]
    if norm == "hook":
        module.register_forward_hook(lambda module, inputs, output: 2 * output)
    x, change = torch.randn(50, 24), torch.randn(50, 24)
    torch.manual_seed(1)
    result = add_and_norm(x, change, module, p)
    torch.manual_seed(1)
    torch.testing.assert_close(result, module(x + Dropout(p)(change)))


def test_under_autocast_the_result_has_the_type_of_the_change() -> None:
    norm = nn.LayerNorm(24)
    x, change = torch.randn(50, 24, requires_grad=True), torch.randn(50, 24).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        result = add_and_norm(x, change, norm, 0.0)
    result.float().square().sum().backward()
    assert result.dtype == torch.bfloat16
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert change.grad is not None and change.grad.dtype == torch.bfloat16
    assert norm.weight.grad is not None and norm.weight.grad.dtype == torch.float32
    torch.testing.assert_close(result.float(), norm(x + change.float()), atol=0.05, rtol=0.02)
