"""The precision of a run on a processor."""

import logging

import pytest
import torch

from nmtkit.training import precision

CPU = torch.device("cpu")


@pytest.mark.parametrize("has_bf16", [True, False])
def test_slow_products_in_bf16_are_announced_once(
    has_bf16: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A layer took ten times as long in bf16 as in fp32 on a processor with AVX2 only, and nothing was said."""
    monkeypatch.setattr(precision, "multiplies_in_bf16", lambda: has_bf16)
    precision._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [precision.resolve("bf16", CPU) for _ in range(2)] == ["bf16", "bf16"]
        assert precision.resolve("auto", CPU) == ("bf16" if has_bf16 else "fp32")
        assert precision.resolve("fp32", CPU) == "fp32"
    assert len(caplog.records) == (0 if has_bf16 else 1)
