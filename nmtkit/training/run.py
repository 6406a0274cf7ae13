"""A training run from the dataset to the last checkpoint: set up or resume, update, log, validate, save, stop."""

import logging
import math
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nmtkit import checkpoint, distributed, models
from nmtkit.architectures.interface import parameter_count
from nmtkit.checkpoint import badness
from nmtkit.data.batching import WINDOW_PAIRS, BatchSampler, check_sizes
from nmtkit.data.binarized import Dataset
from nmtkit.training import report
from nmtkit.training.checkpoints import CheckpointManager, same_run
from nmtkit.training.config import JobConfig, Tables
from nmtkit.training.loader import BatchLoader, Position, Update
from nmtkit.training.memory import largest_slice, try_largest
from nmtkit.training.meter import Meter
from nmtkit.training.nonfinite import NonfiniteGuard
from nmtkit.training.progress import Display, RunLog
from nmtkit.training.setup import batch_tokens_of, build_trainer, device_of, identity, set_threads
from nmtkit.training.signals import StopSignal
from nmtkit.training.validation import Validator

log = logging.getLogger("nmtkit")

EXPECTED_CHANGES = ("max_update", "max_epoch", "save_dir", "device", "threads", "nproc_per_node", "tensorboard")


@dataclass(frozen=True)
class StopReason:
    """Why and where a run ended."""

    reason: str
    updates: int
    received: signal.Signals | None = None


