import math

import pytest
import torch
from torch import Tensor

from nmtkit.models.layers.experts import Experts, ExpertsConfig, count, cv_squared, pop_auxiliary_losses


def config_of(experts: int, active: int, groups: int | None = None, importance: float = 1.0) -> ExpertsConfig:
    weights = {"importance_weight": importance, "load_weight": 1.0}
    return ExpertsConfig(experts=experts, active_experts=active, expert_groups=groups, **weights)


def layer(experts: int = 6, active: int = 2, groups: int | None = None, importance: float = 1.0) -> Experts:
    torch.manual_seed(1)
    result = Experts(config_of(experts, active, groups, importance), 5, 7)
    for name, parameter in result.named_parameters():
        if "gate" in name or "noise" in name:
            torch.nn.init.normal_(parameter)
    return result


def dense(experts: Experts, x: Tensor, gates: Tensor) -> Tensor:
    """Equation 1, over all experts."""
    y = torch.zeros_like(x)
    for index in range(gates.shape[1]):
        y += gates[:, index, None] * ((x @ experts.fc1[index]).clamp(min=0) @ experts.fc2[index])
    return y


def top_gates(scores: Tensor, active: int) -> Tensor:
    """Softmax over the k highest of each row, zero elsewhere (equations 3 and 5)."""
    kept = torch.full_like(scores, -torch.inf)
    for row, values in enumerate(scores):
        for index in sorted(range(len(values)), key=lambda index: -values[index].item())[:active]:
            kept[row, index] = values[index]
    return kept.softmax(-1)


def test_evaluation_sums_the_k_best_experts_without_noise() -> None:
    experts, x = layer().eval(), torch.randn(9, 5)
    torch.testing.assert_close(experts(x), dense(experts, x, top_gates(x @ experts.gate, 2)))
    assert experts.balance_losses == []


def test_training_gates_with_noise_of_the_learned_standard_deviation() -> None:
    experts, x = layer().train(), torch.randn(9, 5)
    torch.manual_seed(4)
    got = experts(x)
    torch.manual_seed(4)
    scores = x @ experts.gate + torch.randn(9, 6) * torch.log1p(torch.exp(x @ experts.noise))
    gates = top_gates(scores, 2)
    torch.testing.assert_close(got, dense(experts, x, gates))
    importance = gates.sum(0)
    torch.testing.assert_close(
        experts.balance_losses[0]["importance"], importance.var(unbiased=False) / importance.mean() ** 2
    )


@pytest.mark.parametrize("counts", [[40, 0, 3, 17, 1, 16], [0, 0, 0, 0, 0, 96], [16] * 6, [0, 1, 0, 0, 0, 0]])
@pytest.mark.parametrize("autocast", [False, True])
def test_blocks_give_what_a_product_of_each_expert_gives(counts: list[int], autocast: bool) -> None:
    experts, results = layer(), []
    x = torch.randn(sum(counts), 5, requires_grad=True)
    direction = torch.randn(sum(counts), 5)
    for compute in (experts.products, experts.blocked_products):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = compute(x, torch.tensor(counts))
        gradients = torch.autograd.grad(y, (x, experts.fc1, experts.fc2), direction.to(y.dtype))
        results.append((y, *gradients))
    for ours, plain in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0.02 if autocast else 1e-5, atol=0.02 if autocast else 1e-6)


def test_load_is_the_probability_of_being_active_with_the_own_noise_drawn_again() -> None:
    experts, x = layer().train(), torch.randn(3, 5)
    torch.manual_seed(4)
    experts(x)
    torch.manual_seed(4)
    noise = torch.randn(3, 6)
    logits, stddev = x @ experts.gate, torch.log1p(torch.exp(x @ experts.noise))
    scores = logits + noise * stddev
    load = torch.zeros(6)
    generator = torch.Generator().manual_seed(9)
    for token in range(3):
        for index in range(6):
            others = torch.cat([scores[token, :index], scores[token, index + 1 :]]).sort(descending=True).values
            draws = torch.randn(40_000, generator=generator)
            load[index] += (logits[token, index] + draws * stddev[token, index] > others[1]).float().mean()
    torch.testing.assert_close(experts.balance_losses[0]["load"], cv_squared(load), rtol=0.03, atol=0.01)


def test_equal_loads_cost_nothing() -> None:
    assert float(cv_squared(torch.full((4,), 3.0))) == 0.0
    assert abs(float(cv_squared(torch.tensor([0.0, 2.0]))) - 1.0) < 1e-6


