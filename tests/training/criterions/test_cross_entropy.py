"""Criterions equal losses that are computed token by token."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from builders import tiny_transformer
from torch import Tensor, nn

from nmtkit.config import derive
from nmtkit.data.packed import IGNORE_INDEX, Batch, Layout, Packed
from nmtkit.models.architectures import Architecture
from nmtkit.training.criterions import CRITERIONS, Criterion, Loss

V = 5
LOGITS = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5], [1.0, 0.0, 0.0, 0.0, 3.0], [2.0, 2.0, 0.0, 1.0, 1.0], [9.0] * V])
TARGET = [2, 4, 0, IGNORE_INDEX]


class Fixed(nn.Module):
    """Returns LOGITS, plus `noise` in every second pass, like dropout."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.output_projection = nn.Identity()
        self.noise = noise
        self.passes = 0

    def forward(self, source: Packed, target_input: Packed) -> Tensor:
        self.passes += 1
        noisy = LOGITS.clone()
        noisy[:, 0] += self.noise * (self.passes % 2)
        return noisy

    def auxiliary_losses(self) -> dict[str, Tensor]:
        return {"balance": torch.tensor(0.25)}

    def token_embeddings(self) -> list[nn.Module]:
        return []


def batch() -> Batch:
    packed = Packed(torch.zeros(4, dtype=torch.int64), Layout.of(torch.tensor([3, 1])))
    return Batch(packed, packed, torch.tensor(TARGET), 3, torch.tensor([7, -1]))


def criterion(name: str, **settings: Any) -> Criterion:
    entry = CRITERIONS[name]
    return entry.factory(derive(entry.preset, settings, "test"), cast(Any, SimpleNamespace()))


def log_probabilities(noise: float = 0.0) -> list[list[float]]:
    rows = []
    for logits in LOGITS[:3].tolist():
        shifted = [logits[0] + noise, *logits[1:]]
        total = math.log(sum(math.exp(value) for value in shifted))
        rows.append([value - total for value in shifted])
    return rows


def smoothed(epsilon: float, noise: float = 0.0) -> float:
    """Returns the sum of cross-entropies with targets (1 - eps) one-hot + eps / V uniform."""
    total = 0.0
    for row, target in zip(log_probabilities(noise), TARGET[:3], strict=True):
        for token, log_p in enumerate(row):
            total -= ((1 - epsilon) * (token == target) + epsilon / V) * log_p
    return total


def test_cross_entropy_is_summed_and_leaves_padding_out() -> None:
    loss = criterion("cross_entropy")(cast(Architecture, Fixed()), batch())
    assert float(loss.sum) == pytest.approx(smoothed(0.0) + 0.75, rel=1e-5)
    assert float(loss.counts["nll"]) == pytest.approx(smoothed(0.0), rel=1e-5)
    assert float(loss.counts["balance"]) == 0.75


@pytest.mark.parametrize("epsilon", [0.1, 0.5])
def test_label_smoothing_mixes_in_the_uniform_distribution(epsilon: float) -> None:
    loss = criterion("label_smoothed_cross_entropy", label_smoothing=epsilon)(cast(Architecture, Fixed()), batch())
    assert float(loss.sum) == pytest.approx(smoothed(epsilon) + 0.75, rel=1e-5)
    assert float(loss.counts["nll"]) == pytest.approx(smoothed(0.0), rel=1e-5)


def test_r_drop_adds_the_symmetric_divergence_of_two_passes() -> None:
    loss = criterion("r_drop", r_drop_alpha=3.0)(cast(Architecture, Fixed(noise=0.7)), batch())
    divergence = 0.0
    for one, other in zip(log_probabilities(0.7), log_probabilities(0.0), strict=True):
        for log_p, log_q in zip(one, other, strict=True):
            divergence += math.exp(log_p) * (log_p - log_q) / 2 + math.exp(log_q) * (log_q - log_p) / 2
    mean = (smoothed(0.1, 0.7) + smoothed(0.1)) / 2
    assert float(loss.counts["divergence"]) == pytest.approx(divergence, rel=1e-4)
    assert float(loss.sum) == pytest.approx(mean + 1.5 * divergence + 0.75, rel=1e-4)


