"""The end of a decay of the learning rate, and the warning of a resumed run about a jump."""

from pathlib import Path
from typing import Any

import pytest

from nmtkit.training.config import JobConfig
from nmtkit.training.run import Run
from nmtkit.training.run_log import Lines

TINY = {"d_model": 16, "d_ff": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
RUN = {"batch_tokens": 200, "max_tokens": 200, "precision": "fp32", "device": "cpu", "validate_interval": None}


def run(data: Path, save_dir: Path, schedule: str, **settings: Any) -> Run:
    names = {"architecture": "transformer_tiny", "lr-scheduler": schedule}
    job = JobConfig.read(names=names, settings=TINY | RUN | {"save_dir": save_dir, "lr": 0.01} | settings)
    return Run(job, data, Lines())


@pytest.mark.parametrize(("schedule", "jumps"), [("polynomial", True), ("fixed", False)])
def test_a_jump_of_the_learning_rate_is_announced(
    mirror_data: Path, tmp_path: Path, schedule: str, jumps: bool, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run(mirror_data, tmp_path, schedule, warmup_updates=0, max_update=2).run()
    run(mirror_data, tmp_path, schedule, warmup_updates=0, max_update=4)
    expected = "the learning rate jumps: update 2 had 0, but the schedule of this run gives 0.005"
    assert (expected in caplog.messages) == jumps


@pytest.mark.slow
@pytest.mark.parametrize("max_update", [None, 100_000])
def test_a_decay_ends_where_the_epochs_do(mirror_data: Path, tmp_path: Path, max_update: int | None) -> None:
    made = run(mirror_data, tmp_path, "cosine", warmup_updates=2, max_epoch=2, max_update=max_update)
    made.run()
    assert made.trainer.lr is not None and made.trainer.lr < 0.0001  # the epochs' updates differ by one or two


def test_a_decay_ends_with_the_updates_where_they_end_before_the_epochs(mirror_data: Path, tmp_path: Path) -> None:
    made = run(mirror_data, tmp_path, "polynomial", warmup_updates=2, max_epoch=100, max_update=12)
    assert made.trainer.scheduler.lr(7) == pytest.approx(0.005)
