"""Trains in this process, like `nmtkit train`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmtkit import checkpoint
from nmtkit.api.settings import PathLike, checked, hints_of
from nmtkit.processes import distributed
from nmtkit.training.callbacks import Callback
from nmtkit.training.config import REGISTRIES, JobConfig, JobTemplate
from nmtkit.training.progress import Lines
from nmtkit.training.run import Run
from nmtkit.training.run_config import RunConfig


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
        scores: dict[str, float] = checkpoint.read(self.best, mmap=True).get("scores", {})
        return scores


def train(
    settings: Mapping[str, Any] | PathLike, data: PathLike | None = None, callbacks: Sequence[Callback] = ()
) -> TrainingResult:
    """Trains a model on a dataset in this process, like `nmtkit train`, and returns a TrainingResult.

    >>> result = nmtkit.train({"arch": "transformer_tiny", "max_update": 1000, "save_dir": "run"}, "data-bin")
    >>> nmtkit.load(result.best).translate("A dog runs.")

    `settings` maps the flags of the command to values. The flags choose components (`arch`, `criterion`, …), set the
    settings of the components and of the run, and name files (`config`, `plugin`). A flag with several values takes a
    list: `{"metrics": ["bleu", "chrf"]}`. Instead of a dict, `settings` can be the path of a config file; the
    `config.toml` of a run also names its `data`. The objects in `callbacks` are called in addition to the callbacks
    that the settings name.

    Repeating the call resumes the run in `save_dir`. Ctrl-C and SIGTERM save and end the run, as on the command line.
    The run uses a GPU if there is one; to use several, start the script with torchrun. Settings of torch for the whole
    process, such as the number of threads, stay changed after the run. Raises OSError or ValueError.
    """
    merged = {"config": settings} if isinstance(settings, str | Path) else dict(settings)
    job = _job({name.replace("-", "_"): value for name, value in merged.items()}, data)
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


def _job(settings: dict[str, Any], data: PathLike | None) -> JobConfig:
    """Returns the job for `settings`, which map flags to values. Raises ValueError for a flag that does not exist."""
    title = "nmtkit.train"
    chosen = {kind: registry.flag[2:].replace("-", "_") for kind, registry in REGISTRIES.items()}
    types = dict.fromkeys(chosen.values(), tuple[str, ...]) | {"config": Path | None, "plugin": tuple[str, ...]}
    kinds = checked(title, {name: value for name, value in settings.items() if name in types}, types)
    names = {kind: ",".join(kinds[name]) or "none" for kind, name in chosen.items() if name in kinds}
    start = settings.get("finetune_from")
    template = JobTemplate.read(kinds.get("config"), names, kinds.get("plugin", ()), Path(start) if start else None)
    classes: list[Any] = [RunConfig, *(type(component.config) for component in template.components.values())]
    hints = hints_of(*classes)
    values = checked(title, settings, {**types, **hints})
    changes = {name: value for name, value in values.items() if name in hints}
    return template.job(changes, None if data is None else Path(data))
