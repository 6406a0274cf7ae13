"""Recurrences over packed sentences, against loops over the tokens of one sentence in float64."""

import pytest
import torch
from torch import Tensor

from nmtkit.data.packed import Layout
from nmtkit.models.layers.scan import gated_scan, parallel_scan, running_average, sequential_scan_

LENGTHS = {"one token each": [1, 1, 1], "equal": [4, 4], "different": [3, 1, 17, 8]}


def random_inputs(lengths: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Layout]:
    generator = torch.Generator().manual_seed(1)
    x, gate = torch.randn(2, sum(lengths), 5, generator=generator, dtype=dtype)
    return x, torch.sigmoid(3 * gate), Layout.of(torch.tensor(lengths))


def by_loop(x: Tensor, forget: Tensor, lengths: list[int]) -> Tensor:
    rows = []
    for sentence, gates in zip(x.split(lengths), forget.split(lengths), strict=True):
        state = torch.zeros(5, dtype=x.dtype)
        for value, gate in zip(sentence, gates, strict=True):
            state = gate * state + (1 - gate) * value
            rows.append(state)
    return torch.stack(rows)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_scan_and_its_gradients_are_those_of_a_loop(lengths: list[int]) -> None:
    x, forget, layout = random_inputs(lengths, torch.float64)
    weight = torch.randn(x.shape, dtype=torch.float64)
    results = []
    for scan in (lambda x, f: gated_scan(x, f, layout), lambda x, f: by_loop(x, f, lengths)):
        inputs = [x.clone().requires_grad_(), forget.clone().requires_grad_()]
        states = scan(*inputs)
        results.append((states, *torch.autograd.grad((states * weight).sum(), inputs)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 33])
def test_both_scans_are_those_of_a_loop(length: int) -> None:
    update, gates = torch.randn(2, 3, length, 4, dtype=torch.float64)
    forget = torch.sigmoid(gates)
    state, states = torch.zeros(3, 4, dtype=torch.float64), []
    for t in range(length):
        state = forget[:, t] * state + update[:, t]
        states.append(state)
    expected = torch.stack(states, 1)
    torch.testing.assert_close(parallel_scan(update, forget), expected)
    torch.testing.assert_close(sequential_scan_(update.clone(), forget), expected)
    state, states = torch.zeros(3, 4, dtype=torch.float64), []
    for t in reversed(range(length)):
        state = (forget[:, t + 1] * state if t + 1 < length else 0) + update[:, t]
        states.insert(0, state)
    torch.testing.assert_close(sequential_scan_(update.clone(), forget, reverse=True), torch.stack(states, 1))


def test_gates_at_their_limits_stay_exact_over_a_thousand_tokens() -> None:
    """A gate of 1 keeps the state, and a gate of 0 replaces it: neither may add rounding errors or overflow."""
    layout = Layout.of(torch.tensor([1000]))
    x = torch.randn(1000, 5)
    forget = torch.ones(1000, 5)
    forget[0], forget[500] = 0.0, 0.0
    expected = torch.cat([x[:1].expand(500, -1), x[500:501].expand(500, -1)])
    assert torch.equal(gated_scan(x, forget, layout), expected)
    torch.testing.assert_close(parallel_scan((x - forget * x)[None], forget[None])[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_running_average_is_the_mean_of_the_tokens_so_far(lengths: list[int]) -> None:
    x, _, layout = random_inputs(lengths, torch.float64)
    expected = [sentence[: t + 1].mean(0) for sentence in x.split(lengths) for t in range(len(sentence))]
    torch.testing.assert_close(running_average(x, layout), torch.stack(expected))


@pytest.mark.slow
def test_a_compiled_scan_computes_the_same_values_and_gradients() -> None:
    torch._dynamo.reset()
    x, forget, layout = random_inputs([3, 1, 9], torch.float64)
    compiled = torch.compile(lambda x, f, lengths: gated_scan(x, f, Layout(lengths, 9, 13)), backend="eager")
    results = []
    for scan in (lambda x, f: gated_scan(x, f, layout), lambda x, f: compiled(x, f, layout.lengths)):
        inputs = [x.clone().requires_grad_(), forget.clone().requires_grad_()]
        states = scan(*inputs)
        results.append((states, *torch.autograd.grad(states.square().sum(), inputs)))
    torch.testing.assert_close(results[1], results[0])
