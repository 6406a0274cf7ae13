"""Progress of long work. Library code counts lines, pairs or files here, and cli/progress.py shows the counts.

A stage of the work begins with `begin`, which names the unit and the total. Then the innermost loop calls `advance`.
Python programs and worker processes have no display, and counting does nothing there.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

Total = float | None | Callable[[], float | None]  # a function is called only if the total is shown


@dataclass
class WorkStage:
    """A part of the work, such as "Translating", and the number of units that are done.

    `total` is None if it is unknown. An empty `unit` means work without counts, such as loading a model.
    """

    title: str
    unit: str = ""  # plural, such as "lines"
    total: float | None = None
    passes: int = 1  # number of times that the work goes through each unit
    done: float = 0.0
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.began

    @property
    def rate(self) -> float:
        """Units per second."""
        return self.done / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """The expected time to the end of the stage, or None if the total is unknown or no unit is done."""
        return None if self.total is None or not self.done else max(0.0, self.total - self.done) / self.rate

    def summary(self) -> str:
        """Returns the number of units, the time and the rate: "2,000 lines in 4.0 s, 500 lines/s"."""
        return f"{quantity(self.done, self.unit)} in {pace(self.done, self.unit, self.seconds)}"


class ProgressDisplay(Protocol):
    """Shows the current stage of the work, perhaps from a thread."""

    stage: WorkStage

    def begin(self, stage: WorkStage) -> None:
        """Called when a stage begins."""

    def hide(self) -> None:
        """Called before other output, which may share the terminal."""

    def pause(self) -> None:
        """Called before a fork, which must not copy locks and threads of the display."""

    def resume(self) -> None:
        """Called after a fork, in the process that forked."""

    def close(self) -> None:
        """Called before other output fills the terminal, and at the end."""


_display: ProgressDisplay | None = None


def show_on(display: ProgressDisplay | None) -> None:
    """Makes `display` show the progress of this process. None: no display."""
    global _display
    _display = display


def is_shown() -> bool:
    """Returns whether this process has a display."""
    return _display is not None


def begin(title: str, unit: str = "", total: Total = None, passes: int = 1) -> None:
    """Begins a stage of the work, and ends the previous stage. `advance` is called `passes` times for each unit."""
    if _display is not None:
        _display.begin(WorkStage(title, unit, total() if callable(total) else total, passes))


@contextmanager
def pause_for(title: str) -> Iterator[None]:
    """A context with a separate stage without counts, such as loading a model. Afterwards, the old stage continues."""
    display = _display
    before = None if display is None else display.stage
    begin(title)
    try:
        yield
    finally:
        if display is not None and before is not None:
            display.begin(before)


def advance(count: float = 1) -> None:
    """Counts `count` units of one pass as done."""
    if _display is not None:
        _display.stage.done += count / _display.stage.passes


def reach(count: float) -> None:
    """Sets the number of finished units to at least `count`, for work that `advance` has counted only partly."""
    if _display is not None:
        _display.stage.done = max(_display.stage.done, count)


@contextmanager
def muted() -> Iterator[None]:
    """A context in which `begin` and `advance` do nothing. The code around the context counts the work instead."""
    global _display
    before, _display = _display, None
    try:
        yield
    finally:
        _display = before


def hide() -> None:
    """Hides the display for a moment, for a line of output."""
    if _display is not None:
        _display.hide()


def close() -> None:
    """Ends the display, for work that shows its own progress."""
    if _display is not None:
        _display.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: None if _display is None else _display.pause(),
        after_in_parent=lambda: None if _display is None else _display.resume(),
        after_in_child=lambda: show_on(None),
    )


# --- texts ------------------------------------------------------------------------------------------------------------


def quantity(count: float, unit: str) -> str:
    """Returns a number with its unit: "1 line", "2,000 lines"."""
    return f"{round(count):,} {unit.removesuffix('s') if round(count) == 1 else unit}"


def rate(per_second: float, unit: str) -> str:
    """Returns a rate with its unit: "500 lines/s", "0.25 files/s"."""
    return f"{per_second:,.0f} {unit}/s" if per_second >= 10 else f"{per_second:.2g} {unit}/s"


def pace(count: float, unit: str, seconds: float) -> str:
    """Returns a time and the units per second in this time: "4.0 s, 500 lines/s"."""
    return f"{duration(seconds)}, {rate(count / max(seconds, 1e-9), unit)}"


def duration(seconds: float) -> str:
    """Returns a duration in one or two units: 3.2 s, 2 min 5 s, 3 h 12 min, 2 d 4 h."""
    whole = round(seconds)
    for size, unit, part, part_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit} {rest} {part_unit}" if rest else f"{whole // size} {unit}"
    return f"{whole} s" if seconds >= 10 else f"{seconds:.1f} s"
