"""The fused projection and loss of two passes against F.kl_div and F.cross_entropy in float64."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.layers import losses
from nmtkit.layers.losses import output_r_drop_loss
from nmtkit.packed import IGNORE_INDEX

V = 29


def case(bias: bool = False) -> tuple[nn.Linear, list[Tensor], Tensor]:
    torch.manual_seed(0)
    output = nn.Linear(11, V, bias=bias)
    nn.init.normal_(output.weight, std=0.3)
    target = torch.randint(V, (37,))
    target[[3, 4, 20]] = IGNORE_INDEX
    return output, [torch.randn(37, 11, requires_grad=True) for _ in range(2)], target


def expected(
    output: nn.Linear, passes: list[Tensor], target: Tensor, alpha: float
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Loss, nll, divergence and the gradients by both passes, weight (and bias), from torch in float64."""
    inputs = [x.detach().double().requires_grad_() for x in passes]
    parameters = [p.detach().double().requires_grad_() for p in output.parameters()]
    logits = [F.linear(x, *parameters) for x in inputs]
    smoothed, plain = (
        sum(F.cross_entropy(z, target, label_smoothing=eps, ignore_index=IGNORE_INDEX, reduction="sum") for z in logits)
        / 2
        for eps in (0.1, 0.0)
    )
    p, q = (z[target != IGNORE_INDEX].log_softmax(-1) for z in logits)
    divergence = sum(F.kl_div(a, b, reduction="sum", log_target=True) for a, b in ((p, q), (q, p))) / 2
    loss = smoothed + alpha / 2 * divergence
    return loss, plain, divergence, list(torch.autograd.grad(loss, [*inputs, *parameters]))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 5.0])
def test_values_and_gradients_equal_float64(
    monkeypatch: pytest.MonkeyPatch, alpha: float, bias: bool, fused: bool
) -> None:
    monkeypatch.setattr(losses, "CHUNK_BYTES", V * 4 * 8)  # chunks of 8 tokens, the last of 5
    output, passes, target = case(bias)
    loss, *counts = output_r_drop_loss(output if fused else nn.Sequential(output), *passes, target, 0.1, alpha)
    assert not any(count.requires_grad for count in counts)
    gradients = torch.autograd.grad(loss * 0.5, [*passes, *output.parameters()])
    *right, right_gradients = expected(output, passes, target, alpha)
    for ours, theirs in zip((loss, *counts), right, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=0, rtol=1e-6)
    for ours, theirs in zip(gradients, right_gradients, strict=True):
        torch.testing.assert_close(ours.double(), 0.5 * theirs, atol=1e-5, rtol=1e-5)


def test_bfloat16_stays_near_float64() -> None:
    output, passes, target = case()
    with torch.autocast("cpu", torch.bfloat16):
        loss, *_ = output_r_drop_loss(output, *passes, target, 0.1, 5.0)
    gradients = torch.autograd.grad(loss, [*passes, output.weight])
    right, _, _, right_gradients = expected(output, passes, target, 5.0)
    assert loss.item() == pytest.approx(right.item(), rel=3e-3)
    for ours, theirs in zip(gradients, right_gradients, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() / theirs.norm() < 0.02
