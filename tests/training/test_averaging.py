"""Averages equal arithmetic, and checkpoints that do not belong together are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

import nmtkit
from nmtkit.data import checkpoint_file
from nmtkit.models import checkpoint
from nmtkit.training import averaging, checkpoints


def write(path: Path, update: int, weight: torch.Tensor, **changes: Any) -> Path:
    contents = {
        "architecture": "some",
        "config": {"d_model": 4},
        "tokenizer": {"model": torch.tensor([1, 2], dtype=torch.uint8)},
        "plugins": [],
        "model": {"weight": weight, "tied": weight, "count": torch.tensor(update)},
        "update": update,
        "training": {"big": torch.zeros(3)},
    }
    checkpoint_file.save(path, contents | changes)
    return path


def test_weights_are_averaged_and_the_result_is_complete(tmp_path: Path) -> None:
    values = [torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0]), torch.tensor([1.0, -1.0])]
    paths = [write(tmp_path / f"{index}.pt", index, value) for index, value in enumerate(values)]
    result = averaging.average(paths)
    assert result["model"]["weight"].tolist() == [2.0, 3.0]
    assert result["model"]["tied"] is result["model"]["weight"]
    assert int(result["model"]["count"]) == 2
    assert "training" not in result
    assert result["averaged"] == ["0.pt", "1.pt", "2.pt"]
    checkpoint_file.save(tmp_path / "averaged.pt", result)
    assert checkpoint.load(tmp_path / "averaged.pt")["update"] == 2


def test_an_average_keeps_the_shortlist(tmp_path: Path) -> None:
    lists = {"lengths": torch.tensor([0, 2]), "targets": torch.tensor([3, 4]), "frequent": torch.tensor([5])}
    paths = [write(tmp_path / "a.pt", 1, torch.ones(2)), write(tmp_path / "b.pt", 2, torch.ones(2), shortlist=lists)]
    assert averaging.average(paths)["shortlist"]["targets"].tolist() == [3, 4]
    assert "shortlist" not in averaging.average(paths[:1])


def test_an_average_keeps_what_all_files_say_about_their_origin(tmp_path: Path) -> None:
    origin = {"languages": ["en", "de"], "license": "mit", "repository": "org/model"}
    origins = {"a": origin, "b": origin, "c": origin | {"repository": "org/other"}, "d": {"languages": ["en", "de"]}}
    a, b, c, d = (write(tmp_path / f"{name}.pt", 1, torch.ones(2), origin=each) for name, each in origins.items())
    plain = write(tmp_path / "plain.pt", 1, torch.ones(2))
    assert averaging.average([a, b])["origin"] == origin
    assert averaging.average([a, c])["origin"] == {"languages": ["en", "de"], "license": "mit"}
    assert averaging.average([a, d])["origin"] == {"languages": ["en", "de"]}
    assert "origin" not in averaging.average([a, plain]) and "origin" not in averaging.average([plain])


def test_sums_are_in_fp32_though_weights_are_not(tmp_path: Path) -> None:
    # in bf16, 256 + 1 is 256
    paths = [write(tmp_path / f"{index}.pt", index, torch.tensor([256.0]).bfloat16()) for index in range(2)]
    paths += [write(tmp_path / f"{index}.pt", index, torch.tensor([1.0]).bfloat16()) for index in range(2, 4)]
    weight = averaging.average(paths)["model"]["weight"]
    assert weight.dtype == torch.bfloat16
    assert float(weight) == float(torch.tensor(514 / 4).bfloat16())


def test_the_files_are_not_changed(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{index}.pt", index, torch.ones(2) * index) for index in range(3)]
    before = [path.read_bytes() for path in paths]
    averaging.average(paths)
    assert [path.read_bytes() for path in paths] == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "other"}, "architecture some and other"),
        ({"config": {"d_model": 8}}, "d_model 4 and 8"),
        ({"tokenizer": {"model": torch.tensor([1, 3], dtype=torch.uint8)}}, "tokenizers"),
        ({"model": {"weight": torch.zeros(3)}}, r"weight of shape \(2,\) and \(3,\)"),
    ],
)
def test_files_of_different_models_are_refused_by_the_difference(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    one = write(tmp_path / "one.pt", 1, torch.zeros(2))
    other = write(tmp_path / "other.pt", 2, torch.zeros(2), **changes)
    with pytest.raises(ValueError, match=f"one.pt and .*other.pt.*{named}"):
        averaging.average([one, other])


def test_a_member_that_is_not_finite_or_damaged_is_refused(tmp_path: Path) -> None:
    good = write(tmp_path / "good.pt", 1, torch.zeros(200))
    lost = write(tmp_path / "lost.pt", 2, torch.full((200,), float("nan")))
    with pytest.raises(ValueError, match=r"lost\.pt: weight .*not finite"):
        averaging.average([good, lost])
    data = bytearray(good.read_bytes())
    data[data.index(bytes(800)) + 400] = 1
    good.write_bytes(data)
    with pytest.raises(ValueError, match=r"good\.pt is damaged"):
        averaging.average([good])


def test_the_last_are_those_saved_at_intervals(tmp_path: Path) -> None:
    for update, scheduled in ((2, True), (4, True), (5, False), (6, True), (7, False)):
        write(tmp_path / checkpoints.file_name(update), update, torch.zeros(1), scheduled=scheduled)
    last = [checkpoint.load(path)["update"] for path in averaging.last_of(tmp_path, 3)]
    assert last == [2, 4, 6]
    with pytest.raises(ValueError, match=r"has 3 checkpoints .*interval, not 4; give --last 3"):
        averaging.last_of(tmp_path, 4)


def test_the_last_and_the_best_of_a_folder(tmp_path: Path) -> None:
    for update, (loss, bleu) in enumerate([(3.0, 20.0), (2.0, 21.0), (2.5, 25.0)], 1):
        scores = {"scores": {"loss": loss, "bleu": bleu}, "maximized": ["bleu"]}
        write(tmp_path / checkpoints.file_name(update), update, torch.zeros(1), **scores)
    diverged = {"scores": {"loss": float("nan"), "bleu": float("nan")}, "maximized": ["bleu"]}
    write(tmp_path / checkpoints.file_name(4), 4, torch.zeros(1), **diverged)
    names = {update: tmp_path / checkpoints.file_name(update) for update in range(1, 5)}
    assert averaging.last_of(tmp_path, 2) == [names[3], names[4]]
    assert averaging.best_of(tmp_path, 2, "loss") == [names[2], names[3]]
    assert averaging.best_of(tmp_path, 2, "bleu") == [names[3], names[2]]
    assert averaging.best_of(tmp_path, 2, "bleu:min") == [names[1], names[2]]
    with pytest.raises(ValueError, match=r"has 4 checkpoints, not 5"):
        averaging.last_of(tmp_path, 5)
    with pytest.raises(ValueError, match=r"has 3 checkpoints .*loss, not 4"):
        averaging.best_of(tmp_path, 4, "loss")


def test_the_best_of_a_folder_have_scores_of_one_valid_set(tmp_path: Path) -> None:
    names = []
    for update, (subset, loss) in enumerate([("valid", 1.0), ("valid", 2.0), ("test", 5.0), ("test", 4.0)], 1):
        tables = {"run": {"valid_subset": [subset], "metrics": []}, "criterion": {"name": "cross_entropy"}}
        facts = {"scores": {"loss": loss}, "run": {"settings": tables}}
        names.append(write(tmp_path / checkpoints.file_name(update), update, torch.ones(1), **facts))
    assert averaging.best_of(tmp_path, 2, "loss") == [names[3], names[2]]
    with pytest.raises(ValueError, match="has 2 checkpoints"):
        averaging.best_of(tmp_path, 3, "loss")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        averaging.last_of(tmp_path / "nowhere", 1)


@pytest.mark.parametrize("choice", [{"last": 0}, {"last": -1}, {"best": 0}])
def test_a_choice_of_no_checkpoints_is_refused(choice: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--{next(iter(choice))} is "):
        nmtkit.average(tmp_path, tmp_path / "averaged.pt", **choice)


def test_a_link_to_itself_is_replaced_by_the_output(tmp_path: Path) -> None:
    output = tmp_path / "loop"
    output.symlink_to("loop")
    averaging.check_files([tmp_path / "a.pt", tmp_path / "b.pt"], output)
    with pytest.raises(ValueError, match="are the same file"):
        averaging.check_files([tmp_path / "a.pt", tmp_path / "." / "a.pt"], output)
