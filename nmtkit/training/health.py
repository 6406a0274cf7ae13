"""Warns if the losses of a run are so high that the user has probably made a mistake, and stops a run that diverges.

Losses of healthy runs are far below the limits in this file, or fall below these limits within a few log lines. The
first loss of a new Transformer is 0.0 to 0.6 nats per token above the loss of uniform guesses. On the data of the demo
and on Multi30k, the first validation loss is below the last training loss, because the validation comes later and has
no dropout.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from nmtkit.data.dataset.binarized import Split
from nmtkit.text.encoded import positions
from nmtkit.training.checkpoints import file_name, numbered
from nmtkit.training.config import JobConfig
from nmtkit.training.meter import DivergedError, perplexity
from nmtkit.training.run_log import FORMS
from nmtkit.training.trainer import StepMetrics

log = logging.getLogger("nmtkit")

FIRST_EXCESS = 2.0  # nats per token by which the first loss may exceed the loss of uniform guesses
DIVERGED_EXCESS = 2.0  # the same limit for the loss of a log line: a run with a higher loss diverges
DIVERGED_UPDATES = 100  # after this number of consecutive updates with such a loss, the run ends
SETTLED = 200  # after this number of updates, the loss of a run that learns is below the loss of uniform guesses
PLATEAU = 0.2  # a run has left the plateau if its loss is this far (nats per token) below the entropy of target pieces
PROGRESS = 0.05  # smallest fall of the loss (nats per token) between two log lines of a run that leaves the plateau
SAMPLE = 20_000  # sentences from which the entropy of the target pieces is computed
VALID_EXCESS = 1.5  # nats per token by which the loss of the first validation may exceed the last training loss


class TrainingHealth:
    """Checks of the loss per target token: in the first update, in log lines and in the first validation.

    The loss is the negative log-likelihood. A run is `fresh` if it is not resumed. The first update is checked only in
    a fresh run without --finetune-from. The first validation is checked only in a fresh run without --overfit-batches,
    because a run that repeats a few batches has a high validation loss.

    A run diverges if its loss is far above the loss of uniform guesses. In fine-tuning, and in a run whose first update
    has such a loss, the loss must also be far above the loss in the first log line.

    `done` is the number of updates before this start of the run. `schedule_start` is the update after which the
    learning-rate schedule begins.
    """

    def __init__(self, job: JobConfig, train: Split, fresh: bool, *, done: int = 0, schedule_start: int = 0) -> None:
        self.save_dir = job.run.save_dir
        self.uniform = math.log(train.tokenizer.target_size)
        self.highest = None if job.run.finetune_from else self.uniform + DIVERGED_EXCESS
        self.good_until = done  # newest update with a logged loss of at most `highest`; at first, `done`
        self.entropy = target_entropy(train)
        warmup = getattr(job.components["lr-scheduler"].config, "warmup_updates", 0)
        self.settled = schedule_start + max(SETTLED, warmup or 0)
        self.first_due = fresh and job.run.finetune_from is None
        self.valid_due = fresh and job.run.overfit_batches is None
        self.rate_due = True  # false after the advice about the learning rate, which is given once
        self.logged: tuple[int, float] | None = None  # update and loss of the newest log line

    def after_update(self, metrics: StepMetrics) -> None:
        """Checks the first update. Only this check waits for the device."""
        if not self.first_due:
            return
        self.first_due = False
        if metrics.own_target_tokens and "nll" in metrics.sums:
            nll = float(metrics.sums["nll"]) / metrics.own_target_tokens
            if nll > self.uniform + FIRST_EXCESS:
                self.highest = None
                log.warning(
                    f"the first update has {shown(nll)}, but uniform guesses among all pieces have "
                    f"{shown(self.uniform)}: check the initial weights of the model (the scale of embeddings and "
                    "output projection)"
                )

    def stop_if_diverged(self, update: int, nll: float) -> None:
        """Raises DivergedError if the losses of many updates are far too high. `nll` is the loss of a log line."""
        if self.highest is None:
            self.highest = max(self.uniform, nll) + DIVERGED_EXCESS
        if nll <= self.highest:
            self.good_until = update
            return
        if update - self.good_until >= DIVERGED_UPDATES:
            raise DivergedError(
                f"update {update} has {shown(nll)}, but uniform guesses have {shown(self.uniform)}: the run has "
                f"diverged since update {self.good_until + 1}. {self._good_checkpoint()} Try a lower --lr, a longer "
                "--warmup-updates, or --clip-norm 1. Give a different --save-dir, because a command with the "
                "same folder resumes the diverged run"
            )
        self._warn_of_divergence(update, nll)

    def _warn_of_divergence(self, update: int, nll: float) -> None:
        self._advise(
            f"update {update} has {shown(nll)}, but uniform guesses have {shown(self.uniform)}: the run diverges, and "
            f"ends after {DIVERGED_UPDATES} consecutive updates with such losses."
        )

    def _advise(self, warning: str, other: str = "--clip-norm 1") -> None:
        """Shows a warning with advice about the learning rate and the setting `other`. Later calls do nothing."""
        if self.rate_due:
            self.rate_due = False
            log.warning("%s Try a lower --lr, a longer --warmup-updates, or %s", warning, other)

    def _good_checkpoint(self) -> str:
        """Returns a sentence about the newest checkpoint from before the divergence."""
        newest = file_name(self.good_until)
        for path in reversed(numbered(self.save_dir)):
            if path.name <= newest:
                return f"The newest checkpoint from before the divergence is {path}."
        return "No checkpoint is from before the divergence."

    def after_log_line(self, record: Mapping[str, Any]) -> None:
        """Checks the mean loss since the previous log line. Raises DivergedError if the run has diverged."""
        if "ppl" not in record:
            return
        nll, update = math.log(record["ppl"]), record["update"]
        self.stop_if_diverged(update, nll)
        began, before = self.logged or (0, math.inf)
        self.logged = update, nll
        if began < self.settled:
            return
        if nll > self.uniform:
            self._advise(
                f"update {update} has {shown(nll)}, above {shown(self.uniform)} of uniform guesses, although warm-up "
                "is over: is the learning rate too high?"
            )
        elif before - nll < PROGRESS and nll > self.entropy - PLATEAU:
            self._advise(
                f"update {update} has {shown(nll)}, and the loss hardly falls: a model that knows only the frequencies "
                f"of the target pieces has {shown(self.entropy)}.",
                "--pre-norm if the architecture has this option",
            )

    def after_validation(self, update: int, scores: Mapping[str, float]) -> None:
        """Compares the first validation after a log line with the training loss in the newest log line.

        A validation before the first log line can only cause the warning about a run that diverges.
        """
        if not self.valid_due or "ppl" not in scores:
            return
        nll = math.log(scores["ppl"])
        if self.logged is None:
            if self.highest is not None and nll > self.highest:
                self._warn_of_divergence(update, nll)
            return
        self.valid_due = False
        if self.highest is not None and self.logged[1] > self.highest:
            return  # the run diverges, so the data is probably not the cause
        if nll > self.logged[1] + VALID_EXCESS:
            log.warning(
                f"the first validation has {shown(nll)}, but training has {shown(self.logged[1])}: do both sets have "
                "the same languages and direction? `nmtkit inspect DATA --verify` shows pairs of each set"
            )


def shown(nll: float) -> str:
    """Returns the perplexity of a loss in nats per token, in the format of the log lines in the terminal."""
    return FORMS["ppl"](perplexity(nll))


def target_entropy(train: Split) -> float:
    """Returns the entropy of the relative frequencies of the target pieces in a training set, in nats per token.

    This entropy is the loss of a model that knows only the frequencies of the pieces. Tokens that the loss does not
    count, such as language tokens, are left out. At most SAMPLE sentences are read, evenly spaced in the set.
    """
    rows = np.linspace(0, len(train) - 1, min(SAMPLE, len(train)), dtype=np.int64)
    sample = train.target.gather(rows)
    counts = np.bincount(sample.ids[positions(sample.lengths) >= train.uncounted])
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
