"""A worker object for tests of the scheduler. Spawned processes import this module, so it imports little."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

LARGE = b"x" * (3 << 20)  # more than a pipe takes


class Squares:
    """Squares numbers, some more slowly than others, and remembers a value."""

    def __init__(self) -> None:
        self._numbers: list[int] = []

    def square(self, number: int) -> int:
        if number < 0:
            raise ValueError(f"bad {number}")
        time.sleep(0.02 if number % 5 == 0 else 0)
        return number * number

    def remember(self, number: int) -> None:
        self._numbers.append(number)

    def remembered(self) -> list[int]:
        return self._numbers

    def fail(self) -> None:
        raise OSError("no room")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self) -> None:
        time.sleep(1000)

    def repeat(self, data: bytes) -> bytes:
        time.sleep(0.01)
        return data

    def unpicklable(self) -> Callable[[], int]:
        return lambda: 1

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()

    def wait_for(self, path: Path) -> int:
        """Waits until a file exists, or for two minutes."""
        end = time.monotonic() + 120
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.005)
        return os.getpid()
