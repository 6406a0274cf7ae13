"""Signs in a run's first losses that something is wrong with it, each told as one warning.

They are far from healthy runs: a fresh Transformer's loss is 0.0 to 0.6 above that of uniform guesses, and the first
validation of the demo and of Multi30k is below the training loss before it, as it comes later and without dropout.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

from nmtkit.training.config import JobConfig
from nmtkit.training.trainer import StepMetrics

log = logging.getLogger("nmtkit")

FIRST_EXCESS = 2.0  # nats per token above uniform that the loss of the first update may have
SETTLED = 200  # updates after which the loss of any run that learns is below uniform
VALID_EXCESS = 1.5  # nats per token by which the first validation may be above the training loss before it


class TrainingHealth:
    """Watches the negative log-likelihood per target token: of the first update, of log lines, of the first validation.

    `fresh` says that the run begins here, with no weights of another one. A batch that is trained on over and over is
    meant to be learned by heart: its validations are not judged.
    """

    def __init__(self, job: JobConfig, target_pieces: int, fresh: bool) -> None:
        self.uniform = math.log(target_pieces)
        warmup = getattr(job.components["lr-scheduler"].config, "warmup_updates", 0)
        self.settled = max(SETTLED, warmup or 0)
        self.first_due = fresh and job.run.finetune_from is None
        self.valid_due = fresh and job.run.overfit_batches is None
        self.above_due = True
        self.logged: tuple[int, float] | None = None  # update and loss of the last log line

    def after_update(self, metrics: StepMetrics) -> None:
        """Judges the first update; waits for the device then, and only then."""
        if not self.first_due:
            return
        self.first_due = False
        if metrics.own_target_tokens and "nll" in metrics.sums:
            nll = float(metrics.sums["nll"]) / metrics.own_target_tokens
            if nll > self.uniform + FIRST_EXCESS:
                log.warning(
                    "the first update has a loss of %.1f per token, and guessing evenly among all pieces would have "
                    "%.1f: look at how the model's weights begin (the scale of embeddings and output projection)",
                    *(nll, self.uniform),
                )

    def after_log_line(self, record: Mapping[str, Any]) -> None:
        """Judges the mean loss since the log line before."""
        if "ppl" not in record:
            return
        nll, update = math.log(record["ppl"]), record["update"]
        began = self.logged[0] if self.logged else 0
        self.logged = update, nll
        if self.above_due and began >= self.settled and nll > self.uniform:
            self.above_due = False
            log.warning(
                "update %d has a loss of %.1f per token, above the %.1f of guessing evenly among all pieces, though "
                "warm-up is over: is the rate too high? Try a lower --lr, a longer --warmup-updates, or --clip-norm 1",
                *(update, nll, self.uniform),
            )

    def after_validation(self, scores: Mapping[str, float]) -> None:
        """Judges the first validation of the run beside the training loss before it."""
        if not self.valid_due or "ppl" not in scores or self.logged is None:
            return
        self.valid_due = False
        nll = math.log(scores["ppl"])
        if nll > self.logged[1] + VALID_EXCESS:
            log.warning(
                "the first validation has a loss of %.1f per token, and training %.1f: is the valid set of the same "
                "languages, in the same direction? `nmtkit inspect DATA --verify` shows pairs of both",
                *(nll, self.logged[1]),
            )
