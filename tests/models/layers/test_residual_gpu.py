"""The residual connection's GPU kernels, in Triton's interpreter where Triton is installed, against fp64."""

import logging
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from nmtkit.models.layers import residual_gpu
from nmtkit.models.layers.residual_gpu import FusedAddAndNorm


@pytest.fixture
def interpreter():
    pytest.importorskip("triton", reason="Triton is not installed: torch brings it with CUDA only")
    residual_gpu.kernels.cache_clear()
    yield
    residual_gpu.kernels.cache_clear()


def inputs(width: int, x_type: torch.dtype, change_type: torch.dtype) -> tuple[Tensor, Tensor, nn.LayerNorm]:
    generator = torch.Generator().manual_seed(width)
    x, change = (torch.randn(37, width, generator=generator) for _ in range(2))
    norm = nn.LayerNorm(width)
    nn.init.normal_(norm.weight, generator=generator)
    nn.init.normal_(norm.bias, generator=generator)
    return x.to(x_type).requires_grad_(), change.to(change_type).requires_grad_(), norm


@pytest.mark.parametrize("width", [512, 48])
@pytest.mark.parametrize(
    ("x_type", "change_type", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-6),
        (torch.float32, torch.bfloat16, 0.01),
        (torch.bfloat16, torch.bfloat16, 0.01),
    ],
)
def test_kernels_compute_the_norm_of_the_sum(interpreter, width, x_type, change_type, tolerance) -> None:
    x, change, norm = inputs(width, x_type, change_type)
    direction = torch.randn(37, width).to(change_type)
    result = FusedAddAndNorm.apply(x, change, norm.weight, norm.bias, norm.eps, 0.0)
    result.backward(direction)
    exact = nn.LayerNorm(width).double()
    exact.load_state_dict(norm.state_dict())
    doubles = [part.detach().double().requires_grad_() for part in (x, change)]
    expected = exact(doubles[0] + doubles[1])
    expected.backward(direction.double())
    got = [result, x.grad, change.grad, norm.weight.grad, norm.bias.grad]
    wanted = [expected, doubles[0].grad, doubles[1].grad, exact.weight.grad, exact.bias.grad]
    assert [part.dtype for part in got[:3]] == [change_type, x_type, change_type]
    for ours, theirs in zip(got, wanted, strict=True):
        assert float((ours.double() - theirs).detach().abs().max() / theirs.detach().abs().max()) < tolerance


@pytest.mark.slow
def test_the_backward_pass_drops_what_the_forward_pass_dropped(interpreter) -> None:
    x, change, norm = (
        torch.zeros(20, 512, requires_grad=True),
        torch.ones(20, 512, requires_grad=True),
        nn.LayerNorm(512),
    )
    torch.manual_seed(3)
    result = FusedAddAndNorm.apply(x, change, norm.weight, norm.bias, norm.eps, 0.25)
    result.backward(torch.randn(20, 512))
    dropped = change.grad == 0
    assert torch.equal(dropped, result < 0)
    assert float(dropped.float().mean()) == pytest.approx(0.25, abs=0.01)
    torch.testing.assert_close(change.grad[~dropped], x.grad[~dropped] / 0.75)

    def again(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return FusedAddAndNorm.apply(x, change, norm.weight, norm.bias, norm.eps, 0.25)

    assert torch.equal(again(3), result) and not torch.equal(again(4), result)


def test_without_triton_or_with_kernels_that_fail_the_plain_way_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("nmtkit")
    monkeypatch.setattr(logger, "handlers", [])  # handlers of commands that other tests ran
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    device = torch.device("cpu")
    residual_gpu.is_usable.cache_clear()
    try:

        def without_triton() -> None:
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

        monkeypatch.setattr(residual_gpu, "kernels", without_triton)
        assert not residual_gpu.is_usable(device) and not caplog.records
        for error, message in (
            (RuntimeError("no compiler for sm_123\nand a traceback"), "no compiler for sm_123"),
            (ModuleNotFoundError("No module named 'setuptools'", name="setuptools"), "No module named 'setuptools'"),
        ):
            residual_gpu.is_usable.cache_clear()
            caplog.clear()
            broken = MagicMock()
            broken.__getitem__.side_effect = error
            monkeypatch.setattr(residual_gpu, "kernels", lambda broken=broken: (broken, broken))
            assert not residual_gpu.is_usable(device) and not residual_gpu.is_usable(device)
            (record,) = caplog.records
            assert record.getMessage().endswith(f": {message}")
    finally:
        residual_gpu.is_usable.cache_clear()
