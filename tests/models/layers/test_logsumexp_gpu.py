"""The log-sum-exp of a search's logits as a GPU kernel, in Triton's interpreter where Triton is installed."""

import logging

import pytest
import torch

from nmtkit.models.layers import logsumexp_gpu
from nmtkit.models.layers.logsumexp_gpu import fused_logsumexp, is_usable, logsumexp


@pytest.fixture
def interpreter():
    pytest.importorskip("triton", reason="Triton is not installed: torch brings it with CUDA only")
    logsumexp_gpu.kernel.cache_clear()
    yield
    logsumexp_gpu.kernel.cache_clear()


@pytest.mark.parametrize("columns", [5, 128, 1000, 1024, 2500])
def test_the_kernel_sums_all_columns_and_keeps_the_largest_of_each_whole_block(interpreter, columns: int) -> None:
    logits = 30 * torch.randn(4, columns, generator=torch.Generator().manual_seed(columns))
    logits[2, 0] = -torch.inf
    result, maxima = fused_logsumexp(logits, 128)
    torch.testing.assert_close(result.double(), logits.double().logsumexp(1))
    whole = columns // 128
    assert torch.equal(maxima, logits[:, : whole * 128].unflatten(1, (whole, 128)).amax(2) if whole else maxima)
    assert maxima.shape == (4, whole)


def test_a_row_that_is_not_finite_spoils_itself_alone(interpreter) -> None:
    logits = torch.zeros(4, 1500)
    logits[0, 1400], logits[1, 3], logits[2, :] = torch.nan, torch.inf, -torch.inf
    result, _ = fused_logsumexp(logits, 128)
    assert result[0].isnan() and not result[1].isfinite() and result[2] == -torch.inf
    assert float(result[3]) == pytest.approx(torch.tensor(1500.0).log().item())


def test_without_the_kernel_it_is_torchs_own(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    logits = torch.randn(3, 300)
    result, maxima = logsumexp(logits, 128)
    assert torch.equal(result, logits.logsumexp(1)) and maxima is None

    def broken(*_: object) -> None:
        raise RuntimeError("no ptxas here\nand more")

    monkeypatch.setattr(logsumexp_gpu, "kernel", lambda: broken)
    monkeypatch.setattr(logsumexp_gpu, "fused_logsumexp", broken)
    is_usable.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not is_usable(torch.device("cpu"))
    (message,) = caplog.messages
    assert message.endswith(": no ptxas here")
    is_usable.cache_clear()
