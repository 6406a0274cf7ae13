"""Rotary positions turn the first heads of a row, and gradients turn back."""

import pytest
import torch

from nmtkit.models.layers.relative_positions import Rotary


@pytest.mark.parametrize("positions", [torch.tensor([0, 1, 2, 7, 0]), 3])
def test_the_first_heads_are_turned_as_complex_numbers(positions: torch.Tensor | int) -> None:
    heads, width = 3, 4
    rotary, x = Rotary(width, 100.0), torch.randn(5, heads * width + 6, dtype=torch.float64)
    pairs = x[:, : heads * width].view(5, heads, 2, width // 2)
    angles = torch.as_tensor(positions)[..., None] * 100.0 ** -(
        torch.arange(width // 2, dtype=torch.float64) * 2 / width
    )
    numbers = torch.complex(pairs[:, :, 0], pairs[:, :, 1]) * torch.polar(torch.ones_like(angles), angles)[..., None, :]
    expected = torch.stack([numbers.real, numbers.imag], 2).flatten(1)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            result = rotary(x, positions, heads)
        torch.testing.assert_close(result[:, : heads * width], expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(result[:, heads * width :], x[:, heads * width :])


def test_the_gradient_is_that_of_finite_differences() -> None:
    x = torch.randn(4, 11, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([0, 1, 5, 2])
    assert torch.autograd.gradcheck(lambda x: Rotary(4, 10.0)(x, positions, 2), x)
    assert torch.autograd.gradcheck(lambda x: Rotary(4, 10.0)(x, positions, 2).sum(), x)
    assert Rotary(4, 10.0)(x[:0], positions[:0], 2).shape == (0, 11)
