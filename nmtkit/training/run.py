"""A training run: set up or resume, then update, log, validate and save until it ends or a signal stops it."""

import logging
import math
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nmtkit import checkpoint, models
from nmtkit.architectures import ARCHITECTURES
from nmtkit.architectures.interface import parameter_count
from nmtkit.checkpoint import Objective
from nmtkit.data.batching import check_all_sizes
from nmtkit.data.binarized import Dataset
from nmtkit.files import atomic_write
from nmtkit.plugins import plugins_for
from nmtkit.processes import distributed, openmp
from nmtkit.training import report
from nmtkit.training.callbacks import CALLBACKS, Callback, CallbackList, RunState, named
from nmtkit.training.checkpoints import CheckpointManager, check_resumable
from nmtkit.training.config import JobConfig
from nmtkit.training.differences import changed_settings, table
from nmtkit.training.health import TrainingHealth
from nmtkit.training.loader import BatchLoader, Position, Update
from nmtkit.training.lr_schedulers import LRScheduler, learning_rate
from nmtkit.training.meter import Meter, NonfiniteGuard
from nmtkit.training.metrics import objective
from nmtkit.training.plan import device_of, resolve
from nmtkit.training.progress import Lines, RunLog
from nmtkit.training.setup import build_trainer, build_transforms, resume_requirements, run_facts
from nmtkit.training.stopping import StopReason, StopSignal
from nmtkit.training.trainer import fit_max_tokens, probe_memory
from nmtkit.training.validation import Validator

log = logging.getLogger("nmtkit")


