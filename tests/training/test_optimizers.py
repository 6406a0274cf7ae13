"""The first steps of each optimizer equal its formula."""

import io
from typing import Any

import pytest
import torch
from builders import tiny_transformer

from nmtkit.config import derive
from nmtkit.models.architectures import Vocabulary
from nmtkit.training.optimizers import OPTIMIZERS, ParameterGroups, muon
from nmtkit.training.optimizers.muon import CompositeOptimizer
from nmtkit.training.parameters import embedding_names, parameter_groups


def group_of(*parameters: torch.nn.Parameter, name: str = "matrices", **settings: Any) -> ParameterGroups:
    names = [f"weight{index}" for index in range(len(parameters))]
    return [{"name": name, "params": list(parameters), "param_names": names} | settings]


def stepped(name: str, gradients: list[float], lr: float = 0.1, start: float = 1.0, **settings: Any) -> float:
    """Returns the single weight of a model after a step on each gradient."""
    weight = torch.nn.Parameter(torch.tensor([[start]], dtype=torch.float32))
    entry = OPTIMIZERS[name]
    optimizer = entry.factory(derive(entry.preset, settings, "test"), group_of(weight))
    for group in optimizer.param_groups:
        group["lr"] = lr
    for gradient in gradients:
        weight.grad = torch.tensor([[gradient]])
        optimizer.step()
    return float(weight.detach())


