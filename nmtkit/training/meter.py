"""Speed and means between log lines."""

import math
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from nmtkit import distributed
from nmtkit.training.trainer import Outcome

RECENT = 50  # updates that the live speed looks back on


class Meter:
    """Adds up outcomes on the device; `read`, at a log line, waits for it once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recent: deque[tuple[float, int]] = deque(maxlen=RECENT)  # when, target tokens
        self._clear()

    def _clear(self) -> None:
        self.outcomes: list[Outcome] = []
        self.started = time.monotonic()

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
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
        if not self.outcomes:
            return {}
        kept = [outcome for outcome in self.outcomes if outcome.sums]
        names = distributed.from_first(list(kept[0].sums) if kept else ["loss", "nll"])
        total = distributed.all_sum(torch.stack([self._total(name) for name in names])).tolist()
        tokens = sum(outcome.target_tokens for outcome in self.outcomes)
        means = {name: value / tokens for name, value in zip(names, total, strict=True)}
        last = self.outcomes[-1]
        elapsed = max(time.monotonic() - self.started, 1e-9)
        self._clear()
        return {
            **means,
            "ppl": math.exp(min(means["nll"], 700.0)),
            "lr": last.lr,
            "norm": float(last.norm),
            "tokens_per_second": round(tokens / elapsed, 1),
        }

    def _total(self, name: str) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for outcome in self.outcomes:
            if name in outcome.sums:
                total += outcome.sums[name]
        return total
