"""Each optimizer's first steps against its formula, by hand."""

from typing import Any

import pytest
import torch

from nmtkit.optimizers import OPTIMIZERS
from nmtkit.registry import derive


def stepped(name: str, gradients: list[float], lr: float = 0.1, start: float = 1.0, **settings: Any) -> float:
    """The one weight of a model after a step on each gradient."""
    weight = torch.nn.Parameter(torch.tensor([[start]], dtype=torch.float32))
    entry = OPTIMIZERS[name]
    optimizer = entry.factory(derive(entry.preset, settings, "test"), [{"params": [weight]}])
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
    """Skipped as the trainer skips it: fused optimizers read `found_inf` on the device, others are not stepped."""
    torch.use_deterministic_algorithms(True)  # fills memory that is allocated uninitialised with NaN
    try:
        weights = []
        for skips in (False, True):
            weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0]]))
            optimizer = OPTIMIZERS[name].factory(OPTIMIZERS[name].preset, [{"params": [weight], "lr": 0.1}])
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
    optimizer = OPTIMIZERS["sgd"].factory(OPTIMIZERS["sgd"].preset, [{"params": [first, second], "lr": 0.1}])
    first.grad = torch.ones(1, 1)
    optimizer.step()
    second.grad = torch.ones(1, 1)  # its layer was left out of the first update
    optimizer.step()
    assert float(second.detach()) == pytest.approx(1 - 0.1 * 1.99)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("adam", {"adam_betas": (0.9,)}),
        ("adam", {"adam_betas": (0.9, 1.0)}),
        ("adamw", {"weight_decay": -1.0}),
        ("sgd", {"momentum": 1.0}),
        ("adafactor", {"beta2_decay": 0.8}),
    ],
)
def test_settings_out_of_range_are_refused(name: str, setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--"):
        derive(OPTIMIZERS[name].preset, setting, "test")
