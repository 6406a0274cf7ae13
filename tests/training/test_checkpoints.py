"""The folder of a run: the checkpoints from which it resumes, and its best checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nmtkit.data import checkpoint_file
from nmtkit.training.checkpoints import CheckpointManager
from nmtkit.training.metrics import Objective, conditions_of

OBJECTIVE = Objective("loss", conditions=conditions_of("loss", {}))


def contents(update: int, loss: float) -> checkpoint_file.Checkpoint:
    facts: dict[str, Any] = {"architecture": "some", "config": {}, "tokenizer": {}, "plugins": []}
    scores = {"scores": {"loss": loss}, "scheduled": True, "training": {}}
    return facts | scores | {"model": {"weight": torch.ones(200)}, "update": update}


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    ones = torch.ones(200).numpy().tobytes()
    data[data.index(ones) + 400] ^= 1
    path.write_bytes(data)


def test_a_damaged_newest_checkpoint_does_not_become_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = CheckpointManager(tmp_path, 2, 1, OBJECTIVE)
    for update, loss in ((1, 3.0), (2, 1.0)):
        newest = manager.save(contents(update, loss))
    damage(newest)
    resumed = CheckpointManager(tmp_path, 2, 1, OBJECTIVE)
    point = resumed.resume_point()
    assert point is not None and point[0].name == "update_00000001.pt"
    assert "update_00000002.pt is damaged" in caplog.text
    assert resumed.is_best(2.0)
    best = resumed.save(contents(3, 2.0))
    assert (tmp_path / "best.pt").resolve() == best.resolve()
    resumed.unlock()


def test_a_damaged_old_checkpoint_does_not_stay_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = CheckpointManager(tmp_path, None, 1, OBJECTIVE)
    oldest, *_ = [manager.save(contents(update, loss)) for update, loss in ((1, 1.0), (2, 3.0), (3, 4.0), (4, 5.0))]
    damage(oldest)
    resumed = CheckpointManager(tmp_path, None, 1, OBJECTIVE)
    point = resumed.resume_point()
    assert point is not None and point[0].name == "update_00000004.pt"
    assert "update_00000001.pt is damaged" in caplog.text
    assert resumed.is_best(2.0) and not resumed.is_best(3.5)
    best = resumed.save(contents(5, 2.0))
    assert (tmp_path / "best.pt").resolve() == best.resolve()
    resumed.unlock()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_never_the_best(value: float, tmp_path: Path) -> None:
    """Each validation with such a score wrote a checkpoint."""
    assert not CheckpointManager(tmp_path, None, 2, OBJECTIVE).is_best(value)
