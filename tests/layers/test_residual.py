"""The fused residual connection against the same in separate torch operations."""

import pytest
import torch
from torch import nn

from nmtkit.layers.dropout import keep_mask, keep_scale, masked
from nmtkit.layers.residual import add_and_norm


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
    fused = add_and_norm(inputs[0], inputs[1], norm, p, training=True)
    torch.manual_seed(1)
    kept = masked(inputs[1].detach(), keep_mask(inputs[1], p)) != 0 if p else torch.ones(50, 24, dtype=torch.bool)
    scale = keep_scale(p) if p else 1.0
    plain = norm(inputs[0] + inputs[1] * kept * scale)
    torch.testing.assert_close(fused, plain)
    for ours, theirs in zip(gradients(fused), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_under_autocast_the_result_has_the_type_of_the_change() -> None:
    norm = nn.LayerNorm(24)
    x, change = torch.randn(50, 24, requires_grad=True), torch.randn(50, 24).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        result = add_and_norm(x, change, norm, 0.1, training=False)
    result.float().square().sum().backward()
    assert result.dtype == torch.bfloat16
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert change.grad is not None and change.grad.dtype == torch.bfloat16
    assert norm.weight.grad is not None and norm.weight.grad.dtype == torch.float32
    torch.testing.assert_close(result.float(), norm(x + change.float()), atol=0.05, rtol=0.02)


def test_nothing_is_dropped_when_evaluating() -> None:
    norm = nn.LayerNorm(8)
    x, change = torch.randn(5, 8), torch.randn(5, 8)
    torch.testing.assert_close(add_and_norm(x, change, norm, 0.9, training=False), norm(x + change))