def adam_by_hand(gradients: list[float], lr: float, start: float) -> float:
    first = second = 0.0
    for step, gradient in enumerate(gradients, 1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.98 * second + 0.02 * gradient**2
        start -= lr * (first / (1 - 0.9**step)) / ((second / (1 - 0.98**step)) ** 0.5 + 1e-9)
    return start


def test_adam_has_the_papers_constants() -> None:
    gradients = [0.5, -0.2, 1.5]
    assert stepped("adam", gradients) == pytest.approx(adam_by_hand(gradients, 0.1, 1.0), abs=1e-6)


def test_adamw_takes_its_decay_off_the_weight_and_not_the_gradient() -> None:
    # one step: 1 - lr x decay x 1 - lr x sign of the gradient
    assert stepped("adamw", [0.5], weight_decay=0.3) == pytest.approx(1 - 0.1 * 0.3 - 0.1, abs=1e-6)


def test_lion_is_algorithm_2() -> None:
    weight, momentum, gradients = 1.0, 0.0, [0.5, -0.2, 1.5, -3.0]
    for gradient in gradients:
        direction = 0.9 * momentum + (1 - 0.9) * gradient
        weight = weight - 0.1 * ((direction > 0) - (direction < 0) + 0.3 * weight)
        momentum = 0.99 * momentum + 0.01 * gradient
    assert stepped("lion", gradients, weight_decay=0.3) == pytest.approx(weight, abs=1e-6)


def schedule_free_by_hand(gradients: list[float], rates: list[float], decay: float) -> tuple[float, float]:
    """Returns the weight at which the next gradient is computed, and the average, after algorithm 1 of the paper."""
    x = y = z = 1.0
    second = total = 0.0
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        second = 0.98 * second + 0.02 * gradient**2
        rate *= (1 - 0.98**step) ** 0.5
        z -= rate * (gradient / (second**0.5 + 1e-9) + decay * y)
        total += rate**2
        x += rate**2 / total * (z - x)
        y = 0.1 * z + 0.9 * x
    return y, x


def test_schedule_free_adamw_is_algorithm_1() -> None:
    weight = torch.nn.Parameter(torch.tensor([[1.0]]))
    preset = derive(OPTIMIZERS["schedule_free_adamw"].preset, {"weight_decay": 0.2}, "test")
    optimizer: Any = OPTIMIZERS["schedule_free_adamw"].factory(preset, group_of(weight))
    gradients, rates = [0.5, -0.2, 1.5, 0.3], [0.05, 0.1, 0.1, 0.1]
    for gradient, rate in zip(gradients, rates, strict=True):
        weight.grad = torch.tensor([[gradient]])
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    trained, average = schedule_free_by_hand(gradients, rates, 0.2)
    assert float(weight.detach()) == pytest.approx(trained, abs=1e-6)
    before = weight.detach().clone()
    with optimizer.swapped():
        assert float(weight.detach()) == pytest.approx(average, abs=1e-6)
    assert torch.equal(weight.detach(), before)


@pytest.mark.parametrize("name", ["lion", "schedule_free_adamw"])
def test_a_step_with_an_infinite_gradient_changes_nothing(name: str) -> None:
    weights = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizers: list[Any] = [OPTIMIZERS[name].factory(OPTIMIZERS[name].preset, group_of(weight)) for weight in weights]
    for step, gradient in enumerate((0.5, torch.inf, -0.25)):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            if optimizer is optimizers[1] and gradient == torch.inf:
                continue  # the second optimizer never sees the step
            weight.grad = torch.full((2, 2), gradient)
            optimizer.param_groups[0]["lr"] = 0.1
            optimizer.found_inf = torch.tensor(float(step == 1))
            optimizer.step()
        torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    torch.testing.assert_close(optimizers[0].state[weights[0]], optimizers[1].state[weights[1]], rtol=0, atol=0)


def test_sgd_has_nesterov_momentum() -> None:
    # v1 = 2, step 2 + 0.5 x 2; v2 = 0.5 x 2 + 1 = 2, step 1 + 0.5 x 2
    assert stepped("sgd", [2.0, 1.0], momentum=0.5) == pytest.approx(1 - 0.1 * 3 - 0.1 * 2, abs=1e-6)


def test_sgd_without_momentum_is_gradient_descent() -> None:
    assert stepped("sgd", [2.0, 1.0], momentum=0.0) == pytest.approx(0.7, abs=1e-6)


def test_adafactor_scales_an_update_by_the_size_of_its_weights() -> None:
    near, far = (1 - stepped("adafactor", [0.5], lr=0.01, start=1.0), 100 - stepped("adafactor", [0.5], 0.01, 100.0))
    assert near > 0
    assert far / near == pytest.approx(100, rel=1e-3)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adafactor_equals_torchs_own(weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(1)
    starts = [torch.randn(shape, generator=generator) for shape in ((6, 4), (3, 5, 2), (7,))] + [torch.zeros(4, 3)]
    ours, theirs = ([torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    preset = derive(OPTIMIZERS["adafactor"].preset, {"weight_decay": weight_decay, "update_clip": 1.1}, "test")
    own = OPTIMIZERS["adafactor"].factory(preset, [{"params": ours}])
    reference = torch.optim.Adafactor(theirs, lr=0.0, weight_decay=weight_decay, d=1.1)
    for lr in (0.01, 0.5, 0.9, 0.3, 0.02):  # above and below 1 / sqrt(step)
        for parameters in zip(ours, theirs, strict=True):
            gradient = torch.randn(parameters[0].shape, generator=generator)
            for parameter in parameters:
                parameter.grad = gradient
        for optimizer in (own, reference):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
    for mine, other, start in zip(ours, theirs, starts, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        assert not torch.equal(mine.detach(), start)


def test_adafactors_state_is_loaded_onto_the_device_of_the_weights() -> None:
    states = []
    for device in ("cpu", "meta"):
        weight = torch.nn.Parameter(torch.ones(2, 3, device=device))
        optimizer = OPTIMIZERS["adafactor"].factory(OPTIMIZERS["adafactor"].preset, [{"params": [weight]}])
        if states:
            optimizer.load_state_dict(states[0])
            assert {value.device.type for value in optimizer.state[weight].values()} == {"meta"}
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        states.append(optimizer.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_a_skipped_first_update_changes_nothing(name: str) -> None:
    """The trainer skips an update: fused optimizers read `found_inf` on the device, and others make no step."""
    torch.use_deterministic_algorithms(True)  # fills memory that is allocated uninitialised with NaN
    try:
        weights = []
        for skips in (False, True):
            weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0]]))
            optimizer = OPTIMIZERS[name].factory(OPTIMIZERS[name].preset, group_of(weight, lr=0.1))
            if skips and getattr(optimizer, "_step_supports_amp_scaling", False):
                weight.grad = torch.full((1, 2), torch.nan)
                optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
                optimizer.step()
                optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
            for gradient in (0.5, -0.2):
                weight.grad = torch.tensor([[gradient, 1.0]])
                optimizer.step()
            weights.append(weight.detach())
        assert torch.equal(*weights)
    finally:
        torch.use_deterministic_algorithms(False)


def test_sgd_takes_a_parameter_whose_gradient_comes_later() -> None:
    first, second = (torch.nn.Parameter(torch.ones(1, 1)) for _ in range(2))
    optimizer = OPTIMIZERS["sgd"].factory(OPTIMIZERS["sgd"].preset, group_of(first, second, lr=0.1))
    first.grad = torch.ones(1, 1)
    optimizer.step()
    second.grad = torch.ones(1, 1)  # its layer was left out of the first update
    optimizer.step()
    assert float(second.detach()) == pytest.approx(1 - 0.1 * 1.99)


# --- Muon and composite optimizers ------------------------------------------------------------------------------------


def orthogonalized(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The quintic Newton-Schulz iteration of Jordan et al. 2024, in float64, by way of the singular values alone.

    Each iteration maps a singular value s to 3.4445 s - 4.775 s^3 + 2.0315 s^5.
    """
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


def muon_by_hand(weight: torch.Tensor, gradients: list[torch.Tensor], lr: float, scale: float) -> torch.Tensor:
    momentum, weight = torch.zeros_like(weight, dtype=torch.float64), weight.double()
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient.double()
        update = orthogonalized(0.05 * gradient.double() + 0.95 * momentum)
        weight = weight - lr * 0.1 * weight - lr * scale * update
    return weight


@pytest.mark.parametrize("shape", [(12, 20), (24, 6)])
@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
def test_muon_orthogonalizes_the_momentum_of_matrices(shape: tuple[int, int], rule: str) -> None:
    torch.manual_seed(1)
    rows, columns = shape
    scale = 0.2 * max(shape) ** 0.5 if rule == "match_rms_adamw" else max(1, rows / columns) ** 0.5
    weight = torch.nn.Parameter(torch.randn(shape))
    gradients = [torch.randn(shape) for _ in range(3)]
    expected = muon_by_hand(weight.detach(), gradients, 0.1, scale)
    config = derive(OPTIMIZERS["muon"].preset, {"muon_adjust_lr": rule}, "test")
    optimizer = OPTIMIZERS["muon"].factory(config, group_of(weight))
    optimizer.param_groups[0]["lr"] = 0.1
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    # torch iterates in bf16: 8 bits, five times
    torch.testing.assert_close(weight.detach().double(), expected, atol=3 * 0.1 * scale * 0.02, rtol=0.0)


@pytest.mark.parametrize("shape", [(12, 20), (24, 6)])
def test_muon_iterates_in_float32_without_bf16_products(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of Muon took 25 to 50 times as long on a processor without AVX-512 BF16."""
    monkeypatch.setattr("nmtkit.training.optimizers.muon.multiplies_in_bf16", lambda: False)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(muon.orthogonalized(matrix, 5).double(), orthogonalized(matrix), atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
def test_muon_with_bf16_products_is_torch_s(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmtkit.training.optimizers.muon.multiplies_in_bf16", lambda: True)
    torch.manual_seed(1)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((12, 20), (24, 6))]
    others = [torch.nn.Parameter(weight.detach().clone()) for weight in ours]
    pair = [kind(weights, lr=0.1, adjust_lr_fn=rule)
            for kind, weights in ((muon.Muon, ours), (torch.optim.Muon, others))]  # fmt: skip
    for _ in range(3):
        for weight, other in zip(ours, others, strict=True):
            weight.grad = torch.randn(weight.shape)
            other.grad = weight.grad.clone()
        for optimizer in pair:
            optimizer.step()
    for weight, other in zip(ours, others, strict=True):
        assert torch.equal(weight, other)
    assert pair[0].state_dict()["state"].keys() == pair[1].state_dict()["state"].keys()


def test_muon_takes_stacked_projections_one_by_one() -> None:
    torch.manual_seed(1)
    separate = [torch.nn.Parameter(torch.randn(rows, 8)) for rows in (8, 8, 4)]
    whole = torch.nn.Parameter(torch.cat([part.detach() for part in separate]))
    whole.stacked_rows = (8, 8, 4)  # type: ignore[attr-defined]
    optimizers = [
        OPTIMIZERS["muon"].factory(OPTIMIZERS["muon"].preset, group_of(*parameters, lr=0.1))
        for parameters in (separate, [whole])
    ]
    for _ in range(2):
        whole.grad = torch.randn(20, 8)
        for part, gradient in zip(separate, whole.grad.split((8, 8, 4)), strict=True):
            part.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(whole.detach(), torch.cat([part.detach() for part in separate]))
    assert optimizers[1].param_groups[0]["param_names"] == ["weight0[0]", "weight0[1]", "weight0[2]"]


def test_muon_leaves_embeddings_output_and_vectors_to_adamw() -> None:
    model = tiny_transformer(Vocabulary(source=40, target=50, joint=False))
    groups = parameter_groups(dict(model.named_parameters()), (), embedding_names(model))
    kinds = {name: group["name"] for group in groups for name in group["param_names"]}
    assert {name for name, kind in kinds.items() if kind == "embeddings"} == {
        name for name in kinds if "embedding" in name or "output_projection" in name
    }
    assert {name for name, kind in kinds.items() if kind == "vectors"} == {
        name for name, parameter in model.named_parameters() if parameter.dim() == 1
    }
    optimizer = OPTIMIZERS["muon"].factory(OPTIMIZERS["muon"].preset, groups)
    assert isinstance(optimizer, CompositeOptimizer)
    of_matrices, adamw = optimizer.optimizers
    assert isinstance(of_matrices, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    assert {id(it) for group in adamw.param_groups for it in group["params"]} == {
        id(parameter) for name, parameter in model.named_parameters() if kinds[name] != "matrices"
    }
    stacked = [name for group in of_matrices.param_groups for name in group["param_names"] if "qkv_proj" in name]
    assert stacked[:3] == [f"encoder.0.self_attention.qkv_proj.weight[{index}]" for index in range(3)]


def test_muon_without_a_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="no matrix"):
        OPTIMIZERS["muon"].factory(
            OPTIMIZERS["muon"].preset, group_of(torch.nn.Parameter(torch.ones(2, 2)), name="embeddings")
        )


def test_a_composite_optimizer_goes_on_from_its_saved_state() -> None:
    """The composite optimizer makes the steps of its parts, and its state can be saved as plain tensors."""

    def parameters() -> list[torch.nn.Parameter]:
        torch.manual_seed(1)
        return [torch.nn.Parameter(torch.randn(3, 3)) for _ in range(3)]

    def composite(of: list[torch.nn.Parameter]) -> CompositeOptimizer:
        sgd = torch.optim.SGD([{"params": of[:1]}, {"params": of[2:], "lr": 0.3}], lr=0.1, momentum=0.9)
        return CompositeOptimizer(sgd, torch.optim.Adam(of[1:2], lr=0.2, fused=True))

    def step(optimizers: list[torch.optim.Optimizer], of: list[torch.nn.Parameter], number: int) -> None:
        for index, parameter in enumerate(of):
            parameter.grad = torch.full((3, 3), float(number + index)).sin()
        for optimizer in optimizers:
            optimizer.step()

    apart, whole, resumed = parameters(), parameters(), parameters()
    alone = [
        torch.optim.SGD([{"params": apart[:1]}, {"params": apart[2:], "lr": 0.3}], lr=0.1, momentum=0.9),
        torch.optim.Adam(apart[1:2], lr=0.2, fused=True),
    ]
    one, other = composite(whole), composite(resumed)
    for number in range(4):
        step(alone, apart, number)
        step([one], whole, number)
        if number < 2:
            step([other], resumed, number)
    again = composite(resumed)
    file = io.BytesIO()
    torch.save(other.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    for number in (2, 3):
        step([again], resumed, number)
    for a, b, c in zip(apart, whole, resumed, strict=True):
        assert torch.equal(a, b) and torch.equal(b, c)


def test_a_composite_of_fused_optimizers_is_skipped_on_the_device() -> None:
    of = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizer = CompositeOptimizer(*(torch.optim.Adam([parameter], lr=0.1, fused=True) for parameter in of))
    assert optimizer._step_supports_amp_scaling
    for parameter in of:
        parameter.grad = torch.full((2, 2), torch.nan)
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None  # type: ignore[attr-defined]
    optimizer.step()
    assert all(torch.equal(parameter.detach(), torch.ones(2, 2)) for parameter in of)
    slow = CompositeOptimizer(torch.optim.Adam(of[:1], fused=True), torch.optim.SGD(of[1:], foreach=True))
    assert not slow._step_supports_amp_scaling


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("adam", {"adam_betas": (0.9,)}),
        ("adam", {"adam_betas": (0.9, 1.0)}),
        ("adamw", {"weight_decay": -1.0}),
        ("sgd", {"momentum": 1.0}),
        ("adafactor", {"beta2_decay": 0.8}),
        ("muon", {"muon_steps": 0}),
        ("lion", {"lion_betas": (0.9,)}),
        ("schedule_free_adamw", {"adam_betas": (0.9, 1.0)}),
    ],
)
def test_settings_out_of_range_are_refused(name: str, setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--"):
        derive(OPTIMIZERS[name].preset, setting, "test")
