"""Training in this process: what `nmtkit train` does."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmtkit import checkpoint
from nmtkit.api.settings import PathLike, checked, names_of
from nmtkit.config import field_types
from nmtkit.processes import distributed
from nmtkit.training.callbacks import Callback
from nmtkit.training.config import REGISTRIES, JobConfig, JobTemplate
from nmtkit.training.progress import Lines
from nmtkit.training.run import Run
from nmtkit.training.run_config import RunConfig


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended, and what it left in its folder."""

    reason: str  # why it ended: "--max-update 1000 is reached"; of a signal its name: "SIGINT"
    updates: int  # made in all, those before a resume included
    finished: bool  # False where a signal stopped it: the same call goes on
    save_dir: Path
    last: Path  # the newest checkpoint
    best: Path | None  # the one of the best validation, if there was one and it is kept

    @property
    def log(self) -> list[dict[str, Any]]:
        """The records of `log.jsonl`, oldest first; `kind` says what each is of: start, train, valid, checkpoint, …"""
        lines = (self.save_dir / "log.jsonl").read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line]

    @property
    def scores(self) -> dict[str, float]:
        """The scores of the best validation, empty where there was none."""
        if self.best is None:
            return {}
        scores: dict[str, float] = checkpoint.read(self.best, mmap=True).get("scores", {})
        return scores


def train(
    settings: Mapping[str, Any] | PathLike, data: PathLike | None = None, callbacks: Sequence[Callback] = ()
) -> TrainingResult:
    """Trains a model on a dataset in this process, as `nmtkit train` does, and returns how the run ended.

    >>> result = nmtkit.train({"arch": "transformer_tiny", "max_update": 1000, "save_dir": "run"}, "data-bin")
    >>> nmtkit.load(result.best).translate("A dog runs.")

    `settings` are the flags of the command: `arch`, `criterion` and the other names of components, their settings,
    those of the run, and `config` and `plugin`, which name files. Lists are lists: `{"metrics": ["bleu", "chrf"]}`. A
    path stands for `{"config": path}`; the `config.toml` of a run names its `data` too. `callbacks` are objects, beside
    those that the settings name.

    The same call again resumes the run in `save_dir`. Ctrl-C and SIGTERM save and end it, as on the command line. A GPU
    is taken where there is one; for several, start the script with torchrun. What torch keeps for the whole process,
    such as its threads, stays set. Raises OSError or ValueError.
    """
    given = {"config": settings} if isinstance(settings, str | Path) else dict(settings)
    job = _job({name.replace("-", "_"): value for name, value in given.items()}, data)
    if job.data is None:
        raise ValueError("nmtkit.train needs data: the dataset that nmtkit.preprocess made")
    processes = job.run.nproc_per_node or 1
    if processes > 1 and not distributed.launched():
        raise ValueError(
            f"nproc_per_node is {processes}, and nmtkit.train trains in this one process; start the script with "
            f"torchrun --nproc-per-node {processes}, or give the command nmtkit train"
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


def _job(given: dict[str, Any], data: PathLike | None) -> JobConfig:
    """Returns the job of settings by the names of flags. Raises ValueError for one that none of its parts has."""
    title = "nmtkit.train"
    chosen = {kind: registry.flag[2:].replace("-", "_") for kind, registry in REGISTRIES.items()}
    types = dict.fromkeys(chosen.values(), tuple[str, ...]) | {"config": Path | None, "plugin": tuple[str, ...]}
    kinds = checked(title, {name: value for name, value in given.items() if name in types}, types)
    names = {kind: ",".join(kinds[name]) or "none" for kind, name in chosen.items() if name in kinds}
    start = given.get("finetune_from")
    template = JobTemplate.read(kinds.get("config"), names, kinds.get("plugin", ()), Path(start) if start else None)
    parts: list[type] = [RunConfig, *(type(component.config) for component in template.components.values())]
    fields = {name: field for part in parts for name, field in names_of(part).items()}
    hints = {name: field_types(part)[field] for part in parts for name, field in names_of(part).items()}
    values = checked(title, given, types | hints)
    changes = {fields[name]: value for name, value in values.items() if name in fields}
    return template.job(changes, None if data is None else Path(data))
