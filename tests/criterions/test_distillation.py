"""Word-level distillation, against the formula written out for each token."""

import math
from pathlib import Path

import pytest
import torch
from builders import save_tiny_transformer, tiny_tokenizer, tiny_transformer

from nmtkit.architectures import Architecture
from nmtkit.config import derive
from nmtkit.criterions import CRITERIONS, Criterion, distillation
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.layers.packed import IGNORE_INDEX, Batch, Packed
from nmtkit.models import from_checkpoint, vocabulary_of


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture
def teachers(tmp_path: Path, tokenizer: Tokenizer) -> tuple[Path, ...]:
    return tuple(
        save_tiny_transformer(tmp_path / f"{seed}.pt", tokenizer, seed=seed, sharpness=3.0, dropout=0.3)
        for seed in (4, 5)
    )


def criterion(tokenizer: Tokenizer, **settings: object) -> Criterion:
    entry = CRITERIONS["kd_cross_entropy"]
    return entry.factory(derive(entry.preset, settings, "test"), tokenizer)


def student(tokenizer: Tokenizer) -> Architecture:
    return tiny_transformer(vocabulary_of(tokenizer), seed=6, dropout=0.0, decoder_self_attention="ssru").train()


def batch() -> Batch:
    source, inputs = Packed.from_lists([[5, 6, 2], [7, 2]]), Packed.from_lists([[1, 8, 9, 10], [1, 11]])
    targets = torch.tensor([8, 9, 10, 2, 11, IGNORE_INDEX])
    return Batch(source, inputs, targets, 5, torch.tensor([0, 1]))


def probabilities(model: Architecture, pairs: Batch) -> list[list[float]]:
    """Returns the distribution of each token in float64."""
    logits = model.double().output_projection(model(pairs.source, pairs.target_input))
    model.float()
    rows = []
    for row in logits.tolist():
        total = sum(math.exp(value - max(row)) for value in row)
        rows.append([math.exp(value - max(row)) / total for value in row])
    return rows


def test_the_loss_mixes_the_target_with_the_renormalised_candidates_of_the_teachers(
    teachers: tuple[Path, ...], tokenizer: Tokenizer
) -> None:
    model, pairs, weight, candidates = student(tokenizer), batch(), 0.3, 4
    own = probabilities(model, pairs)
    first, second = (probabilities(from_checkpoint(path)[0], pairs) for path in teachers)
    nll = soft = 0.0
    for token, target in enumerate([8, 9, 10, 2, 11]):
        mean = [(p + q) / 2 for p, q in zip(first[token], second[token], strict=True)]
        best = sorted(range(len(mean)), key=lambda piece: -mean[piece])[:candidates]
        total = sum(mean[piece] for piece in best)
        soft -= sum(mean[piece] / total * math.log(own[token][piece]) for piece in best)
        nll -= math.log(own[token][target])
    settings = {"teacher": teachers, "teacher_weight": weight, "teacher_candidates": candidates}
    loss = criterion(tokenizer, **settings).train()(model, pairs)
    assert float(loss.sum.detach()) == pytest.approx((1 - weight) * nll + weight * soft, rel=1e-5)
    assert float(loss.counts["nll"]) == pytest.approx(nll, rel=1e-5)
    assert float(loss.counts["teacher"]) == pytest.approx(soft, rel=1e-5)


def test_chunks_change_neither_loss_nor_gradients(
    teachers: tuple[Path, ...], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for size in (100, 2):
        monkeypatch.setattr(distillation, "CHUNK", size)
        model = student(tokenizer)
        loss = criterion(tokenizer, teacher=teachers).train()(model, batch())
        results.append((loss.sum.detach(), *torch.autograd.grad(loss.sum, list(model.parameters()))))
    assert all(gradient.any() for gradient in results[0])
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


def test_a_student_learns_the_distribution_of_its_teacher(teachers: tuple[Path, ...], tokenizer: Tokenizer) -> None:
    """With weight 1, the target has no influence, and the smallest loss is the entropy of the teacher."""
    model, pairs = student(tokenizer), batch()
    loss = criterion(tokenizer, teacher=teachers[:1], teacher_weight=1.0, teacher_candidates=1000).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        loss(model, pairs).sum.backward()
        optimizer.step()
    expected = probabilities(from_checkpoint(teachers[0])[0], pairs)[:5]
    entropy = -sum(p * math.log(p) for row in expected for p in row)
    assert float(loss(model, pairs).sum.detach()) == pytest.approx(entropy, rel=0.02)


def test_teachers_stay_in_evaluation_without_gradients_and_validation_has_none(
    teachers: tuple[Path, ...], tokenizer: Tokenizer
) -> None:
    loss, model, pairs = criterion(tokenizer, teacher=teachers).train(), student(tokenizer), batch()
    assert not any(module.training for teacher in loss.teachers for module in teacher.modules())
    assert not any(parameter.requires_grad for parameter in loss.parameters())
    plain = CRITERIONS["cross_entropy"]
    expected = plain.factory(plain.preset, tokenizer)(model, pairs)
    validated = loss.eval()(model, pairs)
    assert torch.equal(validated.sum, expected.sum) and validated.counts.keys() == {"nll"}


def test_a_missing_teacher_and_a_teacher_of_another_vocabulary_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="kd_cross_entropy needs --teacher"):
        criterion(tokenizer)
    other = save_tiny_transformer(tmp_path / "other.pt", tiny_tokenizer(320))
    with pytest.raises(ValueError, match=r"other.pt has a different tokenizer .* preprocess --tokenizer-from"):
        criterion(tokenizer, teacher=(other,))
