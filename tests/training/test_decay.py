"""Where a run's decay of the learning rate ends, and what a resumed run says of a jump."""

import logging
from pathlib import Path
from typing import Any

import pytest

from nmtkit.training.config import JobTemplate
from nmtkit.training.progress import Lines
from nmtkit.training.run import Run

TINY = {"d_model": 16, "d_ff": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
RUN = {"batch_tokens": 200, "max_tokens": 200, "precision": "fp32", "device": "cpu", "validate_interval": None}


def run(data: Path, save_dir: Path, schedule: str, **settings: Any) -> Run:
    names = {"architecture": "transformer_tiny", "lr-scheduler": schedule}
    job = JobTemplate.read(names=names).job(TINY | RUN | {"save_dir": save_dir, "lr": 0.01} | settings)
    return Run(job, data, Lines())


@pytest.mark.parametrize(("schedule", "jumps"), [("polynomial", True), ("fixed", False)])
def test_a_jump_of_the_learning_rate_is_announced(
    mirror_data: Path, tmp_path: Path, schedule: str, jumps: bool, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(logging.getLogger("nmtkit"), "propagate", True)
    run(mirror_data, tmp_path, schedule, warmup_updates=0, max_update=2).run()
    run(mirror_data, tmp_path, schedule, warmup_updates=0, max_update=4)
    expected = "the learning rate jumps: update 2 had 0, and would have 0.005 by this run's schedule"
    assert (expected in caplog.messages) == jumps
