"""Speed and means between log lines."""

import math
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from nmtkit import distributed
from nmtkit.training.nonfinite import NonfiniteGuard
from nmtkit.training.trainer import StepMetrics

RECENT = 50  # updates that the live speed looks back on


class Meter:
    """Adds up outcomes on the device; `read`, at a log line, waits for it once. On the CPU nothing ever waits."""

    def __init__(self, device: torch.device, skips: NonfiniteGuard) -> None:
        self.device = device
        self.skips = skips
        self.recent: deque[tuple[float, int]] = deque(maxlen=RECENT)  # when, target tokens
        self._clear()

    def _clear(self) -> None:
        self.unread: list[StepMetrics] = []
        self.kept: list[StepMetrics] = []  # those that were not skipped
        self.skipped = 0
        self.started = time.monotonic()

    def add(self, outcome: StepMetrics) -> None:
        self.unread.append(outcome)
        if self.device.type == "cpu":
            self._look()
        self.recent.append((time.monotonic(), outcome.target_tokens))

    def pause(self, seconds: float) -> None:
        """Leaves out time that was not spent on updates."""
        self.started += seconds
        self.recent = deque(((when + seconds, tokens) for when, tokens in self.recent), maxlen=RECENT)

    def pace(self, updates_left: int | None) -> dict[str, Any]:
        """Target tokens per second of late, and the seconds left at that speed."""
        if len(self.recent) < 2:
            return {}
        seconds = max(self.recent[-1][0] - self.recent[0][0], 1e-9)
        tokens = sum(tokens for _, tokens in self.recent) - self.recent[0][1]
        left = None if updates_left is None else round(updates_left * seconds / (len(self.recent) - 1), 1)
        return {"tokens_per_second": round(tokens / seconds, 1), "seconds_left": left}

    def read(self) -> dict[str, Any]:
        """Means per target token over all ranks since the last call, the last learning rate and gradient norm."""
        self._look()
        kept, skipped = self.kept, self.skipped
        if not kept:
            self._clear()
            return {"skipped": skipped} if skipped else {}
        names = distributed.broadcast(list(kept[0].sums))
        total = distributed.all_reduce(torch.stack([self._total(name) for name in names])).tolist()
        tokens = sum(outcome.target_tokens for outcome in kept)
        means = {name: value / tokens for name, value in zip(names, total, strict=True)}
        elapsed = max(time.monotonic() - self.started, 1e-9)
        self._clear()
        return {
            **means,
            "ppl": math.exp(min(means["nll"], 700.0)),
            "lr": kept[-1].lr,
            "norm": float(kept[-1].norm),
            "tokens_per_second": round(tokens / elapsed, 1),
            **({"skipped": skipped} if skipped else {}),
        }

    def glance(self) -> dict[str, Any]:
        """This rank's share of the latest update, where looking does not wait for a device."""
        if self.device.type != "cpu" or not self.kept or not self.kept[-1].own_tokens:
            return {}
        last = self.kept[-1]
        loss, nll = (float(last.sums[name]) / last.own_tokens for name in ("loss", "nll"))
        return {"loss": loss, "ppl": math.exp(min(nll, 700.0)), "lr": last.lr, "norm": float(last.norm)}

    def _look(self) -> None:
        """Sets the skipped ones apart."""
        kept = self.skips.read(self.unread)
        self.skipped += len(self.unread) - len(kept)
        self.kept += kept
        self.unread = []

    def _total(self, name: str) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for outcome in self.kept:
            if name in outcome.sums:
                total += outcome.sums[name]
        return total
