"""The fused projection and ReLU against torch's two operations."""

import pytest
import torch
from torch import nn

from nmtkit.models.layers import feed_forward as module
from nmtkit.models.layers import multiplies_in_bf16
from nmtkit.models.layers.feed_forward import FeedForward, linear_relu

needs_bf16 = pytest.mark.skipif(not multiplies_in_bf16(), reason="this processor does not multiply in bf16")


def results(linear: nn.Linear, x: torch.Tensor, fused: bool) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = linear_relu(linear, x) if fused else torch.relu(linear(x))
    weight = torch.linspace(-1, 1, y.numel()).view(y.shape)
    return [y, *torch.autograd.grad((y * weight).sum(), [x, *(it for it in linear.parameters() if it.requires_grad)])]


@needs_bf16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",)])
def test_the_product_and_its_gradients_are_torch_s(frozen: tuple[str, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(48, 80)
    for name in frozen:
        linear.get_parameter(name).requires_grad_(False)
    x = torch.randn(37, 48).to(dtype)
    fused, plain = results(linear, x, True), results(linear, x, False)
    assert "LinearReLU" in fused[0].grad_fn.name()  # type: ignore[union-attr]
    for ours, theirs in zip(fused, plain, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.01, atol=1e-4)


@needs_bf16
@pytest.mark.parametrize("why", ["hook", "parametrization"])
def test_a_layer_with_hooks_is_called(why: str) -> None:
    linear, x = nn.Linear(48, 80), torch.randn(37, 48)
    if why == "hook":
        linear.register_forward_hook(lambda module, inputs, output: 2 * output)
    else:
        nn.utils.parametrizations.weight_norm(linear)
    fused, plain = results(linear, x, True), results(linear, x, False)
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.01, atol=1e-4)


@pytest.mark.parametrize("activation", ["relu", "reglu"])
def test_a_hook_can_keep_the_inputs_of_the_activation(activation: str) -> None:
    layer, x = FeedForward(8, 16, activation), torch.randn(3, 8)
    kept: list[torch.Tensor] = []
    layer.fc1.register_forward_hook(lambda module, inputs, output: kept.append(output))
    with torch.no_grad():
        layer(x)
        torch.testing.assert_close(kept[0], x @ layer.fc1.weight.t() + layer.fc1.bias)


@pytest.mark.parametrize("why", ["fp32", "no gradients", "no bias", "another processor"])
def test_elsewhere_it_is_torch_s_own(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = nn.Linear(8, 8, bias=why != "no bias"), torch.randn(3, 8)
    monkeypatch.setattr(module, "multiplies_in_bf16", lambda: why != "another processor")
    monkeypatch.setattr(module, "_LinearReLU", None)
    with torch.autocast("cpu", torch.bfloat16, enabled=why != "fp32"), torch.set_grad_enabled(why != "no gradients"):
        assert torch.equal(linear_relu(linear, x), torch.relu(linear(x)))
