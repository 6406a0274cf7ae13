"""The callback `profile`: records updates with torch.profiler, and writes a page and a trace for Perfetto or Chrome."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nmtkit.config import Config, option
from nmtkit.config.files import write_atomically
from nmtkit.pages.document import render
from nmtkit.training.callbacks import CALLBACKS, Callback, RunState

log = logging.getLogger("nmtkit")

PAGE, TRACE = "profile.html", "profile.json"  # files in the folder of the run
ROWS = 60  # maximum number of operations on the page


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Config):
    """The updates that the profiler records."""

    profile_warmup: int = option(10, "Updates before the profiler starts; the first updates are slower.", min=1)
    profile_updates: int = option(3, "Updates that the profiler records.", min=1, max=1000)


@CALLBACKS.register("profile", ProfileConfig())
class Profiler(Callback):
    """A callback that records updates once, after a warm-up. A resumed run records again and replaces the files."""

    def __init__(self, config: ProfileConfig) -> None:
        self.config = config
        self.made = 0  # number of updates that this process has made
        self.profiler: Any = None

    def update(self, run: RunState) -> None:
        self.made += 1
        if self.made == self.config.profile_warmup:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self.profiler = torch.profiler.profile(activities=activities)
            self.profiler.start()
        elif self.made == self.config.profile_warmup + self.config.profile_updates:
            self._finish(run, self.config.profile_updates)

    def end(self, run: RunState, reason: str | None) -> None:
        recorded, wanted = self.made - self.config.profile_warmup, self.config.profile_updates
        if self.profiler is not None:
            self._finish(run, recorded)
        if recorded < wanted:
            warmup = self.config.profile_warmup
            result = f"the profile has only {recorded} of {wanted} updates" if recorded > 0 else "no profile"
            log.warning(
                f"{result}: the run made {self.made} updates, and --profile-warmup {warmup} --profile-updates {wanted} "
                f"needs {warmup + wanted}; lower the two flags, or train longer"
            )

    def _finish(self, run: RunState, updates: int) -> None:
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        if not updates:
            return
        profiler.export_chrome_trace(str(run.save_dir / TRACE))
        first = run.update - updates + 1
        write_page(run.save_dir / PAGE, profiler.key_averages(), first, run.update)
        log.info("profile of updates %d to %d: %s", first, run.update, run.save_dir / PAGE)


def write_page(path: Path, events: Sequence[Any], first: int, last: int) -> None:
    """Writes a page with the operations that have the largest self time.

    The self time of an operation is the time without the operations that it calls.
    """
    on_device = any(event.self_device_time_total for event in events)
    times = {event.key: event.self_device_time_total if on_device else event.self_cpu_time_total for event in events}
    total = sum(times.values()) or 1
    rows = [
        (event.key[:100], f"{times[event.key] / 1000:,.2f}", f"{times[event.key] / total:.1%}", f"{event.count:,}")
        for event in sorted(events, key=lambda event: -times[event.key])[:ROWS]
    ]
    updates = last - first + 1
    where = "on the GPU" if on_device else "on the CPU, all threads together"
    html = render(
        "profile.html",
        title=f"Profile of updates {first} to {last}",
        summary=f"{total / 1000 / updates:,.1f} ms per update {where}; mean of {updates} updates. The self time of an "
        "operation is its time in all recorded updates, without the operations that it calls.",
        trace=TRACE,
        rows=rows,
        body=[],
    )
    write_atomically(path, html)
