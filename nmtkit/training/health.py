"""Warns if the first losses of a run are so high that the user has probably made a mistake.

Healthy runs stay far below the limits. The first loss of a new Transformer is 0.0 to 0.6 nats per token above the loss
of uniform guesses. On the data of the demo and on Multi30k, the first validation loss is below the last training loss,
because the validation comes later and has no dropout.
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
    """Checks of the loss per target token: in the first update, in log lines and in the first validation.

    The loss is the negative log-likelihood. A run is `fresh` if it is not resumed. The first update is checked only in
    a fresh run without --finetune-from. The first validation is checked only in a fresh run without --overfit-batches,
    because a run that repeats a few batches has a high validation loss.
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
        """Checks the first update. Only this check waits for the device."""
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
