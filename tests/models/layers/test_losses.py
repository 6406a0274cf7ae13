"""The fused projections and losses against F.cross_entropy and F.kl_div in float64."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from nmtkit.data.packed import IGNORE_INDEX
from nmtkit.models.layers import losses
from nmtkit.models.layers.losses import cross_entropy, output_cross_entropy, output_two_pass_loss


def case(tokens: int = 37, vocabulary: int = 29, bias: bool = False) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    output = nn.Linear(11, vocabulary, bias=bias)
    nn.init.normal_(output.weight)
    target = torch.randint(vocabulary, (tokens,))
    return output, torch.randn(tokens, 11, requires_grad=True), target


def expected(
    output: nn.Linear, features: Tensor, target: Tensor, smoothing: float
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns loss, nll and the gradients by features, weight and bias, computed by torch in float64."""
    x = features.detach().double().requires_grad_()
    parameters = [p.detach().double().requires_grad_() for p in output.parameters()]
    logits = F.linear(x, *parameters)
    options = {"reduction": "sum", "ignore_index": IGNORE_INDEX}
    loss = F.cross_entropy(logits, target, label_smoothing=smoothing, **options)
    nll = F.cross_entropy(logits, target, **options)
    return loss, nll, list(torch.autograd.grad(loss, [x, *parameters]))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_values_and_gradients_equal_float64(
    monkeypatch: pytest.MonkeyPatch, smoothing: float, bias: bool, fused: bool
) -> None:
    monkeypatch.setattr(losses, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(losses, "CHUNK_STEP", 1)
    monkeypatch.setattr(losses, "CHUNK_BYTES", 29 * 4 * 8)  # chunks of 8 tokens, the last of 5
    output, features, target = case(bias=bias)
    target[[3, 4, 20]] = IGNORE_INDEX
    loss, nll = output_cross_entropy(output if fused else nn.Sequential(output), features, target, smoothing)
    assert not nll.requires_grad
    gradients = torch.autograd.grad(loss * 0.5, [features, *output.parameters()])
    right_loss, right_nll, right_gradients = expected(output, features, target, smoothing)
    torch.testing.assert_close(loss.double(), right_loss)
    torch.testing.assert_close(nll.double(), right_nll)
    for ours, theirs in zip(gradients, right_gradients, strict=True):
        torch.testing.assert_close(ours.double(), 0.5 * theirs, atol=1e-5, rtol=1e-5)


def test_the_formula_is_the_one_of_the_docstring() -> None:
    logits, target = torch.randn(5, 7, dtype=torch.float64), torch.randint(7, (5,))
    minus_log = -(logits.exp() / logits.exp().sum(1, keepdim=True)).log()
    right = sum(0.8 * minus_log[t, target[t]] + 0.2 / 7 * minus_log[t].sum() for t in range(5))
    assert float(cross_entropy(logits, target, 0.2)[0]) == pytest.approx(float(right), rel=1e-6)


@pytest.mark.slow
def test_batches_in_bfloat16_have_chunks_of_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: set[int] = set()
    softmax = losses._softmax_

    def count(logits: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor]:
        sizes.add(len(logits))
        return softmax(logits, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(losses, "_softmax_", count)
    monkeypatch.setattr(losses, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(losses, "CHUNK_BYTES", 20 * 2 * 500)  # chunks of 480 tokens, a multiple of CHUNK_STEP
    for tokens in range(1025, 1025 + 150):
        output, features, target = case(tokens=tokens, vocabulary=20)
        with torch.autocast("cpu", torch.bfloat16):
            loss, nll = output_cross_entropy(output, features, target, 0.1)
        right_loss, right_nll, right_gradients = expected(output, features, target, 0.1)
        assert loss.item() == pytest.approx(right_loss.item(), rel=3e-3)
        assert nll.item() == pytest.approx(right_nll.item(), rel=3e-3)
        ours, theirs = torch.autograd.grad(loss, [features, output.weight]), right_gradients
        assert all((a - b).norm() / b.norm() < 0.02 for a, b in zip(ours, theirs, strict=True))
    assert len(sizes) <= 11 and max(sizes) == 480


def test_bfloat16_stays_near_float64() -> None:
    output, features, target = case(tokens=64, vocabulary=300)
    nn.init.normal_(output.weight, std=0.2)
    with torch.autocast("cpu", torch.bfloat16):
        loss, nll = output_cross_entropy(output, features, target, 0.1)
    gradients = torch.autograd.grad(loss, [features, output.weight])
    right_loss, right_nll, right_gradients = expected(output, features, target, 0.1)
    assert loss.dtype == nll.dtype == torch.float32
    assert loss.item() == pytest.approx(right_loss.item(), rel=3e-3)
    assert nll.item() == pytest.approx(right_nll.item(), rel=3e-3)
    for ours, theirs in zip(gradients, right_gradients, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() / theirs.norm() < 0.02


def test_a_target_that_seems_impossible_costs_its_distance_and_not_infinity() -> None:
    output = nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        output.weight.copy_(torch.tensor([[300.0, 0.0], [0.0, 1.0], [-300.0, 0.0]]))
    loss, _ = output_cross_entropy(output, torch.tensor([[1.0, 0.0]]), torch.tensor([2]), 0.0)
    assert loss.item() == pytest.approx(600.0)


def test_without_gradients_only_values_are_computed() -> None:
    output, features, target = case()
    with torch.no_grad():
        loss, nll = output_cross_entropy(output, features, target, 0.1)
    right_loss, right_nll, _ = expected(output, features, target, 0.1)
    torch.testing.assert_close((loss.double(), nll.double()), (right_loss.detach(), right_nll.detach()))
    assert not loss.requires_grad


def test_a_tied_weight_gathers_the_gradients_of_both_its_uses() -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(17, 6)
    output = nn.Linear(6, 17, bias=False)
    output.weight = embedding.weight
    tokens, target = torch.randint(17, (9,)), torch.randint(17, (9,))
    fused = torch.autograd.grad(output_cross_entropy(output, embedding(tokens), target, 0.1)[0], embedding.weight)[0]
    plain = torch.autograd.grad(cross_entropy(output(embedding(tokens)), target, 0.1)[0], embedding.weight)[0]
    torch.testing.assert_close(fused, plain)


def uniform_part_lost(passes: int) -> tuple[nn.Linear, Tensor, Tensor]:
    """64 of 4,096 tokens share the probability: 0.125 / 4,096 is half the distance of their bf16 1 / 64 to the next.

    The first feature adds the same to all logits, so its gradient is the sum of a row's gradients, which is zero.
    """
    output = nn.Linear(2, 4096, bias=False)
    with torch.no_grad():
        output.weight[:, 0] = 1.0
        output.weight[:, 1] = (torch.arange(4096) < 64).float()
    return output, torch.tensor([[0.0, 256.0]] * passes, requires_grad=True), torch.tensor([5])


def test_label_smoothing_is_not_lost_beside_a_bfloat16_softmax() -> None:
    output, features, target = uniform_part_lost(1)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = output_cross_entropy(output, features, target, 0.125)
    (gradient,) = torch.autograd.grad(loss, features)
    assert abs(gradient[0, 0]) < 1e-4  # the error is 2e-3 if the precision is lost


def test_label_smoothing_is_not_lost_by_r_drop() -> None:
    output, features, target = uniform_part_lost(2)
    with torch.autocast("cpu", torch.bfloat16):
        loss, *_ = output_two_pass_loss(output, features[:1], features[1:], target, 0.125, share=0.5, alpha=0.0)
    (gradient,) = torch.autograd.grad(loss, features)
    assert gradient[:, 0].abs().max() < 1e-4


@pytest.mark.parametrize("passes", [1, 2])
def test_validation_computes_no_gradients(passes: int) -> None:
    """Counted in floating-point operations: one product for the logits of each pass, none for gradients."""
    output, features, target = case()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        if passes == 1:
            output_cross_entropy(output, features, target, 0.1)
        else:
            output_two_pass_loss(output, features, features, target, 0.1, share=0.5, alpha=2.5)
    assert counter.get_total_flops() <= passes * 2 * 37 * 11 * 29 + 2 * 37 * 11


# Two passes


V = 29  # of the cases with two passes


def two_pass_case(bias: bool = False) -> tuple[nn.Linear, list[Tensor], Tensor]:
    torch.manual_seed(0)
    output = nn.Linear(11, V, bias=bias)
    nn.init.normal_(output.weight, std=0.3)
    target = torch.randint(V, (37,))
    target[[3, 4, 20]] = IGNORE_INDEX
    return output, [torch.randn(37, 11, requires_grad=True) for _ in range(2)], target


def expected_two_pass_loss(
    output: nn.Linear, passes: list[Tensor], target: Tensor, share: float, alpha: float
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Returns loss, nll, divergence and the gradients by both passes, weight and bias, computed by torch in float64."""
    inputs = [x.detach().double().requires_grad_() for x in passes]
    parameters = [p.detach().double().requires_grad_() for p in output.parameters()]
    logits = [F.linear(x, *parameters) for x in inputs]
    smoothed, plain = (
        sum(
            weight * F.cross_entropy(z, target, label_smoothing=eps, ignore_index=IGNORE_INDEX, reduction="sum")
            for z, weight in zip(logits, (1 - share, share), strict=True)
        )
        for eps in (0.1, 0.0)
    )
    p, q = (z[target != IGNORE_INDEX].log_softmax(-1) for z in logits)
    divergence = sum(F.kl_div(a, b, reduction="sum", log_target=True) for a, b in ((p, q), (q, p))) / 2
    loss = smoothed + alpha * divergence
    return loss, plain, divergence, list(torch.autograd.grad(loss, [*inputs, *parameters]))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("share", "alpha"), [(0.5, 0.0), (0.5, 2.5), (0.0, 6.0)], ids=["halves", "R-Drop", "SimCut"])
def test_values_and_gradients_of_two_passes_equal_float64(
    monkeypatch: pytest.MonkeyPatch, share: float, alpha: float, bias: bool, fused: bool
) -> None:
    monkeypatch.setattr(losses, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(losses, "CHUNK_STEP", 1)
    monkeypatch.setattr(losses, "CHUNK_BYTES", V * 4 * 8)  # chunks of 8 tokens, the last of 5
    output, passes, target = two_pass_case(bias)
    projection = output if fused else nn.Sequential(output)
    loss, *counts = output_two_pass_loss(projection, *passes, target, 0.1, share=share, alpha=alpha)
    assert not any(count.requires_grad for count in counts)
    gradients = torch.autograd.grad(loss * 0.5, [*passes, *output.parameters()])
    *right, right_gradients = expected_two_pass_loss(output, passes, target, share, alpha)
    for ours, theirs in zip((loss, *counts), right, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=0, rtol=1e-6)
    for ours, theirs in zip(gradients, right_gradients, strict=True):
        torch.testing.assert_close(ours.double(), 0.5 * theirs, atol=1e-5, rtol=1e-5)


def test_r_drop_in_bfloat16_stays_near_float64() -> None:
    output, passes, target = two_pass_case()
    with torch.autocast("cpu", torch.bfloat16):
        loss, *_ = output_two_pass_loss(output, *passes, target, 0.1, share=0.5, alpha=2.5)
    gradients = torch.autograd.grad(loss, [*passes, output.weight])
    right, _, _, right_gradients = expected_two_pass_loss(output, passes, target, 0.5, 2.5)
    assert loss.item() == pytest.approx(right.item(), rel=3e-3)
    for ours, theirs in zip(gradients, right_gradients, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() / theirs.norm() < 0.02


def test_a_second_backward_pass_is_refused() -> None:
    output, features, target = case()
    loss = output_cross_entropy(output, features, target, 0.1)[0]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        loss.backward()


@pytest.mark.parametrize("why", ["hook", "weight_norm", "replaced forward"])
def test_an_output_projection_with_code_of_its_own_is_called(why: str) -> None:
    output, features, target = case(bias=True)
    if why == "hook":
        output.register_forward_hook(lambda module, inputs, output: 2 * output)
    elif why == "weight_norm":
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(output)
        with torch.no_grad():
            output.weight_g.mul_(2)
    else:
        output.forward = lambda x: 3 * nn.Linear.forward(output, x)  # type: ignore[method-assign]
    logits = output(features)
    loss, nll = output_cross_entropy(output, features, target, 0.1)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target, reduction="sum", label_smoothing=0.1))
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in output.parameters())
    drop_loss, drop_nll, _ = output_two_pass_loss(output, features, features, target, 0.0, share=0.5, alpha=0.5)
    torch.testing.assert_close(drop_loss, F.cross_entropy(logits, target, reduction="sum"))
    torch.testing.assert_close(drop_nll, nll)
