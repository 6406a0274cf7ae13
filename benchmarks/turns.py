"""Fair timing on a busy machine: systems take turns, so that a disturbance slows all of them alike."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def in_turns(systems: Mapping[str, Callable[[], T]], rounds: int) -> tuple[dict[str, T], dict[str, list[float]]]:
    """Returns the result of each system, from a first call that warms it up, and the seconds of its later rounds."""
    outputs = {name: run() for name, run in systems.items()}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, run in systems.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return outputs, seconds
