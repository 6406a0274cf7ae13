"""Fair timing on a machine that may be busy: systems take turns, so that what slows one round slows all of them."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def in_turns(systems: Mapping[str, Callable[[], T]], rounds: int) -> tuple[dict[str, T], dict[str, list[float]]]:
    """What each system gives, from a first call that warms it up, and the seconds of each of its later rounds."""
    outputs = {name: run() for name, run in systems.items()}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, run in systems.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return outputs, seconds
