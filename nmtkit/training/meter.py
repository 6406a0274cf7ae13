"""Means and speed between log lines, and the check for updates whose loss or gradient is not finite."""

import logging
import math
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmtkit.jobs import distributed
from nmtkit.models.layers import device_of_sums
from nmtkit.training.trainer import StepMetrics

log = logging.getLogger("nmtkit")

RECENT = 50  # number of updates over which the current speed is measured
IN_A_ROW = 20  # skipped updates in a row that end the run; an fp16 run skips about ten until its loss scale fits
PAIRS_SHOWN = 8


def perplexity(nll: float) -> float:
    """Returns exp(nll), the perplexity for a mean negative log-likelihood. Very large values are capped."""
    return math.exp(min(nll, 700.0))


class DivergedError(ValueError):
    """Reports that too many updates in a row were skipped or had a very high loss."""


class Meter:
    """Sums the metrics of updates on the device, without skipped updates.

    `read` is called for each log line and waits for a GPU once.
    """

    def __init__(self, device: torch.device, save_dir: Path) -> None:
        self.device = device
        self.save_dir = save_dir
        self.skipped_in_a_row = 0
        self.recent: deque[tuple[float, int]] = deque(maxlen=RECENT)  # (time, target tokens) of the latest updates
        self._clear()

    def _clear(self) -> None:
        self.unread: list[StepMetrics] = []
        self.finite: list[StepMetrics] = []
        self.skipped = 0
        self.started = time.monotonic()

    def add(self, metrics: StepMetrics) -> None:
        self.unread.append(metrics)
        if self.device.type == "cpu":
            self._read_flags()
        self.recent.append((time.monotonic(), metrics.target_tokens))

    def pause(self, seconds: float) -> None:
        """Excludes `seconds` from the speed, because they were not spent on updates."""
        self.started += seconds
        self.recent = deque(((when + seconds, tokens) for when, tokens in self.recent), maxlen=RECENT)

    def speed(self, updates_left: int | None) -> dict[str, Any]:
        """Returns the target tokens per second of the latest updates, and the seconds left (None: unknown)."""
        if len(self.recent) < 2:
            return {}
        seconds = max(self.recent[-1][0] - self.recent[0][0], 1e-9)
        tokens = sum(tokens for _, tokens in self.recent) - self.recent[0][1]
        left = None if updates_left is None else round(updates_left * seconds / (len(self.recent) - 1), 1)
        return {"tokens_per_second": round(tokens / seconds, 1), "seconds_left": left}

    def read(self) -> dict[str, Any]:
        """Returns a log record of the updates since the last call: means per target token over all ranks, and speed."""
        self._read_flags()
        finite, skipped = self.finite, {"skipped": self.skipped} if self.skipped else {}
        if not finite:
            self._clear()
            return skipped
        # an update that skips layers may lack a count, such as the alignment loss of a skipped layer
        names = distributed.broadcast(list(dict.fromkeys(name for metrics in finite for name in metrics.sums)))
        sums = distributed.all_reduce(torch.stack([self._sum(name) for name in names])).tolist()
        tokens = sum(metrics.target_tokens for metrics in finite)
        means = {name: value / tokens for name, value in zip(names, sums, strict=True)}
        elapsed = max(time.monotonic() - self.started, 1e-9)
        self._clear()
        return {
            **means,
            "ppl": perplexity(means["nll"]),
            "lr": finite[-1].lr,
            "norm": float(finite[-1].norm),
            "tokens_per_second": round(tokens / elapsed, 1),
            **skipped,
        }

    def latest(self) -> dict[str, Any]:
        """Returns the means of the latest update on this rank. On a GPU, returns an empty dict instead of waiting."""
        if self.device.type != "cpu" or not self.finite or not self.finite[-1].own_target_tokens:
            return {}
        last = self.finite[-1]
        loss, nll = (float(last.sums[name]) / last.own_target_tokens for name in ("loss", "nll"))
        return {"loss": loss, "ppl": perplexity(nll), "lr": last.lr, "norm": float(last.norm)}

    def _read_flags(self) -> None:
        """Reads which of the newest updates had finite gradients, and warns about each update that was skipped.

        Reading waits for the device. After too many skipped updates in a row, raises DivergedError, whose message names
        the newest checkpoint.
        """
        unread, self.unread = self.unread, []
        flags = torch.stack([metrics.finite for metrics in unread]).tolist() if unread else []
        for metrics, finite in zip(unread, flags, strict=True):
            if finite:
                self.skipped_in_a_row = 0
                self.finite.append(metrics)
                continue
            self.skipped += 1
            self.skipped_in_a_row += 1
            warn_of_skip(metrics)
            if self.skipped_in_a_row >= IN_A_ROW:
                last = self.save_dir / "last.pt"
                newest = f"The newest checkpoint is {last.resolve()}." if last.exists() else "There is no checkpoint."
                raise DivergedError(
                    f"{self.skipped_in_a_row} updates in a row, up to update {metrics.number}, had gradients that are "
                    f"not finite. {newest} A lower --lr, --clip-norm, or fp32 instead of fp16 may help"
                )

    def _sum(self, name: str) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=device_of_sums(self.device))
        for metrics in self.finite:
            if name in metrics.sums:
                total += metrics.sums[name].to(total.device)
        return total


def warn_of_skip(metrics: StepMetrics) -> None:
    shown = ", ".join(str(pair + 1) for pair in metrics.pairs[:PAIRS_SHOWN].tolist())
    more = f" and {len(metrics.pairs) - PAIRS_SHOWN} more" if len(metrics.pairs) > PAIRS_SHOWN else ""
    log.warning(
        f"update {metrics.number} skipped: its gradient is not finite (norm {float(metrics.norm)}); its pairs in the "
        f"training set, counted from 1: {shown}{more}"
    )
