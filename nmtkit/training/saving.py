"""Saves a run as a checkpoint, and restores a run from a checkpoint."""

import logging
import math
import time
from pathlib import Path

from nmtkit.config.plugins import plugins_for
from nmtkit.data.checkpoint_file import Checkpoint
from nmtkit.jobs import distributed
from nmtkit.models import building
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.training.callbacks import CallbackList
from nmtkit.training.checkpoints import check_resumable
from nmtkit.training.differences import changed_settings, table
from nmtkit.training.lr_schedulers import LRScheduler, learning_rate
from nmtkit.training.metrics import Objective
from nmtkit.training.run_facts import changed_plugins, resume_requirements
from nmtkit.training.setup import RunSetup
from nmtkit.training.stopping import RunProgress

log = logging.getLogger("nmtkit")


class RunSaver:
    """Saves and restores weights, training state, progress and callbacks of a run. Every rank calls each method."""

    def __init__(self, setup: RunSetup, progress: RunProgress, callbacks: CallbackList) -> None:
        self.job, self.dataset, self.facts = setup.job, setup.dataset, setup.facts
        self.trainer, self.objective, self.maximized = setup.trainer, setup.objective, setup.maximized
        self.folder = setup.checkpoints
        self.progress = progress
        self.callbacks = callbacks
        self.last_save = time.monotonic()

    def save(self, scores: dict[str, float] | None, scheduled: bool) -> Path | None:
        """Gathers the state of all ranks. Rank 0 writes a checkpoint and returns its path; other ranks return None.

        A checkpoint is `scheduled` if it is saved at one of the intervals of the run. Raises OSError if the file cannot
        be written.
        """
        weights, state = self.trainer.weights(), self.trainer.state_dict()
        self.last_save = time.monotonic()
        if not distributed.is_rank_zero():
            return None
        architecture = self.job.components["architecture"]
        contents = building.to_checkpoint(
            self.trainer.model,
            architecture.name,
            architecture.config,
            self.dataset.tokenizer,
            plugins_for(ARCHITECTURES[architecture.name], self.job.plugins),
            self.trainer.done,
        )
        contents |= {
            "model": weights,
            "scores": scores or {},
            "scheduled": scheduled,
            "maximized": self.maximized,
            "run": self.facts,
            "training": state
            | self.progress.state()
            | {
                "objective": [self.objective.name, self.objective.higher_is_better],
                "identity": resume_requirements(self.job, self.dataset, self.trainer.adapters),
                "callbacks": self.callbacks.state(),
            },
        }
        if self.trainer.adapters:
            contents["adapters"] = self.trainer.adapters
            contents.pop("shortlist", None)  # `checkpoint.load` reads the shortlist of the base
        with distributed.long_operation():
            return self.folder.save(contents)

    def restore(self, path: Path, contents: Checkpoint) -> None:
        """Continues from a checkpoint. Raises ValueError if the checkpoint belongs to a different run."""
        state = contents["training"]
        requirements = resume_requirements(self.job, self.dataset, self.trainer.adapters)
        if self.job.run.reset_optimizer:
            del requirements["optimizer"]
        check_resumable(contents, requirements, path)
        same_objective = self._keeps_objective(Objective(*state["objective"]))
        self.trainer.load_weights(contents["model"])
        self.trainer.model.shortlist = contents.get("shortlist")
        self.trainer.load_state_dict(state, contents["update"])
        self.progress.load_state(state, same_objective)
        run = self.callbacks.run
        run.update, run.epoch = self.trainer.done, self.progress.position.epoch + 1
        self.callbacks.load_state(state["callbacks"])
        if distributed.is_rank_zero():
            self._log_changes(contents)

    def _keeps_objective(self, before: Objective) -> bool:
        """Returns whether the run has the same objective as before.

        Raises ValueError if the objective has changed and the learning-rate schedule has followed the old objective.
        """
        if before == self.objective:
            return True
        if type(self.trainer.scheduler).observe is not LRScheduler.observe and not self.job.run.reset_lr_scheduler:
            raise ValueError(
                f"the learning-rate schedule of this run has followed {before.name}; resume with "
                f"--best-checkpoint-metric {before.name}, or with --reset-lr-scheduler"
            )
        return False

    def _log_changes(self, contents: Checkpoint) -> None:
        """Warns about settings, plug-ins and a learning rate that differ from the checkpoint."""
        changed = changed_settings(contents["run"]["settings"], self.job.tables())
        if changed:
            log.warning("%s continues with different settings:\n%s", self.folder.folder, table(changed))
        for plugin in changed_plugins(contents["run"], self.facts):
            log.warning("the source of plug-in %s has changed since update %d was saved", plugin, contents["update"])
        done, before = self.trainer.done, self.trainer.lr
        made = done - self.trainer.schedule_start  # number of updates by this schedule
        now = learning_rate(self.trainer.scheduler, made) if made else None
        if before is not None and now is not None and not math.isclose(now, before):
            log.warning(
                "the learning rate jumps: update %d had %.3g, but the schedule of this run gives %.3g",
                *(done, before, now),
            )
