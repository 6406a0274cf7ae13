"""Shows the progress of every command on stderr: a bar in a terminal, otherwise a line of text at intervals."""

import logging
import math
import sys
import threading
import time
from typing import Any

from rich.console import Console
from rich.text import Text

from nmtkit.jobs.progress import WorkStage, duration, quantity, rate

log = logging.getLogger("nmtkit")

REDRAW = 0.2  # seconds between two redraws of the bar
FIRST_LINE = 5.0  # seconds to the first line of text; later intervals are 1/20 of the time so far, at least FIRST_LINE
LONGEST = 60.0  # seconds; the longest interval between two lines of text
QUIET_OUTPUT = 1.0  # seconds without output after which the bar returns, if stdout is the same terminal
STARTING = "Starting"  # the stage before the first call of `begin`; only a terminal shows this stage
SUMMARY = 2.0  # seconds; a shorter command gets no summary line
BAR = 30  # columns of the widest bar
NARROWEST = 8


class CommandProgress:
    """The progress of a command. A thread draws the current stage, so that counting costs only an addition.

    The thread ends before a fork and starts again after it, because a child process would inherit locks that are held.
    """

    def __init__(self, console: Console) -> None:
        self.stage = WorkStage(STARTING)
        self.longest: WorkStage | None = None  # counted stage that took the longest time
        self.console = console
        self.as_bar = console.is_terminal and not console.is_dumb_terminal
        self.closed = False
        self._shares_terminal = self.as_bar and sys.stdout is not None and sys.stdout.isatty()
        self._began = time.monotonic()
        self._live: Any = None  # rich.live.Live while the bar is visible
        self._lock = threading.Lock()  # for everything that is drawn
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._next = 0.0 if self.as_bar else FIRST_LINE  # seconds from `_began` to the next line of text
        self._output = -math.inf  # time of the last output on a terminal

    def begin(self, stage: WorkStage) -> None:
        self._end_stage()
        stage.ended = None
        self.stage = stage

    def _end_stage(self) -> None:
        stage, stage.ended = self.stage, time.monotonic()
        if stage.unit and stage.done and (self.longest is None or stage.seconds > self.longest.seconds):
            self.longest = stage

    def hide(self) -> None:
        """Removes the bar if stdout is a terminal too. The bar returns when no output comes for a while."""
        if self._shares_terminal:
            with self._lock:
                self._output = time.monotonic()
                self._erase()

    def close(self) -> None:
        """Removes the bar for the rest of the command."""
        if not self.closed:
            self._end_stage()
            self.closed = True
            self.pause()

    def summary(self) -> str | None:
        """Ends the display. Returns a line with units, seconds and rate.

        Returns None if the command was short, counted nothing, or has ended the display itself.
        """
        if self.closed:
            return None
        self.close()
        short = time.monotonic() - self._began < SUMMARY
        return None if short or self.longest is None else self.longest.summary()

    def resume(self) -> None:
        if not self.closed:
            self._stop.clear()
            self._thread = threading.Thread(target=self._draw_often, name="progress", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """Ends the thread and erases the bar."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None
        with self._lock:
            self._erase()

    def _draw_often(self) -> None:
        while not self._stop.wait(REDRAW):
            with self._lock:
                self._draw()

    def _draw(self) -> None:
        now = time.monotonic()
        if self.as_bar:
            if now - self._output >= QUIET_OUTPUT:
                self._draw_bar()
        elif now - self._began >= self._next and self.stage.title != STARTING:
            log.info("%s", "  ".join(fields(self.stage)))
            self._next = now - self._began + min(LONGEST, max(FIRST_LINE, (now - self._began) / 20))

    def _draw_bar(self) -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False, transient=True, redirect_stdout=False)
            self._live.start()
        self._live.update(bar(self.stage, self.console.width), refresh=True)

    def _erase(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def fields(stage: WorkStage) -> list[str]:
    """Returns the texts of a progress bar: title, count, rate and time left.

    For work without counts, returns the title and the elapsed time.
    """
    if not stage.unit:
        return [stage.title, duration(stage.seconds)]
    count = quantity(stage.done, stage.unit)
    if stage.total is not None:
        count = f"{round(min(stage.done, stage.total)):,}/{quantity(stage.total, stage.unit)}"
    shown = [stage.title, count]
    if stage.done:
        shown.append(rate(stage.rate, stage.unit))
    if stage.seconds_left is not None:
        shown.append(f"{duration(stage.seconds_left)} left")
    return shown


def bar(stage: WorkStage, width: int) -> Text:
    """Returns a line of at most `width` columns: the title, a bar if the total is known, and the other fields."""
    title, *others = fields(stage)
    right = "  ".join(others)
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(title + "  ", style="bold")
    columns = min(BAR, width - len(title) - len(right) - 5)
    if stage.unit and stage.total and columns >= NARROWEST:
        filled = round(columns * min(1.0, stage.done / stage.total))
        text.append("━" * filled, style="cyan")
        text.append("━" * (columns - filled), style="bright_black")
        text.append("  ")
    text.append(right, style="dim")
    return text
