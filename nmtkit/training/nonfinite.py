"""Updates whose loss or gradient was not finite: skipped on every rank, reported, and too many of them end the run."""

import logging
from pathlib import Path

import torch

from nmtkit.training.trainer import StepMetrics

log = logging.getLogger("nmtkit")

IN_A_ROW = 20  # an fp16 loss scale that starts too high takes about ten
PAIRS_SHOWN = 8


class DivergedError(ValueError):
    """Too many updates in a row were skipped."""


class NonfiniteGuard:
    """Looks at outcomes in order."""

    def __init__(self, save_dir: Path) -> None:
        self.save_dir = save_dir
        self.in_a_row = 0
        self.total = 0

    def read(self, outcomes: list[StepMetrics]) -> list[StepMetrics]:
        """Those that were not skipped; waits for the device once. Warns of the others, by their pairs' numbers.

        Raises DivergedError after too many in a row, naming the checkpoint from before them.
        """
        if not outcomes:
            return []
        flags = torch.stack([outcome.finite for outcome in outcomes]).tolist()
        for outcome, finite in zip(outcomes, flags, strict=True):
            self.in_a_row = 0 if finite else self.in_a_row + 1
            if not finite:
                self.total += 1
                shown = ", ".join(map(str, outcome.pairs[:PAIRS_SHOWN].tolist()))
                more = f" and {len(outcome.pairs) - PAIRS_SHOWN} more" if len(outcome.pairs) > PAIRS_SHOWN else ""
                log.warning(
                    "update %d skipped: its gradient, of norm %s, is not finite; pairs %s%s of the training set",
                    outcome.number,
                    float(outcome.norm),
                    shown,
                    more,
                )
            if self.in_a_row >= IN_A_ROW:
                raise DivergedError(
                    f"{self.in_a_row} updates in a row had gradients that are not finite, the last number "
                    f"{outcome.number}. {self._good()} A lower --lr or a --clip-norm may help, and fp32 over fp16"
                )
        return [outcome for outcome, finite in zip(outcomes, flags, strict=True) if finite]

    def _good(self) -> str:
        last = self.save_dir / "last.pt"
        return f"The last good checkpoint is {last.resolve()}." if last.exists() else "There is no checkpoint yet."
