"""Word-level distillation, against the formula written out for each token."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import WORDS, save_tiny_transformer, tiny_tokenizer, tiny_transformer

from nmtkit.cli import main
from nmtkit.config import derive
from nmtkit.data import checkpoint_file
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.dataset.teacher_file import TeacherFile
from nmtkit.data.packed import IGNORE_INDEX, Batch, Packed
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models.architectures import Architecture
from nmtkit.models.building import from_checkpoint, vocabulary_of
from nmtkit.training.criterions import CRITERIONS, Criterion, distillation


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


@pytest.mark.slow
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
    with pytest.raises(ValueError, match="kd_cross_entropy needs either --teacher"):
        criterion(tokenizer)
    other = save_tiny_transformer(tmp_path / "other.pt", tiny_tokenizer(320))
    with pytest.raises(ValueError, match=r"other.pt .*--tokenizer-from"):
        criterion(tokenizer, teacher=(other,))


# --- probabilities in files -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset_folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distill")
    tokenizer.save(folder / "tokenizer")
    for side, step in (("en", 1), ("de", 3)):
        lines = [" ".join(WORDS[(pair + step * i) % len(WORDS)] for i in range(2 + pair % 4)) for pair in range(7)]
        (folder / f"train.{side}").write_text("".join(f"{line}\n" for line in lines))
    flags = ["--source-lang", "en", "--target-lang", "de", "--trainpref", folder / "train"]
    flags += ["--tokenizer-from", folder / "tokenizer", "--destdir", folder / "data-bin"]
    main(["preprocess", *map(str, flags)], standalone_mode=False)
    return folder / "data-bin"


def distill(data: Path, teachers: tuple[Path, ...], folder: Path, *flags: object) -> None:
    paths = [word for path in teachers for word in ("--path", path)]
    main(["distill", *map(str, (data, *paths, "--output", folder, *flags))], standalone_mode=False)


@pytest.mark.slow
def test_stored_probabilities_give_the_gradients_of_running_teachers(
    teachers: tuple[Path, ...], tokenizer: Tokenizer, dataset_folder: Path, tmp_path: Path
) -> None:
    data = Dataset.open(dataset_folder)
    size = data.tokenizer.target_size
    distill(dataset_folder, teachers, tmp_path / "probabilities", "--top-k", size, "--pairs-per-file", 3)
    pairs = data["train"].batch(np.array([6, 1, 4, 3, 0]))
    results = []
    for settings in ({"teacher": teachers}, {"teacher_probabilities": tmp_path / "probabilities"}):
        model = student(tokenizer).double()
        loss = criterion(tokenizer, teacher_candidates=size, teacher_weight=0.7, **settings).train()(model, pairs)
        results.append([loss.sum.detach(), *torch.autograd.grad(loss.sum, list(model.parameters()))])
    assert all(gradient.any() for gradient in results[0])
    for running, stored in zip(*results, strict=True):
        torch.testing.assert_close(stored, running, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_the_stored_pieces_are_the_most_probable_and_are_renormalised(
    teachers: tuple[Path, ...], tokenizer: Tokenizer, dataset_folder: Path, tmp_path: Path
) -> None:
    distill(dataset_folder, teachers[:1], tmp_path / "probabilities", "--top-k", 3)
    pairs = Dataset.open(dataset_folder)["train"].batch(np.arange(7))
    whole = probabilities(from_checkpoint(teachers[0])[0], pairs)
    own = probabilities(student(tokenizer), pairs)
    settings = {"teacher_probabilities": tmp_path / "probabilities", "teacher_weight": 1.0}
    for candidates in (3, 2):
        soft = 0.0
        for row, other in zip(whole, own, strict=True):
            best = sorted(range(len(row)), key=lambda piece: -row[piece])[:candidates]
            soft -= sum(row[piece] / sum(row[each] for each in best) * math.log(other[piece]) for piece in best)
        loss = criterion(tokenizer, teacher_candidates=candidates, **settings).train()(student(tokenizer), pairs)
        assert float(loss.sum.detach()) == pytest.approx(soft, rel=1e-5)


@pytest.mark.slow
def test_more_candidates_than_are_stored_are_refused(
    teachers: tuple[Path, ...], tokenizer: Tokenizer, dataset_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "probabilities"
    distill(dataset_folder, teachers[:1], folder, "--top-k", 3)
    criterion(tokenizer, teacher_probabilities=folder)  # the default takes the stored pieces
    with pytest.raises(ValueError, match=r"--teacher-candidates is 4, but .*probabilities has 3 .*--top-k 4"):
        criterion(tokenizer, teacher_probabilities=folder, teacher_candidates=4)


@pytest.mark.slow
def test_an_interrupted_command_continues_and_other_settings_are_refused(
    teachers: tuple[Path, ...], dataset_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "probabilities"
    distill(dataset_folder, teachers, folder, "--pairs-per-file", 3)
    expected = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"00000.bin", "00001.bin", "00002.bin"} < expected.keys()
    (folder / "00001.bin").unlink()
    with pytest.raises(ValueError, match="lacks 1 of 3"):
        TeacherFile.open(folder, Dataset.open(dataset_folder).tokenizer.fingerprint)
    before = (folder / "00000.bin").stat().st_mtime_ns
    distill(dataset_folder, teachers, folder, "--pairs-per-file", 3)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected
    assert (folder / "00000.bin").stat().st_mtime_ns == before
    with pytest.raises(SystemExit):
        distill(dataset_folder, teachers[:1], folder, "--pairs-per-file", 3)
    assert "other settings (teachers)" in " ".join(capsys.readouterr().err.split())


def test_a_teacher_of_the_opposite_direction_is_refused(
    dataset_folder: Path, teachers: tuple[Path, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = checkpoint_file.read(teachers[0])
    for name, pair in (("right", ["en", "de"]), ("wrong", ["de", "en"])):
        checkpoint_file.save(tmp_path / f"{name}.pt", contents | {"run": {"languages": pair}})
    distill(dataset_folder, (tmp_path / "right.pt",), tmp_path / "probabilities")
    with pytest.raises(SystemExit):
        distill(dataset_folder, (tmp_path / "wrong.pt",), tmp_path / "others")
    assert f"--path {tmp_path / 'wrong.pt'}" in capsys.readouterr().err
    assert not (tmp_path / "others").exists()


def test_stored_probabilities_of_other_targets_are_refused(
    teachers: tuple[Path, ...], tokenizer: Tokenizer, dataset_folder: Path, tmp_path: Path
) -> None:
    distill(dataset_folder, teachers, tmp_path / "probabilities")
    loss = criterion(tokenizer, teacher_probabilities=tmp_path / "probabilities").train()
    pairs = Dataset.open(dataset_folder)["train"].batch(np.arange(3))
    other = dataclasses.replace(pairs, target_output=pairs.target_output.flip(0))
    with pytest.raises(ValueError, match="other target sentences"):
        loss(student(tokenizer), other)
    dummy = dataclasses.replace(pairs, target_output=torch.full_like(pairs.target_output, IGNORE_INDEX))
    assert float(loss(student(tokenizer), dummy).sum) == 0.0
