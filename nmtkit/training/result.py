"""Trains a job in this process, and describes the finished run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmtkit.data import checkpoint_file
from nmtkit.jobs import distributed
from nmtkit.training.callbacks import Callback
from nmtkit.training.config import JobConfig
from nmtkit.training.progress import Lines
from nmtkit.training.run import Run


@dataclass(frozen=True)
class TrainingResult:
    """The reason for the end of a run, and the files in its folder."""

    reason: str  # stop reason: "--max-update 1000 is reached", or the name of a signal, such as "SIGINT"
    updates: int  # number of updates made, including updates before a resume
    finished: bool  # False if a signal stopped the run; the same call resumes it
    save_dir: Path
    last: Path  # the newest checkpoint
    best: Path | None  # the checkpoint with the best validation score; None if there is no such file

    @property
    def log(self) -> list[dict[str, Any]]:
        """The records of `log.jsonl`, oldest first. Each has a `kind`: start, train, valid, checkpoint, …"""
        lines = (self.save_dir / "log.jsonl").read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line]

    @property
    def scores(self) -> dict[str, float]:
        """The scores of the best validation, or an empty dict if there was no validation."""
        if self.best is None:
            return {}
        scores: dict[str, float] = checkpoint_file.read(self.best, mmap=True).get("scores", {})
        return scores


def train_job(job: JobConfig, callbacks: Sequence[Callback] = ()) -> TrainingResult:
    """Trains a job in this process, or resumes its run. `callbacks` are called in addition to the callbacks of the job.

    Raises OSError or ValueError.
    """
    if job.data is None:
        raise ValueError("nmtkit.train needs data, a dataset made by nmtkit.preprocess")
    processes = job.run.nproc_per_node or 1
    if processes > 1 and not distributed.launched():
        raise ValueError(
            f"nproc_per_node is {processes}, but nmtkit.train trains in a single process; start the script with "
            f"torchrun --nproc-per-node {processes}, or run nmtkit train instead of the script"
        )
    end = Run(job, job.data, Lines(), callbacks).run()
    distributed.destroy_process_group()
    folder = job.run.save_dir
    best = folder / "best.pt"
    return TrainingResult(
        reason=end.reason,
        updates=end.updates,
        finished=end.received is None,
        save_dir=folder,
        last=folder / "last.pt",
        best=best if best.exists() else None,
    )
