"""Warnings about the first losses of a run that show a mistake.

The limits are far from healthy runs. The loss of a fresh Transformer is 0.0 to 0.6 above the loss of uniform guesses.
With the demo and Multi30k, the loss of the first validation is lower than the training loss before it, because the
validation comes later and has no dropout.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

from nmtkit.training.config import JobConfig
from nmtkit.training.trainer import StepMetrics

log = logging.getLogger("nmtkit")

FIRST_EXCESS = 2.0  # nats per token by which the first loss may exceed the loss of uniform guesses
SETTLED = 200  # after this number of updates, the loss of a run that learns is below the loss of uniform guesses
VALID_EXCESS = 1.5  # nats per token by which the first validation may exceed the training loss before it


class TrainingHealth:
    """Checks the negative log-likelihood per target token of the first update, log lines and the first validation.

    A run is `fresh` if it is not resumed. In other runs, the first update and the first validation are not checked.
    Validations of runs that repeat a few batches (--overfit-batches) are not checked, because a high loss is expected.
    """

    def __init__(self, job: JobConfig, target_pieces: int, fresh: bool) -> None:
        self.uniform = math.log(target_pieces)
        warmup = getattr(job.components["lr-scheduler"].config, "warmup_updates", 0)
        self.settled = max(SETTLED, warmup or 0)
        self.first_due = fresh and job.run.finetune_from is None
        self.valid_due = fresh and job.run.overfit_batches is None
        self.above_due = True
        self.logged: tuple[int, float] | None = None  # update and loss of the newest log line

    def after_update(self, metrics: StepMetrics) -> None:
        """Checks the first update. Waits for the device only in the first update."""
        if not self.first_due:
            return
        self.first_due = False
        if metrics.own_target_tokens and "nll" in metrics.sums:
            nll = float(metrics.sums["nll"]) / metrics.own_target_tokens
            if nll > self.uniform + FIRST_EXCESS:
                log.warning(
                    "the first update has a loss of %.1f per token, but uniform guesses among all pieces have %.1f: "
                    "check the initial weights of the model (the scale of embeddings and output projection)",
                    *(nll, self.uniform),
                )

    def after_log_line(self, record: Mapping[str, Any]) -> None:
        """Checks the mean loss since the previous log line."""
        if "ppl" not in record:
            return
        nll, update = math.log(record["ppl"]), record["update"]
        began = self.logged[0] if self.logged else 0
        self.logged = update, nll
        if self.above_due and began >= self.settled and nll > self.uniform:
            self.above_due = False
            log.warning(
                "update %d has a loss of %.1f per token, above the %.1f of uniform guesses, although warm-up is "
                "over: is the learning rate too high? Try a lower --lr, a longer --warmup-updates, or --clip-norm 1",
                *(update, nll, self.uniform),
            )

    def after_validation(self, scores: Mapping[str, float]) -> None:
        """Compares the first validation of the run with the training loss before it."""
        if not self.valid_due or "ppl" not in scores or self.logged is None:
            return
        self.valid_due = False
        nll = math.log(scores["ppl"])
        if nll > self.logged[1] + VALID_EXCESS:
            log.warning(
                "the first validation has a loss of %.1f per token, but training has %.1f: do the valid set and the "
                "training set have the same languages and direction? `nmtkit inspect DATA --verify` shows them",
                *(nll, self.logged[1]),
            )