def test_r_drop_makes_one_pass_in_validation() -> None:
    model = Fixed()
    loss = criterion("r_drop").eval()(cast(Architecture, model), batch())
    assert model.passes == 1
    assert float(loss.sum) == pytest.approx(smoothed(0.1) + 0.75, rel=1e-5)


def test_simcut_adds_both_divergences_and_the_cross_entropy_of_the_first_pass() -> None:
    loss = criterion("simcut", simcut_alpha=3.0)(cast(Architecture, Fixed(noise=0.7)), batch())
    divergences = 0.0
    for one, other in zip(log_probabilities(0.7), log_probabilities(0.0), strict=True):
        for log_p, log_q in zip(one, other, strict=True):
            divergences += math.exp(log_p) * (log_p - log_q) + math.exp(log_q) * (log_q - log_p)
    assert float(loss.counts["nll"]) == pytest.approx(smoothed(0.0, 0.7), rel=1e-4)
    assert float(loss.sum) == pytest.approx(smoothed(0.1, 0.7) + 3 * divergences + 0.75, rel=1e-4)


def test_simcut_removes_the_embeddings_of_the_second_pass_only() -> None:
    model = tiny_transformer(dropout=0.0, positions="none").train()
    seen: list[Tensor] = []
    for embedding in (model.source_embedding, model.target_embedding):
        embedding.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    ids = Packed(torch.arange(3, 23), Layout.of(torch.tensor([12, 8])))
    full = Batch(ids, ids, torch.arange(20), 20, torch.tensor([0, 1]))
    torch.manual_seed(3)
    loss = criterion("simcut", simcut_rate=0.5)(model, full)
    (source, target), (cut_source, cut_target) = seen[:2], seen[2:]
    assert source.abs().sum(1).all() and target.abs().sum(1).all()
    for rows in (cut_source, cut_target):
        removed = ~rows.abs().sum(1).bool()
        assert 4 <= removed.sum() <= 16
        torch.testing.assert_close(rows[~removed], source[~removed])
    assert float(loss.counts["divergence"]) > 0
    none = criterion("simcut", simcut_rate=0.0)(model, full)
    assert float(none.counts["divergence"]) == pytest.approx(0, abs=1e-5)
    assert not model.source_embedding.tokens._forward_hooks
    seen.clear()
    criterion("simcut", simcut_rate=1.0).eval()(model.eval(), full)
    assert len(seen) == 2  # validation makes one pass


@pytest.mark.parametrize("name", ["label_smoothed_cross_entropy", "r_drop", "simcut"])
def test_smoothing_everything_away_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="--label-smoothing"):
        criterion(name, label_smoothing=1.0)


class Forgetful(Criterion):
    """A criterion of a plug-in without auxiliary losses."""

    def compute_loss(self, model: Architecture, batch: Batch) -> Loss:
        return Loss(torch.tensor(2.0), {"nll": torch.tensor(2.0)})


def test_no_criterion_can_drop_auxiliary_losses() -> None:
    loss = Forgetful()(cast(Architecture, Fixed()), batch())
    assert float(loss.sum) == 2.75 and float(loss.counts["balance"]) == 0.75


class Returning(Criterion):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def compute_loss(self, model: Architecture, batch: Batch) -> Loss:
        return self.value  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor(1.0), r"returned a Tensor of shape \[\]; .*Loss\(sum, counts\)"),
        (None, "Returning returned None; .*Loss"),
        (Loss(torch.tensor(1.0), {"own": torch.tensor(1.0)}), r"counts \['own'\] without 'nll'"),
        (
            Loss(torch.ones(3), {"nll": torch.tensor(1.0)}),
            r"shape \[3\] for 'sum'",
        ),
        (Loss(torch.tensor(1.0), {"nll": torch.ones(1)}), r"shape \[1\] for 'nll'"),
        (Loss(torch.tensor(1.0), {"nll": 1.0}), "returned 1.0 for 'nll'"),  # type: ignore[dict-item]
    ],
)
def test_a_criterion_that_returns_something_else_is_told_what(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Returning(value)(cast(Architecture, Fixed()), batch())
