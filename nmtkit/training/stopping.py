"""Why a run ends, and the signals that ask for it."""

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

log = logging.getLogger("nmtkit")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequestedError(Exception):
    """A stop signal came while this rank was at its share of a validation."""


@dataclass(frozen=True)
class StopReason:
    """Why and where a run ended."""

    reason: str
    updates: int
    received: signal.Signals | None = None


class StopSignal:
    """While entered, keeps the first Ctrl-C, SIGTERM or SIGUSR1 in `received`; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._raises = False
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():  # no other may handle signals
            self._handlers = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """The context in which the signal raises StopRequestedError, at once if it has come before."""
        self._raises = True
        try:
            if self.received is not None:
                raise StopRequestedError
            yield
        finally:
            self._raises = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number)
            log.info("%s: saving and stopping; Ctrl-C stops at once", self.received.name)
            if self._raises:
                raise StopRequestedError
