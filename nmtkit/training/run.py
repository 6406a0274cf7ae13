"""The loop of a training run: update, log, validate and save until the run ends or a signal stops it."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nmtkit.config.plugins import plugins_for
from nmtkit.data import checkpoint_file
from nmtkit.data.checkpoint_file import Checkpoint
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.jobs import distributed, openmp
from nmtkit.models import building
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.models.architectures.interface import parameter_count
from nmtkit.training import report
from nmtkit.training.callbacks import Callback, CallbackList, RunState
from nmtkit.training.checkpoints import CheckpointManager
from nmtkit.training.config import JobConfig
from nmtkit.training.due import Due, Requests, RunProgress, StopReason, StopSignal, due_after_update, stop_reason
from nmtkit.training.health import TrainingHealth
from nmtkit.training.loader import Update
from nmtkit.training.memory import prepare_model
from nmtkit.training.meter import Meter
from nmtkit.training.metrics import Objective, conditions_of, maximized_scores, objective
from nmtkit.training.plan import device_of, resolve
from nmtkit.training.resume import check_resumable, resume_requirements, warn_of_changes
from nmtkit.training.run_facts import run_facts, write_config
from nmtkit.training.run_log import Lines, RunLog, numbers_of
from nmtkit.training.setup import (
    build_loader,
    build_trainer,
    build_validator,
    check_positions,
    validating_where_possible,
)
from nmtkit.training.validation import Validator

log = logging.getLogger("nmtkit")


class Run:
    """A training run in one of its processes. Only rank 0 logs and saves. All ranks do all other work."""

    def __init__(self, job: JobConfig, data: Path, display: Lines, callbacks: Sequence[Callback] = ()) -> None:
        """Sets up or resumes the run. `callbacks` are called in addition to the callbacks that `job` names.

        On rank 0, locks the folder of an existing run, and releases the lock if the setup fails. Raises ValueError or
        OSError for a mistake of the user.
        """
        self.stop = StopSignal()
        self.display = display
        self.progress = RunProgress()
        distributed.init_process_group(device_of(job.run), job.run.timeout_minutes)
        with distributed.long_operation():  # reading a checkpoint and building a model send no heartbeats
            self.dataset = Dataset.open(data)
            if not len(self.dataset["train"]):
                raise ValueError(f"{data}: the training set is empty")
            job = validating_where_possible(replace(job, data=data), self.dataset)
            metrics, config = job.metrics(), job.run
            self.objective = objective(config.best_checkpoint_metric, metrics, config.valid_subset[1:], job.tables())
            self.maximized = maximized_scores(self.objective, metrics, config.valid_subset[1:])
            self.checkpoints = CheckpointManager(config.save_dir, config.keep_last, config.keep_best, self.objective)
            self.checkpoints.check_shared()
            try:
                self._set_up(job, callbacks)
            except BaseException:
                self.checkpoints.unlock()
                raise
        self.exchange = distributed.AsyncMax()
        self.progress.started = self.last_save = time.monotonic()

    def _set_up(self, job: JobConfig, callbacks: Sequence[Callback]) -> None:
        """Builds all parts of the run, and restores their state if the folder has a checkpoint."""
        assert job.data is not None
        path, resumed = self.checkpoints.resume_point() or (None, None)
        batch_tokens = resumed["training"].get("identity", {}).get("batch tokens") if resumed else None
        self.plan = resolve(job, distributed.world_size(), batch_tokens)
        self.plan.configure_torch()
        self.job = self.plan.job
        self.loader = build_loader(self.plan, self.dataset, distributed.rank(), distributed.world_size())
        self.facts = run_facts(self.plan, job.data, self.dataset, resumed["run"] if resumed else None)
        self.trainer = build_trainer(
            self.job,
            self.dataset.tokenizer,
            self.plan.device,
            resumed,
            updates=self.plan.updates(self.loader.sampler.updates_per_epoch)[0],
            dataset=self.dataset,
        )
        self.validator = build_validator(self.plan, self.dataset, self.loader.max_tokens, self.stop, bool(callbacks))
        check_positions(self.trainer.model, self.dataset["train"], self.validator)
        self.callbacks = self._callbacks(callbacks)
        if path and resumed:
            self._restore(path, resumed)
        # whether the run resumes from a checkpoint that was saved at an interval
        self.resumes_scheduled = bool(resumed and resumed["scheduled"])
        late = resumed is not None and self.progress.is_out_of_time(self.job.run)
        self.asked = Requests(out_of_time=distributed.broadcast(late))  # the clocks of the ranks differ
        self.ended = stop_reason(self.job.run, self.progress, self.asked)  # None if updates are left
        if resumed and distributed.is_rank_zero():
            warn_of_changes(resumed["run"], self.facts, self.trainer, self.job.run.save_dir, bool(self.ended))
        if resumed and self.ended:  # log, page and checkpoints keep the settings that have trained the model
            self.facts = resumed["run"]
        self.log = RunLog(self.job.run.save_dir, self.display)
        self.page = report.RunPage(self.job.run.save_dir, self.progress)
        self.meter = Meter(self.trainer.device, self.job.run.save_dir)
        start, train = {"done": self.trainer.done, "schedule_start": self.trainer.schedule_start}, self.dataset["train"]
        self.health = TrainingHealth(self.job, train, not resumed and distributed.is_rank_zero(), **start)

    def _callbacks(self, objects: Sequence[Callback]) -> CallbackList:
        callbacks = self.job.built("callbacks")
        callbacks |= {f"{type(each).__name__} {number}": each for number, each in enumerate(objects, 1)}
        run = RunState(
            save_dir=self.job.run.save_dir,
            settings=self.job.tables(),
            model=self.trainer.model,
            can_validate=self.validator is not None,
            sharded=self.job.run.parallel == "fsdp" and distributed.world_size() > 1,
        )
        return CallbackList(callbacks, run)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> StopReason:
        """Trains until the run ends or a signal stops the run. Returns the reason."""
        try:
            openmp.start()
            end = self._train()
            self._log_end("stopped" if end.received else "finished", end.reason)
            self.callbacks.end(end.reason)
        except BaseException as error:
            self._log_end("failed", str(error) or type(error).__name__)
            self.callbacks.end(None)
            raise
        finally:
            self.checkpoints.unlock()
        return end

    def _train(self) -> StopReason:
        if distributed.is_rank_zero():
            self.checkpoints.folder.mkdir(parents=True, exist_ok=True)
            self.checkpoints.lock()
            if not self.ended:
                write_config(self.job, self.facts)
            self._announce()
        due = self._due_at_start()
        if due.stop:
            return due.stop
        with distributed.long_operation():
            prepare_model(self.plan, self.trainer, self.loader)
        if self.validator:
            self.validator.max_tokens = self.loader.max_tokens
        try:
            with self.stop:
                self.callbacks.call("start")
                due = self._validate_and_save(due)
                for update in () if due.stop else self.loader.updates(self.progress.position):
                    due = self._update(update)
                    if due.log:
                        self._log_line(update)
                    due = self._validate_and_save(due)
                    if due.stop:
                        break
        finally:
            self.loader.close()
        assert due.stop is not None
        return due.stop

    def _due_at_start(self) -> Due:
        """Returns the work before the first update: an overdue validation, --validate-first, or the end of the run."""
        first = self.job.run.validate_first and not self.progress.updates
        if self.validator and (self.progress.validation_due or first):
            return Due(validate=True, save=self.resumes_scheduled, scheduled=self.resumes_scheduled)
        return Due(stop=self.ended)

    def _update(self, update: Update) -> Due:
        """Makes an update. Returns the work that is due afterwards, the same on every rank."""
        metrics = self.trainer.step(update)
        self.progress.updates, self.progress.position = metrics.number, update.next
        self.meter.add(metrics)
        self.health.after_update(metrics)
        self.callbacks.run.update, self.callbacks.run.epoch = metrics.number, update.position.epoch + 1
        self.callbacks.call("update")
        self.display.tick(self._progress_record(update) | self.meter.latest())
        minutes = self.job.run.save_interval_minutes
        late = minutes is not None and time.monotonic() - self.last_save > 60 * minutes
        own = self._requests(out_of_time=self.progress.is_out_of_time(self.job.run), clock_saves=late * metrics.number)
        self.asked = Requests(*self.exchange.maximum(*own))
        reason = self.callbacks.agreed_stop_reason() if self.asked.callback_stops else None
        return due_after_update(self.job.run, self.progress, self.asked, reason)

    def _requests(self, **by_clock: int) -> Requests:
        """Returns the requests that a signal, the callbacks and the clock make on this rank."""
        return Requests(self.stop.received or 0, **self.callbacks.asked(), **by_clock)

    def _validate_and_save(self, due: Due) -> Due:
        """Validates and saves if due. Returns `due` with the work that has become due after the validation.

        A validation that a signal prevents or interrupts is due when the run is resumed.
        """
        scores, best = None, False
        if due.validate and self.validator and not self.asked.stop_signal:
            scores = self._validate(self.validator, due.scheduled)
            due = self._due_after_validation(due)
            best = scores is not None and distributed.broadcast(self.checkpoints.is_best(self.objective.value(scores)))
        self.progress.validation_due = due.validate and self.validator is not None and scores is None
        if due.save or best:
            self._save(scores, scheduled=due.scheduled, must=due.stop is not None)
        return due

    def _due_after_validation(self, due: Due) -> Due:
        """Returns `due` with the end of the run and the checkpoint that patience, callbacks or a signal ask for."""
        asked = Requests(*map(max, zip(*distributed.all_gather_object(self._requests()), strict=True)))
        self.asked = self.asked._replace(stop_signal=asked.stop_signal)
        reason = self.callbacks.agreed_stop_reason() if asked.callback_stops else None
        stop = stop_reason(self.job.run, self.progress, self.asked, reason)
        return replace(due, stop=stop, save=due.save or bool(asked.callback_saves) or stop is not None)

    # --- a validation -----------------------------------------------------------------------------------------------

    def _validate(self, validator: Validator, scheduled: bool) -> dict[str, float] | None:
        """Returns the scores of a validation, or None if a stop signal interrupted the validation.

        If the validation fails, saves a checkpoint and raises the exception again. A run that resumes from this
        checkpoint first repeats the validation.
        """
        started, number = time.monotonic(), self.progress.updates
        self.display.note(f"validating at update {number} …")
        try:
            with self.trainer.evaluated_weights():
                scores = validator.scores(self.trainer.model, self.trainer.criterion)
            if scores is not None and self.objective.name not in scores:
                known = ", ".join(scores)
                raise ValueError(f"--best-checkpoint-metric {self.objective.name}: give a score of this run: {known}")
        except Exception as error:
            if not distributed.is_connection_error(error) or isinstance(error, distributed.PeerError):
                self.progress.validation_due = True
                self._save(None, scheduled=scheduled, must=False)
                if distributed.is_rank_zero():
                    log.error("the validation has failed; the run is saved after update %d", number)
            raise
        if scores is None:
            return None
        value = self.objective.value(scores)
        better = self.progress.add_score(value)
        self.trainer.scheduler.observe(value)
        seconds = time.monotonic() - started
        self.meter.pause(seconds)
        if distributed.is_rank_zero():
            position = self.progress.position
            more = {"best": better, "followed": validator.followed(), "by_length": validator.by_length}
            if validator.by_direction:
                more["directions"] = validator.by_direction
            more |= {"epoch": position.epoch + (position.index > 0), "maximized": self.maximized}
            self.log.write("valid", update=number, **scores, seconds=round(seconds, 3), **more)
            self.health.after_validation(number, scores)
            self.page.write(validator)
        self.callbacks.call("validation", scores)
        return scores

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _save(self, scores: dict[str, float] | None, *, scheduled: bool, must: bool) -> None:
        """Saves a checkpoint. `scheduled` is true if the checkpoint is due at one of the intervals of the run.

        If the file cannot be written, raises OSError if `must` is true, and otherwise logs a warning.
        """
        started = time.monotonic()
        weights, state = self.trainer.weights(), self.trainer.state_dict()  # gathered from all ranks
        self.last_save, self.progress.saved = time.monotonic(), self.progress.updates
        if distributed.is_rank_zero():
            contents = self._contents(weights, state, scores or {}, scheduled)
            try:
                with distributed.long_operation():
                    path = self.checkpoints.save(contents)
            except OSError as error:
                if must:
                    raise
                log.warning("checkpoint not saved: %s; training continues, and older checkpoints are kept", error)
            else:
                self.log.write("checkpoint", update=self.progress.updates, file=path.name)
                self.callbacks.call("checkpoint", path)
        # without this barrier, ranks would wait elsewhere, and the watchdog would consider them hanging
        distributed.barrier()
        self.meter.pause(time.monotonic() - started)

    def _contents(
        self, weights: dict[str, Tensor], trainer: dict[str, Any], scores: dict[str, float], scheduled: bool
    ) -> Checkpoint:
        """Returns the contents of a checkpoint. `trainer` is the state of the trainer."""
        architecture, adapters = self.job.components["architecture"], self.trainer.adapters
        contents = building.to_checkpoint(
            self.trainer.model,
            architecture.name,
            architecture.config,
            self.dataset.tokenizer,
            plugins_for(ARCHITECTURES[architecture.name], self.job.plugins),
            self.progress.updates,
        )
        more = {
            "objective": [self.objective.name, self.objective.higher_is_better],
            "identity": resume_requirements(self.job, self.dataset, adapters),
            "callbacks": self.callbacks.state(),
        }
        contents |= {
            "model": weights,
            "scores": scores,
            "signatures": self.validator.signatures if self.validator and scores else {},
            "scheduled": scheduled,
            "maximized": self.maximized,
            "run": self.facts,
            "training": trainer | self.progress.state() | more,
        }
        if adapters:
            contents["adapters"] = adapters
        return contents

    def _restore(self, path: Path, contents: Checkpoint) -> None:
        """Continues from a checkpoint. Raises ValueError if the checkpoint belongs to a different run."""
        state, updates, config = contents["training"], contents["update"], self.job.run
        requirements = resume_requirements(self.job, self.dataset, self.trainer.adapters)
        if config.reset_optimizer:
            del requirements["optimizer"]
        check_resumable(contents, requirements, path)
        name, higher_is_better = state["objective"]
        before = Objective(name, higher_is_better, conditions_of(name, contents["run"]["settings"]))
        if before != self.objective and self.job.schedule_follows_validations and not config.reset_lr_scheduler:
            raise ValueError(
                f"the learning-rate schedule of this run has followed {before.name}; resume with "
                f"--best-checkpoint-metric {' '.join((before.name, *before.conditions))}, or with --reset-lr-scheduler"
            )
        if contents["run"]["settings"]["lr-scheduler"]["name"] != self.job.components["lr-scheduler"].name:
            state = state | {"scheduler": self.trainer.scheduler.state()}  # each kind of schedule has a different state
        self.trainer.load_weights(contents["model"])
        self.trainer.model.shortlist = contents.get("shortlist")
        self.trainer.load_state_dict(state, updates)
        self.progress.load_state(state, updates)
        if before != self.objective:
            best = min(self.checkpoints.objectives.values(), default=None)  # known only on rank 0
            self.progress.best, self.progress.waited = distributed.broadcast(best), 0
        self.callbacks.run.update, self.callbacks.run.epoch = updates, self.progress.position.epoch + 1
        self.callbacks.load_state(state["callbacks"])

    # --- the log ----------------------------------------------------------------------------------------------------

    def _log_line(self, update: Update) -> None:
        record = self._progress_record(update) | self.meter.read()
        numbers = numbers_of(record, ("update", "updates"))
        self.callbacks.call("log", {name: float(value) for name, value in numbers.items()})
        if distributed.is_rank_zero():
            self.log.write("train", **record)
            self.health.after_log_line(record)
            self.page.keep_current()

    def _progress_record(self, update: Update) -> dict[str, Any]:
        """Returns updates, epoch and speed for the log. Does not wait for the device."""
        number, now = self.progress.updates, self.progress.position
        total, estimated = self.plan.updates(self.loader.sampler.updates_per_epoch, number, now.epoch, now.index)
        record = {"update": number, "updates": total, "estimated": estimated, "epoch": update.position.epoch + 1}
        return record | self.meter.speed(max(0, total - number) if total else None)

    def _announce(self) -> None:
        names = ", ".join(component.name for component in self.job.components.values())
        trainer, folder, done = self.trainer, self.checkpoints.folder, self.progress.updates
        parameters, pairs = parameter_count(trainer.model), len(self.dataset["train"])
        for line in (
            f"{names}: {parameters / 1e6:.1f} M parameters, {trainer.precision} on {trainer.device.type}",
            f"{pairs:,} pairs, {self.plan.batch_tokens:,} tokens per update in micro-batches of "
            f"{self.loader.max_tokens:,}, about {self.loader.sampler.updates_per_epoch:,} updates per epoch",
            f"resuming {folder} after update {done}" if done else f"saving to {folder}",
            f"curves{' and translations' if self.validator else ''}: {folder / 'report.html'}",
        ):
            log.info("%s", line)
        facts = self.facts | {"parameters": parameters, "pairs": pairs}
        self.log.write("resume" if done else "start", update=done, config=facts.pop("settings"), **facts)

    def _log_end(self, state: str, reason: str) -> None:
        if self.checkpoints.locked:  # only rank 0, and only if no other run uses the folder
            self.log.write("end", update=self.progress.updates, state=state, reason=reason)
            self.page.write()


# --- a whole run in this process, for Python --------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingResult(StopReason):
    """The reason for the end of a run, and the files in its folder.

    `updates` includes the updates before a resume. `received` is the signal that stopped the run, or None.
    """

    save_dir: Path = field(kw_only=True)

    @property
    def finished(self) -> bool:
        """False if a signal stopped the run. The same call resumes the run."""
        return self.received is None

    @property
    def last(self) -> Path:
        """The newest checkpoint."""
        return self.save_dir / "last.pt"

    @property
    def best(self) -> Path | None:
        """The checkpoint with the best validation score, or None if there is no such file."""
        best = self.save_dir / "best.pt"
        return best if best.exists() else None

    @property
    def log(self) -> list[dict[str, Any]]:
        """The records of `log.jsonl`, oldest first. Each record has a `kind`: start, train, valid, checkpoint, …"""
        return report.read_lines(self.save_dir / "log.jsonl")

    @property
    def scores(self) -> dict[str, float]:
        """The scores of the best checkpoint, or an empty dict if there is no such file."""
        best = self.best
        return {} if best is None else dict(checkpoint_file.read(best, mmap=True).get("scores", {}))


def train_job(job: JobConfig, callbacks: Sequence[Callback] = (), display: Lines | None = None) -> TrainingResult:
    """Trains a job in this process, or resumes its run. `callbacks` are called in addition to the callbacks of the job.

    Raises ValueError for settings that cannot be used, and OSError for files that cannot be read or written.
    """
    if job.data is None:
        raise ValueError("nmtkit.train needs data, a dataset made by nmtkit.preprocess")
    processes = job.run.nproc_per_node or 1
    if processes > 1 and not distributed.launched():
        raise ValueError(
            f"nproc_per_node is {processes}, but nmtkit.train trains in a single process; start the script with "
            f"torchrun --nproc-per-node {processes}, or run nmtkit train instead of the script"
        )
    end = Run(job, job.data, display or Lines(), callbacks).run()
    distributed.destroy_process_group()
    return TrainingResult(end.reason, end.updates, end.received, save_dir=job.run.save_dir)