class Run:
    """One process's part of a run. Rank 0 talks, writes the log and saves; everything else is done by all alike."""

    def __init__(self, job: JobConfig, data: Path, display: Display) -> None:
        self.data = data
        self.display = display
        self.device = device_of(job.run)
        set_threads(job.run, self.device)
        distributed.init_process_group(self.device, job.run.timeout_minutes)
        self.dataset = Dataset.open(data)
        self.train_split = self.dataset["train"]
        if not len(self.train_split):
            raise ValueError(f"{data}: the training set is empty")
        self.store = CheckpointManager(
            job.run.save_dir, job.run.keep_last, job.run.keep_best, job.run.best_checkpoint_metric
        )
        self.store.check_shared()
        found = self._newest()
        self.job = self._resolved(job, found[1] if found else None)
        config = self.job.run
        source, target = self.train_split.source.lengths, self.train_split.target.lengths
        for start in range(0, len(source), WINDOW_PAIRS):
            end = min(start + WINDOW_PAIRS, len(source))
            check_sizes(range(start, end), source[start:end], target[start:end], config.max_tokens, "--max-tokens")
        assert config.batch_tokens is not None
        self.plan = BatchSampler(source, target, config.batch_tokens, config.seed)
        self.trainer = build_trainer(self.job, self.dataset.tokenizer, self.device, resumed=bool(found))
        self.position = Position(0, 0)
        self.best: float | None = None  # score of the best validation, lower is better
        self.waited = 0  # validations since
        if found:
            self._resume(*found)
        self.validator = self._validator()
        self.log = RunLog(config.save_dir, display, config.tensorboard if distributed.is_rank_zero() else None)
        self.skips = NonfiniteGuard(config.save_dir)
        self.meter = Meter(self.device, self.skips)
        self.agreement = distributed.AsyncMax()
        self.last_save = time.monotonic()

    # --- setting up -------------------------------------------------------------------------------------------------

    def _newest(self) -> tuple[Path, checkpoint.Checkpoint] | None:
        """The checkpoint to resume from, chosen by rank 0."""
        found = None
        if distributed.is_rank_zero():
            self.store.open()
            found = self.store.newest()
        path = distributed.broadcast(found[0] if found else None)
        if path is None or found:
            return found
        return path, checkpoint.load(path)

    def _resolved(self, job: JobConfig, resumed: checkpoint.Checkpoint | None) -> JobConfig:
        """The job with its batch size in tokens; a resumed run keeps the size it was started with."""
        tokens = batch_tokens_of(job.run, distributed.world_size())
        if resumed and job.run.batch_tokens is None:
            tokens = resumed["training"]["identity"]["batch tokens"]
        run = replace(job.run, batch_tokens=tokens, update_freq=None, max_tokens=min(job.run.max_tokens, tokens))
        return replace(job, run=run)

    def _resume(self, path: Path, contents: checkpoint.Checkpoint) -> None:
        same_run(contents, identity(self.job, self.dataset), path)
        state = contents["training"]
        if distributed.is_rank_zero():
            changed = differences(state["run"], self.job.tables())
            if changed:
                log.info("other settings than before: %s", ", ".join(changed))
        self.trainer.load_weights(contents["model"])
        self.trainer.load_state(state, contents["update"])
        self.position = Position(*state["position"])
        self.best, self.waited = state["best"], state["waited"]

    def _validator(self) -> Validator | None:
        config = self.job.run
        if config.validate_interval is None and config.validate_interval_updates is None:
            return None
        split = self.dataset[config.valid_subset]
        if not len(split):
            raise ValueError(f"{self.data}: the subset {config.valid_subset!r} is empty")
        beam = config.valid_beam if config.valid_bleu else None
        return Validator(split, config.max_tokens, self.device, self.trainer.precision, beam)

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> StopReason:
        """Trains to the end, or until asked to stop."""
        if distributed.is_rank_zero():
            self.store.folder.mkdir(parents=True, exist_ok=True)
            (self.store.folder / "config.toml").write_text(self.job.toml(), encoding="utf-8")
            self._announce()
        ending = self._finished(None)
        if ending:
            return ending
        loader = self._loader()
        if self.job.run.compile:
            pairs = largest_slice(self.train_split, self.plan, self.job.run.max_tokens)
            self.trainer.compile(loader.batch(pairs, 0))
        if self.device.type == "cuda":
            try_largest(self.trainer, loader)
        try:
            with StopSignal() as stop:
                for update in loader.updates(self.position):
                    ending = self._update(update, stop)
                    if ending:
                        return ending
        finally:
            loader.close()
            self.log.close()
        raise AssertionError("the loader is endless")

    def _loader(self) -> BatchLoader:
        config = self.job.run
        rank, ranks = distributed.rank(), distributed.world_size()
        shares = self.train_split, self.plan, config.max_tokens, rank, ranks
        equal = config.parallel == "fsdp"
        return BatchLoader(*shares, self.device, config.subword_alpha, fixed_shapes=config.compile, equal_passes=equal)

    def _announce(self) -> None:
        model = self.trainer.model
        config = self.job.run
        names = ", ".join(component.name for component in self.job.components.values())
        done = self.trainer.done
        lines = [
            f"{names}: {parameter_count(model) / 1e6:.1f} M parameters, {self.trainer.precision} on {self.device.type}",
            f"{len(self.train_split):,} pairs, {config.batch_tokens:,} tokens an update in slices of "
            f"{config.max_tokens:,}, about {self.plan.updates_per_epoch:,} updates an epoch",
            f"resuming {self.store.folder} after update {done}" if done else f"saving to {self.store.folder}",
        ]
        for line in lines:
            log.info("%s", line)
        assert config.batch_tokens is not None
        slices, ranks = -(-config.batch_tokens // config.max_tokens), distributed.world_size()
        if slices < ranks:
            log.warning(
                "an update has %d slices of --max-tokens %d for %d processes; lower it to %d to give all of them work",
                *(slices, config.max_tokens, ranks, config.batch_tokens // ranks),
            )
        self.log.write("resume" if done else "start", update=done, config=self.job.tables())

    def _update(self, update: Update, stop: StopSignal) -> StopReason | None:
        """One update and what is due after it."""
        outcome = self.trainer.step(update)
        self.position = update.next
        self.meter.add(outcome)
        config, number = self.job.run, outcome.number
        self.display.tick(self._pace(update) | self.meter.glance())
        save_by_clock = config.save_interval_minutes is not None and (
            time.monotonic() - self.last_save > 60 * config.save_interval_minutes
        )
        signalled, save = self.agreement.largest(stop.received or 0, save_by_clock)
        received = signal.Signals(signalled) if signalled else None
        ending = self._finished(received)
        if ending or number % config.log_interval == 0:
            self._log_line(update)
        validate = _due(number, config.validate_interval_updates) or (
            update.ends_epoch and _due(self.position.epoch, config.validate_interval)
        )
        scores = None
        if self.validator and not (ending and ending.received) and (validate or ending):
            scores = self._validate(number)
            ending = ending or self._finished(received)
        if (
            save
            or ending
            or _due(number, config.save_interval_updates)
            or (update.ends_epoch and _due(self.position.epoch, config.save_interval))
            or (scores and distributed.broadcast(self.store.is_best(self._badness(scores))))
        ):
            self._save(scores, must=bool(ending))
        return ending

    def _finished(self, received: signal.Signals | None) -> StopReason | None:
        config, done = self.job.run, self.trainer.done
        if received is not None:
            return StopReason(received.name, done, received)
        if config.max_update is not None and done >= config.max_update:
            return StopReason(f"--max-update {config.max_update} is reached", done)
        if config.max_epoch is not None and self.position.epoch >= config.max_epoch:
            return StopReason(f"--max-epoch {config.max_epoch} is reached", done)
        if config.patience is not None and self.waited >= config.patience:
            return StopReason(f"no better {config.best_checkpoint_metric} in {config.patience} validations", done)
        return None

    def _updates_to_make(self) -> tuple[int | None, bool]:
        """Updates of the whole run, where it has an end, and whether that is an estimate: epochs differ a little."""
        config, done, now = self.job.run, self.trainer.done, self.position
        if config.max_epoch is None:
            return config.max_update, False
        before = done - now.index  # updates of the epochs that have ended
        per_epoch = before / now.epoch if now.epoch else self.plan.updates_per_epoch
        total = max(done, before + round((config.max_epoch - now.epoch) * per_epoch))
        if config.max_update is not None and config.max_update <= total:
            return config.max_update, False
        return total, now.epoch < config.max_epoch

    def _pace(self, update: Update) -> dict[str, Any]:
        """What is known without waiting for the device."""
        (total, estimated), number = self._updates_to_make(), self.trainer.done
        record = {"update": number, "updates": total, "estimated": estimated, "epoch": update.position.epoch + 1}
        return record | self.meter.pace(max(0, total - number) if total else None)

    def _log_line(self, update: Update) -> None:
        record = self._pace(update) | self.meter.read()
        if distributed.is_rank_zero():
            self.log.write("train", **record)

    def _badness(self, scores: dict[str, float]) -> float:
        metric = self.job.run.best_checkpoint_metric
        return badness(metric, scores[metric])

    def _validate(self, number: int) -> dict[str, float]:
        assert self.validator is not None
        started = time.monotonic()
        self.display.note(f"validating at update {number} …")
        with self.trainer.averaged():
            scores = self.validator.scores(self.trainer.model, self.trainer.criterion)
        value = self._badness(scores)
        better = math.isfinite(value) and (self.best is None or value < self.best)
        self.best, self.waited = (value, 0) if better else (self.best, self.waited + 1)
        self.trainer.scheduler.observe(value)
        seconds = time.monotonic() - started
        self.meter.pause(seconds)
        if distributed.is_rank_zero():
            epoch = self.position.epoch + (self.position.index > 0)
            self.log.write("valid", update=number, epoch=epoch, **scores, best=better, seconds=round(seconds, 3))
            self._report()
        return scores

    def _report(self) -> None:
        assert self.validator is not None
        try:
            report.write(self.store.folder, self.job.toml(), self.validator.worst)
        except OSError as error:
            log.warning("report not written: %s", error)

    def _save(self, scores: dict[str, float] | None, must: bool) -> None:
        """Gathers a checkpoint, which rank 0 writes; a failure ends the run only when nothing would come after it."""
        started = time.monotonic()
        weights, state = self.trainer.weights(), self.trainer.state()
        self.last_save = time.monotonic()
        if not distributed.is_rank_zero():
            return
        architecture = self.job.components["architecture"]
        tokenizer, plugins = self.dataset.tokenizer, list(self.job.plugins)
        model, done = self.trainer.model, self.trainer.done
        contents = models.to_checkpoint(model, architecture.name, architecture.config, tokenizer, plugins, done)
        contents["model"] = weights
        contents["scores"] = scores or {}
        contents["training"] = state | {
            "position": [self.position.epoch, self.position.index],
            "best": self.best,
            "waited": self.waited,
            "identity": identity(self.job, self.dataset),
            "run": self.job.tables(),
            "data": str(self.data),
        }
        try:
            path = self.store.save(contents)
            self.log.write("checkpoint", update=self.trainer.done, file=path.name)
        except OSError as error:
            if must:
                raise
            log.warning("checkpoint not saved: %s; training goes on, the older ones are untouched", error)
        self.meter.pause(time.monotonic() - started)


def differences(before: Tables, now: Tables) -> list[str]:
    """What a resumed run sets otherwise, for people; what says when to stop or where to run is no news."""
    found = []
    for table, settings in now.items():
        for name, value in settings.items():
            old = before.get(table, {}).get(name)
            if old != value and name not in EXPECTED_CHANGES:
                found.append(f"{name} {value} (was {old})")
    return found


def _due(count: int, interval: int | None) -> bool:
    return interval is not None and count % interval == 0
