"""Being asked to stop: Ctrl-C, SIGTERM and SIGUSR1 let the update finish, then the run saves and ends."""

import logging
import signal
from types import FrameType
from typing import Any

log = logging.getLogger("nmtkit")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopSignal:
    """While entered, remembers the first such signal in `received`; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        self._before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number)
            log.info("%s: stopping after this update; Ctrl-C stops at once", self.received.name)
