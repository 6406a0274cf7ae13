"""The loop of a training run: update, log, validate and save until the run ends or a signal stops it."""

import json
import logging
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmtkit.config.files import atomic_write
from nmtkit.data import checkpoint_file
from nmtkit.jobs import distributed, openmp
from nmtkit.models.architectures.interface import parameter_count
from nmtkit.training import report
from nmtkit.training.callbacks import CALLBACKS, Callback, CallbackList, RunState, named
from nmtkit.training.config import JobConfig
from nmtkit.training.health import TrainingHealth
from nmtkit.training.loader import Update
from nmtkit.training.memory import fit_max_tokens, probe_memory
from nmtkit.training.meter import Meter, NonfiniteGuard
from nmtkit.training.plan import device_of
from nmtkit.training.progress import Lines, RunLog
from nmtkit.training.saving import RunSaver
from nmtkit.training.setup import set_up
from nmtkit.training.stopping import RunProgress, StopReason, StopSignal
from nmtkit.training.validation import Validator

log = logging.getLogger("nmtkit")

IDLE_SHARE = 0.1  # a warning is shown if processes are idle for more than this share of the time


class Run:
    """A training run in one of its processes. Only rank 0 logs and saves. All ranks do all other work."""

    def __init__(self, job: JobConfig, data: Path, display: Lines, callbacks: Sequence[Callback] = ()) -> None:
        """Sets up or resumes the run. `callbacks` are called in addition to the callbacks that `job` names."""
        self.stop = StopSignal()
        distributed.init_process_group(device_of(job.run), job.run.timeout_minutes)
        with distributed.long_operation():  # reading a checkpoint and building a model send no heartbeats
            self._set_up(job, data, display, callbacks)
        self.agreement = distributed.AsyncMax()
        self.progress.started = self.saver.last_save = time.monotonic()

    def _set_up(self, job: JobConfig, data: Path, display: Lines, callbacks: Sequence[Callback]) -> None:
        setup = set_up(job, data, self.stop, bool(callbacks))
        self.plan, self.dataset, self.facts = setup.plan, setup.dataset, setup.facts
        self.job = setup.job
        self.sampler, self.loader, self.trainer = setup.sampler, setup.loader, setup.trainer
        self.validator, self.objective, self.maximized = setup.validator, setup.objective, setup.maximized
        self.checkpoints = setup.checkpoints
        self.display = display
        self.out_of_time = False
        self.stopped_by: str | None = None  # stop reason given by a callback
        self.scheduled = False  # whether the run resumes from a checkpoint that was saved at an interval
        resumed_from, setup.resumed_from = setup.resumed_from, None
        try:
            self.callbacks = self._callbacks(callbacks)
            self.progress = RunProgress()
            self.saver = RunSaver(setup, self.progress, self.callbacks)
            if resumed_from:
                self.saver.restore(*resumed_from)
                self.scheduled = resumed_from[1]["scheduled"]
                self.out_of_time = self._is_out_of_time()
            save_dir = self.job.run.save_dir
            self.log = RunLog(save_dir, display)
            self.meter = Meter(self.trainer.device, NonfiniteGuard(save_dir))
            fresh = not resumed_from and distributed.is_rank_zero()
            self.health = TrainingHealth(self.job, self.dataset["train"], fresh)
        except BaseException:
            self.checkpoints.unlock()
            raise

    def _callbacks(self, objects: Sequence[Callback]) -> CallbackList:
        by_name = {
            chosen.name: CALLBACKS[chosen.name].factory(chosen.config) for chosen in self.job.chosen("callbacks")
        }
        run = RunState(
            save_dir=self.job.run.save_dir,
            settings=self.job.tables(),
            model=self.trainer.model,
            can_validate=self.validator is not None,
            sharded=self.job.run.parallel == "fsdp" and distributed.world_size() > 1,
        )
        return CallbackList(by_name | named(objects), run)

    # --- start and end ----------------------------------------------------------------------------------------------

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
            self._write_config()
            self._announce()
        due = self.progress.validation_due or (self.job.run.validate_first and not self.trainer.done)
        end = None if due else self._stop_reason(None)
        if end:
            return end
        with distributed.long_operation():
            self._prepare_model()
        try:
            with self.stop:
                self.callbacks.start()
                if due:
                    end = self._validate_and_save(True, False, self.scheduled, None)
                for update in () if end else self.loader.updates(self.progress.position):
                    end = self._update(update)
                    if end:
                        break
        finally:
            self.loader.close()
        assert end is not None
        return end

    def _prepare_model(self) -> None:
        """Fits micro-batches into the memory, compiles the model if asked, and warns about idle processes."""
        if self.plan.fits_max_tokens:
            fit_max_tokens(self.trainer, self.loader)
            if self.validator:
                self.validator.max_tokens = self.loader.max_tokens
            log.info("micro-batches of up to %s tokens fit", f"{self.loader.max_tokens:,}")
        if self.job.run.compile:
            self.trainer.compile(self.loader.batch(self.loader.largest_micro_batch(), 0))
        if self.trainer.device.type == "cuda" and not self.plan.fits_max_tokens:
            probe_memory(self.trainer, self.loader)
        idle = self.loader.idle_share()
        if idle > IDLE_SHARE and distributed.is_rank_zero():
            log.warning(
                "the %d processes are idle %.0f %% of the time: an update of %s tokens has too few micro-batches of "
                "up to %s tokens for an even division; give --max-tokens %d, or a larger --batch-tokens",
                *(distributed.world_size(), 100 * idle, f"{self.plan.batch_tokens:,}"),
                *(f"{self.loader.max_tokens:,}", self.plan.even_max_tokens(self.loader.max_tokens)),
            )

    def _write_config(self) -> None:
        folder = self.checkpoints.folder
        facts = [f"# {name}: {value}" for name, value in self.facts.items() if name not in ("settings", "data")]
        text = "\n".join(["# To start or resume this run: nmtkit train --config FILE", *facts, "", ""])
        with atomic_write(folder / "config.toml") as file:
            file.write((text + self.job.toml(folder)).encode())

    def _announce(self) -> None:
        names = ", ".join(component.name for component in self.job.components.values())
        trainer, folder, done = self.trainer, self.checkpoints.folder, self.trainer.done
        million = parameter_count(trainer.model) / 1e6
        for line in (
            f"{names}: {million:.1f} M parameters, {trainer.precision} on {trainer.device.type}",
            f"{len(self.dataset['train']):,} pairs, {self.plan.batch_tokens:,} tokens per update in micro-batches of "
            f"{self.loader.max_tokens:,}, about {self.sampler.updates_per_epoch:,} updates per epoch",
            f"resuming {folder} after update {done}" if done else f"saving to {folder}",
            f"curves{' and translations, from the first validation on' if self.validator else ''}: "
            f"{folder / 'report.html'}",
        ):
            log.info("%s", line)
        facts = {name: value for name, value in self.facts.items() if name != "settings"}
        self.log.write("resume" if done else "start", update=done, config=self.job.tables(), **facts)

    def _log_end(self, state: str, reason: str) -> None:
        if self.checkpoints.locked:  # only rank 0, and only if no other run uses the folder
            self.log.write("end", update=self.trainer.done, state=state, reason=reason)
            self._report()

    # --- an update and the work that is due after it ----------------------------------------------------------------

    def _update(self, update: Update) -> StopReason | None:
        """Makes an update, then logs, validates and saves if due. Returns the stop reason, or None."""
        metrics = self.trainer.step(update)
        self.progress.position = update.next
        self.meter.add(metrics)
        self.health.after_update(metrics)
        config, number = self.job.run, metrics.number
        self.callbacks.update(number, update.position.epoch + 1)
        self.display.tick(self._progress_record(update) | self.meter.latest())
        minutes = config.save_interval_minutes
        save_by_clock = minutes is not None and time.monotonic() - self.saver.last_save > 60 * minutes
        signalled, save, late, stop, ask_validation, ask_save = self.agreement.maximum(
            self.stop.received or 0, save_by_clock, self._is_out_of_time(), *self.callbacks.asked()
        )
        self.out_of_time = bool(late)
        self.stopped_by = self.callbacks.agreed_stop_reason() if stop else None
        received = signal.Signals(signalled) if signalled else None
        end = self._stop_reason(received)
        if end or number % config.log_interval == 0:
            self._log_line(update)
        validate = bool(end and not received and config.validates) or self._interval_ends(update, "validate_interval")
        only_by_clock = config.save_interval is None and config.save_interval_updates is None
        scheduled = self._interval_ends(update, "save_interval") or bool((save or ask_save) and only_by_clock)
        return self._validate_and_save(validate or bool(ask_validation), bool(save or ask_save), scheduled, received)

    def _validate_and_save(
        self, validate: bool, save: bool, scheduled: bool, received: signal.Signals | None
    ) -> StopReason | None:
        """Validates and saves if due. Also saves at the end of the run and after a best score.

        A checkpoint is `scheduled` if it is saved at one of the intervals of the run. Returns the stop reason, or None.
        """
        scores = None
        if validate and self.validator and not received:
            scores = self._validate(self.validator, scheduled)
            if scores is None:
                received = signal.Signals(max(distributed.all_gather_object(int(self.stop.received or 0))))
        if scores is not None and self.callbacks:
            stop, _, ask_save = map(any, zip(*distributed.all_gather_object(self.callbacks.asked()), strict=True))
            self.stopped_by = self.callbacks.agreed_stop_reason() if stop else self.stopped_by
            save = save or ask_save
        self.progress.validation_due = validate and self.validator is not None and scores is None
        end = self._stop_reason(received)
        best = scores and distributed.broadcast(self.checkpoints.is_best(self.objective.value(scores)))
        if save or end or best or scheduled:
            self._save(scores, scheduled, must=bool(end))
        return end

    def _is_out_of_time(self) -> bool:
        hours = self.job.run.stop_time_hours
        return hours is not None and self.progress.seconds() >= 3600 * hours

    def _interval_ends(self, update: Update, setting: str) -> bool:
        """Returns whether this update ends an interval, in epochs (`setting`) or in updates (`setting`_updates)."""
        epochs, updates = (getattr(self.job.run, name) for name in (setting, f"{setting}_updates"))
        ended = update.ends_epoch and _divides(epochs, self.progress.position.epoch)
        return ended or _divides(updates, self.trainer.done)

    def _stop_reason(self, received: signal.Signals | None) -> StopReason | None:
        config, done = self.job.run, self.trainer.done
        return self.progress.stop_reason(config, done, received, self.stopped_by, self.out_of_time)

    def _progress_record(self, update: Update) -> dict[str, Any]:
        """Returns updates, epoch and speed for the log. Does not wait for the device."""
        number, now = self.trainer.done, self.progress.position
        total, estimated = self.plan.updates(self.sampler.updates_per_epoch, number, now.epoch, now.index)
        record = {"update": number, "updates": total, "estimated": estimated, "epoch": update.position.epoch + 1}
        return record | self.meter.speed(max(0, total - number) if total else None)

    def _log_line(self, update: Update) -> None:
        record = self._progress_record(update) | self.meter.read()
        self.callbacks.log(record)
        if distributed.is_rank_zero():
            self.log.write("train", **record)
            self.health.after_log_line(record)

    def _validate(self, validator: Validator, scheduled: bool) -> dict[str, float] | None:
        """Returns the scores of a validation, or None if a stop signal interrupted the validation.

        If the validation fails, saves a checkpoint and raises the exception again. A run that resumes from this
        checkpoint first repeats the validation.
        """
        started, number = time.monotonic(), self.trainer.done
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
                self._save(None, scheduled, must=False)
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
            self.health.after_validation(scores)
            self._report(translated=validator.translates)
        self.callbacks.validation(scores)
        return scores

    def _report(self, translated: bool = False) -> None:
        """Writes the page of the run. If `translated` is true, also writes the translations of the last validation."""
        folder = self.checkpoints.folder
        try:
            if translated and self.validator:
                report.write_translations(folder, self.trainer.done, self.validator.hypotheses)
            report.write(folder, self.job.toml(folder), *(self.validator.rated() if self.validator else ()))
        except OSError as error:
            log.warning("report not written: %s", error)

    def _save(self, scores: dict[str, float] | None, scheduled: bool, must: bool) -> None:
        """Saves a checkpoint. If writing fails, raises OSError if `must` is true, or else logs a warning."""
        started = time.monotonic()
        try:
            path = self.saver.save(scores, scheduled)
        except OSError as error:
            if must:
                raise
            log.warning("checkpoint not saved: %s; training continues, and older checkpoints are kept", error)
        else:
            if path:
                self.log.write("checkpoint", update=self.trainer.done, file=path.name)
                self.callbacks.checkpoint(path)
        # without this barrier, ranks would wait elsewhere, and the watchdog would consider them hanging
        distributed.barrier()
        self.meter.pause(time.monotonic() - started)


def _divides(interval: int | None, count: int) -> bool:
    return interval is not None and count % interval == 0


# --- a whole run in this process, for Python --------------------------------------------------------------------------


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
