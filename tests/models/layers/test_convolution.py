import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nmtkit.data.packed import Layout
from nmtkit.models.layers.convolution import PackedConvolution, WeightNormLinear


@pytest.mark.parametrize(
    ("kernel", "dilation", "causal"), [(1, 1, True), (3, 1, False), (3, 4, False), (2, 1, True), (3, 16, True)]
)
def test_equals_a_convolution_of_each_sentence_alone(kernel: int, dilation: int, causal: bool) -> None:
    torch.manual_seed(1)
    lengths = [5, 1, 9, 2]
    x = torch.randn(17, 4, requires_grad=True)
    linear = nn.Linear(kernel * 4, 6)
    convolution = PackedConvolution(linear, kernel, width=4, dilation=dilation, causal=causal)
    got = convolution(x, Layout.of(torch.tensor(lengths)))

    weight = linear.weight.unflatten(1, (kernel, 4)).transpose(1, 2)  # O (K I) -> O I K
    reach = (kernel - 1) * dilation
    pad = (reach, 0) if causal else (reach // 2, reach // 2)
    parts = [
        F.conv1d(F.pad(part.T[None], pad), weight, linear.bias, dilation=dilation)[0].T for part in x.split(lengths)
    ]
    torch.testing.assert_close(got, torch.cat(parts))
    target = torch.randn(17, 6)
    (ours,) = torch.autograd.grad((got * target).sum(), x)
    (theirs,) = torch.autograd.grad((torch.cat(parts) * target).sum(), x)
    torch.testing.assert_close(ours, theirs)


def test_a_neighbour_that_is_not_a_number_does_not_leak() -> None:
    convolution = PackedConvolution(nn.Linear(9, 2), 3, width=3, dilation=2, causal=False)
    x = torch.randn(8, 3)
    x[:4] = torch.nan
    assert convolution(x, Layout.of(torch.tensor([4, 4])))[4:].isfinite().all()


def test_steps_equal_the_causal_convolution() -> None:
    convolution = PackedConvolution(nn.Linear(9, 2), 3, width=3, dilation=3, causal=True)
    x = torch.randn(2, 10, 3)
    whole = convolution(x.flatten(0, 1), Layout.of(torch.tensor([10, 10]))).unflatten(0, (2, 10))
    states = {convolution: (torch.zeros(2, 6, 3),)}
    for position in range(10):
        y = convolution(x[:, position], Layout.of(torch.tensor([1, 1])), states)
        torch.testing.assert_close(y, whole[:, position])


def test_weight_normalised_layer_starts_unnormalised_and_ignores_the_directions_length() -> None:
    torch.manual_seed(1)
    layer = WeightNormLinear(50, 20, std=0.3)
    x = torch.randn(4, 50)
    before = layer(x)
    torch.testing.assert_close(before, x @ layer.direction.T)
    assert abs(float(layer.direction.detach().std()) - 0.3) < 0.03
    layer.direction.data *= 7
    torch.testing.assert_close(layer(x), before)
    layer.gain.data *= 2
    torch.testing.assert_close(layer(x), 2 * before)