class Run:
    """A run, as seen by one of its processes. Rank 0 logs and saves; all ranks do everything else alike."""

    def __init__(self, job: JobConfig, data: Path, display: Lines, callbacks: Sequence[Callback] = ()) -> None:
        """`callbacks` are called beside those that `job` names."""
        self.data = data
        self.display = display
        self.device = device_of(job.run)
        distributed.init_process_group(self.device, job.run.timeout_minutes)
        self.dataset = Dataset.open(data)
        self.train_split = self.dataset["train"]
        if not len(self.train_split):
            raise ValueError(f"{data}: the training set is empty")
        self.metrics = job.metrics()
        subsets = job.run.valid_subset
        self.objective = objective(job.run.best_checkpoint_metric, self.metrics, subsets[1:])
        better = [name for name, metric in self.metrics.items() if metric.higher_is_better]
        maximized = {name + suffix for name in better for suffix in ("", *(f"@{subset}" for subset in subsets[1:]))}
        self.maximized = sorted(maximized | ({self.objective.name} if self.objective.higher_is_better else set()))
        self.checkpoints = CheckpointManager(job.run.save_dir, job.run.keep_last, job.run.keep_best, self.objective)
        self.checkpoints.check_shared()
        newest = self._newest_checkpoint()
        before = newest[1]["training"]["identity"]["batch tokens"] if newest else None
        plan = resolve(replace(job, data=data), distributed.world_size(), before)
        plan.configure_torch()
        self.plan = plan
        self.job = plan.job
        self.facts = run_facts(plan, data, self.dataset)
        config = self.job.run
        check_all_sizes(
            self.train_split.source.lengths, self.train_split.target.lengths, plan.max_tokens, "--max-tokens"
        )
        self.sampler = plan.sampler(self.train_split)
        updates, _ = plan.updates(self.sampler.updates_per_epoch)
        self.trainer = build_trainer(
            self.job, self.dataset.tokenizer, self.device, bool(newest), updates, self.train_split
        )
        self.transforms = build_transforms(self.job, self.dataset.tokenizer)
        self.position = Position(0, 0)
        self.best: float | None = None  # score of the best validation, lower is better
        self.waited = 0  # validations since the best
        self.seconds_before = 0.0  # of training, before the run was resumed
        self.out_of_time = False
        self.validation_due = False  # a signal kept the last one from being made
        self.scheduled = False  # whether the checkpoint resumed from is one of those at regular intervals
        self.stop = StopSignal()
        self.stopped_by: str | None = None  # the reason of a callback
        self.validator = self._validator(on_request=bool(self.job.chosen("callbacks") or callbacks))
        self.callbacks = self._callbacks(callbacks)
        if newest:
            self._resume(*newest)
        self.log = RunLog(config.save_dir, display)
        self.meter = Meter(self.device, NonfiniteGuard(config.save_dir))
        fresh = not newest and distributed.is_rank_zero()
        self.health = TrainingHealth(self.job, self.dataset.tokenizer.target_size, fresh)
        self.agreement = distributed.AsyncMax()
        self.started = self.last_save = time.monotonic()

    # --- setting up -------------------------------------------------------------------------------------------------

    def _newest_checkpoint(self) -> tuple[Path, checkpoint.Checkpoint] | None:
        """Returns the checkpoint to resume from, which rank 0 chooses."""
        newest = None
        if distributed.is_rank_zero():
            self.checkpoints.open()
            newest = self.checkpoints.newest()
        path = distributed.broadcast(newest[0] if newest else None)
        return newest if path is None or newest else (path, checkpoint.read(path))

    def _resume(self, path: Path, contents: checkpoint.Checkpoint) -> None:
        requirements = resume_requirements(self.job, self.dataset, self.trainer.adapters)
        if self.job.run.reset_optimizer:
            del requirements["optimizer"]
        check_resumable(contents, requirements, path)
        state = contents["training"]
        if distributed.is_rank_zero():
            changed = changed_settings(contents["run"]["settings"], self.job.tables())
            if changed:
                log.warning("%s goes on with other settings:\n%s", self.checkpoints.folder, table(changed))
        self.trainer.load_weights(contents["model"])
        self.trainer.load_state_dict(state, contents["update"])
        self._announce_jump()
        self.position = Position(*state["position"])
        if self._same_objective(state["objective"]):
            self.best, self.waited = state["best"], state["waited"]
        self.seconds_before = state["seconds"]
        self.out_of_time = self._is_out_of_time(0.0)
        self.validation_due, self.scheduled = state["validation_due"], contents["scheduled"]
        self.callbacks.run.update, self.callbacks.run.epoch = self.trainer.done, self.position.epoch + 1
        self.callbacks.load_state(state["callbacks"])

    def _same_objective(self, before: list[Any]) -> bool:
        """Returns whether the run goes by the score of before. Raises ValueError if its schedule has to, and cannot."""
        if Objective(*before) == self.objective:
            return True
        scheduler = self.trainer.scheduler
        if type(scheduler).observe is not LRScheduler.observe and not self.job.run.reset_lr_scheduler:
            raise ValueError(
                f"this run's learning-rate schedule has followed {before[0]}; resume with --best-checkpoint-metric "
                f"{before[0]}, or with --reset-lr-scheduler"
            )
        return False

    def _announce_jump(self) -> None:
        """Warns if the learning rate of this run's schedule is not what the resumed run had reached."""
        done, before = self.trainer.done, self.trainer.lr
        made = done - self.trainer.schedule_start  # updates by this schedule
        now = learning_rate(self.trainer.scheduler, made) if made else None
        if distributed.is_rank_zero() and before is not None and now is not None and not math.isclose(now, before):
            log.warning(
                "the learning rate jumps: update %d had %.3g, and would have %.3g by this run's schedule",
                *(done, before, now),
            )

    def _validator(self, on_request: bool) -> Validator | None:
        """Returns None for a run that does not validate; `on_request`, it may if there are sentences for it."""
        config = self.job.run
        names = config.valid_subset
        if not config.validates and not (on_request and all(len(self.dataset.splits.get(it, ())) for it in names)):
            return None
        for name in names:
            if not len(self.dataset[name]):
                raise ValueError(f"{self.data}: the subset {name!r} is empty")
        sharded = config.parallel == "fsdp" and distributed.world_size() > 1
        settings = self.plan.max_tokens, self.device, self.trainer.precision, self.metrics, config.valid_beam, sharded
        first, *others = (
            Validator(self.dataset[name], *settings, {}, self.stop.interrupting, self.dataset.target_lang)
            for name in names
        )
        first.others = dict(zip(names[1:], others, strict=True))
        return first

    def _callbacks(self, objects: Sequence[Callback]) -> CallbackList:
        by_name = {it.name: CALLBACKS[it.name].factory(it.config) for it in self.job.chosen("callbacks")}
        run = RunState(
            save_dir=self.job.run.save_dir,
            settings=self.job.tables(),
            model=self.trainer.model,
            can_validate=self.validator is not None,
        )
        return CallbackList(by_name | named(objects), run)

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> StopReason:
        """Trains to the end, or until a signal asks to stop."""
        openmp.start()
        try:
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

    def _log_end(self, state: str, reason: str) -> None:
        if self.checkpoints.locked:  # on rank 0, and the folder is no other run's
            self.log.write("end", update=self.trainer.done, state=state, reason=reason)
            self._report()

    def _train(self) -> StopReason:
        if distributed.is_rank_zero():
            self.checkpoints.folder.mkdir(parents=True, exist_ok=True)
            self.checkpoints.lock()
            self._write_config()
            self._announce()
        end = None if self.validation_due else self._stop_reason(None)
        if end:
            return end
        loader = self._loader()
        if self.plan.fits_max_tokens:
            fit_max_tokens(self.trainer, loader)
            if self.validator:
                self.validator.max_tokens = loader.max_tokens
            log.info("micro-batches of up to %s tokens fit", f"{loader.max_tokens:,}")
        if self.job.run.compile:
            self.trainer.compile(loader.batch(loader.largest_micro_batch(), 0))
        if self.device.type == "cuda" and not self.plan.fits_max_tokens:
            probe_memory(self.trainer, loader)
        try:
            with self.stop:
                self.callbacks.start()
                if self.validation_due:
                    end = self._validate_and_save(True, False, self.scheduled, None)
                for update in () if end else loader.updates(self.position):
                    end = self._update(update)
                    if end:
                        break
        finally:
            loader.close()
        assert end is not None
        return end

    def _write_config(self) -> None:
        folder = self.checkpoints.folder
        made_by = [f"# {name}: {value}" for name, value in self.facts.items() if name not in ("settings", "data")]
        text = "\n".join(["# To start or resume this run: nmtkit train --config FILE", *made_by, "", ""])
        with atomic_write(folder / "config.toml") as file:
            file.write((text + self.job.toml(folder)).encode())

    def _loader(self) -> BatchLoader:
        config = self.job.run
        rank, ranks = distributed.rank(), distributed.world_size()
        data = self.train_split, self.sampler, self.plan.max_tokens, rank, ranks
        return BatchLoader(*data, self.device, config.max_sentences, self.transforms)

    def _announce(self) -> None:
        model = self.trainer.model
        config = self.job.run
        names = ", ".join(component.name for component in self.job.components.values())
        done = self.trainer.done
        lines = [
            f"{names}: {parameter_count(model) / 1e6:.1f} M parameters, {self.trainer.precision} on {self.device.type}",
            f"{len(self.train_split):,} pairs, {config.batch_tokens:,} tokens an update in micro-batches of "
            f"{self.plan.max_tokens:,}, about {self.sampler.updates_per_epoch:,} updates an epoch",
            f"resuming {self.checkpoints.folder} after update {done}"
            if done
            else f"saving to {self.checkpoints.folder}",
            f"curves and translations, from the first validation on: {self.checkpoints.folder / 'report.html'}",
        ]
        for line in lines:
            log.info("%s", line)
        assert config.batch_tokens is not None
        parts, ranks = -(-config.batch_tokens // self.plan.max_tokens), distributed.world_size()
        if config.max_tokens is not None and parts < ranks:
            log.warning(
                "an update has %d micro-batches of --max-tokens %d for %d processes; lower it to %d to give all of "
                "them work",
                *(parts, self.plan.max_tokens, ranks, config.batch_tokens // ranks),
            )
        self.log.write(
            "resume" if done else "start",
            update=done,
            config=self.job.tables(),
            **{name: value for name, value in self.facts.items() if name != "settings"},
        )

    def _update(self, update: Update) -> StopReason | None:
        """Makes one update and what is due after it. Returns why the run ends here, if it does."""
        metrics = self.trainer.step(update)
        self.position = update.next
        self.meter.add(metrics)
        self.health.after_update(metrics)
        config, number = self.job.run, metrics.number
        self.callbacks.update(number, update.position.epoch + 1)
        self.display.tick(self._progress(update) | self.meter.latest())
        minutes = config.save_interval_minutes
        save_by_clock = minutes is not None and time.monotonic() - self.last_save > 60 * minutes
        out_of_time = self._is_out_of_time(time.monotonic() - self.started)
        signalled, save, late, *asked = self.agreement.maximum(
            self.stop.received or 0, save_by_clock, out_of_time, *self.callbacks.asked()
        )
        self.out_of_time = bool(late)
        self.stopped_by = self.callbacks.agreed_stop_reason() if asked[0] else None
        received = signal.Signals(signalled) if signalled else None
        end = self._stop_reason(received)
        if end or number % config.log_interval == 0:
            self._log_line(update)
        validate = bool(end and not received and config.validates) or self._interval_ends(update, "validate_interval")
        validate, save = validate or bool(asked[1]), save or asked[2]
        by_clock_alone = config.save_interval is None and config.save_interval_updates is None
        scheduled = self._interval_ends(update, "save_interval") or (bool(save) and by_clock_alone)
        return self._validate_and_save(validate, bool(save), scheduled, received)

    def _validate_and_save(
        self, validate: bool, save: bool, scheduled: bool, received: signal.Signals | None
    ) -> StopReason | None:
        """Validates and saves if due; saves at the end and for a best score too. Returns why the run ends.

        A checkpoint is `scheduled` if it is one of those at regular intervals.
        """
        scores = None
        if validate and self.validator and not received:
            scores = self._validate(self.validator)
            if scores is None:
                received = signal.Signals(max(distributed.all_gather_object(int(self.stop.received or 0))))
        if scores is not None and self.callbacks:
            stop, _, asked = map(any, zip(*distributed.all_gather_object(self.callbacks.asked()), strict=True))
            self.stopped_by = self.callbacks.agreed_stop_reason() if stop else self.stopped_by
            save = save or asked
        self.validation_due = validate and self.validator is not None and scores is None
        end = self._stop_reason(received)
        best = scores and distributed.broadcast(self.checkpoints.is_best(self.objective.value(scores)))
        if save or end or best or scheduled:
            self._save(scores, scheduled, must=bool(end))
        return end

    def _is_out_of_time(self, seconds: float) -> bool:
        """Returns whether --stop-time-hours are over, `seconds` after the run was resumed."""
        hours = self.job.run.stop_time_hours
        return hours is not None and self.seconds_before + seconds >= 3600 * hours

    def _interval_ends(self, update: Update, setting: str) -> bool:
        """Returns whether an interval in epochs, or the one in updates, ends with this update."""
        epochs, updates = (getattr(self.job.run, name) for name in (setting, f"{setting}_updates"))
        return _due(self.trainer.done, updates) or (update.ends_epoch and _due(self.position.epoch, epochs))

    def _stop_reason(self, received: signal.Signals | None) -> StopReason | None:
        config, done = self.job.run, self.trainer.done
        if received is not None:
            return StopReason(received.name, done, received)
        if config.max_update is not None and done >= config.max_update:
            return StopReason(f"--max-update {config.max_update} is reached", done)
        if config.max_epoch is not None and self.position.epoch >= config.max_epoch:
            return StopReason(f"--max-epoch {config.max_epoch} is reached", done)
        if self.stopped_by is not None:
            return StopReason(self.stopped_by, done)
        if self.out_of_time:
            return StopReason(f"--stop-time-hours {config.stop_time_hours:g} are over", done)
        if config.patience is not None and self.waited >= config.patience:
            return StopReason(f"no better {config.best_checkpoint_metric} in {config.patience} validations", done)
        return None

    def _progress(self, update: Update) -> dict[str, Any]:
        """Returns how far the run is; does not wait for the device."""
        number, now = self.trainer.done, self.position
        total, estimated = self.plan.updates(self.sampler.updates_per_epoch, number, now.epoch, now.index)
        record = {"update": number, "updates": total, "estimated": estimated, "epoch": update.position.epoch + 1}
        return record | self.meter.speed(max(0, total - number) if total else None)

    def _log_line(self, update: Update) -> None:
        record = self._progress(update) | self.meter.read()
        self.callbacks.log(record)
        if distributed.is_rank_zero():
            self.log.write("train", **record)
            self.health.after_log_line(record)

    def _validate(self, validator: Validator) -> dict[str, float] | None:
        """Returns the scores of a validation, None when a stop signal interrupted it."""
        started, number = time.monotonic(), self.trainer.done
        self.display.note(f"validating at update {number} …")
        with self.trainer.evaluated_weights():
            scores = validator.scores(self.trainer.model, self.trainer.criterion)
        if scores is None:
            return None
        if self.objective.name not in scores:
            known = ", ".join(scores)
            raise ValueError(f"--best-checkpoint-metric {self.objective.name}: this run's validations have {known}")
        value = self.objective.value(scores)
        better = math.isfinite(value) and (self.best is None or value < self.best)
        self.best, self.waited = (value, 0) if better else (self.best, self.waited + 1)
        self.trainer.scheduler.observe(value)
        seconds = time.monotonic() - started
        self.meter.pause(seconds)
        if distributed.is_rank_zero():
            epoch = self.position.epoch + (self.position.index > 0)
            more = {"best": better, "followed": validator.followed(), "by_length": validator.by_length}
            more["maximized"] = self.maximized
            self.log.write("valid", update=number, epoch=epoch, **scores, seconds=round(seconds, 3), **more)
            self.health.after_validation(scores)
            self._report(translated=validator.translates)
        self.callbacks.validation(scores)
        return scores

    def _report(self, translated: bool = False) -> None:
        """Writes the page of the run, and the translations that a validation has just made."""
        folder = self.checkpoints.folder
        try:
            if translated and self.validator:
                report.write_translations(folder, self.trainer.done, self.validator.hypotheses)
            report.write(folder, self.job.toml(folder), *(self.validator.rated() if self.validator else ()))
        except OSError as error:
            log.warning("report not written: %s", error)

    def _save(self, scores: dict[str, float] | None, scheduled: bool, must: bool) -> None:
        """Gathers a checkpoint, which rank 0 writes. A failure to write ends the run only if it is a `must`."""
        started = time.monotonic()
        weights, state = self.trainer.weights(), self.trainer.state_dict()
        self.last_save = time.monotonic()
        if not distributed.is_rank_zero():
            return
        architecture = self.job.components["architecture"]
        tokenizer, plugins = self.dataset.tokenizer, plugins_for(ARCHITECTURES[architecture.name], self.job.plugins)
        model, done = self.trainer.model, self.trainer.done
        contents = models.to_checkpoint(model, architecture.name, architecture.config, tokenizer, plugins, done)
        contents["model"] = weights
        if self.trainer.adapters:
            contents["adapters"] = self.trainer.adapters
        contents["scores"], contents["scheduled"] = scores or {}, scheduled
        contents["maximized"] = self.maximized
        contents["run"] = self.facts
        contents["training"] = state | {
            "position": [self.position.epoch, self.position.index],
            "objective": [self.objective.name, self.objective.higher_is_better],
            "best": self.best,
            "waited": self.waited,
            "seconds": self.seconds_before + time.monotonic() - self.started,
            "validation_due": self.validation_due,
            "identity": resume_requirements(self.job, self.dataset, self.trainer.adapters),
            "callbacks": self.callbacks.state(),
        }
        try:
            with distributed.long_operation():
                path = self.checkpoints.save(contents)
            self.log.write("checkpoint", update=self.trainer.done, file=path.name)
        except OSError as error:
            if must:
                raise
            log.warning("checkpoint not saved: %s; training goes on, the older ones are untouched", error)
        else:
            self.callbacks.checkpoint(path)
        self.meter.pause(time.monotonic() - started)


def _due(count: int, interval: int | None) -> bool:
    return interval is not None and count % interval == 0