def test_losses_are_summed_over_layers_averaged_over_passes_and_taken_once() -> None:
    first, second, x = layer(importance=0.5), layer(importance=0.5), torch.randn(9, 5)
    model = torch.nn.Sequential(first, second).train()
    model(x)
    model(x + 1)
    expected = sum(by_name["importance"].item() for part in (first, second) for by_name in part.balance_losses) / 2
    losses = pop_auxiliary_losses(model)
    assert abs(losses["importance"].item() - expected) < 1e-5
    assert set(losses) == {"importance", "load"}
    assert pop_auxiliary_losses(model) == {}


def test_a_fresh_gate_sends_tokens_everywhere() -> None:
    torch.manual_seed(2)
    experts = Experts(config_of(4, 1), 5, 7).train()
    assert not experts.gate.any() and not experts.noise.any()
    _, indices = experts.gates(torch.randn(400, 5))
    counts = indices.flatten().bincount(minlength=4)
    assert counts.min() > 60


def test_gradients_equal_the_dense_sums() -> None:
    experts, x = layer().eval(), torch.randn(9, 5)
    experts(x).square().sum().backward()
    sparse = {name: parameter.grad.clone() for name, parameter in experts.named_parameters() if name != "noise"}
    experts.zero_grad()
    dense(experts, x, top_gates(x @ experts.gate, 2)).square().sum().backward()
    for name, gradient in sparse.items():
        torch.testing.assert_close(gradient, experts.get_parameter(name).grad)


def test_two_levels_multiply_their_weights() -> None:
    experts, x = layer(experts=12, groups=4).eval(), torch.randn(9, 5)
    primary, gates = top_gates(x @ experts.group_gate, 2), torch.zeros(9, 12)
    for group in range(4):
        own = slice(3 * group, 3 * group + 3)
        gates[:, own] = primary[:, group, None] * top_gates(x @ experts.gate[:, own], 2)
    torch.testing.assert_close(experts(x), dense(experts, x, gates))
    assert ((gates > 0).sum(1) == 4).all()


def test_load_of_two_levels_is_the_groups_load_times_the_share_within() -> None:
    experts, x = layer(experts=6, active=1, groups=2).train(), torch.randn(7, 5)
    with torch.no_grad():
        experts.group_gate.zero_()
        experts.group_noise.zero_()
    torch.manual_seed(4)
    experts(x)
    torch.manual_seed(4)
    first = torch.randn(7, 2) * math.log(2)  # softplus(0)
    group = first.argmax(1)
    within = torch.randn(7, 1, 3)
    group_load, load = torch.zeros(2), torch.zeros(2, 3)
    normal = torch.distributions.Normal(0.0, 1.0)
    for token in range(7):
        for index in range(2):
            group_load[index] += normal.cdf(-first[token, 1 - index] / math.log(2))
        own = slice(3 * int(group[token]), 3 * int(group[token]) + 3)
        logits, stddev = x[token] @ experts.gate[:, own], torch.log1p(torch.exp(x[token] @ experts.noise[:, own]))
        noisy = logits + within[token, 0] * stddev
        for index in range(3):
            best = max(float(noisy[other].detach()) for other in range(3) if other != index)
            load[group[token], index] += normal.cdf((logits[index] - best) / stddev[index])
    members = group.bincount(minlength=2).clamp(min=1)
    expected = cv_squared((group_load[:, None] * load / members[:, None]).flatten())
    torch.testing.assert_close(experts.balance_losses[0]["load"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_equal_those_of_one_expert_after_another(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares outputs and gradients. torch computes grouped products on a CPU, too, but slowly."""
    results = []
    for name in ("products", "grouped_products"):
        monkeypatch.setattr(Experts, "products_on", lambda self, x, name=name: getattr(self, name))
        torch.manual_seed(1)
        experts, x = Experts(config_of(12, 2, 4), 8, 16).eval(), torch.randn(9, 8, requires_grad=True)
        for gate in (experts.gate, experts.group_gate):
            torch.nn.init.normal_(gate)
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            y = experts(x)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [x, experts.gate, experts.fc1, experts.fc2])])
    for by_expert, by_group in zip(*results, strict=True):
        torch.testing.assert_close(by_group, by_expert)


def test_counts_are_those_of_bincount() -> None:
    indices = torch.tensor([[4, 1], [1, 2], [4, 4]])
    assert torch.equal(count(indices, 6), indices.flatten().bincount(minlength=6))
